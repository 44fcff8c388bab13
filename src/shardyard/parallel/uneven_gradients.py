"""Ranks whose gradients are of different parameters: a missing gradient is zero before any sum.

As in torch's DistributedDataParallel with ``find_unused_parameters``: a parameter that no
rank used keeps no gradient, so that neither weight decay nor momentum moves it. This is for
modules of unknown content. In models of known families each parameter gets a gradient in
every micro-batch.

With ZeRO 1 and 2 each rank gathers all blocks in one order, also those that it does not
call. With ZeRO 3 a call gathers, so ranks must call the same blocks, which
``rank_agreement.py`` compares.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardyard.parallel.collectives import all_gather_into
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.rank_agreement import RankAgreement
from shardyard.torch_private import GroupSums, has_one_group

_NAME = "uneven_gradients"
_ROOT = "what is in no block"

_outside_graphs: Any = torch.compiler.disable


class UnevenGradients:
    """Lets the ranks of a model agree on which of its parameters got a gradient."""

    def __init__(self, model: nn.Module, mesh: Mesh, blocks: Mapping[str, nn.Module], *,
                 remedy: str) -> None:  # fmt: skip
        """Take a model that is sharded, or held whole; its blocks by full name."""
        self._agreement = RankAgreement(model, remedy=remedy)
        self._sums: GroupSums | None = None
        self._used: set[str] = set()
        self._without: dict[str, Tensor] = {}
        """Parameters that had no gradient before this step."""
        if not isinstance(model, FSDPModule):
            return
        sharded = {name: each for name, each in blocks.items() if isinstance(each, FSDPModule)}
        self._sums = GroupSums(model, list(reversed(sharded.values())))
        is_split = mesh.group("fsdp").size() > 1
        if mesh.layout.zero < 3 or not is_split:
            _GatherAll(model, list(sharded.values()), only_training=not is_split)
        if is_split:
            _compare_gathers(model, self._agreement)

    def end_each_backward(self) -> None:
        """Agree after every backward pass of a script, and not when ``end_step`` is called."""
        assert self._sums is not None
        self._sums.finished = self.end_step

    def zeros(self, params: Mapping[str, nn.Parameter]) -> None:
        """Give each parameter a gradient before they are summed, of a model that is held whole."""
        for name, param in params.items():
            if param.grad is None:
                self._without[name] = param
                param.grad = torch.zeros_like(param)
            else:
                self._used.add(name)

    def end_step(self) -> None:
        """Take away the zeros of what no rank used. All ranks call it together."""
        order: Sequence[int] = ()
        if self._sums is not None:
            order = self._sums.order
            self._used |= self._sums.used
            self._without |= self._sums.started
            self._sums.used, self._sums.started = set(), {}
        used, is_same_order = self._agreement.end_step(self._used, order)
        if self._sums is not None and is_same_order:
            self._sums.reorder(order)
        for name, param in self._without.items():
            if name not in used:
                param.grad = None
        self._used, self._without = set(), {}


def handle_uneven_gradients(
    model: nn.Module, mesh: Mesh, blocks: Mapping[str, nn.Module], *, remedy: str
) -> UnevenGradients | None:
    """Hang it on a model; None: there is one rank. All ranks call it together."""
    if dist.get_world_size() == 1:
        return None
    found = UnevenGradients(model, mesh, blocks, remedy=remedy)
    setattr(model, _NAME, found)
    return found


def uneven_gradients_of(model: nn.Module) -> UnevenGradients | None:
    """Return a model's uneven gradients. None: all its parameters get a gradient on each rank."""
    attached: UnevenGradients | None = getattr(model, _NAME, None)
    return attached


class _AllGather:
    """torch's gather of a group's parameters, once all ranks are known to gather that group."""

    def __init__(self, name: str, agreement: RankAgreement) -> None:
        self._action = f"gathers {name}"
        self._agreement = agreement

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer to gather from or into."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather."""
        self._agreement.before(self._action)
        return all_gather_into(output_tensor, input_tensor, group, is_async=async_op)


def _compare_gathers(model: nn.Module, agreement: RankAgreement) -> None:
    for name, module in model.named_modules():
        # torch takes no gather of ours for a block whose experts are on a mesh of their own
        if has_one_group(module) and isinstance(module, FSDPModule):
            gather: Any = _AllGather(name or _ROOT, agreement)
            module.set_custom_all_gather(gather)

    def begin(*_args: Any) -> None:
        agreement.begin_forward(has_gradients=torch.is_grad_enabled())

    def end(*_args: Any) -> None:
        agreement.end_forward()

    model.register_forward_pre_hook(_outside_graphs(begin), prepend=True)
    model.register_forward_hook(_outside_graphs(end))


class _GatherAll:
    """Gathers blocks in one order, also those that this rank does not call.

    Each is gathered once and stays, so a rank that comes to a block first gathers those before it,
    and those that are left once its forward pass is over.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[FSDPModule], *, only_training: bool
    ) -> None:
        """Hook the gathers into a model and its blocks.

        Args:
            only_training: Whether no data is sent, so that evaluations need not do it.
        """
        self._blocks = blocks
        self._only_training = only_training
        self._next = 0
        model.register_forward_pre_hook(_outside_graphs(self._begin))
        model.register_forward_hook(_outside_graphs(self._end))
        if not only_training:
            for place, block in enumerate(self._blocks):
                before = _outside_graphs(lambda *_, place=place: self._gather(place))
                module: Any = block
                module.register_forward_pre_hook(before, prepend=True)

    def _begin(self, *_args: Any) -> None:
        self._next = 0

    def _gather(self, end: int) -> None:
        for place in range(self._next, end):
            self._blocks[place].unshard()
        self._next = max(self._next, end + 1)

    def _end(self, *_args: Any) -> None:
        if torch.is_grad_enabled() or not self._only_training:
            self._gather(len(self._blocks))
