"""Contents of a run's folder as one value; this module judges and writes no data.

A run may have just begun, may have been killed, or may miss any file. Missing parts are
None or empty, and a torn last line is ignored.
"""

import base64
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardyard.config.resolved import Resolved
from shardyard.config.tasks import loss_unit_of, unit_of
from shardyard.errors import RequestError, StorageError
from shardyard.io.files import parse_json, read_json_object, read_plain
from shardyard.planner.plan import Plan
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.confusion import Confusion, read_confusion
from shardyard.rundir.counted_lines import CountedLines, counted
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import is_locked
from shardyard.rundir.profiles import ProfileSummary, read_profiles
from shardyard.rundir.script import ScriptRequest, read_script
from shardyard.rundir.state import state_of

Line = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class ImagePrediction:
    """An image of the validation split, and what the model says of it."""

    jpeg: str
    """The image in base64."""
    label: str
    predicted: str
    probability: float
    """Probability of the predicted class, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """One start of all processes and what it left."""

    number: int
    events: tuple[Line, ...]
    lines: tuple[Line, ...]
    """Its lines of metrics.jsonl, also those of steps that were done again later."""
    resolved: Resolved | None
    plan: Plan | None
    manifest: Line
    script: ScriptRequest | None = None
    """Name and config from the user's script; None: a recipe made the attempt."""

    def first(self, kind: str, generation: int | None = None) -> Line | None:
        """Its first event of a kind, in a generation if one is given."""
        return next(iter(self.all(kind, generation)), None)

    def last(self, kind: str, generation: int | None = None) -> Line | None:
        """Its last event of a kind, in a generation if one is given."""
        return next(reversed(self.all(kind, generation)), None)

    def all(self, kind: str, generation: int | None = None) -> list[Line]:
        """Its events of a kind, in a generation if one is given."""
        return [
            event
            for event in self.events
            if event["kind"] == kind and generation in (None, event.get("generation"))
        ]

    @property
    def generations(self) -> list[int]:
        """Numbers of its generations, in order."""
        return sorted({event.get("generation", 0) for event in self.events})


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All that is known about one run."""

    run: RunDir
    attempts: tuple[AttemptRecord, ...]
    counted: CountedLines
    """Lines of metrics.jsonl that count, and those of steps that were lost."""
    sample: str | None
    predictions: tuple[ImagePrediction, ...]
    """Validation images at the end of the run; empty: none were written."""
    confusion: Confusion | None
    """Classes that the last validation took for others; None: nothing is classified."""
    set_aside: tuple[str, ...]
    """Folders of checkpoints that were found damaged."""
    profiles: tuple[ProfileSummary, ...]
    """In order of their steps."""
    state: str
    """The word of `rundir/state.py`: running, finished, failed, ..."""

    @property
    def steps(self) -> tuple[Line, ...]:
        """Line of each step that counts, in order."""
        return self.counted.steps

    @property
    def lost(self) -> tuple[Line, ...]:
        """Lines of steps that were lost, whether they were done again or not."""
        return self.counted.lost

    @property
    def evaluations(self) -> tuple[Line, ...]:
        """Line of each evaluation that counts, in order."""
        return self.counted.evaluations

    @property
    def latest(self) -> AttemptRecord | None:
        """The last attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def resolved(self) -> Resolved | None:
        """Resolved recipe of the newest attempt that has one."""
        return _latest([attempt.resolved for attempt in self.attempts])

    @property
    def script(self) -> ScriptRequest | None:
        """Name and config from the newest attempt's script; None: the run is a recipe's."""
        return _latest([attempt.script for attempt in self.attempts])

    @property
    def unit(self) -> str:
        """Unit of its speeds."""
        return "token" if self.resolved is None else unit_of(self.resolved.recipe.task.name)

    @property
    def loss_unit(self) -> str:
        """Unit of its losses, in words."""
        return loss_unit_of("" if self.resolved is None else self.resolved.recipe.task.name)

    @property
    def sampling_method(self) -> str:
        """Sampling method of the sample; empty: an earlier version, which did not report it."""
        finished = self.last("run_finished") or {}
        temperature, top_k = finished.get("temperature"), finished.get("top_k")
        if temperature is None:
            return ""
        likeliest = f" from the {top_k} likeliest tokens" if top_k else ""
        return f"drawn{likeliest} at temperature {temperature:g}" if temperature else "greedy"

    @property
    def main_attempt(self) -> AttemptRecord | None:
        """The attempt with most steps that count; of equal ones the newest."""
        numbers = Counter(line.get("attempt") or 0 for line in self.steps)
        return max(self.attempts, key=lambda a: (numbers[a.number], a.number), default=None)

    @property
    def plan(self) -> Plan | None:
        """Prediction for the main attempt; if that has none, the newest."""
        main = self.main_attempt
        if main is not None and main.plan is not None:
            return main.plan
        return _latest([attempt.plan for attempt in self.attempts])

    def last(self, kind: str) -> Line | None:
        """The last event of a kind in the whole run."""
        return _latest([attempt.last(kind) for attempt in self.attempts])

    def all(self, kind: str) -> list[Line]:
        """All events of a kind in the whole run."""
        return [event for attempt in self.attempts for event in attempt.all(kind)]

    def counted_events(self, kind: str) -> list[Line]:
        """All events of a kind, without those of steps that were lost."""
        return [event for event in self.all(kind) if self.counted.counts(event)]


def read_run(run: RunDir) -> RunRecord:
    """Read a run's folder.

    Raises:
        RequestError: The folder is not a run's, or holds no attempt yet.
    """
    events = [event for event in read_lines(run.events) if {"t", "kind"} <= event.keys()]
    numbers = sorted({*run.attempts(), *(event.get("attempt", 0) for event in events)})
    if not numbers:
        raise RequestError(
            f"{run.path} holds no attempt: attempts/ and events.jsonl are empty. A report needs a "
            f"run that has begun. Start it with `shardyard resume {run.handle}`."
        )
    all_lines = list(read_lines(run.metrics))
    lines = [line for line in all_lines if "eval" not in line]
    return RunRecord(
        run=run,
        attempts=tuple(_read_attempt(run, number, events, lines) for number in numbers),
        counted=counted(all_lines, events),
        sample=_read_sample(run, events),
        predictions=tuple(_read_predictions(run)),
        confusion=read_confusion(run),
        set_aside=tuple(sorted(path.name for path in run.checkpoints.glob("*.damaged"))),
        profiles=tuple(read_profiles(run, events)),
        state=state_of(events, is_leased=is_locked(run.lease)),
    )


def _read_attempt(
    run: RunDir, number: int, events: Sequence[Line], lines: Sequence[Line]
) -> AttemptRecord:
    return AttemptRecord(
        number=number,
        events=tuple(event for event in events if event.get("attempt", 0) == number),
        lines=tuple(line for line in lines if line.get("attempt", 0) == number),
        resolved=_read_resolved(run.resolved(number)),
        plan=_read_plan(run.plan(number)),
        manifest=_read_json(run.manifest(number)),
        script=read_script(run, number),
    )


def _read_json(path: Path) -> Line:
    try:
        return read_json_object(path)
    except (OSError, ValueError):
        return {}


def _read_resolved(path: Path) -> Resolved | None:
    try:
        return read_resolved(path)
    except RequestError:  # missing, or of another version: the page says so
        return None


def _read_plan(path: Path) -> Plan | None:
    try:
        return Plan.from_json(_read_json(path))
    except (KeyError, TypeError):
        return None


_MOST_SAMPLE_BYTES = 2**20


def _read_sample(run: RunDir, events: Sequence[Line]) -> str | None:
    """The sample; None of a link: a page that is handed on shows no other file of this machine."""
    if run.sample.is_symlink():
        return None
    try:
        content = read_plain(run.sample, limit_bytes=_MOST_SAMPLE_BYTES)
        return content.decode("utf-8", errors="replace")
    except (OSError, StorageError):
        finished = [event for event in events if event["kind"] == "run_finished"]
        return finished[-1].get("sample") if finished else None


_MOST_PREDICTIONS = 16


def _read_predictions(run: RunDir) -> Iterator[ImagePrediction]:
    """Yield the images that are JPEG files of plausible size; whatever else is there has none."""
    if run.predictions.is_symlink():
        return
    try:
        found = parse_json(read_plain(run.predictions, limit_bytes=_MOST_SAMPLE_BYTES))
        for each in found[:_MOST_PREDICTIONS]:
            if base64.b64decode(each["jpeg"], validate=True).startswith(b"\xff\xd8\xff"):
                label, predicted = (str(each[key])[:40] for key in ("label", "predicted"))
                yield ImagePrediction(each["jpeg"], label, predicted, float(each["probability"]))
    except (OSError, StorageError, ValueError, TypeError, KeyError):
        return


def _latest(values: Sequence[T | None]) -> T | None:
    return next((value for value in reversed(values) if value is not None), None)
