"""Live progress on a terminal: a bar for training, a download, or a dry run of a model.

Where stderr is no terminal, the plain lines of control/ take their place.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TransferSpeedColumn,
)

from shardyard.config.resolved import Resolved
from shardyard.config.tasks import unit_of
from shardyard.control.fetch import log_progress
from shardyard.control.follow import View, describe_scores, describe_step, log_view
from shardyard.control.plan import log_phase
from shardyard.io.sanitize import sanitize
from shardyard.planner.dry_run import OnPhase as ToldPhase
from shardyard.transfer.download import ProgressCallback

_BAR_WIDTH = 24
_WIDTH_FOR_BAR = 110
"""Columns of a terminal from which there is room for a bar next to the facts."""


def attempt_view(resolved: Resolved) -> View:
    """A bar on a terminal, plain lines elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        return log_view(resolved)
    return AttemptBar(console, resolved.steps, unit=unit_of(resolved.recipe.task.name))


@contextmanager
def bytes_progress(total_bytes: int) -> Iterator[ProgressCallback]:
    """A bar on a terminal, a line every tenth elsewhere."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        with log_progress(total_bytes) as tell:
            yield tell
        return
    with Progress(
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=_BAR_WIDTH),
        DownloadColumn(binary_units=True), TransferSpeedColumn(), console=console,
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=total_bytes)

        def show(name: str, size: int) -> None:
            bar.update(task, description=sanitize(Path(name).name), advance=size)

        yield show


@contextmanager
def phases_progress() -> Iterator[ToldPhase]:
    """A bar on a terminal, which goes away with the last phase; a line each elsewhere."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield log_phase
        return
    with Progress(
        SpinnerColumn(), BarColumn(bar_width=_BAR_WIDTH), MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False), console=console, transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=None)

        def show(phase: str, done: int, of: int) -> None:
            bar.update(task, description=sanitize(phase), completed=done, total=of or None)

        yield show


class AttemptBar:
    """One progress bar that stays at the bottom; lines of events above it."""

    def __init__(self, console: Console, total_steps: int, *, unit: str = "token") -> None:
        """Create the bar.

        Args:
            unit: Unit of the speed.
        """
        self._console = console
        self._unit = unit
        self._total_steps = total_steps
        bar = [BarColumn(bar_width=_BAR_WIDTH)] if console.width >= _WIDTH_FOR_BAR else []
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            *bar,
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            console=console,
            refresh_per_second=5,
        )
        self._width_of_rest = 6 + 2 * len(str(total_steps)) + len(bar) * (_BAR_WIDTH + 1)
        self._task = self._progress.add_task("", total=total_steps, facts="")
        self._phase = ""
        self._step_fields: list[str] = []
        self._evaluation: list[str] = []
        self._progress.start()

    def phase(self, words: str, *, is_logged: bool) -> None:  # noqa: ARG002  the bar tells it too
        self._phase = sanitize(words)
        self._show()

    def step(self, line: dict[str, Any], *, step_s: float | None) -> None:
        self._step_fields = describe_step(line, self._total_steps, step_s, self._unit)
        self._progress.update(self._task, completed=line["step"])
        self._show()

    def length(self, steps: int) -> None:
        self._total_steps = steps
        self._progress.update(self._task, total=steps)

    def evaluation(self, step: int, scores: Mapping[str, float | None]) -> None:
        self._evaluation = [f"eval {', '.join(describe_scores(scores))} (step {step})"]
        self._show()

    def line(self, text: str) -> None:
        self._console.print(sanitize(text), markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()

    def _show(self) -> None:
        room = self._console.width - self._width_of_rest - len(self._phase)
        facts = fit([*self._step_fields, *self._evaluation], room)
        self._progress.update(self._task, description=self._phase, facts="  ".join(facts))


def fit(fields: list[str], width: int) -> list[str]:
    """Leave out what a narrow terminal has no room for, the least important first."""
    for ending in ("/step", "s/s", ")", " left"):
        if len("  ".join(fields)) <= width:
            break
        fields = [fact for fact in fields if not fact.endswith(ending)]
    return fields
