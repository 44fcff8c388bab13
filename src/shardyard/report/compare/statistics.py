"""Speed comparison of runs: the steps that count, their medians, and confidence intervals."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import NormalDist, fmean, quantiles, stdev, variance
from typing import Any, Literal

from shardyard.report.run_data import Line, RunRecord
from shardyard.report.walltime import AttemptTime
from shardyard.rundir.counted_lines import start_of

# Quantiles of Student's t, which Python's library lacks and a report needs no SciPy for.

_STEPS = 400
"""Steps of Simpson's rule, which make the quantile right to 1e-6."""


@cache
def t_half_width(degrees: int, confidence: float) -> float:
    """Half the width, in standard errors, of an interval that holds the mean so often.

    Args:
        degrees: Of freedom, from 1.
        confidence: Between 0 and 1, both sides together: 0.95.
    """
    low, high = 0.0, 1.0
    while _within(high, degrees) < confidence:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """Probability of a value between -t and t.

    With t = sqrt(degrees) tan(a) the density becomes a power of the cosine, which is smooth and
    has a finite end.
    """
    end = math.atan(t / math.sqrt(degrees))
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    width = end / _STEPS
    total = sum(
        (1 if k in (0, _STEPS) else 4 if k % 2 else 2) * math.cos(k * width) ** (degrees - 1)
        for k in range(_STEPS + 1)
    )
    return 2 * scale / math.sqrt(math.pi) * total * width / 3


# Is one run's step faster than another's? A verdict: faster, slower or inconclusive.
#
# Neighbouring steps of a run are alike (a busy neighbour, a warm processor), so the error of a mean
# is not that of independent steps. It is taken from three things, and nothing else is assumed:
#
# 1. Noise: the means of short batches of neighbouring steps differ by so much.
# 2. Drift: the eighths of a run differ by more than that noise explains. A shared machine drifts
# over
#    hours as it does over minutes, so that it is not divided by the number of eighths: the next run
#    is taken to be where the machine, wandering on, would have got to.
# 3. Between runs: two runs of one recipe differ by what no single one of them shows (where memory
#    was placed, which processors were given). Three pairs of runs that alternate show it, and drift
#    too; then the pairs alone make the interval. Below that ``BETWEEN_RUNS`` stands for it.
#
# A verdict needs an interval that leaves equality out, and an effect of ``SMALLEST_EFFECT``: what
# is real but small is inconclusive, never equal.

Verdict = Literal["faster", "slower", "inconclusive"]

SMALLEST_EFFECT = 0.02
"""Smallest share of step time for a verdict; a smaller effect is none, however certain."""
BETWEEN_RUNS = 0.01
"""Standard deviation between runs of one recipe, where too few runs are there to show it."""
CONFIDENCE = 0.95
BLOCKS = 8
"""Stretches of a run that show its drift."""
BATCHES = 4
"""Batches of neighbouring steps in each stretch, which show its noise."""
_DRIFT_FACTOR = 2.0
"""Square of the distance between two runs' means, over the sum of their eighths' variances.

It holds for a random walk and two runs in a row.
"""
_FREE = 3
"""Degrees of freedom of a run's drift: eighths that wander are alike, too."""
MIN_STEPS = BLOCKS * BATCHES * 2
"""Fewest steps of one run; a batch of one step has no neighbours to compare with."""
MIN_PAIRS = 3
"""Pairs of runs that make an interval by themselves."""
_CUT = 10
"""The quickest and the slowest tenth of each stretch count as what the next one took: spikes."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The steps of one run that count."""

    name: str
    started_t: float
    """Unix seconds; they show which runs alternated."""
    seconds: tuple[float, ...]
    """Time of each step, for a token, an image or a sample; in order."""


@dataclass(frozen=True, kw_only=True)
class SpeedComparison:
    """Step time of one side compared with the baseline's, for the same work."""

    verdict: Verdict
    ratio: float | None
    """Above 1: slower than the baseline. None: too few steps."""
    low: float | None
    high: float | None
    """Upper end of the ratio's interval at ``CONFIDENCE``; `low` is the lower end."""
    ratio_of_means: float | None
    """With the slowest steps in full, as the clock counts them."""
    steps: tuple[int, int]
    """Number of steps that count, of the baseline and of this side."""
    how: str
    """Basis of the interval, in words."""
    why: str
    """Reason for the verdict."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class _Level:
    """Estimate by one run of the logarithm of its step time."""

    log_s: float
    square_error: float
    """Squared error as a forecast of another run's value, without the variance between runs."""


def compare_speed(baseline: Sequence[Pace], other: Sequence[Pace]) -> SpeedComparison:
    """The verdict on ``other``, each side one run or several of one kind."""
    steps = (sum(len(p.seconds) for p in baseline), sum(len(p.seconds) for p in other))
    short = [pace for pace in (*baseline, *other) if len(pace.seconds) < MIN_STEPS]
    if short:
        few = ", ".join(f"{pace.name} has {len(pace.seconds)}" for pace in short)
        return SpeedComparison(
            verdict="inconclusive", ratio=None, low=None, high=None, ratio_of_means=None,
            steps=steps, how="",
            why=f"too few steps count: {few}, and {MIN_STEPS} are needed of each run",
        )  # fmt: skip
    log_ratio, half, how = _interval(baseline, other)
    ratio, low, high = (math.exp(log_ratio + side * half) for side in (0, -1, 1))
    verdict, why = _classify(ratio, low, high)
    means = [fmean(s for pace in side for s in pace.seconds) for side in (baseline, other)]
    return SpeedComparison(
        verdict=verdict, ratio=ratio, low=low, high=high, ratio_of_means=means[1] / means[0],
        steps=steps, how=how, why=why,
    )  # fmt: skip


def _classify(ratio: float, low: float, high: float) -> tuple[Verdict, str]:
    if low <= 1 <= high:
        return "inconclusive", "the interval holds 1"
    if max(ratio, 1 / ratio) < 1 + SMALLEST_EFFECT:
        return "inconclusive", f"less than {SMALLEST_EFFECT:.0%} is not a verdict, though not equal"
    return ("slower" if ratio > 1 else "faster"), f"the interval leaves 1 out, {CONFIDENCE:.0%}"


def _interval(baseline: Sequence[Pace], other: Sequence[Pace]) -> tuple[float, float, str]:
    """Logarithm of the ratio, half its interval, and what that is made of."""
    pairs = alternating_pairs(baseline, other)
    if len(pairs) >= MIN_PAIRS:
        logs = [_level(b.seconds).log_s - _level(a.seconds).log_s for a, b in pairs]
        half = t_half_width(len(logs) - 1, CONFIDENCE) * stdev(logs) / math.sqrt(len(logs))
        return fmean(logs), half, f"{len(pairs)} pairs of runs that alternate"
    log_ratio, measured, allowed, free = 0.0, 0.0, 0.0, 0
    for side, sign in ((baseline, -1), (other, 1)):
        levels = [_level(pace.seconds) for pace in side]
        log_ratio += sign * fmean(level.log_s for level in levels)
        within = fmean(level.square_error for level in levels)
        # runs that alternate share the machine's drift out between the sides; others do not
        alike = len(levels) if pairs else 1
        if not pairs and len(levels) > 1:
            within += variance([level.log_s for level in levels]) / len(levels)
        measured += within / alike
        allowed += BETWEEN_RUNS**2 / alike
        free += _FREE * len(levels)
    half = math.hypot(
        t_half_width(free, CONFIDENCE) * math.sqrt(measured),
        NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(allowed),
    )
    return log_ratio, half, _interval_basis(baseline, other, are_paired=bool(pairs))


def _interval_basis(baseline: Sequence[Pace], other: Sequence[Pace], *, are_paired: bool) -> str:
    allowed = f"noise and drift of each run, and {BETWEEN_RUNS:.0%} between runs"
    if len(baseline) == len(other) == 1:
        return f"{allowed}; three runs of each, in turn, would show that"
    if are_paired:
        return f"{allowed}; a third pair of runs would show that"
    return (
        f"{allowed}; the runs do not alternate, so the machine's drift cannot be separated from "
        "theirs"
    )


def alternating_pairs(baseline: Sequence[Pace], other: Sequence[Pace]) -> list[tuple[Pace, Pace]]:
    """Neighbours in time, one of each side; none where the sides did not take turns."""
    if len(baseline) != len(other):
        return []
    marked = [(pace.started_t, 0, pace) for pace in baseline]
    marked += [(pace.started_t, 1, pace) for pace in other]
    marked.sort(key=lambda each: each[:2])
    pairs = []
    for first, second in zip(marked[::2], marked[1::2], strict=True):
        if first[1] == second[1]:
            return []
        a, b = (first, second) if first[1] == 0 else (second, first)
        pairs.append((a[2], b[2]))
    return pairs


def _level(seconds: Sequence[float]) -> _Level:
    """Return the level of at least ``MIN_STEPS`` steps.

    It leaves out the first few so that stretches are even.
    """
    size = len(seconds) // (BLOCKS * BATCHES)
    logs = [math.log(each) for each in seconds[-size * BLOCKS * BATCHES :]]
    length = size * BATCHES
    blocks = [_winsorized(logs[i : i + length]) for i in range(0, len(logs), length)]
    means = [fmean(block) for block in blocks]
    noise = fmean(
        variance([fmean(block[i : i + size]) for i in range(0, length, size)]) / BATCHES
        for block in blocks
    )
    drift = max(0.0, variance(means) - noise)
    return _Level(log_s=fmean(means), square_error=noise / BLOCKS + _DRIFT_FACTOR * drift)


def _winsorized(logs: Sequence[float]) -> list[float]:
    """Clip the outermost tenths to where they begin; all values stay, in order."""
    tenths = quantiles(logs, n=_CUT, method="inclusive")
    low, high = tenths[0], tenths[-1]
    return [min(max(each, low), high) for each in logs]


WARM_UP_STEPS = 5
"""Steps left out after each start and phase: memory fills, kernels are chosen, caches warm."""

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
    excluded: Counter[str] = Counter()
    seconds: list[float] = []
    for line in steps:
        rate, step = line.get("tokens_per_s"), line["step"]
        if (*start_of(line), step) in early:
            excluded[START] += 1
        elif _kind(line) != usual:
            excluded[OTHER] += 1
        elif step in evaluating:
            excluded[EVALUATION] += 1
        elif step in saving:
            excluded[SAVE] += 1
        elif not rate:
            excluded[UNTIMED] += 1
        else:
            seconds.append(1 / rate)
    began_t = times[0].began_t if times else 0.0
    pace = Pace(name=record.run.run_id, started_t=began_t, seconds=tuple(seconds))
    return pace, dict(excluded)


def _kind(line: Line) -> tuple[int | None, int | None]:
    """Return what makes steps of one run differ in length: its world size and its phase."""
    return line.get("world_size"), line.get("phase")


def _early(record: RunRecord) -> set[tuple[int, int, int]]:
    """Attempt, generation and number of the first steps of each start and phase."""
    early: set[tuple[int, int, int]] = set()
    for attempt in record.attempts:
        counts: Counter[tuple[int, int, int | None]] = Counter()
        for line in attempt.lines:
            place = (*start_of(line), line.get("phase"))
            counts[place] += 1
            if counts[place] <= WARM_UP_STEPS:
                early.add((*start_of(line), line["step"]))
    return early


def _evaluating(record: RunRecord) -> set[int]:
    """Steps before and after an evaluation: it empties what the next ones had prepared."""
    at = [
        event["step"]
        for kind in ("evaluated", "generated")
        for event in record.counted_events(kind)
        if event.get("step") is not None
    ]
    return {step for each in at for step in (each, each + 1)}


def _saving(record: RunRecord, steps: Sequence[Line]) -> set[int]:
    """Return steps at a save, and those during which it was written."""
    lasted = {
        (*start_of(event), event.get("step")): event.get("seconds") or 0.0
        for event in record.all("checkpoint_durable")
    }
    blocked = [line["step"] for line in steps if line.get("checkpoint_blocked_s")]
    saving = {step for each in blocked for step in (each, each + 1)}
    place = {line["step"]: index for index, line in enumerate(steps)}
    for event in record.counted_events("checkpoint_started"):
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
