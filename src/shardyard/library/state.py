"""What belongs to the layout of a model, hung on the model as one attribute."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardyard.errors import RequestError
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.custom import Loss
from shardyard.tasks.loss_computation import Computation

Optimizers = Optimizer | Sequence[Optimizer] | None
"""One, several that step parameters of their own, or none."""
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
    built_as: type[nn.Module] | None = None
    """The class of a model that ``wrap`` changed, and that the script still calls."""
    finish_saves: Callable[[], None] | None = field(default=None, repr=False)
    """Waits until the checkpoints of a loop are durable; None: no loop writes any."""
    control: dist.ProcessGroup = field(repr=False)
    """A gloo group of all ranks, for facts in host memory."""

    def agree(self, fact: Any) -> list[Any]:
        """A small fact of every rank, by rank. All ranks call it."""
        facts: list[Any] = [None] * self.mesh.layout.world_size
        dist.all_gather_object(facts, fact, group=self.control)
        return facts

    def names_on_all_ranks(self, names: Iterable[str]) -> set[str]:
        """Names that any rank has: stages of pp, and experts of ep, are on some. All call it."""
        mine = list(names)
        if self.mesh.layout.pp == self.mesh.layout.ep == 1:
            return set(mine)
        return {name for found in self.agree(mine) for name in found}


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


def listed(optimizer: Optimizers) -> Sequence[Optimizer]:
    """One optimizer, several, or none, as a list."""
    if optimizer is None:
        return ()
    found = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    for each in found:
        if not isinstance(each, Optimizer):
            raise RequestError(
                f"{type(each).__name__} is no torch.optim.Optimizer. Give one, or several in a "
                "list; a scheduler is made of each."
            )
    return found
