"""The samples of a step, and the learning rate that goes with them.

Either the global batch is held (``optim.global_batch``), or the batch of a device is
(``optim.batch_per_device``): then the step grows and shrinks with the devices. A run's length, its
warm-up and its decay are counted in steps of the batch that it began with, which
``optim.global_batch`` keeps: in samples, so that a change of size moves none of them.
"""

import math
from dataclasses import dataclass
from typing import assert_never

from shardyard.config.schema.recipe import Optim


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch on so many devices."""

    samples: int
    """Of a step now."""
    first: int
    """Of a step when the run began."""
    lr_factor: float
    """What the learning rate of the schedule is multiplied by."""

    @staticmethod
    def of(optim: Optim, *, devices: int) -> "Batch":
        """By resolved settings."""
        samples, first = step_samples(optim, devices=devices), first_batch(optim)
        ratio = samples / (optim.lr_batch or first)
        match optim.lr_scaling:
            case "none":
                factor = 1.0
            case "linear":  # Goyal et al. 2017, arXiv:1706.02677
                factor = ratio
            case "sqrt":  # Krizhevsky 2014, arXiv:1404.5997
                factor = math.sqrt(ratio)
            case _:
                assert_never(optim.lr_scaling)
        return Batch(samples=samples, first=first, lr_factor=factor)


def step_samples(optim: Optim, *, devices: int) -> int:
    """Samples of one step on so many devices, by resolved settings."""
    if optim.batch_per_device is not None:
        return optim.batch_per_device * devices
    return first_batch(optim)


def first_batch(optim: Optim) -> int:
    """Samples of a step when the run began, by resolved settings."""
    assert isinstance(optim.global_batch, int)
    return optim.global_batch


def steps_on(optim: Optim, steps: int, *, devices: int) -> int:
    """As many steps of so many devices as it takes for ``steps`` of the batch of the beginning."""
    return -(-steps * first_batch(optim) // step_samples(optim, devices=devices))


def batch_if_known(optim: Optim, *, devices: int | None) -> int | None:
    """Samples of one step as far as the settings say it; None: not yet.

    Args:
        devices: All that train; None: not known yet.
    """
    if optim.batch_per_device is not None:
        return None if devices is None else optim.batch_per_device * devices
    return None if optim.global_batch == "auto" else optim.global_batch
