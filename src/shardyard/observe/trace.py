"""A trace of torch.profiler as spans of time: who ran when, on the training thread and the device.

The format is Chrome's: a list of events, times in microseconds. ``X`` is a span with its thread
(``tid``) and duration; ``cat`` says what it is: ``cpu_op`` an operator, ``user_annotation`` a range
that somebody named, ``cuda_runtime`` and ``cuda_driver`` a call that launches something,
``kernel``, ``gpu_memcpy`` and ``gpu_memset`` what the device did, joined to its launch by
``correlation``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import currentframe
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.compiler import is_compiling
from torch.profiler import record_function

from shardyard.io.files import read_json

STEPS = "shardyard/steps"
"""Around all that is profiled, on the training thread."""
APART = "shardyard/apart"
"""Inside of it: evaluations and saves, which are no part of a step."""
DATA = "shardyard/data"
"""Waits for the samples of a step."""
OPTIMIZER = "shardyard/optimizer"
"""Norm of the gradients, and the update."""
EXCHANGE = "shardyard/exchange "
"""Begin of the name of a collective's range; the axis of the mesh follows."""
LATER = "shardyard/exchange-later "
"""The same of one that is only begun, and waited for later."""


S = TypeVar("S")

OF_DTENSOR = "_c10d_functional"
"""Begin of the namespace of collectives that DTensor calls by itself. FSDP's and ours are others,
so these are of parameters that the tensor axis splits or copies."""

COLLECTIVE_PREFIXES = ("c10d::", "symm_mem::")
"""Begin of the names of all others."""

_RESOLUTION_S = 5e-9
"""Resolution of a trace, whose times are microseconds since some start, as floats.

A span that ends by less than this after the next begins ends before it, and does not hold
it.
"""

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH = ("_runtime", "_driver")
"""Ends of the categories of calls that launch something; a kind of accelerator comes before."""
_HOST = ("cpu_op", "user_annotation")
_GLOO = "gloo:"


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One event; times in seconds, from the begin of ``STEPS``."""

    name: str
    begin_s: float
    end_s: float
    correlation: int = -1
    """Id that joins a launch with the kernel or copy that it launched."""
    group: str = ""
    """Description of the process group that a device's collective is of."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Content of a trace that is used, each list in order of begin."""

    seconds: float
    """From the begin of what is profiled to its end."""
    host: tuple[TraceSpan, ...]
    """Operators and ranges of the training thread; they are nested or disjoint."""
    gloo: tuple[TraceSpan, ...]
    """Collectives between CPU processes, in the threads that carry them out."""
    device: tuple[TraceSpan, ...]
    """Kernels and copies; empty without an accelerator."""
    launches: Mapping[int, tuple[Any, float]]
    """Correlation -> the thread that launched it, and when."""
    ranges: Mapping[Any, tuple[TraceSpan, ...]]
    """Our own ranges of each thread, and DTensor's collectives: backward passes for a device have a
    thread of their own."""


_MOST_BYTES = 4 * 2**30
"""Limit of a trace's size: some hundred bytes for each kernel of the profiled steps."""


class NoStepsError(ValueError):
    """A trace without the range ``STEPS``."""


def read_trace(path: Path) -> Trace:
    """Read what the profiler wrote.

    Raises:
        ValueError: It is no trace of ours.
    """
    return parse_trace(read_json(path, limit_bytes=_MOST_BYTES)["traceEvents"])


def parse_trace(events: Sequence[Mapping[str, Any]]) -> Trace:
    """Spans of the events of a trace."""
    whole = [each for each in events if each.get("ph") == "X" and "ts" in each and "dur" in each]
    steps = next((each for each in whole if each.get("name") == STEPS and _is_host(each)), None)
    if steps is None:
        raise NoStepsError("the trace lacks the range of the profiled steps")
    zero_us, thread = steps["ts"], steps.get("tid")
    whole.sort(key=lambda event: (event["ts"], -event["dur"]))

    def spans(matches: Iterable[Mapping[str, Any]]) -> tuple[TraceSpan, ...]:
        return tuple(_span(event, zero_us) for event in matches)

    hosted = [each for each in whole if _is_host(each)]
    ours = [each for each in hosted if str(each["name"]).startswith(("shardyard/", OF_DTENSOR))]
    mine = (each for each in hosted if each.get("tid") == thread and not _is_gloo(each))
    return Trace(
        seconds=steps["dur"] / 1e6,
        host=spans(mine),
        gloo=spans(each for each in hosted if _is_gloo(each)),
        device=spans(each for each in whole if each.get("cat") in _DEVICE),
        launches=dict(_launches(whole, zero_us)),
        ranges={
            tid: spans(each for each in ours if each.get("tid") == tid)
            for tid in {each.get("tid") for each in ours}
        },
    )


def _launches(
    events: Iterable[Mapping[str, Any]], zero_us: float
) -> Iterator[tuple[int, tuple[Any, float]]]:
    for event in events:
        correlation = (event.get("args") or {}).get("correlation")
        if correlation is not None and str(event.get("cat")).endswith(_LAUNCH):
            yield int(correlation), (event.get("tid"), (event["ts"] - zero_us) / 1e6)


def _span(event: Mapping[str, Any], zero_us: float) -> TraceSpan:
    begin_s = (event["ts"] - zero_us) / 1e6
    args = event.get("args") or {}
    return TraceSpan(
        name=str(event["name"]),
        begin_s=begin_s,
        end_s=begin_s + event["dur"] / 1e6,
        correlation=int(args.get("correlation", -1)),
        group=str(args.get("Process Group Description", "")),
    )


def _is_host(event: Mapping[str, Any]) -> bool:
    return event.get("cat") in _HOST


def _is_gloo(event: Mapping[str, Any]) -> bool:
    return str(event["name"]).startswith(_GLOO)


# --- spans in each other ------------------------------------------------------------------------


class TraceSegment(NamedTuple):
    """Piece of time without a begin or an end of a span."""

    begin_s: float
    end_s: float
    state: Any
    """State computed from the spans that are open."""


def nested(
    spans: Sequence[TraceSpan], end_s: float, outside: S, fold: Callable[[S, TraceSpan], S]
) -> Iterator[TraceSegment]:
    """Cut the time from 0 to ``end_s`` where a span begins or ends.

    Args:
        spans: Of one thread, in order of begin; each ends before the one that it lies in. One that
            does not has its begin in that of an operator which opened it (a range under a mode of
            torch's dispatcher, as selective recompute has): the operator is over then.
        outside: The state where no span is open.
        fold: Makes the state inside of a span from the one around it.
    """
    now_s = 0.0
    open_spans: list[tuple[float, S]] = []  # end and state, the outermost first

    def until(limit_s: float) -> Iterator[TraceSegment]:
        nonlocal now_s
        while open_spans and open_spans[-1][0] <= limit_s + _RESOLUTION_S:
            last_s, state = open_spans.pop()
            if last_s > now_s:
                yield TraceSegment(now_s, last_s, state)
                now_s = last_s
        if limit_s > now_s:
            yield TraceSegment(now_s, limit_s, open_spans[-1][1] if open_spans else outside)
            now_s = limit_s

    for span in spans:
        if span.begin_s >= end_s:
            break
        yield from until(span.begin_s)
        while open_spans and open_spans[-1][0] < min(span.end_s, end_s) - _RESOLUTION_S:
            open_spans.pop()
        around_s, around = open_spans[-1] if open_spans else (end_s, outside)
        open_spans.append((min(span.end_s, around_s), fold(around, span)))
    yield from until(end_s)


def side_by_side(
    labelled: Iterable[tuple[TraceSpan, str]], end_s: float, order: Sequence[str]
) -> Iterator[TraceSegment]:
    """The same of spans that may overlap in any way: of those open, the first in ``order`` counts.

    Returns:
        Pieces whose state is a label; None: no span is open.
    """
    marks: list[tuple[float, int, str]] = []
    for span, label in labelled:
        begin_s, last_s = max(0.0, span.begin_s), min(end_s, span.end_s)
        if last_s > begin_s:
            marks += [(begin_s, 1, label), (last_s, -1, label)]
    marks.sort(key=lambda mark: mark[0])
    count = dict.fromkeys(order, 0)
    now_s = 0.0
    for at_s, change, label in marks:
        if at_s > now_s:
            yield TraceSegment(now_s, at_s, next((name for name in order if count[name]), None))
            now_s = at_s
        count[label] += change
    if end_s > now_s:
        yield TraceSegment(now_s, end_s, None)


def intersect(
    first: Iterable[TraceSegment], second: Iterable[TraceSegment]
) -> Iterator[tuple[float, Any, Any]]:
    """Two ways to cut the same time, together: seconds and both states of each piece."""
    ones, others = iter(first), iter(second)
    one, other = next(ones, None), next(others, None)
    now_s = 0.0
    while one is not None and other is not None:
        end_s = min(one.end_s, other.end_s)
        if end_s > now_s:
            yield end_s - now_s, one.state, other.state
            now_s = end_s
        if one.end_s <= end_s:
            one = next(ones, None)
        if other.end_s <= end_s:
            other = next(others, None)


# Names of collectives in a trace: gloo tells no group, and a mesh axis may have the group of all.
#
# While a profile is taken, the public functions of ``torch.distributed`` are put into ones that
# open a range with the axis of the mesh. FSDP2 and our own code call them by these names.

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
    """Choose, of several axes over the same ranks, the one whose code calls.

    torch gives all of them one group where they cover all ranks.
    """
    caller = None if called is None else called.f_back
    name = "" if caller is None else str(caller.f_globals.get("__name__", ""))
    is_data = name.startswith(_DATA_MODULES)
    return next((axis for axis in axes if (axis in _OF_DATA) is is_data), axes[0])
