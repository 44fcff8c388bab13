"""`shardyard export`: a checkpoint becomes a Hugging Face folder (checkpoint/export.py does it)."""

import subprocess
import sys
from pathlib import Path

import click

from shardyard.cli.options import LocalPath, json_option, run_argument, runs_dir_option
from shardyard.rundir.layout import find_run


@click.command("export")
@run_argument
@click.option("--to", type=LocalPath(path_type=Path), required=True, help="Folder to write.")
@click.option("--step", default="latest", show_default=True, help="A step, latest or best.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of the weights; default: as saved.",
)
@runs_dir_option
@click.option("--dry-run", is_flag=True, help="Say what would be written.")
@json_option
def command(
    run: str, to: Path, step: str, dtype: str | None, runs_dir: Path, dry_run: bool, as_json: bool
) -> None:
    """Write a checkpoint of RUN as a Hugging Face folder: weights, config and tokenizer."""
    argv = [str(find_run(run, runs_dir).path), "--to", str(to), "--step", step]
    argv += ["--dtype", dtype] if dtype else []
    argv += ["--dry-run"] if dry_run else []
    argv += ["--json"] if as_json else []
    # a process of its own: the command line never imports torch
    done = subprocess.run([sys.executable, "-m", "shardyard.checkpoint.export", *argv], check=False)
    sys.exit(done.returncode)
