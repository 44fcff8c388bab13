"""The band around a predicted speed: where four published runs in five of its kind lie.

``error_bands.json`` holds the planner's error on every published run, by kind of run;
``python -m benchmarks.error_bands`` writes it. A band is a weighted quantile of these errors.
Runs of the same kind count most. Each property in which a run differs halves its weight, and so
does each generation between two devices.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from shardyard.config.layout import Layout
from shardyard.hardware.accelerator import Accelerator
from shardyard.io.files import read_json_object
from shardyard.planner.dispatch import Work
from shardyard.planner.workload import Workload

DATA = Path(__file__).with_suffix(".json")

SHARE = 0.8
"""Share of runs that a band is made for."""

DIFFERENCE = 0.5
"""Weight of a run for each property in which it differs."""

LEAST_SPREAD = 0.02
"""Least distance of a band's ends from its middle, as a logarithm."""

_GENERATIONS = {7: "Volta", 8: "Ampere", 9: "Hopper", 10: "Blackwell", 12: "Blackwell"}
"""Major number of NVIDIA's compute capability -> generation; Turing counts as Volta, Ada as Ampere.
"""
_ORDER = ("Volta", "Ampere", "Hopper", "Blackwell")


@dataclass(frozen=True, kw_only=True)
class RunKind:
    """Properties of a run by which the planner's errors differ."""

    generation: str
    """NVIDIA's generation, or the name of another vendor's accelerator."""
    number_format: str
    """``16 bit``, or a format of matrix products."""
    model: str
    """``dense`` or ``experts``."""
    layout: str
    """``data ranks only``, ``model axes`` (tp, cp, ep) or ``pipeline``."""

    @property
    def words(self) -> str:
        """``Hopper, 16 bit, dense, data ranks only``."""
        return f"{self.generation}, {self.number_format}, {self.model}, {self.layout}"

    def weight(self, other: "RunKind") -> float:
        """Return the weight of an error of another kind for this one."""
        differences = _generation_distance(self.generation, other.generation)
        differences += self.number_format != other.number_format
        differences += self.model != other.model
        differences += self.layout != other.layout
        return float(DIFFERENCE**differences)


def _generation_distance(one: str, other: str) -> int:
    """Another vendor's part is as far as the most distant generation that counts, two."""
    if one == other:
        return 0
    if one not in _ORDER or other not in _ORDER:
        return 2
    return min(2, abs(_ORDER.index(one) - _ORDER.index(other)))


def kind_of_run(accelerator: Accelerator, workload: Workload, layout: Layout) -> RunKind:
    """Return the kind of a run of a workload under a layout."""
    major = (accelerator.capability or (0, 0))[0]
    number_format = workload.formats.compute
    split = max(layout.tp, layout.cp, layout.ep) > 1
    return RunKind(
        generation=_GENERATIONS.get(major, accelerator.name),
        number_format="16 bit" if number_format in ("bf16", "fp16") else number_format,
        model="experts" if workload.shape.num_experts else "dense",
        layout="pipeline" if layout.pp > 1 else "model axes" if split else "data ranks only",
    )


@dataclass(frozen=True, kw_only=True)
class PublishedRuns:
    """The planner's errors on the runs of one source and kind."""

    source: str
    kind: RunKind
    errors: tuple[float, ...]
    """Logarithm of predicted over measured speed of each run."""


@dataclass(frozen=True, kw_only=True)
class ErrorBand:
    """Factors on a predicted speed between which a measured one lies in 80 % of runs."""

    low: float
    high: float
    runs: int
    """Published runs of this very kind; 0: the band is of other kinds."""
    sources: tuple[str, ...]
    """Their sources."""
    kind: str
    """Kind of run, in words."""
    share: float = SHARE

    def of_rate(self, rate: float) -> tuple[float, float]:
        """Return the band of a speed, the least first."""
        return rate * self.low, rate * self.high

    def of_time(self, seconds: float, *, steps_s: float | None = None) -> tuple[float, float]:
        """Return the band of a time.

        Args:
            steps_s: The part of it in which steps are computed, which alone has an error of speed;
                None: all.
        """
        moving = seconds if steps_s is None else min(steps_s, seconds)
        rest = seconds - moving
        return rest + moving / self.high, rest + moving / self.low

    @staticmethod
    def from_json(content: dict[str, Any]) -> "ErrorBand":
        """Return the band that a plan.json holds."""
        return ErrorBand(**{**content, "sources": tuple(content["sources"])})

    def basis(self) -> str:
        """``48 runs like it``: published ones, for a line of a terminal."""
        if not self.runs:
            return "runs of other kinds"
        return f"{self.runs} run{'s' * (self.runs > 1)} like it"

    def words(self) -> str:
        """``48 published runs of this kind (Hopper, ...)``."""
        if not self.runs:
            return f"published runs of other kinds (none is {self.kind})"
        plural = "s" if self.runs > 1 else ""
        return f"{self.runs} published run{plural} of this kind ({self.kind}) and others"


def band_of_kind(
    kind: RunKind,
    published: Sequence[PublishedRuns],
    *,
    widening: float,
    without: Collection[str] = (),
) -> ErrorBand:
    """Return the band of a kind of run.

    Args:
        widening: Factor on the distance of both ends from the middle, so that runs of a source
            that is left out lie in the band as often as they should.
        without: Sources that do not count.
    """
    used = [runs for runs in published if runs.source not in without]
    low, middle, high = spread_of(kind, used)
    same = [runs for runs in used if runs.kind == kind]
    return ErrorBand(
        # Predicted over measured, so the largest error is the slowest run.
        low=math.exp(-(middle + widening * (high - middle))),
        high=math.exp(-(middle - widening * (middle - low))),
        runs=sum(len(runs.errors) for runs in same),
        sources=tuple(sorted({runs.source for runs in same})),
        kind=kind.words,
    )


def spread_of(kind: RunKind, published: Iterable[PublishedRuns]) -> tuple[float, float, float]:
    """Return the low end, middle and high end of the errors, as logarithms, before any widening."""
    weighted = []
    for runs in published:
        # Runs of one source share what is particular to it: n of them count as much as sqrt(n).
        each = kind.weight(runs.kind) / math.sqrt(len(runs.errors))
        weighted += [(error, each) for error in runs.errors]
    weighted.sort()
    tail = (1 - SHARE) / 2
    low, middle, high = (_quantile(weighted, share) for share in (tail, 0.5, 1 - tail))
    return min(low, middle - LEAST_SPREAD), middle, max(high, middle + LEAST_SPREAD)


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """Quantile of (value, weight), sorted; linear between the middles of two weights."""
    wanted = share * sum(weight for _, weight in weighted)
    # The cumulative weight at the middle of each value's own; nothing lies below the first.
    ends = [0.0, *accumulate(weight for _, weight in weighted)]
    middles = [end + weight / 2 for end, (_, weight) in zip(ends, weighted, strict=False)]
    above = min(bisect_left(middles, wanted), len(weighted) - 1)
    if above == 0 or middles[above] <= wanted:
        return weighted[above][0]
    (low, _), (high, _) = weighted[above - 1], weighted[above]
    return low + (high - low) * (wanted - middles[above - 1]) / (
        middles[above] - middles[above - 1]
    )


@cache
def published_runs() -> tuple[tuple[PublishedRuns, ...], float, float]:
    """Return all errors, and the widening of bands and of bands of calibrated plans."""
    content = read_json_object(DATA)
    runs = tuple(
        PublishedRuns(source=source, kind=RunKind(**kind), errors=tuple(errors))
        for source, kind, errors in (
            (row["source"], row["kind"], row["errors"]) for row in content["runs"]
        )
    )
    return runs, content["widening"], content["scaled_widening"]


def scaled(published: Iterable[PublishedRuns]) -> tuple[PublishedRuns, ...]:
    """Return the errors that are left once each source's own middle is known.

    A measured step tells a plan the same as a source's middle does.
    """
    errors: dict[str, list[float]] = {}
    runs = list(published)
    for each in runs:
        errors.setdefault(each.source, []).extend(each.errors)
    middles = {source: median(values) for source, values in errors.items()}
    return tuple(
        PublishedRuns(
            source=each.source,
            kind=each.kind,
            errors=tuple(error - middles[each.source] for error in each.errors),
        )
        for each in runs
        if len(errors[each.source]) > 1
    )


@cache
def _planned_band(kind: RunKind, *, is_scaled: bool) -> ErrorBand:
    runs, widening, scaled_widening = published_runs()
    if is_scaled:
        return band_of_kind(kind, scaled(runs), widening=scaled_widening)
    return band_of_kind(kind, runs, widening=widening)


def error_band(
    work: Work, accelerator: Accelerator | None, layout: Layout, *, is_scaled: bool = False
) -> ErrorBand | None:
    """Return the band of a planned speed; None for images and on a CPU: no run was compared.

    Args:
        is_scaled: Whether a measured step scales the prediction (``Calibration.step_scale``).
    """
    if accelerator is None or not isinstance(work, Workload):
        return None
    return _planned_band(kind_of_run(accelerator, work, layout), is_scaled=is_scaled)
