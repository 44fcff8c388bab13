"""A run as curves: each step that counts, with its place on every axis of a comparison.

A run that was resumed or rolled back has each step once. The last one counts, and steps
that were lost and not done again are not shown. This code knows no other run: the
neighbours of a run change none of its numbers.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardyard.report.cost import Spent
from shardyard.report.run_data import AttemptRecord, Line, RunRecord
from shardyard.report.walltime import AttemptTime
from shardyard.rundir.counted_lines import start_of
from shardyard.rundir.jsonl import scores_of

AXES = {
    "steps": "step",
    "epochs": "epoch",
    "samples": "samples",
    "tokens": "tokens (or images)",
    "hours": "hours of wall time, without waiting between attempts",
    "dollars": "US dollars",
}
"""Axes against which curves can be drawn, and their names."""

Position = Mapping[str, float | None]
"""By axis; None: not known, so that a curve has no point there."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Values in order of their steps; None is a gap, never 0."""

    positions: tuple[Position, ...]
    values: tuple[float | None, ...]
    is_of_each_step: bool
    """Whether a step that is missing between two is a gap, too."""

    def segments(self, axis: str) -> list[list[tuple[float, float]]]:
        """Points between gaps, each stretch in order; a place that is not known has no point."""
        segments: list[list[tuple[float, float]]] = []
        last_step: float | None = None
        for place, value in zip(self.positions, self.values, strict=True):
            step, x = place["steps"], place[axis]
            if value is None or x is None or step is None:
                last_step = None
                continue
            is_next = last_step is not None and step == last_step + 1
            if not segments or last_step is None or (self.is_of_each_step and not is_next):
                segments.append([])
            segments[-1].append((x, value))
            last_step = step
        return segments


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """Curves of one run."""

    steps: tuple[Line, ...]
    """Lines of the steps that count."""
    positions: tuple[Position, ...]
    """Place of each of these steps, at its end."""
    evaluations: tuple[tuple[Position, Line], ...]
    """Scores of each evaluation that counts, and where it ended."""

    def of_steps(self, key: str) -> Curve:
        """A number of each step's line."""
        values = tuple(line.get(key) for line in self.steps)
        return Curve(positions=self.positions, values=values, is_of_each_step=True)

    def of_evaluations(self, metric: str) -> Curve:
        """A score of each evaluation."""
        return Curve(
            positions=tuple(place for place, _ in self.evaluations),
            values=tuple(scores.get(metric) for _, scores in self.evaluations),
            is_of_each_step=False,
        )


def curves_of(record: RunRecord, times: Sequence[AttemptTime]) -> RunCurves:
    """All of a run.

    Args:
        times: Wall time of its attempts, from ``account``.
    """
    steps = record.steps
    ends, clock = _ends(record), _Clock(record, times)
    places = tuple(_position(line, ends.get(_key(line)), clock) for line in steps)
    numbers = [line["step"] for line in steps]
    told = {e.get("step"): e for e in record.counted_events("evaluated")}
    evaluations: list[tuple[Position, Line]] = []
    for each in record.evaluations:
        index = bisect_left(numbers, each["step"])
        if index == len(numbers) or numbers[index] != each["step"]:
            continue  # of a step that was lost
        place, event = dict(places[index]), told.get(each["step"])
        if event is not None:
            place |= clock.read(event.get("attempt", 0), event["t"])
        evaluations.append((place, scores_of(each)))
    return RunCurves(steps=tuple(steps), positions=places, evaluations=tuple(evaluations))


class _Clock:
    """From unix seconds to hours and dollars of a run."""

    def __init__(self, record: RunRecord, times: Sequence[AttemptTime]) -> None:
        self._spent = Spent(record)
        self._started_t: dict[int, float] = {}
        waited_s = 0.0
        for time in times:
            waited_s += time.phases.get("waiting", 0.0)
            self._started_t[time.number] = times[0].began_t + waited_s

    def read(self, attempt: int, t: float) -> Position:
        began_t = self._started_t.get(attempt)
        return {
            "hours": None if began_t is None else (t - began_t) / 3600,
            "dollars": self._spent.usd_at(attempt, t),
        }


def _position(line: Line, end_t: float | None, clock: _Clock) -> Position:
    time_and_cost: Position = {"hours": None, "dollars": None}
    if end_t is not None:
        time_and_cost = clock.read(line.get("attempt", 0), end_t)
    return {
        "steps": line["step"],
        "epochs": line.get("epoch"),
        "samples": line.get("samples"),
        "tokens": line.get("tokens"),
        **time_and_cost,
    }


_Key = tuple[int, int, int]


def _key(line: Line) -> _Key:
    """Attempt, generation and step: no start does a step twice."""
    return (*start_of(line), line["step"])


def _ends(record: RunRecord) -> dict[_Key, float]:
    """Unix seconds at which each line's step ended.

    Lines carry durations and no clock. Events of the same step do, so that the error of a sum of
    durations ends at the next of them.
    """
    ends: dict[_Key, float] = {}
    for attempt in record.attempts:
        for generation in attempt.generations:
            _fill_ends(attempt, generation, ends)
    return ends


def _fill_ends(attempt: AttemptRecord, generation: int, ends: dict[_Key, float]) -> None:
    first = {e.get("step"): e for e in attempt.all("first_step", generation)}
    kinds = ("evaluated", "generated", "checkpoint_started")
    pauses = [event for kind in kinds for event in attempt.all(kind, generation)]
    after: dict[object, float] = {}
    for event in pauses:
        after[event.get("step")] = max(after.get(event.get("step"), 0.0), event["t"])
    ready = attempt.first("model_ready", generation)
    clock_t: float | None = None if ready is None else ready["t"]
    for line in attempt.lines:
        if line.get("generation", 0) != generation:
            continue
        step, began = line["step"], first.get(line["step"])
        if began is not None:
            clock_t = began["t"]
        elif clock_t is not None:
            clock_t += line.get("step_time_s") or 0.0
        if clock_t is not None:
            ends[_key(line)] = clock_t
            clock_t = max(clock_t, after.get(step, 0.0))
