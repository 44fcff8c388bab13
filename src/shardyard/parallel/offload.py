"""Activation offload: what a block keeps for its backward pass waits for it in host memory.

Autograd hands over every tensor that it keeps (``saved_tensors_hooks`` around each block), and so
does selective recompute. A storage leaves the device once, however many tensors are views of it,
while the next block computes; it comes back, with all that its block kept, while a later block's
backward pass runs. Parameters stay: they are not activations, and gathered ones come and go anyway.

At most two blocks' activations are on the device in the forward pass, the one that computes and the
one that leaves, and in the backward pass the one that is read and ``depth`` that come.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardyard.parallel.device import CopyQueue
from shardyard.torch_private import storage_key

LEAST_BYTES = 2**14
"""Smaller storages stay on the device: there are few, and starting a copy costs more than it."""


class ActivationOffload:
    """Moves activations of one rank's blocks; enter ``around`` for each call of a block."""

    def __init__(self, device: torch.device, *, depth: int, keeps_last: bool) -> None:
        """Args:
        depth: Blocks whose activations come back ahead of the one whose backward pass runs.
        keeps_last: Whether the last block's stay, as its backward pass begins at once.
        """
        self._device = device
        self._depth = depth
        self._keeps_last = keeps_last
        self._out, self._back = CopyQueue(device), CopyQueue(device)
        self.moved_bytes = 0
        """Bytes that have left the device so far."""
        self._by_storage: dict[int, tuple[weakref.ref[Any], weakref.ref[_OffloadedStorage]]] = {}
        self._group: _Group | None = None
        """Group of the block that computes now."""
        self._before: _Group | None = None
        """Group of the block before it."""

    @contextmanager
    def around(self, block: nn.Module, *, is_first: bool, is_last: bool) -> Iterator[None]:
        """While a block computes, take what autograd keeps of it.

        Args:
            is_first: Of the blocks that this micro-batch passes here, and so is ``is_last``.
        """
        if not torch.is_grad_enabled():
            yield
            return
        before = None if is_first else self._before
        group = _Group(block, before, is_resident=is_last and self._keeps_last)
        self._group = group
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._group, self._before = None, None if is_last else group
        group.copied_out = self._out.mark()
        if before is not None:
            self._release(before)
        if is_last:
            self._release(group)

    def pack(self, tensor: Tensor) -> "Tensor | _Saved":
        """Return the object that autograd keeps instead of a tensor."""
        group = self._group
        if group is None or not self._is_moved(tensor, group):
            return tensor.detach()  # the tensor itself would keep what made it, and that keeps it
        held = self._offloaded(tensor.untyped_storage(), group)
        held.uses += 1
        view = (int(tensor.storage_offset()), tensor.size(), tensor.stride())
        return _Saved(held, group, tensor.dtype, view)

    def unpack(self, saved: "Tensor | _Saved") -> Tensor:
        """The tensor again, on the device."""
        if isinstance(saved, Tensor):
            return saved
        group: _Group | None = saved.group
        for _ in range(1 + self._depth):
            if group is not None and not group.is_back:
                self._prefetch(held for ref in group.storages if (held := ref()) is not None)
                group.is_back = True
            group = group and group.before
        held = saved.storage
        if held.bytes is None:  # of another block's group, or asked for again
            self._prefetch([held])
        assert held.bytes is not None
        self._back.wait(held.arrived)
        tensor = torch.empty(0, dtype=saved.dtype, device=self._device)
        tensor.set_(held.bytes.untyped_storage(), *saved.view)
        held.uses -= 1
        if held.uses <= 0 and held.host is not None:
            held.bytes = None
        return tensor

    def _is_moved(self, tensor: Tensor, group: "_Group") -> bool:
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return False
        if tensor.device.type != self._device.type or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= LEAST_BYTES and storage_key(storage) not in group.parameters

    def _offloaded(self, storage: torch.UntypedStorage, group: "_Group") -> "_OffloadedStorage":
        """The storage, on its way; one for all tensors that are views of it."""
        key = storage_key(storage)
        alive, known = self._by_storage.get(key, (None, None))
        held = known() if known is not None and alive is not None and alive() is storage else None
        if held is not None:
            return held
        held = _OffloadedStorage(_bytes_of(storage))
        if not group.is_resident:
            assert held.bytes is not None
            held.host = self._out.to_host(held.bytes)
            group.leaving.append(held.bytes)
            self.moved_bytes += storage.nbytes()
            held.bytes = None
        group.storages.append(weakref.ref(held))
        known_as_this = weakref.ref(storage, lambda ref: self._forget(key, ref))
        self._by_storage[key] = (known_as_this, weakref.ref(held))
        return held

    def _forget(self, key: int, ref: "weakref.ref[Any]") -> None:
        if key in self._by_storage and self._by_storage[key][0] is ref:
            del self._by_storage[key]

    def _release(self, group: "_Group") -> None:
        """Free a block's storages: what is computed from now on waits until they are copied."""
        self._out.wait(group.copied_out)
        group.leaving.clear()

    def _prefetch(self, some: Iterable["_OffloadedStorage"]) -> None:
        """Start to copy back what is not on the device."""
        coming = [held for held in some if held.bytes is None]
        for held in coming:
            assert held.host is not None
            held.bytes = self._back.to_device(held.host)
        arrived = self._back.mark()
        # one mark for all: who waits for one may free any, also those that nobody reads
        for held in coming:
            held.arrived = arrived


class _OffloadedStorage:
    """One storage that was on the device, and is in host memory, and is on the device again."""

    def __init__(self, on_device: Tensor) -> None:
        self.bytes: Tensor | None = on_device
        self.host: Tensor | None = None
        self.arrived: torch.Event | None = None
        self.uses = 0
        """Tensors that are views of it and have not been asked for."""


class _Group:
    """Tensors that one block keeps of one micro-batch."""

    def __init__(self, block: nn.Module, before: "_Group | None", *, is_resident: bool) -> None:
        self._block = block
        self._parameters: set[int] | None = None
        self.before = before
        self.is_resident = is_resident
        self.storages: list[weakref.ref[_OffloadedStorage]] = []
        self.leaving: list[Tensor] = []
        """Kept alive until they are copied."""
        self.copied_out: torch.Event | None = None
        self.is_back = is_resident

    @property
    def parameters(self) -> set[int]:
        """Storages of the block's parameters, first asked when they have been gathered."""
        if self._parameters is None:
            self._parameters = {
                storage_key(param.to_local() if isinstance(param, DTensor) else param)
                for param in self._block.parameters()
            }
        return self._parameters


@dataclass(frozen=True)
class _Saved:
    """Handle that autograd keeps instead of a tensor."""

    storage: _OffloadedStorage
    group: _Group
    dtype: torch.dtype
    view: tuple[int, torch.Size, tuple[int, ...]]
    """Offset, sizes and strides in the storage."""


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage, as one row of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
