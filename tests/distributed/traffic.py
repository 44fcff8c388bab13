"""Counts what this rank sends: every collective of torch.distributed, by group, as it is called."""

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardyard.parallel.tensor import SAVED_OPERATORS as SUMMED_PRODUCTS

_KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "send": "send",
}
"""Operator of the namespace c10d -> name here."""

_FUNCTIONAL_KINDS = {"all_reduce": "all_reduce"}
"""Operator of the namespace _c10d_functional, which DTensor calls -> name here."""

_group_of: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]

_SILENT = {"recv_", "barrier", "wait_tensor", "_wrap_tensor_autograd"}
"""Operators that send no data."""


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, adds up bytes sent to other ranks as if every collective were a ring.

    Of n ranks each sends (n - 1) / n of a whole tensor to gather it, to reduce and scatter it or to
    exchange it, and twice that to sum it everywhere.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[tuple[tuple[int, ...], str]] = Counter()
        """(ranks of the group, kind) -> bytes."""
        self.calls: Counter[tuple[tuple[int, ...], str]] = Counter()
        """(ranks of the group, kind) -> how often."""

    def over(self, group: dist.ProcessGroup) -> dict[str, tuple[int, int]]:
        """Kind -> calls and bytes over one group, and over others that have the same ranks."""
        same = tuple(dist.get_process_group_ranks(group))
        return {
            kind: (calls, self.bytes[ranks, kind])
            for (ranks, kind), calls in self.calls.items()
            if ranks == same
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            names = [argument.name for argument in func._schema.arguments[: len(args)]]
            namespace, operator = func._schema.name.split("::")
            self._count(namespace, operator, {**dict(zip(names, args, strict=True)), **kwargs})
        result = func(*args, **kwargs)
        if func in SUMMED_PRODUCTS:
            self._add("reduce_scatter", {"output_tensor": result}, _group_of(args[2]))
        return result

    def _count(self, namespace: str, operator: str, given: dict[str, Any]) -> None:
        if operator in _SILENT:
            return
        kinds = _KINDS if namespace == "c10d" else _FUNCTIONAL_KINDS
        if operator not in kinds:
            raise NotImplementedError(f"it is not known what {namespace}::{operator} sends")
        if namespace == "c10d":
            group = dist.ProcessGroup.unbox(given["process_group"])
        else:
            group = _group_of(given["group_name"])
            given = {"tensors": given["input"]}
        self._add(kinds[operator], given, group)

    def _add(self, kind: str, given: dict[str, Any], group: dist.ProcessGroup) -> None:
        key = (tuple(dist.get_process_group_ranks(group)), kind)
        self.calls[key] += 1
        self.bytes[key] += _sent(kind, given, group)


def _sent(kind: str, given: dict[str, Any], group: dist.ProcessGroup) -> int:
    size = group.size()
    if kind == "send":
        return _nbytes(given["tensors"])
    if kind == "all_reduce":
        return 2 * (size - 1) * _nbytes(given["tensors"]) // size
    if kind == "all_gather":
        return (size - 1) * _nbytes(given["input_tensor"])
    if kind == "reduce_scatter":
        return (size - 1) * _nbytes(given["output_tensor"])
    whole, rows = _nbytes(given["input"]), given["input_split_sizes"]
    if not rows:  # equal parts
        return (size - 1) * whole // size
    return int(whole - whole * rows[group.rank()] // max(1, sum(rows)))


def _nbytes(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))
