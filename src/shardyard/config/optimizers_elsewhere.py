"""What others call our optimizers, for whoever brings their configurations."""

from collections.abc import Mapping
from typing import Literal

from shardyard.config.optimizers import OptimizerName

Elsewhere = Literal["deepspeed", "trainer", "torchtitan"]

NAMES: dict[OptimizerName, Mapping[Elsewhere, tuple[str, ...]]] = {
    "adamw": {
        "deepspeed": ("adam", "adamw", "fusedadam"),
        "trainer": (
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_torch_xla",
            "adamw_hf",
            "adamw_apex_fused",
        ),
        "torchtitan": ("adamw",),
    },
    "sgd": {"deepspeed": ("sgd",), "trainer": ("sgd",)},
    "lamb": {"deepspeed": ("lamb",)},
    "lars": {},
}
"""In small letters; one row for each of ``OPTIMIZERS``."""


def named_elsewhere(where: Elsewhere, name: str) -> OptimizerName | None:
    """Our name of the optimizer that others call ``name``; None where it is not there."""
    return next(
        (ours for ours, others in NAMES.items() if name.lower() in others.get(where, ())), None
    )
