"""Offloaded activations: the same gradients, nothing moved twice, little left on the device."""

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardyard.models.random import SampleKeys
from shardyard.parallel.device import CopyQueue
from shardyard.parallel.offload import LEAST_BYTES, ActivationOffload
from shardyard.parallel.recompute import apply_recompute

CPU = torch.device("cpu")
BLOCKS, TOKENS, WIDTH = 6, 128, 64
INPUT_BYTES = TOKENS * WIDTH * 4
assert INPUT_BYTES >= LEAST_BYTES


class Block(nn.Module):
    """Attention and an MLP with all that makes offload hard: views, shared inputs, packed parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate_up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Residual on both sides."""
        y = self.norm(x_TD)
        q, k, v = (part(y).unflatten(-1, (4, -1)).transpose(0, 1)[None] for part in self._inputs())
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_TD = x_TD + attended[0].transpose(0, 1).flatten(1)
        gate, up = self.gate_up(x_TD).chunk(2, dim=-1)
        out_TD: Tensor = x_TD + self.down(F.silu(gate) * up)
        return out_TD

    def _inputs(self) -> list[nn.Linear]:
        return [self.query, self.key, self.value]


class RecordingQueue(CopyQueue):
    """A queue that remembers what it was given."""

    def __init__(self, *, keeps_sources: bool = False) -> None:
        super().__init__(CPU)
        self.keeps_sources = keeps_sources
        self.sources: list[Tensor] = []
        self.on_host: list[weakref.ref[Any]] = []

    def to_host(self, source: Tensor) -> Tensor:
        if self.keeps_sources:
            self.sources.append(source)
        copy = super().to_host(source)
        self.on_host.append(weakref.ref(copy.untyped_storage()))
        return copy


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Storages that operators have made and that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = weakref.ref(storage)
        return result

    def count(self, without: Iterable[Any]) -> int:
        """Of all but some storages."""
        host = {storage._cdata for storage in without}
        alive = {s._cdata: s.nbytes() for ref in self._made.values() if (s := ref()) is not None}
        return sum(int(size) for key, size in alive.items() if key not in host)


def _blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(BLOCKS))


def _forward(
    blocks: nn.ModuleList,
    offload: ActivationOffload | None,
    look: Callable[[Tensor], None] | None = None,
) -> Tensor:
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    for number, block in enumerate(blocks):
        is_first, is_last = number == 0, number == BLOCKS - 1
        entered = offload and offload.around(block, is_first=is_first, is_last=is_last)
        with entered or nullcontext():
            x = block(x)
        if look is not None:
            x.register_hook(look)
    return x


def _gradients(blocks: nn.ModuleList) -> list[Tensor]:
    return [param.grad for param in blocks.parameters() if param.grad is not None]


@pytest.mark.filterwarnings("error::FutureWarning")  # torch 2.14 has one for hooks it passes by
@pytest.mark.parametrize("recompute", ["none", "full", "selective", 2, ("gate_up", "down")])
@pytest.mark.parametrize(("depth", "keeps_last"), [(0, True), (1, False), (9, True)])
def test_gradients_are_those_without(recompute: Any, depth: int, keeps_last: bool) -> None:
    plain, moved = _blocks(), _blocks()
    offload = ActivationOffload(CPU, depth=depth, keeps_last=keeps_last)
    keys = SampleKeys()
    for blocks, where in ((plain, None), (moved, offload)):
        named = {str(number): block for number, block in enumerate(blocks)}
        apply_recompute(named, recompute, keys=keys, offload=where)
        for _ in range(2):
            _forward(blocks, where).square().sum().backward()  # type: ignore[no-untyped-call]
    assert offload.moved_bytes >= 2 * (BLOCKS - 1) * INPUT_BYTES
    for found, expected in zip(_gradients(moved), _gradients(plain), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler's own doing
def test_compiled_blocks_hand_over_what_they_keep() -> None:
    plain, moved = _blocks(), _blocks()
    offload = ActivationOffload(CPU, depth=1, keeps_last=True)
    for blocks, where in ((plain, None), (moved, offload)):
        for block in blocks:
            block.compile(backend="aot_eager")  # what is kept is decided before any backend
        for _ in range(2):
            _forward(blocks, where).square().sum().backward()  # type: ignore[no-untyped-call]
    assert offload.moved_bytes >= 2 * (BLOCKS - 1) * INPUT_BYTES
    for found, expected in zip(_gradients(moved), _gradients(plain), strict=True):
        assert torch.equal(found, expected)


def test_interleaved_micro_batches_and_a_second_backward_pass() -> None:
    plain, moved = _blocks(), _blocks()
    offload = ActivationOffload(CPU, depth=1, keeps_last=False)
    for blocks, where in ((plain, None), (moved, offload)):
        first, second = _forward(blocks, where).sum(), _forward(blocks, where).square().sum()
        first.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        second.backward()  # type: ignore[no-untyped-call]
        first.backward()  # type: ignore[no-untyped-call]
    for found, expected in zip(_gradients(moved), _gradients(plain), strict=True):
        assert torch.equal(found, expected)


def test_what_autograd_keeps_leaves_once_and_parameters_never() -> None:
    blocks, kept = _blocks(), {}
    offload = ActivationOffload(CPU, depth=1, keeps_last=False)
    offload._out = queue = RecordingQueue(keeps_sources=True)

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.detach()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _forward(blocks, None)
    out = _forward(blocks, offload)
    parameters = {param.untyped_storage()._cdata for param in blocks.parameters()}
    assert any(param.nbytes >= LEAST_BYTES for param in blocks.parameters())
    activations = [tensor for key, tensor in kept.items() if key not in parameters]
    sizes = [tensor.untyped_storage().nbytes() for tensor in activations]
    large = sorted(size for size in sizes if size >= LEAST_BYTES)
    assert sorted(source.nbytes for source in queue.sources) == large
    assert len({source.untyped_storage()._cdata for source in queue.sources}) == len(large)
    assert offload.moved_bytes == sum(large)
    del out


def test_few_blocks_are_on_the_device() -> None:
    all_kept, _ = _bytes_on_device(None)
    block = all_kept / BLOCKS
    for depth in (0, 1, 2):
        kept, in_backward = _bytes_on_device(depth)
        assert kept < 1.2 * block  # the last one
        # between the backward passes of two blocks: those that came ahead
        assert len(in_backward) == BLOCKS
        assert max(in_backward[1:]) < (depth + 0.3) * block
        assert max(in_backward[1:]) > (depth - 0.3) * block


def _bytes_on_device(depth: int | None) -> tuple[int, list[int]]:
    """After the forward pass, and as the backward pass of each block begins; None: no offload."""
    blocks, queue, in_backward = _blocks(), RecordingQueue(), []
    offload = None
    if depth is not None:
        offload = ActivationOffload(CPU, depth=depth, keeps_last=True)
        offload._out = queue
    with LiveBytes() as live:

        def measure() -> int:
            parameters = [*blocks.parameters(), *_gradients(blocks)]
            on_host = [storage for ref in queue.on_host if (storage := ref()) is not None]
            found: int = live.count([*on_host, *(each.untyped_storage() for each in parameters)])
            return found

        out = _forward(blocks, offload, lambda _: in_backward.append(measure()))
        kept = measure()
        out.sum().backward()  # type: ignore[no-untyped-call]
    return kept, in_backward
