"""Tokens a second, time and price, where the device's peak is known; else the reason why not.

One stated efficiency, not a model: what one published run reached. The planner that predicts
communication and kernels comes later; until then this is an order of magnitude and says so.
"""

from dataclasses import dataclass

from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.catalogue import Instance

EFFICIENCY = 0.40
"""Share of the peak that a training step reaches (MFU, full-attention convention)."""

EFFICIENCY_SOURCE = (
    "rough: the 39.7 % MFU of torchtitan, Llama 3 8B, bf16, FSDP on 4 x p5.48xlarge "
    "(awslabs/awsome-distributed-training, 3.test_cases/pytorch/torchtitan)"
)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak FLOP/s of one device, or None, and where that comes from."""

    flops_per_s: float | None
    source: str


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Predicted rate of all ranks together; None where nothing honest can be said."""

    tokens_per_s: float | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Price:
    """On-demand price of the whole cluster; None where none is known."""

    usd_per_hour: float | None
    source: str


def peak_of(
    accelerator: Accelerator | None, *, device_name: str, number_format: str, given: float | None
) -> Peak:
    """Peak of one device in the compute format.

    Args:
        device_name: As shown to the user, for the reason.
        number_format: ``precision.compute``.
        given: ``observe.peak_tflops``, TFLOP/s; overrides the catalogue.
    """
    if given is not None:
        return Peak(flops_per_s=given * 1e12, source="observe.peak_tflops")
    if accelerator is None:
        kind = f"a {device_name}" if device_name.startswith(("CPU", "dev")) else device_name
        why = f"no peak is known for {kind}: MFU is refused, not guessed; set "
        return Peak(flops_per_s=None, source=f"{why}observe.peak_tflops to have it")
    peak = accelerator.peak_flops_per_s(number_format)
    if peak is None:
        why = f"the catalogue has no {number_format} peak for {accelerator.name}"
        return Peak(flops_per_s=None, source=f"{why} ({accelerator.source})")
    text = f"{accelerator.name} {number_format}, {accelerator.source}"
    return Peak(flops_per_s=peak, source=text)


def speed_of(peak: Peak, *, ranks: int, full_flops_per_token: float, number_format: str) -> Speed:
    """Tokens a second of all ranks, at the one stated efficiency."""
    if peak.flops_per_s is None:
        return Speed(tokens_per_s=None, reason="cannot be said without a peak")
    if number_format not in ("bf16", "fp16"):
        why = f"no published efficiency to go by for {number_format}"
        return Speed(tokens_per_s=None, reason=why)
    rate = ranks * EFFICIENCY * peak.flops_per_s / full_flops_per_token
    return Speed(tokens_per_s=rate, reason=f"{EFFICIENCY:.0%} of the peak, {EFFICIENCY_SOURCE}")


def price_of(instance: Instance | None, *, nodes: int) -> Price:
    """Price of all nodes for an hour."""
    if instance is None:
        return Price(usd_per_hour=None, source="cluster.instance is not set")
    if instance.usd_per_hour is None:
        why = f"no on-demand price of {instance.name} was found ({instance.price_source})"
        return Price(usd_per_hour=None, source=why)
    return Price(usd_per_hour=nodes * instance.usd_per_hour, source=instance.price_source)
