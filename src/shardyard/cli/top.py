"""`shardyard top`: the state of a run with all its nodes and ranks, every few seconds."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardyard.cli.options import json_option, launchers_in, run_argument, runs_dir_option
from shardyard.control.job import LaunchedJob, fetch_progress, launched_of, warn_unfinished
from shardyard.control.live_status import Board, NodeRow, RankRow, read_board
from shardyard.errors import EXIT_INTERRUPTED
from shardyard.io.polling import poll_until
from shardyard.io.sanitize import sanitize
from shardyard.io.terminal import echo, print_table
from shardyard.launchers.base import JobState
from shardyard.launchers.ledger import Ledger
from shardyard.rundir.layout import RunDir, find_run
from shardyard.units import (
    ABSENT,
    format_age,
    format_bytes,
    format_count,
    format_seconds,
    format_usd,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

_FETCH_EVERY_S = 15.0
"""Seconds between reads of node 0's output, where the nodes' folder is out of reach."""
_AROUND = 6
"""Lines of a terminal without the table's rows."""
_NUMBERS = ("step", "a step", "waits", "memory", "used", "power")
_RANK_HEADS = ("rank", "node", "pid", *_NUMBERS, "")
_NODE_HEADS = ("node", "ranks", *_NUMBERS, "")


@click.command()
@run_argument
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.2),
    default=2.0,
    show_default=True,
    help="Seconds between updates on a terminal.",
)
@runs_dir_option
@json_option
@click.pass_context
def command(
    context: click.Context, run: str, *, every_s: float, runs_dir: Path, as_json: bool
) -> int:
    """Show RUN (path, id or its beginning) live, with its nodes and ranks.

    On a terminal, it updates until the run ends or you press Ctrl-C, which does not end the run.
    In a pipe, it prints plain text once.
    """
    run_dir = find_run(run, runs_dir)
    launched, ledger = None, Ledger(run_dir.ledger)
    if ledger.jobs():
        launched = launched_of(run_dir, launchers_in(context))
    else:
        warn_unfinished(run_dir, ledger)
    look = _BoardReader(run_dir, launched)
    if as_json:
        echo(json.dumps(look().to_json(), indent=1))
    elif sys.stdout is None or not sys.stdout.isatty():
        _print_board(look())
    else:
        return _show(look, every_s)
    return 0


class _BoardReader:
    """Reads the run's folder, and brings there first what only its nodes have."""

    def __init__(self, run_dir: RunDir, launched: LaunchedJob | None) -> None:
        self._run = run_dir
        is_far = launched is not None and not launched.launcher.capabilities.shares_folder
        self._far = launched if is_far else None
        self._fetched_s = -_FETCH_EVERY_S
        self._is_running = False

    def __call__(self) -> Board:
        if self._far is not None and time.monotonic() - self._fetched_s >= _FETCH_EVERY_S:
            state = self._far.state()
            if state not in (JobState.WAITING, JobState.GONE):
                fetch_progress(self._far)
            self._is_running = state == JobState.RUNNING
            self._fetched_s = time.monotonic()
        return read_board(self._run, is_training_remotely=self._is_running)


def _print_board(board: Board) -> None:
    """Print all ranks, for any number of them."""
    for line in head_lines(board):
        echo(line)
    heads, rows = rank_table(board)
    if rows:
        print_table(heads, rows)


def _show(read: Callable[[], Board], every_s: float) -> int:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    newest = [read()]
    try:
        with Live(_drawn(newest[0], console.height), console=console, auto_refresh=False) as live:
            for _ in poll_until(lambda: newest[0].is_over, every_s=every_s):
                newest[0] = read()
                live.update(_drawn(newest[0], console.height), refresh=True)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _drawn(board: Board, height: int) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    heads, rows, more = fitting(board, height - _AROUND)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(heads):
        widest = max(len(text) for text in (name, *(row[place] for row in rows)))
        is_marks = place == len(heads) - 1  # what is wrong, in words: the only one that is cut
        table.add_column(name, no_wrap=True, min_width=None if is_marks else widest)
    for row in rows:
        is_marked = bool(row[-1])
        table.add_row(*(Text(sanitize(c), style="bold red" if is_marked else "") for c in row))
    lines = [Text(sanitize(line)) for line in head_lines(board)]
    return Group(*lines, table, *([Text(more, style="dim")] if more else []))


def head_lines(board: Board) -> list[str]:
    """The run as a whole."""
    state = board.state
    of = "" if board.last_step is None else f" of {board.last_step:,}"
    step = ABSENT if state.step is None else f"{state.step:,}{of}"
    rate = board.tokens_per_s
    numbers = [
        f"step {step}",
        f"loss {_four(state.loss)}",
        f"validation {_four(board.eval_loss)}",
        ABSENT if rate is None else f"{format_count(rate)} {board.unit}s/s",
        "a step " + (ABSENT if board.step_s is None else format_seconds(board.step_s)),
        "waits for data " + (ABSENT if board.data_wait is None else f"{board.data_wait:.1%}"),
        "MFU " + (ABSENT if board.mfu is None else f"{board.mfu:.1%}"),
    ]
    if board.spent is not None:
        rate_usd = format_usd(board.spent.usd_per_hour)
        numbers.append(f"{format_usd(board.spent.usd)}, {rate_usd} an hour")
    lines = [f"{state.id}  {state.state}{_since(board)}", "  ".join(numbers)]
    if state.no_step_s is not None:
        lines.append(f"no step for {format_seconds(state.no_step_s)}")
    if state.stop_reason:
        lines.append(f"stopping: {state.stop_reason}")
    return lines


def _since(board: Board) -> str:
    changed_at = board.state.updated_at
    return "" if changed_at is None else f", changed {format_age(time.time() - changed_at)}"


def _four(loss: float | None) -> str:
    return ABSENT if loss is None else f"{loss:.4f}"


Rows = list[tuple[str, ...]]


def rank_table(board: Board) -> tuple[Sequence[str], Rows]:
    """A row a rank; a node that has none, or something wrong itself, has a row of its own."""
    rows: Rows = []
    for node in board.nodes:
        if node.mark or not node.ranks:
            rows.append((ABSENT, node.node, ABSENT, *_numbers(()), node.mark))
        rows += [_rank_row(rank) for rank in node.ranks]
    return _RANK_HEADS, rows


def node_table(board: Board) -> tuple[Sequence[str], Rows]:
    """A row a node, with the fullest of its ranks and all that is wrong there."""
    return _NODE_HEADS, [_node_row(node) for node in board.nodes]


def fitting(board: Board, height: int) -> tuple[Sequence[str], Rows, str]:
    """Return the rows that fit a terminal: ranks, else nodes, those with problems first.

    Returns:
        Heads, rows, and a description of the rows left out.
    """
    heads, rows = rank_table(board)
    if len(rows) <= height:
        return heads, rows, ""
    heads, rows = node_table(board)
    if len(rows) <= height:
        return heads, rows, ""
    rows.sort(key=lambda row: not row[-1])
    shown = rows[: max(1, height - 1)]
    left = rows[len(shown) :]
    marked = sum(bool(row[-1]) for row in left)
    wrong = f", {marked} of them with something wrong" if marked else ", all healthy"
    return heads, shown, f"and {len(left)} more nodes{wrong}"


def _rank_row(row: RankRow) -> tuple[str, ...]:
    pid = ABSENT if row.pid is None else str(row.pid)
    return (str(row.rank), row.node, pid, *_numbers((row,)), row.mark)


def _node_row(node: NodeRow) -> tuple[str, ...]:
    ranks = [rank.rank for rank in node.ranks]
    span = ABSENT if not ranks else f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
    return (node.node, span, *_numbers(node.ranks), node.marks)


def _numbers(rows: Sequence[RankRow]) -> list[str]:
    """Return the numbers of one rank, or of several ranks together.

    For several, they are the last step that all have done, the longest step and the least waiting;
    then the fullest device, the idlest one, and the sum of their power.
    """
    step = min((r.step for r in rows if r.step is not None), default=None)
    step_s = max((r.step_s for r in rows if r.step_s is not None), default=None)
    waits = min((r.waits for r in rows if r.waits is not None), default=None)
    memory = max((r.memory_bytes for r in rows if r.memory_bytes), default=None)
    used = min((r.utilisation for r in rows if r.utilisation is not None), default=None)
    power = [r.power_w for r in rows if r.power_w is not None]
    return [
        ABSENT if step is None else f"{step:,}",
        ABSENT if step_s is None else format_seconds(step_s),
        ABSENT if waits is None else f"{waits:.0%}",
        ABSENT if memory is None else format_bytes(memory),
        ABSENT if used is None else f"{used:.0%}",
        f"{sum(power):,.0f} W" if power else ABSENT,
    ]
