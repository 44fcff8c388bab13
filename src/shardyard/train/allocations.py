"""A log of every allocation of a step on fake devices: how large, from when to when, and what for.

torch's own MemTracker looks at all live tensors at every operator; here each storage is written
down once when it is born and once when it dies, and the peak is found afterwards. By then it is
also known what a storage became: a gradient, say, is only known when the optimizer is given it.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardyard import torch_private
from shardyard.torch_private import TorchDispatchMode, storage_key, tree_leaves

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
GATHERED = "gathered parameters"
UNREDUCED = "unreduced gradients"
ACTIVATIONS = "activations"
LOGITS = "logits and loss"
TEMPORARY = "temporary"
CATEGORIES = (
    PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, UNREDUCED, ACTIVATIONS, LOGITS, TEMPORARY,
)  # fmt: skip

SET_UP, OPTIMIZER_STEP = "set-up", "optimizer step"
FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"
"""The loss begins with the first logits: by then every block has kept what it keeps."""

_BLOCK_BYTES = 512
"""The CUDA caching allocator rounds every request up to this (c10/cuda/CUDACachingAllocator.h)."""

_READ_BY: dict[str, Callable[[Sequence[Any], dict[str, Any]], dict[str, Any]]] = {
    "fsdp::all_gather_copy_in": lambda args, _: {GATHERED: args[:2]},
    "fsdp::chunk_cat": lambda args, named: {UNREDUCED: [args[0], named["out"]]},
}
"""Operators that show what their arguments are for."""


class StepPhase(NamedTuple):
    """A stretch of the step; micro-batches count from 1, and are 0 outside of them."""

    name: str
    micro_batch: int


@dataclass(kw_only=True, eq=False)
class Allocation:
    """One storage from the moment it has a size to the moment it has none."""

    bytes: int
    operator: str
    """Operator that made it."""
    segment: int
    """Stretch of operators that autograd records one after the other.

    A stretch is a forward pass, or the recompute of one block. An allocation that outlives its
    stretch was kept for a backward pass.
    """
    is_recorded: bool
    """Whether autograd recorded when it was made, or a function of our own in a forward pass."""
    outlives_segment: bool = False
    category: str | None = None

    def kind(self) -> str:
        """Return the purpose of the allocation, as far as it has been shown."""
        if self.category is not None:
            return self.category
        return ACTIVATIONS if self.is_recorded and self.outlives_segment else TEMPORARY


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """The moment of a phase, or of the whole step, at which most is allocated."""

    phase: str
    micro_batch: int
    """From 1; 0 in the optimizer step."""
    operator: str
    """Operator of the last allocation."""
    bytes: int
    terms: dict[str, int]
    """Category -> bytes; they add up to ``bytes``."""


class AllocationLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it inside a FakeTensorMode, build and step, then ask for the peaks."""

    def __init__(
        self,
        *,
        vocab_size: int,
        tokens: int,
        micro_batches: int,
        chunk: int | None = None,
        on_phase: Callable[[StepPhase], None] = lambda _phase: None,
    ) -> None:
        """Args:
        vocab_size: Entries of the vocabulary: logits are known by their shape.
        tokens: Tokens of one micro-batch that have logits.
        chunk: Tokens of a chunk of the loss, the last of which may have fewer.
        micro_batches: Micro-batches of the step; after the last backward pass comes the optimizer.
        on_phase: Called with each phase of the step as it begins.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[str] = set()
        rows = {tokens} if chunk is None else {min(chunk, tokens), tokens % chunk or chunk}
        self._logits_shapes = {(each, vocab_size) for each in rows}
        self._micro_batches = micro_batches
        self._events: list[tuple[int, Allocation]] = []
        self._phases: list[StepPhase] = []
        """Phase of each event."""
        self._live: dict[int, tuple[weakref.ref[Any], Allocation | None]] = {}
        self._phase = StepPhase(SET_UP, 0)
        self._on_phase = on_phase
        self._segment = 0
        self._is_recorded = False
        self._original_resize = torch.UntypedStorage.resize_

    def __enter__(self) -> "AllocationLog":
        # FSDP frees and refills gathered parameters by resizing, which passes by every dispatcher
        log, original = self, self._original_resize

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            original(storage, size)
            log._resized(storage)

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._original_resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as operators on this rank's part
        if func is torch_private.READ_A_NUMBER:
            return 1  # the step counts its tokens; a fake tensor has no numbers
        named = kwargs or {}
        self._update_phase()
        result = func(*args, **named)
        name = torch_private.operator_name(func)
        self.operators.add(name)
        if name in _READ_BY:
            for category, tensors in _READ_BY[name](args, named).items():
                self.mark(tree_leaves(tensors), category)
        if name == torch_private.REDUCE_SCATTER and self._is_for(args[1], UNREDUCED):
            self.mark([args[0]], GRADIENTS)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._seen(leaf, name)
        return result

    def mark(self, tensors: Iterable[Any], category: str) -> None:
        """Say what tensors are for. Parameters and optimizer state stay what they are."""
        for tensor in tensors:
            allocation = self._of(tensor)
            if allocation is not None and allocation.category not in (PARAMETERS, OPTIMIZER):
                allocation.category = category

    def _is_for(self, tensor: Tensor, category: str) -> bool:
        allocation = self._of(tensor)
        return allocation is not None and allocation.category == category

    def _of(self, tensor: Tensor) -> Allocation | None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return self._live.get(storage_key(local), (None, None))[1]

    def peaks(self) -> list[MemoryPeak]:
        """The peak of each phase in order; the largest is the peak of the step."""
        # Those that are still alive have not been judged by _record_free.
        for _, allocation in self._live.values():
            if allocation is not None:
                allocation.outlives_segment = allocation.segment != self._segment
        highest: dict[StepPhase, tuple[int, int]] = {}
        total = 0
        for index, (sign, allocation) in enumerate(self._events):
            total += sign * allocation.bytes
            phase = self._phases[index]
            if total > highest.get(phase, (-1, 0))[0]:
                highest[phase] = (total, index)
        return [self._peak_at(index, phase) for phase, (_, index) in highest.items()]

    def _peak_at(self, index: int, phase: StepPhase) -> MemoryPeak:
        terms = dict.fromkeys(CATEGORIES, 0)
        for sign, allocation in self._events[: index + 1]:
            terms[allocation.kind()] += sign * allocation.bytes
        return MemoryPeak(
            phase=phase.name,
            micro_batch=phase.micro_batch,
            operator=self._events[index][1].operator,
            bytes=sum(terms.values()),
            terms=terms,
        )

    def _update_phase(self) -> None:
        """Read the phase from autograd: a backward pass runs, or operators are recorded."""
        is_backward = torch_private.in_backward()
        is_recorded = torch.is_grad_enabled()
        name, micro_batch = self._phase
        if is_backward:
            name = BACKWARD
        # Autograd has ended: after the last micro-batch the optimizer follows, else a forward pass.
        elif name == BACKWARD:
            is_over = micro_batch == self._micro_batches
            name, micro_batch = (OPTIMIZER_STEP, 0) if is_over else (FORWARD, micro_batch + 1)
        phase = StepPhase(name, micro_batch)
        # Within a backward pass, gradients are switched on only where a block is recomputed.
        recomputes = is_backward and is_recorded != self._is_recorded
        if phase != self._phase or recomputes:
            self._segment += 1
        self._is_recorded = is_recorded
        self._enter(phase)

    def _enter(self, phase: StepPhase) -> None:
        if phase != self._phase:
            self._phase = phase
            self._on_phase(phase)

    def begin_step(self) -> None:
        """Begin a step with the first forward pass."""
        self._enter(StepPhase(FORWARD, 1))
        self._segment += 1

    def _seen(self, tensor: Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._live or tensor.device.type == "meta":
            return
        rows = tensor.numel() // max(1, tensor.shape[-1]) if tensor.dim() else 0
        is_logits = tensor.dim() > 0 and (rows, tensor.shape[-1]) in self._logits_shapes
        if is_logits and self._phase.name == FORWARD:
            self._enter(StepPhase(LOSS, self._phase.micro_batch))
        allocation = self._record_allocation(storage, operator)
        if allocation is not None and is_logits:
            allocation.category = LOGITS

        def died(reference: weakref.ref[Any]) -> None:
            # The key is free again once a storage dies, and a new one may have it by now.
            found = self._live.get(key)
            if found is not None and found[0] is reference:
                del self._live[key]
                self._record_free(found[1])

        self._live[key] = (weakref.ref(storage, died), allocation)

    def _record_allocation(self, storage: torch.UntypedStorage, operator: str) -> Allocation | None:
        size = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        if not size:
            return None
        allocation = Allocation(
            bytes=size,
            segment=self._segment,
            # An autograd.Function runs forward() with gradients off, and still keeps tensors.
            is_recorded=self._is_recorded or self._phase.name in (FORWARD, LOSS),
            operator=operator,
        )
        self._note(1, allocation)
        return allocation

    def _record_free(self, allocation: Allocation | None) -> None:
        if allocation is not None:
            allocation.outlives_segment = allocation.segment != self._segment
            self._note(-1, allocation)

    def _note(self, sign: int, allocation: Allocation) -> None:
        self._events.append((sign, allocation))
        self._phases.append(self._phase)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        found = self._live.get(storage_key(storage))
        if found is None:
            return
        reference, allocation = found
        if allocation is not None:
            allocation.category = GATHERED
        self._record_free(allocation)
        allocation = self._record_allocation(storage, "resize_")
        if allocation is not None:
            allocation.category = GATHERED
        self._live[storage_key(storage)] = (reference, allocation)
