# ruff: noqa: N999 - a verb lives in the file of its name
"""`shardyard import`: others' configurations become a recipe, their checkpoints a folder."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardyard.cli.completion import by, configurations
from shardyard.cli.options import json_option
from shardyard.io.path_option import LocalPath
from shardyard.io.terminal import echo, echo_raw, print_table

if TYPE_CHECKING:
    from shardyard.importers.configs.convert import Imported


@click.command()
@click.argument(
    "files", nargs=-1, required=True, metavar="FILE...", shell_complete=by(configurations)
)
@click.option(
    "--to",
    type=LocalPath(path_type=Path),
    help="Recipe file to write; lists options without a counterpart. For a checkpoint: a folder.",
)
@click.option(
    "--like",
    type=LocalPath(path_type=Path, file_okay=False),
    help="For a checkpoint: a Hugging Face folder of the same model, for config and tokenizer.",
)
@click.option("--prefix", help="For a checkpoint: prefix of its weights' names, to strip.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="For a checkpoint: format of the weights. Default: as saved.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="KEY",
    help="Drop a key that is not supported, or an argument of a Megatron checkpoint; * is a "
    "wildcard. Repeatable.",
)
@click.option("--force", "is_forced", is_flag=True, help="Overwrite an existing file.")
@click.option("--dry-run", is_flag=True, help="Print the recipe, without writing it.")
@json_option
def command(
    files: tuple[str, ...],
    *,
    to: Path | None,
    like: Path | None,
    prefix: str | None,
    dtype: str | None,
    without: tuple[str, ...],
    is_forced: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Convert the configuration of a job, or a checkpoint, from another tool.

    FILE: a torchrun line or sbatch script, DeepSpeed JSON, accelerate YAML, a PyTorchJob or
    TrainJob, Trainer arguments, torchtitan TOML, SageMaker SMP parameters. Several
    files describe one job. The recipe says where each value came from. Add section.key=value to
    set or override values.

    Or a checkpoint, which becomes a Hugging Face folder: a torch.save file, or a folder of FSDP,
    torch.distributed.checkpoint, DeepSpeed or Megatron.
    """
    from shardyard.config.load import is_override
    from shardyard.importers.checkpoints.convert import is_checkpoint

    words = [each for each in files if is_override(each)]
    kind = LocalPath(path_type=Path)
    paths = [kind.convert(each, None, None) for each in files if not is_override(each)]
    if not paths:
        raise click.UsageError("FILE is missing: a configuration of your job, or a checkpoint.")
    if any(map(is_checkpoint, paths)):
        if len(paths) > 1 or words or is_forced:
            raise click.UsageError(
                "A checkpoint is imported by itself, without another FILE, section.key=value or "
                "--force. Its folder then goes into a recipe as model.path."
            )
        _import_checkpoint(
            paths[0], to, like, prefix=prefix, dtype=dtype, without=without,
            dry_run=dry_run, as_json=as_json,
        )  # fmt: skip
        return
    given = {"--like": like, "--prefix": prefix, "--dtype": dtype}
    for name in (name for name, value in given.items() if value is not None):
        raise click.UsageError(f"{name} is of a checkpoint, and {files[0]} is a configuration.")
    _import_configurations(
        paths, words, without, to=to, is_forced=is_forced, dry_run=dry_run, as_json=as_json
    )


def _import_checkpoint(
    path: Path,
    to: Path | None,
    like: Path | None,
    *,
    prefix: str | None,
    dtype: str | None,
    without: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    from shardyard.cli.progress import bytes_progress
    from shardyard.importers.checkpoints.convert import plan_import, run_import

    if like is None:
        raise click.UsageError(
            "--like is missing: a Hugging Face folder of the same model, for config and tokenizer, "
            "such as the one that training began with."
        )
    if to is None and not dry_run:
        raise click.UsageError(
            "--to is missing: the folder to write. --dry-run says what is there."
        )
    planned = plan_import(path, like, prefix=prefix, dtype=dtype, without=without)
    if not dry_run:
        assert to is not None
        with bytes_progress(planned.bytes) as progress:
            run_import(planned, to, lambda size: progress(path.name, size))
    told = planned.to_json()
    if as_json:
        echo(json.dumps(told, indent=1))
        return
    echo(f"checkpoint: {told['format']}, {planned.step_summary}")
    echo(f"weights: {told['tensors']} tensors, {planned.size_summary}")
    for line in (*planned.missing_state, *told["remarks"]):
        echo(line)
    if dry_run:
        return
    echo(f"folder: {to}")
    echo(f"next: model.path={to} in a recipe; it begins at step 0")


def _import_configurations(
    paths: list[Path],
    words: list[str],
    without: tuple[str, ...],
    *,
    to: Path | None,
    is_forced: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    from shardyard.importers.configs.convert import import_files

    if to is not None and to.is_dir():
        raise click.UsageError(f"{to} is a folder. --to names the recipe's file.")
    if to is not None and to.exists() and not (is_forced or dry_run):
        raise click.UsageError(
            f"{to} exists already. Name another file with --to, or write over it with --force."
        )
    imported = import_files(paths, words, without)
    if as_json:
        echo(json.dumps(imported.to_json(), indent=1, default=str))
    imported.raise_errors()
    if to is not None and not dry_run:
        _write(to, imported.text)
    if as_json:
        return
    if to is None or dry_run:
        echo_raw(imported.text)
        return
    _print_import_summary(imported, to)


def _write(file: Path, text: str) -> None:
    from shardyard.errors import StorageError

    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{file} cannot be written: {error.strerror}. Give a file in a folder that exists and "
            "is yours: --to FILE."
        ) from error


def _print_import_summary(imported: "Imported", file: Path) -> None:
    """Report what was written, and which keys of the files are not in it."""
    from shardyard.importers.configs.rules import OutcomeKind

    counts = {kind: len(imported.of_kind(kind)) for kind in OutcomeKind}
    echo(f"recipe: {file}")
    echo("keys: " + ", ".join(f"{count} {kind.value}" for kind, count in counts.items()))
    rows = [
        (each.location, str(each.redacted_value), each.result.words)
        for each in imported.of_kind(OutcomeKind.NONE)
    ]
    if rows:
        print_table(("without a counterpart", "value", "why"), rows)
    echo(f"next: shardyard plan {file}")
