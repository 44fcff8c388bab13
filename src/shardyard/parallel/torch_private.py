"""Parts of torch that are not public and that differ between its versions: here, and nowhere else.

What each version has was read in its source: 2.11.0, 2.12.1 and 2.13.0.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map

from shardyard.errors import RequestError

_ShardPlacementResult: Any = getattr(_fsdp_common, "ShardPlacementResult", None)
"""Since 2.12; ``fully_shard``'s documentation names it."""

_KEEPS_BY_NUMBER = torch.__version__ >= "2.13"
"""Whether selective recompute finds a result by the number of its call, or takes the next one."""


def placed_over(mesh: DeviceMesh) -> Callable[[Shard | None], Any]:
    """How ``shard_placement_fn`` says that a parameter is split over another mesh than its group.

    Raises:
        RequestError: This torch has one mesh for all parameters of a group.
    """
    if _ShardPlacementResult is None:
        raise RequestError(
            f"parallel.ep above 1 needs torch 2.12 or newer, and this is {torch.__version__}: "
            "it cannot split experts over other ranks than the rest of their block. "
            "Install a newer torch, or set parallel.ep=1."
        )
    if mesh.ndim == 1:
        info = _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    else:
        info = _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return lambda where: _ShardPlacementResult(where, info)


def sum_gradients(model: nn.Module) -> None:
    """Do what FSDP does after a backward pass; for one in which its hooks are not called.

    Torch has no public function for this; its pipeline stages do the same.
    """
    state = fully_shard.state(model)  # type: ignore[attr-defined]
    for group_state in state._state_ctx.all_states:
        for group in _param_groups(group_state):
            group.post_backward()
    state._root_post_backward_final_callback()


def _param_groups(state: Any) -> list[Any]:
    """Of one FSDP module: since 2.12 it may have several."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def keep_results(
    contexts: tuple[Any, Any], pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> None:
    """Let selective recompute keep what ``pack`` makes of its results, not the results.

    Args:
        contexts: Of torch's ``create_selective_checkpoint_contexts``.
        pack: Is given a result in the forward pass.
        unpack: Gives the result again, in the backward pass.
    """
    kind = _KeptByNumber if _KEEPS_BY_NUMBER else _KeptInOrder
    kept: defaultdict[Any, Any] = defaultdict(lambda: kind(_Packing(pack, unpack)))
    for context in contexts:
        context.storage = kept


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


class _KeptByNumber(dict[int, Any]):
    """Results of one operator, as torch 2.13 keeps them."""

    def __init__(self, packing: _Packing) -> None:
        super().__init__()
        self._packing = packing

    def __setitem__(self, number: int, results: Any) -> None:
        super().__setitem__(number, self._packing.all_of(results))


class _KeptInOrder(list[Any]):
    """Results of one operator, as torch 2.11 and 2.12 keep them."""

    def __init__(self, packing: _Packing) -> None:
        super().__init__()
        self._packing = packing

    def append(self, results: Any) -> None:
        super().append(self._packing.all_of(results))
