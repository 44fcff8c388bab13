"""What a step knows of the way to its losses, on this rank; a recipe's step, and a script's."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor, nn

from shardyard.models.grad_scale import LossScale
from shardyard.parallel.step_counters import Statistics, Watcher

Batch = TypeVar("Batch")


class LossSums(NamedTuple):
    """What this rank adds to a step: summed over all ranks these are the step's."""

    loss_sum: Tensor
    """fp64, on the device."""
    divisor: int | Tensor
    """How many losses there are: the step's loss is the sum divided by it, once."""
    sums: Mapping[str, Tensor] = {}
    """What is counted beside the loss, by name; fp64, and of the same names and sizes on all
    ranks."""


class Computation(ABC, Generic[Batch]):
    """How the losses of micro-batches are computed on this rank, with and without gradients."""

    model: nn.Module
    """With a pipeline, the modules of all stages of this rank."""
    roots: Sequence[nn.Module]
    """What is sharded as a whole: the stages of this rank, or the model."""
    tied_across_stages: Collection[str] = ()
    """Names of parameters that both ends of a pipeline hold."""
    loss_scale: LossScale
    """What all its losses begin their gradients with."""
    statistics: Sequence[Statistics] = ()
    """What modules count beside the loss."""
    fixed_settings: Mapping[str, str] = {}
    """Settings that this model learns by, and others do not -> why: a resume keeps them."""

    def watch(self, watcher: Watcher) -> None:
        """Let somebody follow all backward passes from now on."""
        raise NotImplementedError(f"{type(self).__name__} cannot be watched: {watcher}")

    def means(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002
        """What is told beside the loss, each a number, of ``LossSums.sums`` added up over all ranks."""
        return {}

    @abstractmethod
    def backward(self, batches: Sequence[Batch]) -> LossSums:
        """Forward and backward passes of equally many micro-batches on every rank.

        Adds up gradients, undivided.
        """

    @abstractmethod
    def forward(self, batches: Iterable[Batch]) -> LossSums:
        """Forward passes alone; each micro-batch is asked for when its turn comes."""
