"""Updates that do not depend on where a parameter is cut into shards.

A kernel on a CPU takes elements by whole vectors and the last few one by one, with other
instructions: an element may be rounded otherwise in a shard of another length. So each shard is
given in two pieces: whole vectors as they lie in memory, and the last elements of all shards side
by side, filled up to whole vectors. For optimizers that take each element by itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardyard.train.optimizers import MakeUpdate, State

VECTOR = 64
"""Elements: a multiple of what any processor takes at once, unrolled loops included."""

_TAILS = {True: "last of matrices", False: "last of others"}
"""Names by whether they are of matrices; only matrices decay."""


class WholeVectors:
    """An update that is given pieces in place of shards."""

    most_elements = math.inf

    def __init__(
        self,
        shards: Mapping[str, nn.Parameter],
        make: MakeUpdate,
    ) -> None:
        """Args:
        make: The update of pieces.
        """
        self._shards = shards
        self._pieces = {name: nn.Parameter(_whole(each.data)) for name, each in shards.items()}
        device = next((each.device for each in shards.values()), None)
        for is_matrix, tail in _TAILS.items():
            like = torch.zeros((1, VECTOR) if is_matrix else VECTOR, device=device)
            self._pieces[tail] = nn.Parameter(like)
        self._inner = make(self._pieces)

    def begin(
        self, *, lr: float, divisor: Tensor, skip: Tensor, grads: Mapping[str, Tensor]
    ) -> None:
        """A step begins."""
        self._inner.begin(lr=lr, divisor=divisor, skip=skip, grads=grads)

    def update(self, names: Sequence[str], states: Mapping[str, State]) -> None:
        """Take shards by their pieces."""
        moving = [name for name in names if self._shards[name].grad is not None]
        whole_states: dict[str, State] = {}
        for name in moving:
            piece, held = self._pieces[name], _sharded_tensors(self._shards[name], states[name])
            piece.data, piece.grad = _whole(held["weight"]), _whole(held["gradient"])
            whole_states[name] = {key: _whole(each) for key, each in states[name].items()}
        packed = [self._pack(is_matrix, moving, states, whole_states) for is_matrix in _TAILS]
        self._inner.update(list(whole_states), whole_states)
        for unpack in packed:
            unpack()
        for name in names:
            self._shards[name].grad = None

    def finish(self) -> None:
        """All shards have been given."""
        self._inner.finish()

    def _pack(
        self,
        is_matrix: bool,
        names: Sequence[str],
        states: Mapping[str, State],
        whole_states: dict[str, State],
    ) -> Callable[[], None]:
        """Give the last elements of shards as one piece; returns what takes them back."""
        lasts = [
            _sharded_tensors(self._shards[name], states[name])
            for name in names
            if (self._shards[name].dim() >= 2) == is_matrix and self._shards[name].numel() % VECTOR
        ]
        if not lasts:
            return lambda: None
        tail = self._pieces[_TAILS[is_matrix]]
        packed = {key: _packed([held[key] for held in lasts], is_matrix) for key in lasts[0]}
        tail.data, tail.grad = packed["weight"], packed["gradient"]
        # A copy: the optimizer counts up in place, and the shards' own counters count as well.
        step = {key: each.clone() for key, each in states[names[0]].items() if each.dim() == 0}
        averages = {k: v for k, v in packed.items() if k not in ("weight", "gradient")}
        whole_states[_TAILS[is_matrix]] = {
            **averages,
            **step,
        }  # all of them have taken as many steps

        def unpack() -> None:
            for key in (*averages, "weight"):
                ends = [_end(held[key]) for held in lasts]
                filled = packed[key].view(-1)[: sum(map(len, ends))]
                for end, part in zip(ends, torch.split(filled, list(map(len, ends))), strict=True):
                    end.copy_(part)

        return unpack


def _sharded_tensors(shard: nn.Parameter, state: State) -> dict[str, Tensor]:
    """All that is cut as a shard is."""
    assert shard.grad is not None
    averages = {key: each for key, each in state.items() if each.dim()}
    return {"weight": shard.data, "gradient": shard.grad, **averages}


def _whole(tensor: Tensor) -> Tensor:
    """The part of whole vectors, in its own memory; a number as it is."""
    if not tensor.dim():
        return tensor
    flat = tensor.view(-1)
    whole = flat[: len(flat) - len(flat) % VECTOR]
    # A matrix keeps two dimensions: optimizers know by them what decays.
    return whole.view(-1, VECTOR) if tensor.dim() >= 2 else whole


def _end(tensor: Tensor) -> Tensor:
    """Return the elements after the last whole vector."""
    flat = tensor.view(-1)
    return flat[len(flat) - len(flat) % VECTOR :]


def _packed(tensors: Sequence[Tensor], is_matrix: bool) -> Tensor:
    """Return such ends of several tensors, side by side, filled up with zeros."""
    ends = torch.cat([_end(each) for each in tensors])
    filled = torch.cat([ends, ends.new_zeros(-len(ends) % VECTOR)])
    return filled.view(-1, VECTOR) if is_matrix else filled
