"""Interface between a run and its task, and the lookup of a task by its name.

A task is one file next to this one and one row of ``config/tasks.py``. The row names the
preparation of its data and its metrics. The file defines what the loader yields, how losses
are computed from that, and how an evaluation is scored.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from shardyard.config.resolved import Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_code
from shardyard.data.loader import MicroBatch, Samples
from shardyard.errors import RequestError
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.loss_computation import Computation


class TaskData(NamedTuple):
    """Samples that a run reads."""

    train: Samples
    eval: Samples | None
    """Samples of the validation split; None: there is none."""
    eval_parts: Mapping[str, Samples] = MappingProxyType({})
    """Validation samples of each source of a mixture, by name; together they are ``eval``."""
    eval_sets: Mapping[str, Samples] = MappingProxyType({})
    """Samples of each set of data.eval_sets, by name; none of them is in ``eval``."""


class GeneratedText(NamedTuple):
    """Text that a model wrote."""

    prompt: str
    text: str
    """Continuation of the prompt, or the answer to it."""
    whole: str
    """Prompt and text together."""


class Task(ABC):
    """A task, bound to what computes its losses on this rank."""

    def __init__(self, computation: Computation[MicroBatch]) -> None:
        self.computation = computation

    @property
    def model(self) -> nn.Module:
        """Model that is trained."""
        return self.computation.model

    @staticmethod
    @abstractmethod
    def open_data(resolved: Resolved) -> TaskData:
        """Open what was prepared, and say what the loader yields of it."""

    @staticmethod
    @abstractmethod
    def compute(
        model: ParallelModel, mesh: Mesh, *, recipe: Recipe, device: torch.device
    ) -> Computation[MicroBatch]:
        """Return the computation of this task by a model of a known family."""

    @staticmethod
    @abstractmethod
    def empty_batch(recipe: Recipe) -> MicroBatch:
        """A micro-batch of the size of a real one, for a run on fake devices."""

    @staticmethod
    @abstractmethod
    def scores(loss: float, means: Mapping[str, float]) -> dict[str, float]:
        """Return every metric of an evaluation, by the names in the task's row.

        Args:
            loss: Mean loss.
            means: Values of ``Computation.means``, in addition to the loss.
        """

    def sample(self, resolved: Resolved, mesh: Mesh, device: torch.device) -> str | None:  # noqa: ARG002
        """Return output of the trained model for the report. All ranks call it together.

        None: no sample was requested, or the task has none to show.
        """
        return None

    def generate_text(
        self,
        prompt: str,  # noqa: ARG002
        resolved: Resolved,  # noqa: ARG002
        mesh: Mesh,  # noqa: ARG002
        device: torch.device,  # noqa: ARG002
    ) -> GeneratedText | None:
        """Continue a prompt by ``task.generate_tokens`` tokens. All ranks call it together.

        It must not change what is trained, nor use the generators of the training. None: the
        models of the task do not continue text.
        """
        return None

    @staticmethod
    def class_names(resolved: Resolved) -> Sequence[str]:
        """Return the names of the labels, by number; empty: they have none."""
        return resolved.data.label_names

    def predictions(self, resolved: Resolved) -> list[dict[str, Any]]:  # noqa: ARG002
        """Return a few validation samples with their labels and what the model predicts.

        All ranks call it together. Empty: the task has none to show.
        """
        return []


def task_class(name: str) -> type[Task]:
    """The task of a name.

    Raises:
        RequestError: There is none of it, or a package's cannot be used.
    """
    task_type: type[Task] = task_code(name)
    if (
        not (isinstance(task_type, type) and issubclass(task_type, Task))
        or task_type.__abstractmethods__
    ):
        lacks = ", ".join(sorted(getattr(task_type, "__abstractmethods__", ()))) or "its base class"
        raise RequestError(
            f"task.name={name}: {task_type!r}, which its row names as its code, is not a complete "
            f"shardyard.tasks.base.Task: it lacks {lacks}. Fix the package that adds it."
        )
    return task_type
