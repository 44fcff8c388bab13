"""Comparison of several runs as one value: the page, the terminal and ``--json`` print the same.

A side is one run, or several of one kind that were repeated. The first side is the
baseline. Every number of a run comes only from its own folder: other compared runs change
none of them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.report.compare.curves import RunCurves, curves_of
from shardyard.report.compare.differences import (
    Difference,
    environment_differences,
    settings_that_differ,
)
from shardyard.report.compare.statistics import Pace, SpeedComparison, compare_speed, pace_of
from shardyard.report.compare.targets import Reached, Target, reached, targets_of
from shardyard.report.run_data import RunRecord
from shardyard.report.summary import Summary, summarize


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run."""

    side: int
    """From 0, the baseline."""
    record: RunRecord
    summary: Summary
    curves: RunCurves
    pace: Pace
    excluded_steps: dict[str, int]
    """Steps that are left out of its speed, by reason."""

    @property
    def id(self) -> str:
        return self.record.run.run_id

    def to_json(self) -> dict[str, Any]:
        """Its numbers, as `shardyard report` tells them."""
        summary = self.summary
        return {
            "run": self.id,
            "path": str(self.record.run.path),
            "side": self.side,
            "state": summary.state,
            "steps": summary.steps_done,
            "unit": summary.unit,
            "loss": summary.loss,
            "eval": {"loss": summary.eval_loss, **summary.scores},
            "best_eval_loss": summary.best_eval_loss,
            "tokens_per_s": summary.tokens_per_s,
            "step_time_s": summary.step_time_s,
            "mfu": summary.mfu,
            "peak_memory_bytes": summary.peak_memory_bytes,
            "wall_s": summary.wall_s,
            "usd": None if summary.cost is None else summary.cost.so_far_usd,
            "steps_that_count": len(self.pace.seconds),
            "steps_left_out": self.excluded_steps,
        }


@dataclass(frozen=True, kw_only=True)
class ComparedSide:
    """Runs that are compared as one."""

    number: int
    runs: tuple[ComparedRun, ...]

    @property
    def name(self) -> str:
        """Name of its first run, and the number of further ones."""
        first, more = self.runs[0].id, len(self.runs) - 1
        return first if not more else f"{first} and {more} more"


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """All of it."""

    sides: tuple[ComparedSide, ...]
    speeds: tuple[SpeedComparison, ...]
    """Speed of each side but the first, compared with the first."""
    targets: tuple[Reached, ...]
    """Result of each run at each target."""
    settings: tuple[Difference, ...]
    environment: tuple[Difference, ...]

    @property
    def runs(self) -> tuple[ComparedRun, ...]:
        """In the order in which they were named."""
        return tuple(run for side in self.sides for run in side.runs)

    @property
    def units(self) -> tuple[str, ...]:
        """Units of their losses and speeds: token, image."""
        return tuple(dict.fromkeys(run.summary.unit for run in self.runs))

    @property
    def loss_units(self) -> tuple[str, ...]:
        """Units of the runs' losses, each once."""
        return tuple(dict.fromkeys(run.summary.loss_unit for run in self.runs))

    def to_json(self) -> dict[str, Any]:
        """Plain values; the curves are in the runs' own metrics.jsonl."""
        first = self.sides[0].name
        return {
            "runs": [run.to_json() for run in self.runs],
            "speeds": [
                {"side": side.number, "name": side.name, "baseline": first, **speed.to_json()}
                for side, speed in zip(self.sides[1:], self.speeds, strict=True)
            ],
            "targets": [each.to_json() for each in self.targets],
            "settings": [asdict(each) for each in self.settings],
            "surroundings": [asdict(each) for each in self.environment],
        }


def compare(sides: Sequence[Sequence[RunRecord]], *, target: Target) -> RunComparison:
    """Put runs side by side.

    Args:
        sides: The runs of each side, the baseline first.
        target: Metric -> value; empty: what the runs' own run.target asks for.

    Raises:
        RequestError: No run is evaluated by a metric of the target.
    """
    made = tuple(
        ComparedSide(number=number, runs=tuple(_compared(record, number) for record in records))
        for number, records in enumerate(sides)
    )
    runs = [run for side in made for run in side.runs]
    records = [run.record for run in runs]
    targets = targets_of(records, target)
    paces = [[run.pace for run in side.runs] for side in made]
    units = [{run.summary.unit for run in side.runs} for side in made]
    return RunComparison(
        sides=made,
        speeds=tuple(
            compare_speed(paces[0], pace) if unit == units[0] else _other_units(paces[0], pace)
            for pace, unit in zip(paces[1:], units[1:], strict=True)
        ),
        targets=tuple(reached(run.record, run.curves, each) for each in targets for run in runs),
        settings=tuple(settings_that_differ(records)),
        environment=tuple(environment_differences(records)),
    )


def _compared(record: RunRecord, side: int) -> ComparedRun:
    summary = summarize(record)
    pace, left_out = pace_of(record, summary.attempts)
    return ComparedRun(
        side=side,
        record=record,
        summary=summary,
        curves=curves_of(record, summary.attempts),
        pace=pace,
        excluded_steps=left_out,
    )


def _other_units(baseline: Sequence[Pace], other: Sequence[Pace]) -> SpeedComparison:
    steps = (sum(len(p.seconds) for p in baseline), sum(len(p.seconds) for p in other))
    return SpeedComparison(
        verdict="inconclusive", ratio=None, low=None, high=None, ratio_of_means=None, steps=steps,
        how="", why="one counts tokens, the other images",
    )  # fmt: skip
