"""Which steps of a run say how fast its steps are, and how many are left out, by reason."""

from collections import Counter
from collections.abc import Sequence

from shardyard.report.compare.speed import Pace
from shardyard.report.run_data import Line, RunRecord
from shardyard.report.walltime import AttemptTime
from shardyard.rundir.counted_lines import start_of

WARM_UP_STEPS = 5
"""Of each start and phase: memory is taken, kernels are chosen, caches fill."""

START, EVALUATION, SAVE = "the first of a start", "beside an evaluation", "during a save"
OTHER, UNTIMED = "on other ranks or of another phase", "without a time"
"""Reasons, in words that follow a number of steps."""


def pace_of(record: RunRecord, times: Sequence[AttemptTime]) -> tuple[Pace, dict[str, int]]:
    """The steps that count, and how many do not, by reason.

    Times are for a token or an image, so that runs with other batches compare; where the batch is
    the same, their ratio is that of step times.
    """
    steps = record.steps
    numbers = Counter(_kind(line) for line in steps)
    usual = max(numbers, key=lambda kind: numbers[kind], default=None)
    early, evaluating, saving = _early(record), _evaluating(record), _saving(record, steps)
    left_out: Counter[str] = Counter()
    seconds: list[float] = []
    for line in steps:
        rate, step = line.get("tokens_per_s"), line["step"]
        if (*start_of(line), step) in early:
            left_out[START] += 1
        elif _kind(line) != usual:
            left_out[OTHER] += 1
        elif step in evaluating:
            left_out[EVALUATION] += 1
        elif step in saving:
            left_out[SAVE] += 1
        elif not rate:
            left_out[UNTIMED] += 1
        else:
            seconds.append(1 / rate)
    began_t = times[0].began_t if times else 0.0
    pace = Pace(name=record.run.run_id, began_t=began_t, seconds=tuple(seconds))
    return pace, dict(left_out)


def _kind(line: Line) -> tuple[int | None, int | None]:
    """What makes steps of one run differ in length: its ranks, and its phase."""
    return line.get("world_size"), line.get("phase")


def _early(record: RunRecord) -> set[tuple[int, int, int]]:
    """Attempt, generation and number of the first steps of each start and phase."""
    early: set[tuple[int, int, int]] = set()
    for attempt in record.attempts:
        begun: Counter[tuple[int, int, int | None]] = Counter()
        for line in attempt.lines:
            place = (*start_of(line), line.get("phase"))
            begun[place] += 1
            if begun[place] <= WARM_UP_STEPS:
                early.add((*start_of(line), line["step"]))
    return early


def _evaluating(record: RunRecord) -> set[int]:
    """Steps before and after an evaluation: it empties what the next ones had prepared."""
    at = [event["step"] for event in record.counting("evaluated") if event.get("step") is not None]
    return {step for each in at for step in (each, each + 1)}


def _saving(record: RunRecord, steps: Sequence[Line]) -> set[int]:
    """Steps at a save, and those that it was written beside."""
    lasted = {
        (*start_of(event), event.get("step")): event.get("seconds") or 0.0
        for event in record.all("checkpoint_durable")
    }
    blocked = [line["step"] for line in steps if line.get("checkpoint_blocked_s")]
    saving = {step for each in blocked for step in (each, each + 1)}
    place = {line["step"]: index for index, line in enumerate(steps)}
    for event in record.counting("checkpoint_started"):
        index = place.get(event.get("step") or -1)
        if index is None:
            continue
        saving.add(steps[index]["step"])
        left_s = lasted.get((*start_of(event), event["step"]), 0.0)
        for line in steps[index + 1 :]:
            saving.add(line["step"])
            left_s -= line.get("step_time_s") or 0.0
            if left_s <= 0:
                break
    return saving
