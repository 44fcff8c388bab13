"""Sharding by FSDP2: modules that are gathered together, the split of experts, and zero levels."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardyard import torch_private
from shardyard.families.family import Family
from shardyard.models.submodules import blocks_of, is_tied, part_of
from shardyard.parallel.ddp import ReplicaSums
from shardyard.parallel.expert import sparse_blocks
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.step_counters import Watcher
from shardyard.parallel.uneven_gradients import uneven_gradients_of

# FSDP2's ``fully_shard`` implements data parallelism: ZeRO 1 to 3 and hybrid, or only replicas.
#
# A step with gradient accumulation over n micro-batches differs by ZeRO level:
#
# ====  ===========================  ==============================  ============================
# zero  parameters                   gradients                       collectives of a step
# ====  ===========================  ==============================  ============================
# 1     whole from first to last     whole, reduced after the last   1 gather, 1 reduction
# 2     whole from first to last     sharded after each              1 gather, n reductions
# 3     gathered block by block      sharded after each              2n gathers, n reductions
# ====  ===========================  ==============================  ============================
#
# All levels keep parameters sharded between optimizer steps. A mesh with dp_shard 1 replicates
# them. Where nothing is split and all is fp32, ``parallel/ddp.py`` takes over at any level.
# Gradients are summed, not averaged: the loss is a sum, and the step divides it once.

Placement = Callable[[nn.Parameter], Any]
"""Function that returns a parameter's split. None: along its first dimension over all shards."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Modules that are gathered together, by group; all unnamed ones form one more group."""

    first: Sequence[nn.Module] = ()
    """Modules that compute before the blocks, a group each."""
    blocks: Sequence[nn.Module]
    """A group each, so that one at a time is whole."""
    last: Sequence[nn.Module] = ()
    """Modules that compute after the blocks, one group."""
    output_dtype: torch.dtype | None
    """Format of the module's output. None: unchanged."""
    placement: Placement | None = None


def shard_groups(
    model: nn.Module,
    mesh: Mesh,
    groups: Groups,
    *,
    precision: MixedPrecisionPolicy,
    prefetch: int,
    on_host: bool = False,
    average_gradients: bool = False,
) -> None:
    """Shard a module in place, group by group.

    Args:
        average_gradients: Whether gradients are averaged over ranks, as torch does it, and not
            summed. No
            factor is given then: by one, torch divides twice where a group shards over one rank.
        on_host: Keep shards and their gradients in host memory; a group's shard comes to the device
            when the group is gathered, and its gradient leaves when it is summed.
    """
    # logits are a view of a matrix product; nothing here changes them in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    sharding = mesh.sharding()
    options: dict[str, Any] = {"mesh": sharding, "shard_placement_fn": groups.placement}
    if on_host:  # pinned, so that copies run beside compute
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=sharding.device_type != "cpu")
    # on one rank resharding still frees the copies in the compute format
    reshard = mesh.layout.zero == 3
    ahead = [*groups.first, *groups.blocks]
    between = replace(precision, output_dtype=precision.param_dtype)
    for module in ahead:
        fully_shard(module, mp_policy=between, reshard_after_forward=reshard, **options)
    of_root = replace(precision, output_dtype=groups.output_dtype)
    if groups.last:
        # backward begins here: freeing them after forward would gather twice for nothing
        fully_shard(list(groups.last), mp_policy=of_root, reshard_after_forward=False, **options)
    fully_shard(model, mp_policy=of_root, reshard_after_forward=False, **options)

    if sharding.size() > 1:  # over one rank torch averages nothing, but would divide a copy
        for group in _groups(model):
            if not average_gradients:
                group.set_gradient_divide_factor(1.0)
            # without it gloo refuses the factor (it would need a pre-multiplied sum)
            group.set_force_sum_reduction_for_comms(True)
    # a tied model's head is in the root's group, and the root stays whole
    _set_prefetch([*ahead, *groups.last[:1]], prefetch)


class GradientSync:
    """Says, micro-batch by micro-batch, when gradients are summed over ranks (table above)."""

    watcher: Watcher | None = None
    """Sums gradients in place of FSDP; None: FSDP does."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model = model
        self._zero = mesh.layout.zero
        self._sums: ReplicaSums | None = None
        """Sums of a module that is not sharded."""
        if not isinstance(model, FSDPModule):
            self._sums = ReplicaSums(model, mesh.group("dp_replicate"))
        self._uneven = uneven_gradients_of(model)
        self._is_last = False

    def before_backward(self, *, is_last: bool) -> None:
        """Call before the backward pass of each micro-batch."""
        self._is_last = is_last
        if self._sums is None:
            self._configure_fsdp(is_last)
        elif is_last:
            self._sums.begin()
        if self.watcher is not None:
            self.watcher.before_backward(is_last=is_last)

    def _configure_fsdp(self, is_last: bool) -> None:
        assert isinstance(self._model, FSDPModule)
        if self._zero == 1:
            self._model.set_requires_gradient_sync(is_last)
        else:
            # shards are summed over replicas once, after the last
            self._model.set_requires_all_reduce(is_last)
        if self._zero < 3:
            self._model.set_reshard_after_backward(is_last)
        self._model.set_is_last_backward(is_last)

    def after_backward(self, loss: Tensor) -> None:
        """Call after the backward pass of each micro-batch."""
        if self._sums is not None and self._is_last:
            self._sums.end()
        if self.watcher is not None:
            self.watcher.after_backward(loss)

    def end_step(self) -> None:
        """Call after the last micro-batch of a step; all ranks call it together."""
        if self._uneven is not None:
            self._uneven.end_step()

    def sum_gradients(self) -> None:
        """Do what FSDP does after a backward pass; for one in which its hooks are not called."""
        torch_private.sum_gradients(self._model)


def backward_all(losses: Iterable[Tensor], sync: GradientSync, *, number: int) -> Tensor:
    """Run the backward pass of each micro-batch's loss; add up gradients. Return the sum, fp64.

    Args:
        losses: Each is computed on demand, so that one forward pass is held at a time.
        number: Number of losses.
    """
    total: float | Tensor = 0.0
    for index, loss in enumerate(losses):
        sync.before_backward(is_last=index == number - 1)
        loss.backward()  # type: ignore[no-untyped-call]
        sync.after_backward(loss)
        total += loss.detach().double()  # in place from the second on
    assert isinstance(total, Tensor), "a step has a micro-batch"
    return total


def summable(loss: Tensor) -> Tensor:
    """Round a micro-batch's loss in fp64 so that sums up to 2^33 are the same in any order.

    It is a multiple of 2^-20: that changes only an fp32 number below 16, by at most 5e-7.
    """
    return (loss.double() * 2.0**20).round() / 2.0**20


def reshard(roots: Iterable[nn.Module]) -> None:
    """Let go of gathered parameters after a forward pass that no backward pass follows."""
    for root in roots:
        for module in _groups(root):
            module.reshard()


def _groups(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _set_prefetch(groups: Sequence[nn.Module], prefetch: int) -> None:
    """Gather ``prefetch`` groups ahead, in their order and in the backward pass against it.

    FSDP's own order of a backward pass is that of all forward passes since the last step. It
    would gather the head of an earlier micro-batch behind the first block. After the last
    backward pass, that head is unused.
    """
    ordered: list[FSDPModule] = [group for group in groups if isinstance(group, FSDPModule)]
    for index, group in enumerate(ordered):
        before = ordered[max(0, index - prefetch) : index]
        # without a module FSDP follows its own order; the group itself is there already
        group.set_modules_to_backward_prefetch(list(reversed(before)) or [group])
        if prefetch > 1:  # the next one is gathered while this one computes in any case
            group.set_modules_to_forward_prefetch(ordered[index + 1 : index + 1 + prefetch])


def groups_of(
    model: nn.Module,
    mesh: Mesh,
    family: Family,
    precision: MixedPrecisionPolicy,
    *,
    loss_in_model: bool,
) -> Groups:
    """The groups of a model or a stage of a known family.

    Args:
        loss_in_model: What it returns is a sum of losses, which stays in fp32.
    """
    embedding, norm, head = (
        part_of(model, name) for name in (family.embedding, family.norm, family.head)
    )
    # tied ones stay in the root's group: two groups would untie them silently
    tied = is_tied(model, family)
    of_end = None if loss_in_model else precision.output_dtype
    return Groups(
        first=[embedding] if embedding is not None and not tied else [],
        blocks=list(blocks_of(model, family).values()),
        last=[norm, head] if norm is not None and head is not None and not tied else [],
        # what a pipeline stage returns goes into blocks
        output_dtype=precision.param_dtype if head is None else of_end,
        placement=_expert_placement(model, mesh, family),
    )


def _expert_placement(model: nn.Module, mesh: Mesh, family: Family) -> Placement | None:
    """Return the placement of parameters not split along their first dimension over all shards."""
    experts = {
        param for mlp in sparse_blocks(model, family).values() for param in mlp.experts.parameters()
    }
    if not experts:
        return None
    sharding = mesh.sharding(of_experts=True)
    # with ep, fewer ranks hold the same expert than the same block: a mesh of its own, yet in the
    # block's group: FSDP hooks inside a block would run again, and differ, under recompute
    of_mesh = None if mesh.experts is None else torch_private.placement_on_mesh(sharding)

    def placement(param: nn.Parameter) -> Any:
        if param not in experts:
            return None
        where = _even_dimension(param, ranks=sharding.shape[-1])
        return where if of_mesh is None else of_mesh(where)

    return placement


def _even_dimension(param: nn.Parameter, *, ranks: int) -> Shard | None:
    """Choose the dimension that splits experts: the first (None) if it divides, else another.

    Eight experts over 64 ranks would leave 56 of them without any.
    """
    sizes = param.to_local().shape if isinstance(param, DTensor) else param.shape
    if sizes[0] % ranks == 0:
        return None
    taken = [place.dim for place in getattr(param, "placements", ()) if isinstance(place, Shard)]
    free = [dim for dim in (1, 2) if dim not in taken and sizes[dim] % ranks == 0]
    return Shard(free[0]) if free else None
