"""Names of collectives in a trace: gloo tells no group, and a mesh axis may have the group of all.

While a profile is taken, the public functions of ``torch.distributed`` are put into ones that open
a range with the axis of the mesh. FSDP2 and our own code call them by these names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import currentframe
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.compiler import is_compiling
from torch.profiler import record_function

from shardyard.observe.profiler_ranges import EXCHANGE, LATER

COLLECTIVE_FUNCTIONS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
"""Public functions of torch.distributed in which a rank waits for others; no version has all."""


@contextmanager
def exchanges_named(axes: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Have each collective that is called meanwhile named in the trace.

    Args:
        axes: Name of a process group -> axes of the mesh that have these ranks.
    """
    before = {name: getattr(dist, name) for name in COLLECTIVE_FUNCTIONS if hasattr(dist, name)}
    for name, function in before.items():
        setattr(dist, name, _named(function, axes))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _named(function: Callable[..., Any], axes: Mapping[str, Sequence[str]]) -> Callable[..., Any]:
    @wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return function(*args, **kwargs)
        given = (kwargs.get("group"), *args)
        group = next((each for each in given if isinstance(each, dist.ProcessGroup)), None)
        fits = ("world",) if group is None else axes.get(group.group_name, ("other",))
        axis = fits[0] if len(fits) == 1 else _by_caller(fits, currentframe())
        with record_function(f"{LATER if kwargs.get('async_op') else EXCHANGE}{axis}"):
            return function(*args, **kwargs)

    return named


_OF_DATA = ("fsdp", "dp_replicate", "expert_shard")
_DATA_MODULES = ("torch.distributed.fsdp", "shardyard.parallel.ddp")


def _by_caller(axes: Sequence[str], called: FrameType | None) -> str:
    """Of several axes over the same ranks, the one whose code calls: torch gives all of them one
    group where they are all ranks."""
    caller = None if called is None else called.f_back
    name = "" if caller is None else str(caller.f_globals.get("__name__", ""))
    is_data = name.startswith(_DATA_MODULES)
    return next((axis for axis in axes if (axis in _OF_DATA) is is_data), axes[0])
