"""What a training step knows of a task, and of the way to its losses.

A task is one file beside this one and one row of ``config/tasks.py``. The row says what prepares
its data and which metrics it has; the file says what the loader yields, how losses are computed of
that, and how an evaluation is scored.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shardyard.config.resolved import Resolved
from shardyard.config.schema import Recipe
from shardyard.data.loader import MicroBatch, Samples
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.parallel.statistics import Statistics

Batch = TypeVar("Batch")


class Part(NamedTuple):
    """What this rank adds to a step: summed over all ranks these are the step's."""

    loss_sum: Tensor
    """fp64, on the device."""
    divisor: int | Tensor
    """How many losses there are: the step's loss is the sum divided by it, once."""


class Computation(ABC, Generic[Batch]):
    """How the losses of micro-batches are computed on this rank, with and without gradients."""

    model: nn.Module
    """With a pipeline, the modules of all stages of this rank."""
    roots: Sequence[nn.Module]
    """What is sharded as a whole: the stages of this rank, or the model."""
    held_twice: Collection[str] = ()
    """Names of parameters that both ends of a pipeline hold."""
    statistics: Sequence[Statistics] = ()
    """What modules count beside the loss."""
    held: Mapping[str, str] = {}
    """Settings that this model learns by, and others do not -> why: a resume keeps them."""

    @abstractmethod
    def backward(self, batches: Sequence[Batch]) -> Part:
        """Forward and backward passes of equally many micro-batches on every rank.

        Adds up gradients, undivided.
        """

    @abstractmethod
    def forward(self, batches: Iterable[Batch]) -> Part:
        """Forward passes alone; each micro-batch is asked for when its turn comes."""


class Data(NamedTuple):
    """What a run reads."""

    train: Samples
    eval: Samples | None
    """None: nothing was held out."""


class Task(ABC):
    """A task, bound to what computes its losses on this rank."""

    def __init__(self, computation: Computation[MicroBatch]) -> None:
        self.computation = computation

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        return self.computation.model

    @staticmethod
    @abstractmethod
    def open_data(resolved: Resolved) -> Data:
        """Open what was prepared, and say what the loader yields of it."""

    @staticmethod
    @abstractmethod
    def compute(
        model: ParallelModel, mesh: Mesh, *, device: torch.device
    ) -> Computation[MicroBatch]:
        """How a model of a known family computes this task."""

    @staticmethod
    @abstractmethod
    def empty_batch(recipe: Recipe) -> MicroBatch:
        """A micro-batch of the size of a real one, for a run on fake devices."""

    @staticmethod
    @abstractmethod
    def scores(loss: float) -> dict[str, float]:
        """Every metric of an evaluation, by the names in the task's row, from its mean loss."""

    def sample(self, resolved: Resolved, mesh: Mesh, device: torch.device) -> str | None:  # noqa: ARG002
        """Something that the trained model makes, for the report. All ranks call it together.

        None: nothing was asked for, or the task has nothing to show.
        """
        return None
