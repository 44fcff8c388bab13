"""`shardyard logs`: output of a run, of one node or of all merged."""

from collections.abc import Iterator
from pathlib import Path

import click

from shardyard.cli.options import (
    launchers_in,
    raw_option,
    run_argument,
    runs_dir_option,
    side_option,
)
from shardyard.control.follow import replay
from shardyard.control.job import LaunchedJob, Which, is_trained_here, launched_of
from shardyard.errors import RequestError
from shardyard.io.sanitize import log_line
from shardyard.io.terminal import echo, echo_raw
from shardyard.launchers.base import LogLine
from shardyard.launchers.log_markers import parse, rebuild
from shardyard.rundir.layout import RunDir, find_run


@click.command()
@run_argument
@click.option("--node", type=click.IntRange(min=0), help="Node to show. Default: node 0.")
@click.option("--all", "is_all", is_flag=True, help="Show all nodes, each line with its node.")
@click.option("--follow", is_flag=True, help="Follow until the job ends.")
@side_option
@raw_option
@runs_dir_option
@click.pass_context
def command(
    context: click.Context,
    run: str,
    *,
    node: int | None,
    is_all: bool,
    follow: bool,
    is_side: bool,
    is_raw: bool,
    runs_dir: Path,
) -> None:
    """Print the output of RUN (path, id or its beginning).

    Of a run that `shardyard train` started: its log, or with --all the logs of its ranks.

    Control characters are shown as text, such as \\x1b.
    """
    if is_all and node is not None:
        raise click.UsageError("--node and --all exclude each other.")
    which: Which = "side" if is_side else "any"
    run_dir = find_run(run, runs_dir)
    if is_trained_here(run_dir) and not is_side:
        _print_trained(run_dir, node=node, is_all=is_all, follow=follow)
        return
    launched = launched_of(run_dir, launchers_in(context), which=which)
    if node is not None and node >= (nodes := launched.most_nodes()):
        raise RequestError(
            f"--node {node}: run {launched.run_dir.run_id} has at most {nodes} nodes, numbered "
            f"from 0. Give at most {nodes - 1}, or --all."
        )
    print_lines(launched, node=None if is_all else node or 0, follow=follow, is_raw=is_raw)


def _print_trained(run_dir: RunDir, *, node: int | None, is_all: bool, follow: bool) -> None:
    if node:
        raise RequestError(
            f"--node {node}: run {run_dir.run_id} was trained on one node, number 0. Use --all for "
            "the logs of all ranks."
        )
    replay(run_dir, echo, is_followed=follow)
    logs = sorted((run_dir.path / "logs").glob("attempt-*/rank-*.log")) if is_all else []
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            echo(f"{log.parent.name} {log.stem} | {log_line(line)}")


def print_lines(
    launched: LaunchedJob, *, node: int | None, follow: bool, is_raw: bool = False
) -> None:
    """Print lines as they come; where the nodes' folder is out of reach, keep what they tell.

    Args:
        is_raw: Whether control characters are printed as they are.
    """
    lines = launched.launcher.logs(launched.submission, node=node, follow=follow)
    marked = _without_markers(lines, nonce=launched.nonce, is_merged=node is None, is_raw=is_raw)
    if launched.launcher.capabilities.shares_folder:
        for _ in marked:  # told by the run's folder itself
            pass
    else:
        rebuild(marked, launched.run_dir.path, nonce=launched.nonce)


def _without_markers(
    lines: Iterator[LogLine], *, nonce: str, is_merged: bool, is_raw: bool
) -> Iterator[str]:
    """Print what is for people; yield the events and steps, which are for the run's folder."""
    for line in lines:
        if parse(line.text, nonce=nonce) is not None:
            yield line.text
            continue
        source = f"{line.source} | " if is_merged else ""
        if is_raw:
            echo_raw(f"{source}{line.text}\n")
        else:
            echo(f"{source}{log_line(line.text)}")
