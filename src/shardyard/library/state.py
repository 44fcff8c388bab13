"""What belongs to the layout of a model, hung on the model as one attribute."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from shardyard.errors import RequestError
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.computation import Computation
from shardyard.tasks.own import Loss

_NAME = "_shardyard"


class Reader(Protocol):
    """How the batches of a script are read, and what computes them."""

    @property
    def held_twice(self) -> Collection[str]:
        """Names of parameters that both ends of a pipeline hold."""

    def read(
        self, batches: Sequence[Any], loss: Loss | None
    ) -> tuple[Computation[Any], Sequence[Any]]:
        """What computes them, and the batches in its form.

        Raises:
            RequestError: They cannot be computed.
        """


@dataclass(kw_only=True)
class Sharded:
    """A model's place in a mesh."""

    mesh: Mesh
    device: torch.device
    reader: Reader
    params: dict[str, nn.Parameter]
    """Named once: FSDP shows other parameters while they are gathered."""
    has_weights: bool
    """False from the meta device until weights are filled or loaded."""
    is_known: bool
    """A model of a family that recipes train, not one of the user's own."""
    control: dist.ProcessGroup = field(repr=False)
    """A gloo group of all ranks, for facts in host memory."""

    def agree(self, fact: Any) -> list[Any]:
        """A small fact of every rank, by rank. All ranks call it."""
        facts: list[Any] = [None] * self.mesh.layout.world_size
        dist.all_gather_object(facts, fact, group=self.control)
        return facts


def is_sharded(model: nn.Module) -> bool:
    """Whether a model has been through ``parallelize``."""
    return hasattr(model, _NAME)


def attach(model: nn.Module, sharded: Sharded) -> None:
    """Hang it on the model."""
    setattr(model, _NAME, sharded)


def sharded(model: nn.Module) -> Sharded:
    """What hangs on a model.

    Raises:
        RequestError: Nothing does.
    """
    found = getattr(model, _NAME, None)
    if not isinstance(found, Sharded):
        raise RequestError(
            f"this {type(model).__name__} is in no mesh yet: gradients, norms and checkpoints are "
            "those of all ranks together. Call model = shardyard.parallelize(model, mesh, ...) "
            "first, and pass the model that it returns."
        )
    return found
