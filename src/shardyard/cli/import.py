# ruff: noqa: N999 - a verb lives in the file of its name
"""`shardyard import`: others' configurations become a recipe."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardyard.cli.completion import by, configurations
from shardyard.cli.options import json_option
from shardyard.local_path import LocalPath
from shardyard.terminal import tell, tell_exactly

if TYPE_CHECKING:
    from shardyard.importers.configs.importing import Imported


@click.command()
@click.argument(
    "files", nargs=-1, required=True, metavar="FILE...", shell_complete=by(configurations)
)
@click.option(
    "--to",
    type=LocalPath(path_type=Path, dir_okay=False),
    help="Write the recipe there, and table what has no counterpart.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="KEY",
    help="Leave a key out though it is refused; * stands for anything. May be repeated.",
)
@click.option("--force", "is_forced", is_flag=True, help="Write over a file that is there.")
@click.option("--dry-run", is_flag=True, help="Print the recipe; write nothing.")
@json_option
def command(
    files: tuple[str, ...],
    *,
    to: Path | None,
    without: tuple[str, ...],
    is_forced: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Turn configurations of one job into a recipe, each line with where it came from.

    FILE: a torchrun line or sbatch script, DeepSpeed JSON, accelerate YAML, a PyTorchJob or
    TrainJob, Trainer arguments, torchtitan TOML, SageMaker SMP parameters; several are one job.
    section.key=value says what no file does, and wins over them.
    """
    from shardyard.config.load import is_override
    from shardyard.importers.configs.importing import import_files

    words = [each for each in files if is_override(each)]
    kind = LocalPath(path_type=Path, dir_okay=False)
    paths = [kind.convert(each, None, None) for each in files if not is_override(each)]
    if not paths:
        raise click.UsageError("FILE is missing: a configuration of your job.")
    if to is not None and to.exists() and not (is_forced or dry_run):
        raise click.UsageError(
            f"{to} exists already. Name another file with --to, or write over it with --force."
        )
    imported = import_files(paths, words, without)
    if as_json:
        tell(json.dumps(imported.to_json(), indent=1, default=str))
    imported.raise_problems()
    if to is not None and not dry_run:
        _write(to, imported.text)
    if as_json:
        return
    if to is None or dry_run:
        tell_exactly(imported.text)
        return
    _tell(imported, to)


def _write(file: Path, text: str) -> None:
    from shardyard.errors import StorageError

    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{file} cannot be written: {error.strerror}. Give a file in a folder that exists and "
            "is yours: --to FILE."
        ) from error


def _tell(imported: "Imported", file: Path) -> None:
    """What was written, and what of the files is not in it."""
    from shardyard.cli.tables import print_table
    from shardyard.importers.configs.rules import Kind

    counts = {kind: len(imported.of_kind(kind)) for kind in Kind}
    tell(f"recipe: {file}")
    tell("keys: " + ", ".join(f"{count} {kind.value}" for kind, count in counts.items()))
    rows = [
        (each.place, str(each.shown), each.verdict.words) for each in imported.of_kind(Kind.NONE)
    ]
    if rows:
        print_table(("without a counterpart", "value", "why"), rows)
    tell(f"next: shardyard plan {file}")
