"""Counts of modules during a step next to the loss, and their observers."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Statistics(Protocol):
    """A row of numbers of a step; it travels in the one all-reduce that a step makes anyway."""

    @property
    def metrics(self) -> Sequence[str]:
        """Names of the numbers that ``give_back`` returns, as in metrics.jsonl."""

    @property
    def size(self) -> int:
        """Numbers in a row; the same on all ranks."""

    def take(self, device: torch.device) -> Tensor:
        """Return this rank's row (size,) since the last step, fp64, and restart the count."""

    def give_back(self, summed: Tensor, *, skipped: Tensor) -> Sequence[Tensor]:
        """Take the sum of the rows of all ranks.

        Args:
            skipped: Whether the step is not applied; on the device, so that no code waits for it.
                State that is kept from step to step must then stay as it was.

        Returns:
            The numbers for the step's line in metrics.jsonl, by the names in ``metrics``.
        """


class Watcher(Protocol):
    """Observer of the backward passes of a step, micro-batch by micro-batch."""

    def before_backward(self, *, is_last: bool) -> None:
        """One comes."""

    def after_backward(self, loss: Tensor) -> None:
        """It is over; of this loss."""
