"""Steps of each optimizer: one class each, named by its row in ``config/optimizers.py``.

An update works on this rank's shards, as plain tensors. Where it needs the norm of a whole
parameter it asks for it once a step (``parallel/gradients.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from shardyard.config.optimizers import optimizer_of
from shardyard.config.schema.recipe import Optim
from shardyard.parallel.gradients import ParamNorms

State = dict[str, Tensor]
"""Name -> average in fp32, of a shard's form, and ``step`` where the row counts steps."""


def gradients(shards: Mapping[str, nn.Parameter], names: Sequence[str]) -> list[Tensor]:
    """Return the gradients of shards that move."""
    found = []
    for name in names:
        grad = shards[name].grad
        assert grad is not None, name
        found.append(grad)
    return found


class Update(Protocol):
    """One optimizer over the shards of this rank. It must never wait for the device."""

    most_elements: float
    """Most elements of one ``update`` whose state is fp32, to bound its extra memory.

    Infinity: all at once.
    """

    def __init__(self, shards: Mapping[str, nn.Parameter], optim: Optim, norms: ParamNorms) -> None:
        """Args:
        shards: Name -> what this rank holds of it; what is frozen is not among them.
        """

    def begin(
        self, *, lr: float, divisor: Tensor, skip: Tensor, grads: Mapping[str, Tensor]
    ) -> None:
        """A step begins.

        Args:
            grads: Name -> undivided gradient of each shard that moves; not to be held, so that
                their memory is free once they are used.
            divisor: Of all gradients.
            skip: 1 where weights and state must stay as they are, bit for bit.
        """

    def update(self, names: Sequence[str], states: Mapping[str, State]) -> None:
        """Take some of the shards, with their undivided ``.grad``; each is given once a step.

        State is changed in place. The shard itself may wait for ``finish``.
        """

    def finish(self) -> None:
        """All shards have been given. Afterwards none has a gradient."""


@runtime_checkable
class KeepsStates(Protocol):
    """An update that keeps its states itself, in forms that only it knows."""

    states: Mapping[str, State]
    """Name of a shard -> tensors that a checkpoint holds, as they are after each step."""


MakeUpdate = Callable[[Mapping[str, nn.Parameter]], Update]
"""From shards to the update of them."""


def make_update(shards: Mapping[str, nn.Parameter], optim: Optim, norms: ParamNorms) -> Update:
    """The update of the optimizer that the recipe names.

    Raises:
        LookupError: There is no optimizer of that name.
    """
    module, _, name = optimizer_of(optim).update.partition(":")
    update: Update = getattr(import_module(module), name)(shards, optim, norms)
    return update


def make_one_pass(
    shards: Mapping[str, nn.Parameter], optim: Optim, copies: Mapping[str, Tensor]
) -> Update | None:
    """The update that writes copies of weights in the same pass; None: this optimizer has none."""
    row = optimizer_of(optim)
    if row.one_pass is None:
        return None
    module, _, name = row.one_pass.update.partition(":")
    update: Update = getattr(import_module(module), name)(shards, optim, copies)
    return update
