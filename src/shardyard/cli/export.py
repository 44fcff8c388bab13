"""`shardyard export`: a checkpoint becomes a Hugging Face folder, where its files are.

`checkpoint/export.py` writes it, in a process of its own: the command line never imports torch.
"""

import json
from pathlib import Path
from typing import Any

import click

from shardyard.cli.confirm import side_terms
from shardyard.cli.options import (
    json_option,
    launchers_in,
    run_argument,
    runs_dir_option,
    trust_option,
)
from shardyard.cli.progress import bytes_progress
from shardyard.control.export import export_run
from shardyard.control.run_location import locate_run
from shardyard.io.object_store import parse_location
from shardyard.io.path_option import LocalPath
from shardyard.io.terminal import echo
from shardyard.rundir.contracts import sentence
from shardyard.rundir.layout import find_run
from shardyard.transfer.hub import is_hub, parse_repository
from shardyard.transfer.s3 import is_s3


class _ExportPath(LocalPath):
    """A folder, s3://bucket/prefix, or hf://owner/name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if is_hub(text):
            return str(parse_repository(text))
        return str(parse_location(text)) if is_s3(text) else str(super().convert(text, param, ctx))


@click.command("export")
@run_argument
@click.option(
    "--to",
    type=_ExportPath(),
    required=True,
    help="Output folder, s3://bucket/prefix, or hf://owner/name.",
)
@click.option(
    "--step",
    default="latest",
    show_default=True,
    help="Checkpoint to export: a step, latest or best.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Format of the weights. Default: as saved.",
)
@click.option(
    "--merged",
    is_flag=True,
    help="For LoRA runs: merge the adapters into the weights, instead of exporting only adapters.",
)
@click.option(
    "--public",
    "is_public",
    is_flag=True,
    help="For hf://: make a new repository public. Default: private.",
)
@click.option("--yes", "is_yes", is_flag=True, help="Do not ask for confirmation of a side job.")
@trust_option
@runs_dir_option
@click.option(
    "--dry-run", is_flag=True, help="Show what would be written or submitted, without doing it."
)
@json_option
@click.pass_context
def command(
    context: click.Context,
    run: str,
    *,
    to: str,
    step: str,
    dtype: str | None,
    merged: bool,
    is_public: bool,
    is_yes: bool,
    trusts_folder: bool,
    runs_dir: Path,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write a checkpoint of RUN as a Hugging Face folder: weights, config and tokenizer.

    hf://owner/name pushes it to the Hugging Face hub, as one commit with a model card.

    For LoRA runs, it writes only the adapters, in PEFT's format, unless you add --merged. If only
    the nodes can read the run's files, a side job exports and verifies the checkpoint there.
    """
    home = locate_run(find_run(run, runs_dir), launchers_in(context))
    terms = side_terms(is_yes=is_yes, dry_run=dry_run, as_json=as_json, trusts_folder=trusts_folder)
    asked = {"step": step, "dtype": dtype, "merged": merged}
    told = export_run(home, to, asked, terms, is_public=is_public, progress=bytes_progress)
    if told is not None:
        echo(json.dumps(told, indent=1) if as_json else sentence(told))
