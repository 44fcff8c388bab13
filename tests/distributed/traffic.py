"""Counts what this rank sends: every collective of torch.distributed, by group, as it is called."""

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "send": "send",
}
"""Operator of the namespace c10d -> name here."""

_SILENT = {"recv_", "barrier"}
"""Operators that send no data."""


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, adds up bytes sent to other ranks as if every collective were a ring.

    Of n ranks each sends (n - 1) / n of a whole tensor to gather it, to reduce and scatter it or to
    exchange it, and twice that to sum it everywhere.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[tuple[str, str]] = Counter()
        """(name of the group, kind) -> bytes."""
        self.calls: Counter[tuple[str, str]] = Counter()
        """(name of the group, kind) -> how often."""

    def over(self, group: dist.ProcessGroup) -> dict[str, tuple[int, int]]:
        """Kind -> calls and bytes over one group.

        Mesh axes that have the same ranks share a group.
        """
        return {
            kind: (calls, self.bytes[name, kind])
            for (name, kind), calls in self.calls.items()
            if name == group.group_name
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            names = [argument.name for argument in func._schema.arguments[: len(args)]]
            operator = func._schema.name.removeprefix("c10d::")
            self._count(operator, {**dict(zip(names, args, strict=True)), **kwargs})
        return func(*args, **kwargs)

    def _count(self, operator: str, given: dict[str, Any]) -> None:
        if operator in _SILENT:
            return
        if operator not in _KINDS:
            raise NotImplementedError(f"it is not known what c10d::{operator} sends")
        group = dist.ProcessGroup.unbox(given["process_group"])
        kind = _KINDS[operator]
        key = (group.group_name, kind)
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
