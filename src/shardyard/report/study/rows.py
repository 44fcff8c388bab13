"""One size of a study: what ran, how fast it was, how sure that is, and its settings.

The interval of a mean step time comes from the steps of one run, by batch means. Steps that
follow each other are alike (caches, neighbours on the machine, clocks). Each of them
separately would count as more evidence than it is. So the steps are cut into a few stretches
of equal length, whose means hardly depend on each other. Student's t bounds how far the mean
of these may be from the truth (Law and Kelton, Simulation Modeling and Analysis, batch
means). The mean and not the median: a step that is slow now and then is paid for too.

The interval leaves out differences from one run of the same size to the next (other nodes,
other neighbours): that takes several runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean, stdev
from typing import Literal

from shardyard.report.compare.statistics import CONFIDENCE, t_half_width

SEGMENTS = 10
_MIN_SEGMENTS, _LEAST_STEPS = 4, 2
CONFIDENCE_WORDS = "95 % interval by batch means"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Uncertainty of a mean, as a share of it: on the logarithm, so that ratios are simple."""

    error: float
    """Standard error of the mean over the mean."""
    freedom: float
    """Degrees of freedom."""

    @property
    def factor(self) -> float:
        """The interval goes from the value over this to the value times this."""
        # of the whole number below where it is none: the next wider interval
        return math.exp(t_half_width(max(1, math.floor(self.freedom)), CONFIDENCE) * self.error)

    def combined_with(self, other: "Spread") -> "Spread":
        """Return the spread of the ratio of two independent means (Welch and Satterthwaite)."""
        squares = self.error**2, other.error**2
        total = sum(squares)
        if total == 0:
            return Spread(error=0.0, freedom=min(self.freedom, other.freedom))
        parts = squares[0] ** 2 / self.freedom + squares[1] ** 2 / other.freedom
        return Spread(error=math.sqrt(total), freedom=total**2 / parts)


def spread_of(seconds: Sequence[float]) -> Spread | None:
    """Return the spread of the mean of step times, given in order; None: too few steps."""
    stretches = min(SEGMENTS, len(seconds) // _LEAST_STEPS)
    if stretches < _MIN_SEGMENTS:
        return None
    size = len(seconds) // stretches
    kept = seconds[len(seconds) - size * stretches :]  # what is over is left out at the beginning
    means = [fmean(kept[first : first + size]) for first in range(0, len(kept), size)]
    error = stdev(means) / math.sqrt(stretches)
    return Spread(error=error / fmean(means), freedom=stretches - 1)


Origin = Literal["measured", "published", "predicted", "extrapolated", "failed", "not run"]
Hold = Literal["batch-per-device", "global-batch"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number with the interval or band that it lies in; none: it is not known."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class SizeRate:
    """Speed of a size, all accelerators together; at least one of the three is known."""

    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    epochs_per_s: float | None = None
    spread: Spread | None = None
    """None: one number, as most sources publish."""

    @property
    def value(self) -> float:
        """Basis of efficiencies: the same of the three for all rows of a series."""
        known = (self.tokens_per_s, self.samples_per_s, self.epochs_per_s)
        return next(value for value in known if value is not None)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that must be equal for two sizes to be called scaling; empty or None: unknown."""

    micro_batch: int | None = None
    accumulation: int | None = None
    """Micro-batches of one data rank in a step."""
    layout: str = ""
    """Data axes by their usual name, and the model axes, without the number of ranks."""
    is_one_rank: bool = False
    """Whether it is one rank, where every sharding setting gives the same layout."""
    recompute: str = ""
    precision: str = ""
    global_batch: int | None = None
    """Samples of a step, all ranks. Follows from what is held; it is no change of its own."""


@dataclass(frozen=True, kw_only=True)
class OpenTerm:
    """A part of a step that no plan can know beforehand, and what it would do at its worst."""

    name: str
    assumed: str
    """At its worst, in words."""
    step_s: float
    """Step time with only this term at its worst."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast of a size by the plan, and the range that its open terms allow."""

    samples_per_step: int
    step_s: float
    best_s: float
    """Step time without any wait for transfers between nodes."""
    worst_s: float
    """The step with all open terms at their worst."""
    open_terms: tuple[OpenTerm, ...]
    tokens_per_sample: int | None
    """None: images."""
    mfu: float | None = None
    memory_bytes: int | None = None
    """Memory of one device."""
    terms: tuple[tuple[str, float], ...] = ()
    """Seconds of the step by what they are spent on."""

    @property
    def samples_per_s(self) -> float:
        """All accelerators together."""
        return self.samples_per_step / self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """The same in tokens."""
        if self.tokens_per_sample is None:
            return None
        return self.samples_per_s * self.tokens_per_sample


@dataclass(frozen=True, kw_only=True)
class SeriesRow:
    """One size."""

    nodes: int
    accelerators: int
    origin: Origin
    note: str = ""
    """Why it failed or was not run; what else is to be known of it."""
    run_id: str = ""
    rate: SizeRate | None = None
    forecast: Forecast | None = None
    settings: Settings = field(default_factory=Settings)
    terms: tuple[tuple[str, float], ...] = ()
    """Measured seconds of a step by what they are spent on; they add up to it."""
    memory_bytes: int | None = None
    """Most that a device, or a CPU process, held."""
    mfu: float | None = None
    epoch_samples: int | None = None
    """Training samples of a pass over the data."""
    run_samples: int | None = None
    """Samples of the whole run that the recipe asks for."""
    usd_per_hour: float | None = None
    """All nodes together."""
    unmeasured: str = ""
    """Why the rates of the plan were never measured; empty: they were, or there is no plan."""
    tight: str = ""
    """Why the planned memory is tight; empty: it is not."""
    printed: str = ""
    """The efficiency or speed-up as the source prints it."""


@dataclass(frozen=True, kw_only=True)
class ScalingSeries:
    """Sizes that are held against each other: of one recipe, or of one published table."""

    name: str
    rows: tuple[SeriesRow, ...]
    """By accelerators; each number once."""
    hold: Hold | None = None
    """None: not known."""
    source: str = ""

    @property
    def kind(self) -> str:
        """Weak or strong scaling, in words."""
        match self.hold:
            case "batch-per-device":
                return "weak scaling: the batch per device is fixed, the global batch grows"
            case "global-batch":
                return "strong scaling: the global batch is fixed, the batch per device shrinks"
            case None:
                return "weak or strong is not said: no batches are given"


_NAMES = {
    "micro_batch": "micro-batch",
    "accumulation": "accumulation",
    "layout": "layout",
    "recompute": "recompute",
    "precision": "precision",
}
"""Field of ``Settings`` -> its name in the column of changes."""


def changes(row: Settings, first: Settings, hold: Hold | None) -> tuple[str, ...]:
    """Return the settings that differ from the first size, so that the two are not called scaling.

    With the global batch held, each device has fewer samples by definition, and accumulation
    shrinks. That is the meaning of strong scaling, and is no change here.
    """
    found = []
    for name in (each.name for each in fields(Settings) if each.name in _NAMES):
        ours, theirs = getattr(row, name), getattr(first, name)
        if ours in (None, "") or theirs in (None, "") or ours == theirs:
            continue
        if name == "accumulation" and hold == "global-batch":
            continue
        if name == "layout" and (row.is_one_rank or first.is_one_rank):
            continue
        found.append(f"{_NAMES[name]} {theirs} -> {ours}")
    return tuple(found)
