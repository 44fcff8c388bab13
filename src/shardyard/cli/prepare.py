"""`shardyard prepare`: text into token shards, in a process of its own, here or on a launcher."""

import json
from dataclasses import asdict

import click

from shardyard.cli.completion import by, launchers
from shardyard.cli.confirm import confirm, side_terms
from shardyard.cli.options import json_option, launchers_in, recipe_argument
from shardyard.config.data_choices import SLOTS
from shardyard.config.resolved import DatasetMetadata, SourceMetadata
from shardyard.control.attempt import (
    eval_set_words,
    prepare_also_h5,
    prepare_and_show,
    prepare_data,
    split_rows,
    would_prepare,
)
from shardyard.control.aux_jobs import SideTerms
from shardyard.control.prepare_remote import prepare_on
from shardyard.control.prune import Unused, delete, find_sets
from shardyard.control.request import Request
from shardyard.control.submission import launcher_named
from shardyard.io.terminal import echo, echo_err, print_table
from shardyard.launchers.registry import LAUNCHERS
from shardyard.units import format_bytes


@click.command()
@recipe_argument
@click.option(
    "--on",
    metavar="LAUNCHER",
    shell_complete=by(launchers),
    help="Prepare data and model as a job of this launcher: " + ", ".join(LAUNCHERS) + ".",
)
@click.option(
    "--yes", "is_yes", is_flag=True, help="With --on or --prune: do not ask for confirmation."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show what would be read and written; with --on, print the job to submit.",
)
@click.option("--verify", is_flag=True, help="Check the SHA-256 of every prepared file.")
@click.option(
    "--also",
    type=click.Choice(["h5"]),
    help="Also write the samples of run.epochs as BERT's h5 files, for other programs.",
)
@click.option(
    "--show",
    metavar="N",
    type=click.IntRange(min=1),
    help="Also print the first N samples as text, with the parts that are trained on.",
)
@click.option(
    "--prune",
    is_flag=True,
    help="Delete the datasets in data.dir that no run in run.dir needs.",
)
@json_option
@click.pass_context
def command(
    context: click.Context,
    recipe: tuple[str, ...],
    *,
    on: str | None,
    is_yes: bool,
    dry_run: bool,
    verify: bool,
    also: str | None,
    show: int | None,
    prune: bool,
    as_json: bool,
) -> None:
    """Prepare the data of RECIPE (files and section.key=value overrides).

    Skips data that is prepared already. Repeat an interrupted command to continue.
    """
    if prune:
        if on is not None or verify or also is not None or show is not None:
            raise click.UsageError("--prune goes only with --yes, --dry-run and --json.")
        _prune(recipe, is_yes=is_yes, dry_run=dry_run, as_json=as_json)
        return
    if also is not None and (on is not None or dry_run):
        raise click.UsageError("--also goes with neither --on nor --dry-run.")
    if show is not None and (on is not None or dry_run or also is not None):
        raise click.UsageError("--show goes with none of --on, --dry-run and --also.")
    if on is not None:
        terms = side_terms(is_yes=is_yes, dry_run=dry_run, as_json=as_json)
        _prepare_remote(context, recipe, on, terms, verify=verify, as_json=as_json)
        return
    if is_yes:
        raise click.UsageError("--yes goes with --on and --prune; prepare without them never asks.")
    request = Request.read(recipe, needs_weights=False, runs_here=True)
    if dry_run:
        plan = would_prepare(request)
        if as_json:
            echo(json.dumps(plan, indent=1))
        else:
            print_table(("", ""), list(plan.items()), title="would prepare")
        return
    if show is not None:
        _print_samples(request, show, verify=verify, as_json=as_json)
        return
    h5: dict[str, str] = {}
    if also is None:
        facts = prepare_data(request, verify=verify)
    else:
        facts, h5["h5"] = prepare_also_h5(request, verify=verify)
    if as_json:
        echo(json.dumps({**asdict(facts), **h5}, indent=1))
        return
    print_table(("", ""), [*_rows(facts), *(("h5 files", folder) for folder in h5.values())])


def _print_samples(request: Request, count: int, *, verify: bool, as_json: bool) -> None:
    facts, samples = prepare_and_show(request, count, verify=verify)
    if as_json:
        echo(json.dumps({**asdict(facts), "samples": samples}, indent=1))
        return
    print_table(("", ""), _rows(facts))
    for number, sample in enumerate(samples, start=1):
        echo(f"\nsample {number}: {sample['tokens']:,} tokens, {sample['loss_tokens']:,} with loss")
        for part in sample["parts"]:
            mark = "loss" if part["loss"] else "    "
            echo(f"{mark}  {json.dumps(part['text'], ensure_ascii=False)}")


def _prune(recipe: tuple[str, ...], *, is_yes: bool, dry_run: bool, as_json: bool) -> None:
    """Show the datasets that no run needs and those that stay, ask, and delete."""
    settings = Request.read(recipe, needs_weights=False, runs_here=True).recipe
    sets = find_sets(settings)
    if not as_json:
        rows = [(str(each.folder), format_bytes(each.num_bytes)) for each in sets.unused]
        rows = rows or [(f"every dataset in {settings.data.dir} is read by a run", "")]
        print_table(("", ""), rows, title=f"read by no run in {settings.run.dir}")
        for kept in sets.retained:
            echo(
                f"{kept.folder} stays: {kept.reason}. To delete it, delete that run's folder first."
            )
        for each in sets.unused:
            for run in each.lost_readers:
                echo_err(
                    f"{each.folder} was read by run {run}, whose folder is not on this machine. If "
                    "that run is elsewhere and may be resumed, keep the dataset."
                )
    deleted: list[Unused] = []
    if sets.unused and not dry_run:
        total = format_bytes(sum(each.num_bytes for each in sets.unused))
        what = f"{len(sets.unused)} dataset{'s' * (len(sets.unused) > 1)}, {total}"
        confirm(f"Delete {what}? Runs that are not found here may read them.", is_yes=is_yes)
        deleted = [each for each in sets.unused if delete(each)]
        for each in sets.unused:
            if each not in deleted:
                echo_err(f"{each.folder} stays: a training reads it, or another command writes it")
    if as_json:
        content = {
            "unused": [str(each.folder) for each in sets.unused],
            "deleted": [str(each.folder) for each in deleted],
            "kept": [{"folder": str(each.folder), "why": each.reason} for each in sets.retained],
        }
        echo(json.dumps(content))


def _prepare_remote(
    context: click.Context,
    recipe: tuple[str, ...],
    on: str,
    terms: SideTerms,
    *,
    verify: bool,
    as_json: bool,
) -> None:
    launcher = launcher_named(on, launchers_in(context))
    request = Request.read(recipe, needs_weights=False, only_looks=True, sees=launcher.node_paths)
    found = prepare_on(request, launcher, terms, verify=verify)
    if found is None:
        return
    run_dir, answer = found
    if as_json:
        echo(
            json.dumps({"run_id": run_dir.run_id, "run_dir": str(run_dir.path), **answer}, indent=1)
        )
        return
    rows = _rows(DatasetMetadata(**answer["data"]))
    if answer["model_dir"] is not None:
        commit = f", commit {answer['model_commit']}" if answer["model_commit"] else ""
        rows.append(("model", f"{answer['model_dir']}{commit}"))
    print_table(("", ""), [("run", run_dir.run_id), *rows])


def _rows(metadata: DatasetMetadata) -> list[tuple[str, str]]:
    if metadata.item_kind is not None:
        return [
            ("folder", metadata.dir),
            ("items", f"{metadata.item_kind}, read while training"),
            ("training", f"{metadata.train_samples:,} items"),
            ("validation", f"{metadata.eval_samples:,} items"),
        ]
    if metadata.num_classes is not None:
        return [
            ("folder", metadata.dir),
            ("classes", f"{metadata.num_classes:,}"),
            ("training", _image_count(metadata.train_samples, metadata.train_bytes)),
            ("validation", _image_count(metadata.eval_samples, metadata.eval_bytes)),
            *split_rows(metadata),
        ]
    return [
        ("folder", metadata.dir),
        ("training", f"{metadata.train_tokens:,} tokens of {metadata.train_documents:,} documents"),
        ("validation", f"{metadata.eval_tokens:,} tokens of {metadata.eval_documents:,} documents"),
        *split_rows(metadata),
        *((("rows", f"chat: {metadata.chat_rows}"),) if metadata.chat_rows else ()),
        *_loss_token_rows(metadata),
        *_packed(metadata),
        ("vocabulary", f"{metadata.vocab_size:,} tokens{_bytes_a_token(metadata)}"),
        ("documents begin with", metadata.bos_token or "no token of their own"),
        *_entropy(metadata),
        *((f"source {part.name}", _of_part(part)) for part in metadata.parts),
        *((f"eval set {each.name}", eval_set_words(each)) for each in metadata.eval_sets),
    ]


def _image_count(number: int | None, num_bytes: int | None) -> str:
    size = "" if num_bytes is None else f", {format_bytes(num_bytes)}"
    return f"{number or 0:,} pictures{size}"


def _of_part(part: SourceMetadata) -> str:
    data = part.data
    held_out = f"{data.eval_tokens:,} for validation"
    return f"{part.slots / SLOTS:.1%} of the samples, {data.train_tokens:,} tokens, {held_out}"


def _entropy(metadata: DatasetMetadata) -> list[tuple[str, str]]:
    """The unigram entropy, where the loss is one of tokens."""
    entropy = metadata.unigram_entropy
    return [("unigram entropy", f"{entropy:.3f} nats a token")] if entropy else []


def _loss_token_rows(metadata: DatasetMetadata) -> list[tuple[str, str]]:
    if metadata.train_learnt is None:
        return []
    share = metadata.train_learnt / metadata.train_tokens
    return [("carry loss", f"{share:.1%} of the training tokens, {metadata.train_learnt:,}")]


def _packed(metadata: DatasetMetadata) -> list[tuple[str, str]]:
    if metadata.train_places is None:
        return []
    sets = [part.data for part in metadata.parts] or [metadata]
    samples = sum(each.train_samples or 0 for each in sets)
    a_sample = metadata.train_places / max(1, samples)
    found = [("packed", f"{samples:,} samples of {a_sample:,.0f} tokens each")]
    if metadata.too_long:
        found.append(("too long", f"{metadata.too_long:,} documents, by data.too_long"))
    return found


def _bytes_a_token(metadata: DatasetMetadata) -> str:
    """Return the bytes of text per token; empty for sets prepared before bytes were counted."""
    if not metadata.train_bytes:
        return ""
    return f", {metadata.train_bytes / metadata.train_tokens:.2f} bytes of text each"
