"""Peak, speed and price, each with where it comes from; or why there is none."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from shardyard.config.layout import Layout
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.calibration import Calibration

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


@dataclass(frozen=True, kw_only=True)
class PublishedError:
    """Error of predicted tokens/s over published runs on one chip, none of which set a rate."""

    chip: str
    has_model_axes: bool
    """Whether cp, tp, pp or ep split the model; without them, only data ranks."""
    runs: int
    mean: float
    """Mean absolute error, as a share of the measured rate."""
    most: float
    """Error that nine runs in ten stay within."""
    sources: tuple[str, ...]

    def words(self) -> str:
        """The error and what it is of."""
        axes = "with model axes" if self.has_model_axes else "with data ranks only"
        return (
            f"{self.runs} published runs on {self.chip} {axes} ({', '.join(self.sources)}): off by "
            f"{self.mean:.1%} on average, nine in ten within {self.most:.1%}; docs/accuracy.md"
        )


_VTRAIN, _MOSAIC, _FMS, _TITAN = "vtrain-single", "mosaic-llm-foundry", "fms-fsdp", "torchtitan"
_BRIDGE, _V100 = "megatron-bridge", "bigscience-v100"
PUBLISHED_ERRORS = tuple(
    PublishedError(chip=chip, has_model_axes=axes, runs=runs, mean=mean, most=most, sources=sources)
    for chip, axes, runs, mean, most, sources in (
        ("A100", False, 219, 0.074, 0.166, (_FMS, _MOSAIC, _TITAN, "torchtune", _VTRAIN)),
        ("A100", True, 382, 0.101, 0.186, ("bigscience-tr11", "korthikanti", _VTRAIN)),
        ("B200", False, 4, 0.047, 0.063, (_BRIDGE,)),
        ("B200", True, 16, 0.338, 0.641, (_BRIDGE,)),
        ("B300", True, 9, 0.519, 0.706, (_BRIDGE,)),
        ("GB200", True, 34, 0.101, 0.209, (_BRIDGE,)),
        ("GB300", False, 8, 0.110, 0.157, (_BRIDGE,)),
        ("GB300", True, 29, 0.167, 0.312, (_BRIDGE,)),
        ("H100", False, 48, 0.093, 0.238, (_FMS, _MOSAIC, "nemo", "torchao", _TITAN)),
        ("H100", True, 44, 0.170, 0.275, (_BRIDGE, "nemo", _TITAN)),
        ("MI300X", False, 4, 0.185, 0.282, ("torchao",)),
        ("V100", False, 23, 0.944, 1.708, (_V100,)),
        ("V100", True, 59, 0.303, 0.985, (_V100,)),
    )
)
"""Rows of quality A and B of planner-accuracy-rows-20261129.csv and -more-rows-20261129.csv."""


def published_error(device: str, layout: Layout) -> PublishedError | None:
    """Return the error over published token runs of the same chip and kind of layout; None: none.

    Args:
        device: Name of the accelerator, which begins with its chip.
    """
    has_model_axes = max(layout.cp, layout.tp, layout.pp, layout.ep) > 1
    key = device.partition(" ")[0], has_model_axes
    return next(
        (each for each in PUBLISHED_ERRORS if (each.chip, each.has_model_axes) == key), None
    )


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
) -> Speed:
    """A predicted rate, or why there is none; and whether somebody timed what it rests on."""
    if tokens_per_s is None:
        return Speed(tokens_per_s=None, reason=reason)
    # Only a measured product replaces the rate that the mark is about; links do not.
    is_calibrated = calibration is not None and calibration.matmul_share is not None
    unmeasured = ""
    if accelerator is not None and not is_calibrated:
        unmeasured = accelerator.unmeasured(number_format)
    return Speed(tokens_per_s=tokens_per_s, reason=SPEED_REASON, unmeasured=unmeasured)


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
