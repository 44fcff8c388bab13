"""Is one run's step faster than another's? A verdict: faster, slower or inconclusive.

Neighbouring steps of a run are alike (a busy neighbour, a warm processor), so the error of a mean
is not that of independent steps. It is taken from three things, and nothing else is assumed:

1. Noise: the means of short batches of neighbouring steps differ by so much.
2. Drift: the eighths of a run differ by more than that noise explains. A shared machine drifts over
   hours as it does over minutes, so that it is not divided by the number of eighths: the next run
   is taken to be where the machine, wandering on, would have got to.
3. Between runs: two runs of one recipe differ by what no single one of them shows (where memory
   was placed, which processors were given). Three pairs of runs that alternate show it, and drift
   too; then the pairs alone make the interval. Below that ``BETWEEN_RUNS`` stands for it.

A verdict needs an interval that leaves equality out, and an effect of ``SMALLEST_EFFECT``: what is
real but small is inconclusive, never equal.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean, quantiles, stdev, variance
from typing import Any, Literal

from shardyard.report.compare.student import student

Verdict = Literal["faster", "slower", "inconclusive"]

SMALLEST_EFFECT = 0.02
"""Of step time; a smaller one is no verdict, however sure it is."""
BETWEEN_RUNS = 0.01
"""Standard deviation between runs of one recipe, where too few runs are there to show it."""
CONFIDENCE = 0.95
BLOCKS = 8
"""Stretches of a run that show its drift."""
BATCHES = 4
"""Of neighbouring steps in each of them, which show its noise."""
_WANDERED = 2.0
"""Of a random walk: the square that the means of two runs in a row are apart, over what the
variances of their eighths add up to."""
_FREE = 3
"""Degrees of freedom of a run's drift: eighths that wander are alike, too."""
FEWEST_STEPS = BLOCKS * BATCHES * 2
"""Of one run; a batch of one step knows nothing of its neighbours."""
FEWEST_PAIRS = 3
"""Pairs of runs that make an interval by themselves."""
_CUT = 10
"""The quickest and the slowest tenth of each stretch count as what the next one took: spikes."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The steps of one run that count."""

    name: str
    began_t: float
    """Unix seconds; who alternated with whom is told by it."""
    seconds: tuple[float, ...]
    """Of each step, for a token, an image or a sample; in order."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Step time of one side beside the baseline's, for the same work."""

    verdict: Verdict
    ratio: float | None
    """Above 1: slower than the baseline. None: too few steps."""
    low: float | None
    high: float | None
    """Where the ratio lies, at ``CONFIDENCE``."""
    ratio_of_means: float | None
    """With the slowest steps in full, as the clock counts them."""
    steps: tuple[int, int]
    """That count, of the baseline and of this side."""
    how: str
    """What the interval is made of."""
    why: str
    """Of the verdict."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class _Level:
    """What one run says of the logarithm of its step time."""

    log_s: float
    square_error: float
    """Of it, as a forecast of another run's; without what is between runs."""


def compare_speed(baseline: Sequence[Pace], other: Sequence[Pace]) -> Speed:
    """The verdict on ``other``, each side one run or several of one kind."""
    steps = (sum(len(p.seconds) for p in baseline), sum(len(p.seconds) for p in other))
    short = [pace for pace in (*baseline, *other) if len(pace.seconds) < FEWEST_STEPS]
    if short:
        few = ", ".join(f"{pace.name} has {len(pace.seconds)}" for pace in short)
        return Speed(
            verdict="inconclusive", ratio=None, low=None, high=None, ratio_of_means=None,
            steps=steps, how="",
            why=f"too few steps count: {few}, and {FEWEST_STEPS} are needed of each run",
        )  # fmt: skip
    log_ratio, half, how = _interval(baseline, other)
    ratio, low, high = (math.exp(log_ratio + side * half) for side in (0, -1, 1))
    verdict, why = _judge(ratio, low, high)
    means = [fmean(s for pace in side for s in pace.seconds) for side in (baseline, other)]
    return Speed(
        verdict=verdict, ratio=ratio, low=low, high=high, ratio_of_means=means[1] / means[0],
        steps=steps, how=how, why=why,
    )  # fmt: skip


def _judge(ratio: float, low: float, high: float) -> tuple[Verdict, str]:
    if low <= 1 <= high:
        return "inconclusive", "the interval holds 1"
    if max(ratio, 1 / ratio) < 1 + SMALLEST_EFFECT:
        return "inconclusive", f"less than {SMALLEST_EFFECT:.0%} is no verdict, though not equal"
    return ("slower" if ratio > 1 else "faster"), f"the interval leaves 1 out, {CONFIDENCE:.0%}"


def _interval(baseline: Sequence[Pace], other: Sequence[Pace]) -> tuple[float, float, str]:
    """Logarithm of the ratio, half its interval, and what that is made of."""
    pairs = pairs_in_time(baseline, other)
    if len(pairs) >= FEWEST_PAIRS:
        logs = [_level(b.seconds).log_s - _level(a.seconds).log_s for a, b in pairs]
        half = student(len(logs) - 1, CONFIDENCE) * stdev(logs) / math.sqrt(len(logs))
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
        student(free, CONFIDENCE) * math.sqrt(measured),
        NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(allowed),
    )
    return log_ratio, half, _how(baseline, other, are_paired=bool(pairs))


def _how(baseline: Sequence[Pace], other: Sequence[Pace], *, are_paired: bool) -> str:
    allowed = f"noise and drift of each run, and {BETWEEN_RUNS:.0%} between runs"
    if len(baseline) == len(other) == 1:
        return f"{allowed}; three runs of each, in turn, would show that"
    if are_paired:
        return f"{allowed}; a third pair of runs would show that"
    return f"{allowed}; the runs do not alternate, so the machine's drift is not told from theirs"


def pairs_in_time(baseline: Sequence[Pace], other: Sequence[Pace]) -> list[tuple[Pace, Pace]]:
    """Neighbours in time, one of each side; none where the sides did not take turns."""
    if len(baseline) != len(other):
        return []
    marked = [(pace.began_t, 0, pace) for pace in baseline]
    marked += [(pace.began_t, 1, pace) for pace in other]
    marked.sort(key=lambda each: each[:2])
    pairs = []
    for first, second in zip(marked[::2], marked[1::2], strict=True):
        if first[1] == second[1]:
            return []
        a, b = (first, second) if first[1] == 0 else (second, first)
        pairs.append((a[2], b[2]))
    return pairs


def _level(seconds: Sequence[float]) -> _Level:
    """Of at least ``FEWEST_STEPS`` steps; the first few are left out so that stretches are even."""
    size = len(seconds) // (BLOCKS * BATCHES)
    logs = [math.log(each) for each in seconds[-size * BLOCKS * BATCHES :]]
    length = size * BATCHES
    blocks = [_without_spikes(logs[i : i + length]) for i in range(0, len(logs), length)]
    means = [fmean(block) for block in blocks]
    noise = fmean(
        variance([fmean(block[i : i + size]) for i in range(0, length, size)]) / BATCHES
        for block in blocks
    )
    drift = max(0.0, variance(means) - noise)
    return _Level(log_s=fmean(means), square_error=noise / BLOCKS + _WANDERED * drift)


def _without_spikes(logs: Sequence[float]) -> list[float]:
    """The outermost tenths moved to where they begin; nothing is left out, the order stays."""
    tenths = quantiles(logs, n=_CUT, method="inclusive")
    low, high = tenths[0], tenths[-1]
    return [min(max(each, low), high) for each in logs]
