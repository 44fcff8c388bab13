"""Number formats that the devices of a recipe cannot compute in, or that do not go together."""

from collections.abc import Iterable

from shardyard.config.cluster_choice import chosen_cluster
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import Problem, RequestError
from shardyard.hardware.accelerator import Accelerator

_DEVICES_WITHOUT_FP8 = ("cpu", "xpu", "hpu", "xla")
"""Devices without fp8 in torchao, regardless of their hardware."""


def check_precision(recipe: Recipe) -> Iterable[Problem]:
    """Every one, with what to use instead."""
    compute, accelerator = recipe.precision.compute, _named_accelerator(recipe)
    if compute == "fp8":
        lacking = None
        if recipe.cluster.device in _DEVICES_WITHOUT_FP8:
            lacking = recipe.cluster.device
        elif accelerator is not None and not _multiplies_fp8(accelerator):
            lacking = accelerator.name
        if lacking is not None:
            text = f"=fp8: torchao has no fp8 products for {lacking}. Use bf16 or fp32."
            yield Problem("precision.compute", text)
    if compute == "fp16" and recipe.precision.reduce == "bf16":
        text = (
            "=bf16 with precision.compute=fp16: bf16 keeps 8 of the 11 bits of such a gradient. "
            "Use precision.reduce=fp32."
        )
        yield Problem("precision.reduce", text)
    if compute not in ("fp16", "auto") and recipe.precision.loss_scale != "dynamic":
        text = (
            f"={recipe.precision.loss_scale:g} with precision.compute={compute}, whose gradients "
            "need no scale. Leave it out, or use precision.compute=fp16."
        )
        yield Problem("precision.loss_scale", text)
    is_on_cpu = recipe.cluster.device == "cpu"
    if compute == "bf16" and accelerator is not None and not is_on_cpu and not accelerator.has_bf16:
        yield Problem("precision.compute", f"=bf16: {without_bf16(accelerator.name)}")


def without_bf16(name: str) -> str:
    """Why a device does not compute in bf16, and what to do."""
    return (
        f"{name} has no bf16 products: that takes an NVIDIA device of capability 8.0 or more "
        "(Ampere, 2020). torch would emulate them, slower than fp32. Use precision.compute=fp16 or "
        "fp32."
    )


def _multiplies_fp8(accelerator: Accelerator) -> bool:
    return accelerator.device not in _DEVICES_WITHOUT_FP8 and "fp8" in accelerator.peak_tflops


def _named_accelerator(recipe: Recipe) -> Accelerator | None:
    """Return the accelerator of cluster.instance or cluster.file; this machine is probed later."""
    try:
        cluster = chosen_cluster(recipe.cluster)
    except RequestError:
        return None  # another check says what is wrong with it
    return None if cluster is None else cluster.accelerator
