"""What a run knows of its task.

A task is one file beside this one and one row of ``config/tasks.py``. The row says what prepares
its data and which metrics it has; the file says what the loader yields, how losses are computed of
that, and how an evaluation is scored.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from shardyard.config.resolved import Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.data.loader import MicroBatch, Samples
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.loss_computation import Computation


class TaskData(NamedTuple):
    """What a run reads."""

    train: Samples
    eval: Samples | None
    """None: nothing was held out."""
    eval_parts: Mapping[str, Samples] = MappingProxyType({})
    """Of a mixture: what each source holds out, by name; together they are ``eval``."""


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
    def open_data(resolved: Resolved) -> TaskData:
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
    def scores(loss: float, means: Mapping[str, float]) -> dict[str, float]:
        """Every metric of an evaluation, by the names in the task's row.

        Args:
            loss: Its mean.
            means: What its computation tells beside the loss.
        """

    def sample(self, resolved: Resolved, mesh: Mesh, device: torch.device) -> str | None:  # noqa: ARG002
        """Something that the trained model makes, for the report. All ranks call it together.

        None: nothing was asked for, or the task has nothing to show.
        """
        return None
