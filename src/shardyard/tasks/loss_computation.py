"""Computation of a step's losses on this rank, for a recipe's step and a script's."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor, nn

from shardyard.models.grad_scale import LossScale
from shardyard.parallel.step_counters import Statistics, Watcher
from shardyard.tasks.own_objective import NO_OBJECTIVE, OwnObjective

Batch = TypeVar("Batch")


class LossSums(NamedTuple):
    """Contribution of this rank to a step; the sum over all ranks is the step's."""

    loss_sum: Tensor
    """fp64, on the device."""
    divisor: int | Tensor
    """Number of losses: the step's loss is the sum divided by it, once."""
    sums: Mapping[str, Tensor] = {}
    """Sums counted in addition to the loss, by name; fp64.

    All ranks have the same names and sizes.
    """


class Computation(ABC, Generic[Batch]):
    """Computation of micro-batch losses on this rank, with and without gradients."""

    model: nn.Module
    """With a pipeline, the modules of all stages of this rank."""
    roots: Sequence[nn.Module]
    """Modules that are sharded as a whole: the stages of this rank, or the model."""
    tied_across_stages: Collection[str] = ()
    """Names of parameters that both ends of a pipeline hold."""
    loss_scale: LossScale
    """Loss scale with which all its losses begin their gradients."""
    statistics: Sequence[Statistics] = ()
    """Statistics that modules count in addition to the loss."""
    fixed_settings: Mapping[str, str] = {}
    """Settings that this model learns by, and others do not -> why: a resume keeps them."""

    objective: OwnObjective = NO_OBJECTIVE
    """Loss and metrics of the user's own, in place of the task's and in addition to them."""
    code_digests: Mapping[str, str] = {}
    """Digests of the user's own code that it computes by, by the settings that name it."""

    def watch(self, watcher: Watcher) -> None:
        """Let somebody follow all backward passes from now on."""
        raise NotImplementedError(f"{type(self).__name__} cannot be watched: {watcher}")

    def means(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002
        """Return numbers reported with the loss, from ``LossSums.sums`` added up over all ranks."""
        return {}

    def confusion(self, sums: Mapping[str, Tensor]) -> Tensor | None:
        """Return how often each class was predicted as each other, from these sums.

        (C * C,), fp64: true class by predicted class. None: nothing is classified.
        """
        return sums.get("confusion")

    @abstractmethod
    def backward(self, batches: Sequence[Batch]) -> LossSums:
        """Forward and backward passes of equally many micro-batches on every rank.

        Adds up gradients, undivided.
        """

    @abstractmethod
    def forward(self, batches: Iterable[Batch]) -> LossSums:
        """Run only forward passes; each micro-batch is read when its turn comes."""
