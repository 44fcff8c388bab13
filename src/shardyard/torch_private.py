"""Our only use of torch's private interfaces, which torch does not promise.

A name that begins with an underscore may be gone in the next version, and with it all that
depends on it. So each is named once, with its purpose and its first version; the rest of
the package sees plain functions. `tests/test_torch_private.py` reads the source for any
other use.

It is below `models`, which need some of it, and does not depend on the rest of the package.

Versions: 2.11.0 to 2.15.0 were tried (docs/compatibility.md), and "in all" means in each of
them.
"""

import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shardyard.errors import RequestError

if TYPE_CHECKING:  # they take a second to import, which the agent of a node has no use for
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement, Shard

__all__ = ["TorchDispatchMode", "tree_leaves", "tree_map"]
"""Taken from here as they are: who sees every operator (a base class that torch's own tutorials
subclass), and the tensors in a nest of lists and mappings, or what is made of each. In all
versions."""


_MEETINGS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"


def torch_version() -> tuple[int, ...]:
    """(2, 13) of torch 2.13.0+cpu."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


# -- operators ----------------------------------------------------------------------------------


def ops_saved_by_selective_recompute() -> set[Any]:
    """Costly operators under public functions (attention, scaled products); torch's own examples of
    selective recompute name them. In all versions."""
    # registers its operator, and imports the compiler: 1.4 s that an agent has no use for
    import_module("torch.nn.attention.varlen")
    return {
        torch.ops.aten._scaled_mm.default,  # of fp8, where a compiler looks inside of them
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._efficient_attention_forward.default,
        torch.ops.torch_attn._varlen_attn.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }


KERNELS_OF_ATTENTION = {
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_fused_attention_overrideable": "the vendor's",
    "_varlen_attn": "flash by length",
}
"""Operator -> kernel by which torch's public attention attends; without one, it multiplies out. In
all versions."""
FLASH_ATTENTIONS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu", "torch_attn::_varlen_attn"
}  # fmt: skip
"""Operators of a dry run, on a CPU or with given lengths."""
REDUCE_SCATTER = "c10d::_reduce_scatter_base_"
READ_A_NUMBER = torch.ops.aten._local_scalar_dense.default
"""Operator of ``tensor.item()``."""


def dtensor_like(
    param: Any, local: Tensor, placements: Sequence["Placement"], shape: torch.Size
) -> Tensor:
    """A DTensor on the mesh of another, of a local tensor that lies in host memory.

    The public ``from_local`` would copy it to a device of the mesh. FSDP2, which offloads, makes
    its own so. In all versions.
    """
    spec = param._spec
    stride = torch.empty(shape, device="meta").stride()
    meta = spec.tensor_meta._replace(dtype=local.dtype, shape=shape, stride=stride)
    make: Any = import_module("torch.distributed.tensor").DTensor
    placed_as = replace(spec, placements=tuple(placements), tensor_meta=meta)
    placed: Tensor = make(local, placed_as, requires_grad=False)
    return placed


def operator_name(operator: Any) -> str:
    """``aten::mm`` of an operator that a TorchDispatchMode is shown. In all versions."""
    return str(operator._schema.name)


foreach_add_: Any = torch._foreach_add_
foreach_addcmul_: Any = torch._foreach_addcmul_
foreach_copy_: Any = torch._foreach_copy_
foreach_div_: Any = torch._foreach_div_
foreach_mul_: Any = torch._foreach_mul_
foreach_norm: Any = torch._foreach_norm
foreach_sqrt: Any = torch._foreach_sqrt
foreach_sub_: Any = torch._foreach_sub_
"""One operator for a list of tensors, as torch's own optimizers compute. In all versions."""


# -- tensors and modules ------------------------------------------------------------------------


def storage_key(of: Tensor | torch.UntypedStorage) -> int:
    """Equal for two tensors that share a storage, as long as it lives; also for fake ones, which
    have no address. torch has no public identity of a storage. In all versions."""
    storage = of.untyped_storage() if isinstance(of, Tensor) else of
    return int(storage._cdata)


def group_timeout(group: Any) -> float:
    """Seconds after which a collective of a process group fails (torch 2.11 to 2.13)."""
    backend = group._get_backend(group._device_types[0])
    timeout: timedelta = backend.options._timeout
    return timeout.total_seconds()


def change_count(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor, or of a view; 0 by fused optimizers.

    Autograd compares ``_version`` before a backward pass (torch 2.11 to 2.13).
    """
    count: int = tensor._version
    return count


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread. torch's own checkpointing asks the
    same way. In all versions."""
    return bool(torch._C._current_graph_task_id() != -1)


def parameter_named(module: nn.Module, name: str) -> nn.Parameter:
    """A module's own parameter, also where its class has a property of that name.

    ``_parameters`` is where every ``nn.Module`` keeps them (torch 2.11 to 2.13).
    """
    found = module._parameters[name]
    assert found is not None, name
    return found


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of a module's own buffers that it leaves out of its state dict. In all versions."""
    return set(module._non_persistent_buffers_set)


def strided_in(placement: Any, dim: int) -> "Placement":
    """The same strided placement of another dimension. In all versions."""
    moved: Any = type(placement)(dim, split_factor=placement.split_factor)
    return moved  # type: ignore[no-any-return]


def is_strided(placement: "Placement") -> bool:
    """Whether FSDP splits a dimension of which later axes hold parts (tp, ep). In all versions."""
    placement_types: Any = import_module("torch.distributed.tensor.placement_types")
    return isinstance(placement, placement_types._StridedShard)


def group_named(name: str) -> torch.distributed.ProcessGroup:
    """The process group of a name: an operator takes no group as argument. In all versions."""
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    group: torch.distributed.ProcessGroup = resolve(name)
    return group


def fake_tensors() -> Any:
    """A mode in which tensors have sizes and no content. In all versions."""
    mode: Any = import_module("torch._subclasses.fake_tensor").FakeTensorMode
    return mode(allow_non_fake_inputs=True)


def fake_store() -> Any:
    """The store of the process group ``fake``, whose other ranks do not exist. In all versions."""
    return import_module("torch.testing._internal.distributed.fake_pg").FakeStore()


# -- the elastic agent --------------------------------------------------------------------------


def worker_processes(agent: Any) -> list[Any]:
    """Return the processes of a LocalElasticAgent, by local rank.

    torch only offers pids, no exit codes. In all versions.
    """
    processes = getattr(agent._pcontext, "_pc", None)
    return list(processes.processes) if processes else []


def have_workers_ended(agent: Any) -> bool:
    """Whether a LocalElasticAgent's workers have ended by themselves, or there are none."""
    return agent._pcontext is None or bool(agent._pcontext.wait(0))


def end_workers(agent: Any, number: signal.Signals, timeout_s: int) -> None:
    """Signal the workers, and wait for so long; then they are killed."""
    if agent._pcontext is not None:
        agent._pcontext.close(number, timeout_s)


def kill_without_grace(agent: Any) -> None:
    """Let an agent that stops by an error kill its workers at once. Since 2.12, which has
    the public setting ``shutdown_timeout`` for it; 2.11 reads neither."""
    agent._shutdown_timeout = 0


def disable_restarts(agent: Any) -> None:
    """Let the loss that is just being reported be the last. In all versions."""
    agent._remaining_restarts = 0


@contextmanager
def replaced_start_processes(start: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile a LocalElasticAgent has its processes started by this function, which is called as
    the public ``start_processes``, all by name: it looks that up in its module. In all versions."""
    module: Any = import_module("torch.distributed.elastic.agent.server.local_elastic_agent")
    usual, module.start_processes = module.start_processes, start
    try:
        yield
    finally:
        module.start_processes = usual


def rendezvous_round(handler: Any) -> int:
    """The number of the newest meeting that a DynamicRendezvousHandler knows of."""
    return int(handler._state_holder.state.round)


LONG_AGO = datetime.min.replace(tzinfo=UTC)
"""The last sign of life of a node that all are to forget; every clock reads it alike."""


def forget_nodes(
    handler: Any, ranks: Collection[int], *, round_number: int, max_attempts: int
) -> None:
    """Have nodes of a meeting that is over count as gone at once, in the state that all share;
    safe to repeat, by any node. In all versions."""
    with handler._heartbeat_lock:
        for _ in range(max_attempts):
            handler._state_holder.sync()
            state = handler._state_holder.state
            gone = [node for node, rank in state.participants.items() if rank in ranks]
            if not (state.complete and state.round == round_number and gone):
                return  # another node has said so, or the next round has begun
            for node in gone:
                state.last_heartbeats[node] = LONG_AGO
            handler._state_holder.mark_dirty()
            if handler._state_holder.sync():
                return


def stop_heartbeats(handler: Any) -> None:
    """Have it tell no more that its node lives; ``shutdown`` closes it for all. In all versions."""
    handler._stop_heartbeats()


def other_participants(handler: Any) -> int:
    """Return the number of other live nodes in the shared state. In all versions."""
    with handler._heartbeat_lock:
        handler._state_holder.sync()
        state = handler._state_holder.state
        there = {*state.participants, *state.wait_list, *state.redundancy_list}
    return len(there - {handler._this_node})


def set_object_pickler(pickler: Any, unpickler: Any) -> None:
    """Set the pickler and unpickler of object collectives, torch's own too. In all versions."""
    module: Any = distributed_c10d
    module._pickler, module._unpickler = pickler, unpickler


def import_compiler() -> None:
    """Import what torch.compile imports at its first use; starts no process. In all versions."""
    import_module("torch._dynamo")
    import_module("torch._inductor.compile_fx")


def allow_graphs(most: int) -> None:
    """Graphs of one function in this process; torch.compile stops after 8. In all versions."""
    config: Any = import_module("torch._dynamo.config")
    config.recompile_limit = max(most, config.recompile_limit)


def compile_seconds() -> float:
    """Return seconds of torch.compile in this process so far, both passes. In all versions."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0.0 if utils is None else float(utils.calculate_time_spent()["total_wall_time"])


def node_name(handler: Any) -> str:
    """Return a DynamicRendezvousHandler's node name in the shared state. In all versions."""
    return repr(handler._this_node)


def node_ranks(handler: Any) -> dict[str, int]:
    """Return node ranks in a DynamicRendezvousHandler's newest rendezvous. In all versions."""
    return {repr(node): rank for node, rank in handler._state_holder.state.participants.items()}


def set_store_factory(handler: Any, make_store: Callable[[], Any]) -> None:
    """Have it ask for the store of a meeting once that is complete. In all versions."""
    handler._get_store = make_store


def set_rendezvous_poll_interval(handler: Any, poll_s: float) -> None:
    """Set how often a handler probes for new nodes; default: each second. In all versions."""
    meetings: Any = import_module(_MEETINGS)
    delay = import_module("torch.distributed.elastic.rendezvous.utils")._delay
    meetings._delay = lambda seconds: delay(poll_s if seconds == 1 else seconds)
    handler._state_holder._cache_duration = poll_s  # it would not ask before


def empty_rendezvous_state() -> Any:
    """Return a DynamicRendezvousHandler's shared state without nodes. In all versions."""
    return import_module(_MEETINGS)._RendezvousState()


def rendezvous_node(address: str, pid: int, number: int) -> Any:
    """A node in what they share. In all versions."""
    return import_module(_MEETINGS)._NodeDesc(address, pid, number)


# -- fully_shard --------------------------------------------------------------------------------


def mesh_ranks(mesh: "DeviceMesh") -> Any:
    """Return the ranks of a mesh in the world, in nested lists; also among tensors without data."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return mesh.mesh.tolist()


def placement_on_mesh(mesh: "DeviceMesh") -> "Callable[[Shard | None], Any]":
    """Return how ``shard_placement_fn`` splits a parameter over another mesh than its group.

    Raises:
        RequestError: This torch has one mesh for all parameters of a group.
    """
    common: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
    # since 2.12; fully_shard's documentation names it
    result: Any = getattr(common, "ShardPlacementResult", None)
    if result is None:
        raise RequestError(
            f"parallel.ep above 1 needs torch 2.12 or newer, and this is {torch.__version__}: "
            "it cannot split experts over other ranks than the rest of their block. "
            "Install a newer torch, or set parallel.ep=1."
        )
    if mesh.ndim == 1:
        info = common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    else:
        info = common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return lambda where: result(where, info)


def reducer_calls(reducer: Any) -> Any:
    """Before and after a forward pass of DistributedDataParallel, and buffers. Tried in 2.13."""
    return reducer._pre_forward, reducer._post_forward, reducer._sync_buffers


def has_hooks(param: Tensor) -> bool:
    """Whether anything is called with a parameter's gradients. Tried in 2.13."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)


def sum_gradients(model: nn.Module) -> None:
    """Sum gradients as FSDP does after a backward pass, for one in which its hooks are not called.

    torch's pipeline stages do the same. Public since 2.15, as ``finalize_backward`` of a model
    that was set so before its forward pass. In all versions.
    """
    from torch.distributed.fsdp import fully_shard

    state = fully_shard.state(model)  # type: ignore[attr-defined]
    context = state._state_ctx
    if getattr(context, "manual_backward_finalization_active", False) is None:
        # since 2.15 the first hook of a backward pass writes down who ends it, and none was called
        context.manual_backward_finalization_active = context.manual_backward_finalization
    for group_state in context.all_states:
        for group in _param_groups(group_state):
            group.post_backward()
    state._root_post_backward_final_callback()


class GroupSums:
    """FSDP's sums of gradients: each group once a backward pass, whole, in one order.

    FSDP sums what got a gradient on this rank, group by group as autograd comes to them, which
    may be something else on another rank. Here a missing gradient is zero, and a group waits
    for its turn. ``reduce_scatter_unused_params`` (since 2.13) only makes the zeros. In all
    versions.
    """

    def __init__(self, model: nn.Module, first: Collection[nn.Module]) -> None:
        """Take a model that went through ``fully_shard``.

        Args:
            first: Modules whose groups are summed first, in this order, until ``reorder``.
        """
        from torch.distributed.fsdp import FSDPModule, fully_shard

        named = {id(param): name for name, param in model.named_parameters()}
        sharded = [each for each in model.modules() if isinstance(each, FSDPModule)]
        modules = [*first, *(each for each in sharded if each not in set(first))]
        states = [fully_shard.state(module) for module in modules]  # type: ignore[attr-defined]
        found = {id(group): group for state in states for group in _param_groups(state)}
        self._groups = list(found.values())
        self._names = [[named[id(p.sharded_param)] for p in g.fsdp_params] for g in self._groups]
        self._sum = [group.post_backward for group in self._groups]
        self._order = list(range(len(self._groups)))
        self._last_order = self._order
        self._calls = self._ends = [0] * len(self._groups)
        self.used: set[str] = set()
        """Parameters that got a gradient on this rank; the reader empties it."""
        self.started: dict[str, Any] = {}
        """Parameters that had no gradient before that."""
        self.finished: Callable[[], None] | None = None
        """Called after each backward pass whose gradients were summed."""
        self._reset()
        for place, group in enumerate(self._groups):
            group.post_backward = partial(self._fired, place)
            group._register_post_backward_hook = partial(
                self._registered, place, group._register_post_backward_hook
            )
        for state in {id(state): state for state in states}.values():
            state._root_post_backward_final_callback = partial(
                self._ended, state._root_post_backward_final_callback
            )

    @property
    def order(self) -> Sequence[int]:
        """Groups as autograd came to the end of each in the last backward pass."""
        return self._last_order

    def reorder(self, order: Sequence[int]) -> None:
        """Sum in this order from the next backward pass on, which must be the same on all ranks."""
        self._order = list(order)

    def _reset(self) -> None:
        """Be ready for the next backward pass; forward passes may have been before this one."""
        self._calls = [max(0, n - e) for n, e in zip(self._calls, self._ends, strict=True)]
        self._ends = [0] * len(self._groups)
        self._ready: list[int] = []
        self._late: list[int] = []
        self._done = 0

    def _registered(self, group_index: int, register: Any, args: Any, kwargs: Any) -> Any:
        """A forward pass of a group: autograd will come to its end if an input needs a gradient."""
        found = register(args, kwargs)
        self._calls[group_index] += found[0] is not args or found[1] is not kwargs
        return found

    def _fired(self, group_index: int, *_unused: Any) -> None:
        """Autograd came to the end of one forward pass of a group."""
        group = self._groups[group_index]
        self._ends[group_index] += 1
        if not group.reduce_grads:  # another micro-batch comes
            self._sum[group_index]()
            return
        if (
            group_index in self._order[: self._done]
        ):  # a second backward pass through one forward pass
            self._late.append(group_index)
        elif self._ends[group_index] >= self._calls[group_index]:
            self._ready.append(group_index)
        if (
            self._order[self._done : self._done + 1] != [group_index]
            or group_index not in self._ready
        ):
            group.reduce_grads = False  # adds up, and lets go of the gathered parameters
            self._sum[group_index]()
            group.reduce_grads = True
        while self._done < len(self._order) and self._order[self._done] in self._ready:
            self._sum_next()

    def _ended(self, end: Callable[[], None]) -> None:
        """Autograd is done; what it did not come to is summed now."""
        is_summed = all(group.reduce_grads for group in self._groups)
        while is_summed and self._done < len(self._order):
            self._sum_next()
        for place in dict.fromkeys(self._late):
            self._fill(place)
            self._sum[place]()
        end()
        if is_summed:
            rest = [place for place in self._order if place not in self._ready]
            self._last_order = [*dict.fromkeys(self._ready), *rest]
        self._reset()
        if is_summed and self.finished is not None:
            self.finished()

    def _sum_next(self) -> None:
        place = self._order[self._done]
        self._done += 1
        self._fill(place)
        self._sum[place]()

    @torch.no_grad()
    def _fill(self, group_index: int) -> None:
        """Let each trained parameter of a group have a gradient, all in one format."""
        pairs = zip(self._groups[group_index].fsdp_params, self._names[group_index], strict=True)
        found = [(each, name) for each, name in pairs if hasattr(each, "_unsharded_param")]
        found = [(each, name) for each, name in found if each.unsharded_param.requires_grad]
        sums = [each.unsharded_accumulated_grad for each, _ in found]
        wide = next((total.dtype for total in sums if total is not None), None)
        for each, name in found:
            param = each.unsharded_param
            if each.sharded_param.grad is None:
                self.started[name] = each.sharded_param
            if each.unsharded_accumulated_grad is not None or param.grad is not None:
                self.used.add(name)
            else:
                param.grad = torch.zeros_like(param)
            if wide is not None and each.unsharded_accumulated_grad is None:
                each.unsharded_accumulated_grad, param.grad = param.grad.to(wide), None


def has_one_group(module: nn.Module) -> bool:
    """Whether what ``fully_shard`` gathers for a module is at most one collective. In 2.13."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not isinstance(module, FSDPModule):
        return True
    return len(_param_groups(fully_shard.state(module))) < 2  # type: ignore[attr-defined]


def _param_groups(state: Any) -> list[Any]:
    """Return the groups of one FSDP module: since 2.12 it may have several."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


# -- selective recompute ------------------------------------------------------------------------

HOOKS_BYPASS_SAVED_RESULTS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": False} if torch_version() >= (2, 14) else {}
)
"""Arguments of torch's ``checkpoint`` for results that selective recompute keeps.

Hooks of saved tensors (offload) do not see them; ``keep_results`` packs them. Before 2.14
no hook does. Since then torch warns, without this argument, of a later version that asks
them.
"""

_KEEPS_BY_NUMBER = torch_version() >= (2, 13)
"""Whether selective recompute finds a result by the number of its call, or takes the next one."""


def keep_results(
    contexts: tuple[Any, Any], pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> None:
    """Let selective recompute keep what ``pack`` makes of its results, not the results.

    Args:
        contexts: Of torch's ``create_selective_checkpoint_contexts``.
        pack: Is given a result in the forward pass.
        unpack: Gives the result again, in the backward pass.
    """
    kind = _ResultsByIndex if _KEEPS_BY_NUMBER else _ResultsInOrder
    storage: defaultdict[Any, Any] = defaultdict(lambda: kind(_Packing(pack, unpack)))
    for context in contexts:
        context.storage = storage


class _Packing:
    """Packs results in torch's wrapping, and leaves its marks as they are."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self._pack, self._unpack = pack, unpack

    def all_of(self, results: Any) -> Any:
        return tree_map(self._packed, results)

    def _packed(self, result: Any) -> Any:
        value = getattr(result, "val", None)
        if not isinstance(value, Tensor):
            return result
        return _PackedResult(self._pack(value), self._unpack)


class _PackedResult:
    """A result in torch's wrapping, elsewhere."""

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self._packed, self._unpack = packed, unpack

    def get_val(self, _may_have_changed: bool) -> Tensor:
        """The result, as torch asks for it."""
        return self._unpack(self._packed)


class _ResultsByIndex(dict[int, Any]):
    """Results of one operator, as torch 2.13 keeps them."""

    def __init__(self, packing: _Packing) -> None:
        super().__init__()
        self._packing = packing

    def __setitem__(self, number: int, results: Any) -> None:
        super().__setitem__(number, self._packing.all_of(results))


class _ResultsInOrder(list[Any]):
    """Results of one operator, as torch 2.11 and 2.12 keep them."""

    def __init__(self, packing: _Packing) -> None:
        super().__init__()
        self._packing = packing

    def append(self, results: Any) -> None:
        super().append(self._packing.all_of(results))
