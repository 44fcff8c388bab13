"""Peak, speed and price, each with where it comes from; or why there is none."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.calibration import Calibration
from shardyard.planner.error_bands import ErrorBand

_Number = TypeVar("_Number", int, float)

SPEED_REASON = (
    "matrix products by shape, attention, memory, launches, collectives by topology; its error "
    "against published runs is in docs/accuracy.md"
)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak FLOP/s of one device, or None, and where that comes from."""

    flops_per_s: float | None
    source: str


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Predicted rate of all ranks together. None where no honest prediction exists."""

    tokens_per_s: float | None
    reason: str
    unmeasured: str = ""
    """Why the rate of products it rests on is no measurement; empty: somebody timed them."""
    band: ErrorBand | None = None
    """Factors between which 80 % of published runs of its kind lie; None: none was compared."""


Range = tuple[float, float]
"""Low and high end of a band."""


def price_range(usd: float, wall_s: float, band: Range) -> Range:
    """Return the band of a price in proportion to a time with a band."""
    low_s, high_s = band
    return usd * low_s / wall_s, usd * high_s / wall_s


def range_sum(ranges: Iterable[Range | None]) -> Range | None:
    """Return the sums of the ends, as all err in one direction. None if one is not known."""
    found = list(ranges)
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return None
    return sum(low for low, _ in known), sum(high for _, high in known)


UNMEASURED = "*"
"""Mark of a speed, time or price that rests on an unmeasured rate of products."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """Price of the cluster, as it is rented, without spare nodes; None where none is known."""

    usd_per_hour: float | None
    source: str

    def of(self, wall_s: float, *, nodes: int, spares: int) -> float | None:
        """Return the cost of a run of this length, with spare nodes at the price of the others."""
        if self.usd_per_hour is None:
            return None
        return wall_s / 3600 * self.usd_per_hour * (nodes + spares) / nodes


def speed_of(
    tokens_per_s: float | None,
    reason: str,
    accelerator: Accelerator | None,
    number_format: str,
    calibration: Calibration | None,
    band: ErrorBand | None,
) -> Speed:
    """A predicted rate with its band, or why there is none; and whether its basis was timed."""
    if tokens_per_s is None:
        return Speed(tokens_per_s=None, reason=reason)
    # Only a measured product replaces the rate that the mark is about; links do not.
    is_calibrated = calibration is not None and calibration.matmul_share is not None
    unmeasured = ""
    if accelerator is not None and not is_calibrated:
        unmeasured = accelerator.unmeasured(number_format)
    return Speed(tokens_per_s=tokens_per_s, reason=SPEED_REASON, unmeasured=unmeasured, band=band)


def peak_of(
    accelerator: Accelerator | None,
    *,
    device_name: str,
    number_format: str,
    override_tflops: float | None,
) -> Peak:
    """Peak of one device in the compute format.

    Args:
        device_name: As shown to the user, for the reason.
        number_format: ``precision.compute``.
        override_tflops: ``observe.peak_tflops``, TFLOP/s; overrides the catalogue.
    """
    if override_tflops is not None:
        return Peak(flops_per_s=override_tflops * 1e12, source="observe.peak_tflops")
    if accelerator is None:
        kind = f"a {device_name}" if device_name.startswith(("CPU", "dev")) else device_name
        why = f"no peak is known for {kind}; for an MFU set "
        return Peak(flops_per_s=None, source=f"{why}observe.peak_tflops")
    peak = accelerator.peak_flops_per_s(number_format)
    if peak is None:
        why = f"the catalogue has no {number_format} peak for {accelerator.name}"
        return Peak(flops_per_s=None, source=f"{why} ({accelerator.source})")
    text = f"{accelerator.name} {number_format}, {accelerator.source}"
    return Peak(flops_per_s=peak, source=text)


def price_of(cluster: ClusterHardware | None) -> Price:
    """Price of all nodes for an hour."""
    if cluster is None:
        return Price(usd_per_hour=None, source="cluster.instance is not set")
    if cluster.usd_per_hour is None:
        why = f"no price of {cluster.name} was found ({cluster.price_source})"
        return Price(usd_per_hour=None, source=why)
    return Price(usd_per_hour=cluster.usd_per_hour, source=cluster.price_source)


def sum_or_none(values: Iterable[_Number | None]) -> _Number | None:
    """Return the sum of all values. None if one is not known."""
    total: _Number | None = None
    for value in values:
        if value is None:
            return None
        total = value if total is None else total + value
    return total
