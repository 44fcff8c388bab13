"""`python -m shardyard.node.side_job`: what a scheduler starts on the one node of a side job.

Its answer is one marked line on stdout: what the kind's function returns, or the message and exit
code that it ended with. All talk goes to stderr.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.control.code_bundle import take_code
from shardyard.errors import EXIT_DRAINED, RequestError, ShardyardError
from shardyard.io.path_option import LocalPath
from shardyard.io.terminal import run
from shardyard.launchers.base import SideJob
from shardyard.launchers.log_markers import mark
from shardyard.launchers.secrets import resolve_local
from shardyard.node.log_markers import take_nonce
from shardyard.node.main import stop
from shardyard.rundir.layout import RunDir

FUNCTIONS: dict[str, str] = {
    "prepare": "shardyard.node.side_jobs:prepare",
    "probe": "shardyard.node.side_jobs:probe",
    "export": "shardyard.node.side_jobs:export_on_node",
    "fetch": "shardyard.node.side_jobs:serve",
}
"""Kind -> module:function, imported on first use: takes a ``SideWork``, returns plain JSON."""

LONGEST_ANSWER_BYTES = 15_000  # of what a function returns
"""Container runtimes cut a line of a log at 16 KiB. More than this goes into a file."""


@dataclass(frozen=True, kw_only=True)
class SideWork:
    """Input of a side job's function."""

    run: RunDir
    """The run's folder, as this node sees it."""
    recipe: Recipe
    """Recipe as it was sent. Where its paths are relative, the function says to which folder."""
    arguments: dict[str, Any]
    """``SideJob.arguments``."""


_LONGEST_ERROR = 4000
"""Characters of a message; all of it is above in the log."""

SideFunction = Callable[[SideWork], dict[str, Any]]


@click.command()
@click.argument("recipe", type=LocalPath(path_type=Path))
@click.option("--run-dir", type=LocalPath(path_type=Path), required=True, help="The run's folder.")
@click.option("--side", required=True, metavar="JSON", help="Kind and arguments.")
@click.option(
    "--code", type=LocalPath(path_type=Path), help="launch.code, where not in the run's folder."
)
def command(recipe: Path, *, run_dir: Path, side: str, code: Path | None) -> int:
    """Do the side job SIDE of the run that RECIPE asks for."""
    nonce = take_nonce(os.environ)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    asked = SideJob.from_text(side)
    try:
        content = _work(asked, recipe, run_dir.expanduser().resolve(), code)
    except ShardyardError as error:
        _answer(asked, nonce, error=str(error), exit_code=error.exit_code)
        raise
    except (SystemExit, KeyboardInterrupt):
        words = "it was asked to end before it was done"
        _answer(asked, nonce, error=words, exit_code=EXIT_DRAINED)
        raise
    except Exception as error:
        _answer(asked, nonce, error=f"{type(error).__name__}: {error}", exit_code=1)
        raise
    _answer(asked, nonce, result=content, exit_code=0)
    return 0


def function_of(kind: str) -> SideFunction:
    """Return the function for a kind of side job.

    Raises:
        RequestError: This version has no such kind.
    """
    place = FUNCTIONS.get(kind)
    if place is None:
        raise RequestError(
            f"this version of Shardyard has no side job {kind!r}. The command line that sent it is "
            "of another version. Let the nodes' image or Python have that version."
        )
    module, _, name = place.partition(":")
    function: SideFunction = getattr(importlib.import_module(module), name)
    return function


def _work(job: SideJob, file: Path, folder: Path, code: Path | None) -> dict[str, Any]:
    function, run = function_of(job.kind), RunDir(folder)
    recipe = load_checked_recipe([file], [], of_run=True)
    os.environ.update(resolve_local(recipe.secrets, os.environ))
    take_code(recipe, run, code)
    content = function(SideWork(run=run, recipe=recipe, arguments=job.arguments))
    size_bytes = len(mark("answer", content).encode())
    if size_bytes > LONGEST_ANSWER_BYTES:
        raise ShardyardError(
            f"the answer of {job.kind} has {size_bytes:,} bytes, and a line of a log holds "
            f"{LONGEST_ANSWER_BYTES:,} for certain. What it did is done; only its answer is lost. "
            "This is a bug of shardyard: please report it."
        )
    return content


def _answer(job: SideJob, nonce: str, **content: Any) -> None:
    if "error" in content:
        content["error"] = str(content["error"])[:_LONGEST_ERROR]
    sys.stdout.flush()
    print(mark("answer", {"side": job.label, **content}, nonce=nonce), flush=True)


if __name__ == "__main__":
    sys.exit(run(command))
