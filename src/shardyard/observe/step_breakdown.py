"""Time of a step on one rank, read from its trace and split by the terms of the plan.

On an accelerator, the device's time is split. It counts computation first, then the
collective that runs, then the reason why an idle device waits. On a CPU process, the
training thread's time is split: the running operator, or else the collective that it waits
in. Each moment is counted once, and a collective only as far as no computation overlaps it.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardyard.io.files import read_json
from shardyard.observe.trace import (
    APART,
    COLLECTIVE_PREFIXES,
    DATA,
    EXCHANGE,
    LATER,
    OF_DTENSOR,
    OPTIMIZER,
    Trace,
    TraceSegment,
    TraceSpan,
    intersect,
    nested,
    side_by_side,
)
from shardyard.parallel.device import COLLECTIVE_KERNELS
from shardyard.rundir.profiles import ProfileTerm

PRODUCTS, ATTENTION, ELEMENTWISE = "matrix products", "attention", "memory-bound"
PIPELINE, UPDATE, OFFLOAD = "pipeline", "optimizer", "offload"
WAIT, LAUNCH, INPUT, OTHERS = "stragglers", "launch", "data", "other collectives"

AXES = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "fsdp": "data parallel",
    "dp_replicate": "data parallel",
    "expert_shard": "data parallel",
    "pp": PIPELINE,
    "world": WAIT,
}
"""Axis of the mesh -> the term of its exchanges; world: all ranks, which agree on a few numbers."""


@dataclass(frozen=True, kw_only=True)
class TermRow:
    """One row of a profile's table."""

    name: str
    planned: tuple[str, ...]
    """Names of the plan's terms that it covers."""
    reason: str


COMPUTE = TermRow(
    name="compute",
    planned=(PRODUCTS, ATTENTION, ELEMENTWISE, "vocabulary", "recompute"),
    reason="operators, forward and backward",
)
PARTS = (
    TermRow(name=PRODUCTS, planned=(PRODUCTS,), reason="products and convolutions of all modules"),
    TermRow(
        name=ATTENTION, planned=(ATTENTION,), reason="scores and their product with the values"
    ),
    TermRow(name=ELEMENTWISE, planned=(ELEMENTWISE,), reason="all other operators"),
)
"""Parts of compute. Each includes what the plan calls vocabulary and recompute."""
ROWS = (
    TermRow(
        name="tensor parallel", planned=("tensor parallel",), reason="exposed collectives of tp"
    ),
    TermRow(
        name="context parallel", planned=("context parallel",), reason="exposed exchange over cp"
    ),
    TermRow(
        name="expert parallel", planned=("expert parallel",), reason="exposed exchange over ep"
    ),
    TermRow(
        name="data parallel",
        planned=("data parallel",),
        reason="exposed gathers of parameters and sums of gradients",
    ),
    TermRow(
        name=PIPELINE,
        planned=("pipeline bubble", "pipeline sends"),
        reason="bubble and sends: waits for other stages",
    ),
    TermRow(
        name=UPDATE, planned=(UPDATE,), reason="norm of the gradients, update of this rank's part"
    ),
    TermRow(name=OFFLOAD, planned=(OFFLOAD,), reason="exposed transfers to and from host memory"),
    TermRow(
        name=WAIT,
        planned=(WAIT,),
        reason="waits in sums over all ranks of a few numbers: for the slowest of them",
    ),
    TermRow(name=INPUT, planned=(INPUT,), reason="waits for samples"),
    TermRow(
        name=LAUNCH,
        planned=(LAUNCH,),
        reason="no operator and no collective runs: Python and torch between them",
    ),
    TermRow(name=OTHERS, planned=(), reason="exposed collectives of no axis of the mesh"),
)
TERMS = (*(row.name for row in PARTS), *(row.name for row in ROWS))
"""Terms of a rank's time."""


def terms_of(trace: Trace, *, steps: int) -> dict[str, float]:
    """Seconds of one step by ``TERMS``, mean over the profiled steps; they add up to its time."""
    find = _device_term if trace.device else _host_term
    second = _on_device(trace) if trace.device else _between_processes(trace)
    found = dict.fromkeys(TERMS, 0.0)
    host = nested(trace.host, trace.seconds, _OUTSIDE, _inside)
    for seconds, doing, other in intersect(host, second):
        if doing.term != APART:
            found[find(doing, other)] += seconds / steps
    return found


def table(
    by_rank: Mapping[int, Mapping[str, float]], predicted: Mapping[str, float]
) -> tuple[ProfileTerm, ...]:
    """Rows of all that was measured or predicted.

    Args:
        by_rank: Of ``terms_of``; at least one rank.
        predicted: Seconds by the names of the plan's terms; empty without a plan.
    """
    sums = {
        rank: {**terms, COMPUTE.name: sum(terms[part.name] for part in PARTS)}
        for rank, terms in by_rank.items()
    }
    rows = [_row(row, sums, predicted, is_part=row in PARTS) for row in (COMPUTE, *PARTS, *ROWS)]
    return tuple(row for row in rows if row.highest_s > 0 or row.predicted_s)


def _row(
    row: TermRow,
    by_rank: Mapping[int, Mapping[str, float]],
    predicted: Mapping[str, float],
    *,
    is_part: bool,
) -> ProfileTerm:
    each = {rank: terms[row.name] for rank, terms in by_rank.items()}
    lowest, highest = min(each, key=each.__getitem__), max(each, key=each.__getitem__)
    known = [predicted[name] for name in row.planned if name in predicted]
    # of a plan, a term that is not there is none; without a plan nothing is known
    expected = sum(known) if known or (predicted and row.planned) else None
    return ProfileTerm(
        name=row.name,
        reason=row.reason,
        predicted_s=expected,
        measured_s=sum(each.values()) / len(each),
        lowest_s=each[lowest],
        lowest_rank=lowest,
        highest_s=each[highest],
        highest_rank=highest,
        is_part=is_part,
    )


def read_step_terms(plan: Path, phase: int = 0) -> dict[str, float]:
    """Predicted seconds of a step by the names of their terms; empty where there is no plan."""
    try:
        content = read_json(plan)
        phases = content.get("phases") or ()
        content = phases[phase] if phases else content
        return {str(term["name"]): float(term["seconds"]) for term in content["time"]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


# --- the training thread ------------------------------------------------------------------------


class _Activity(NamedTuple):
    """Activity of the training thread."""

    term: str
    weight: int
    """Inside of a span only what weighs more counts: a copy in a product is part of the product."""


_OUTSIDE = _Activity(LAUNCH, 0)
_PLAIN, _HEAVY, _PHASE, _WHOLE = 1, 2, 3, 4

_HEAVY_NAMES = frozenset(
    {
        "mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "matmul", "linear", "einsum",
        "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "mkldnn_linear",
    }
)  # fmt: skip
_ATTENTION_PARTS = (
    "scaled_dot_product", "flash_attention", "efficient_attention", "flex_attention", "varlen_attn",
)  # fmt: skip
_NOT_COMPUTE = ("autograd", "torch")
"""Namespaces of spans around operators."""
_BETWEEN_STAGES = ("send", "recv_")
_COMPILED = "## Call CompiledFxGraph"


def _inside(around: _Activity, span: TraceSpan) -> _Activity:
    found = _own(span.name)
    return found if found is not None and found.weight > around.weight else around


def _own(name: str) -> _Activity | None:
    """Return the activity of a span by itself. None if it only holds others."""
    if name == APART:
        return _Activity(APART, _WHOLE)
    if name == DATA:
        return _Activity(INPUT, _WHOLE)
    if name == OPTIMIZER:
        return _Activity(UPDATE, _PHASE)
    for begin in (EXCHANGE, LATER):
        if name.startswith(begin):
            return _Activity(AXES.get(name.removeprefix(begin), OTHERS), _WHOLE)
    if name.startswith(_COMPILED):
        return _Activity(ELEMENTWISE, _PLAIN)
    namespace, found, operator = name.partition("::")
    if not found or namespace in _NOT_COMPUTE:
        return None
    if namespace.startswith(OF_DTENSOR):
        return _Activity("tensor parallel", _WHOLE)
    if name.startswith(COLLECTIVE_PREFIXES):
        return _Activity(PIPELINE if operator in _BETWEEN_STAGES else OTHERS, _WHOLE)
    if any(part in operator for part in _ATTENTION_PARTS):
        return _Activity(ATTENTION, _HEAVY)
    if operator in _HEAVY_NAMES or "conv" in operator:
        return _Activity(PRODUCTS, _HEAVY)
    return _Activity(ELEMENTWISE, _PLAIN)


def _host_term(activity: _Activity, exchange: str | None) -> str:
    """Return the term of a CPU process. An update that waits for others is none."""
    return exchange if exchange is not None and not activity.weight else activity.term


def _between_processes(trace: Trace) -> Sequence[TraceSegment]:
    """Return what is under way between CPU processes and is awaited later than it began.

    A collective that is awaited at once has its range on the training thread. Sends and
    receives belong to the pipeline. A collective awaited later belongs to the axis that began
    last.
    """
    begun = [span for span in trace.host if span.name.startswith(LATER)]
    begins_s = [span.begin_s for span in begun]
    found = []
    for span in trace.gloo:
        place = bisect_right(begins_s, span.begin_s)
        if span.name.startswith(("gloo:send", "gloo:recv")):
            found.append((span, PIPELINE))
        elif place:
            found.append((span, AXES.get(begun[place - 1].name.removeprefix(LATER), OTHERS)))
    return tuple(side_by_side(found, trace.seconds, (*AXES.values(), OTHERS)))


# --- an accelerator -----------------------------------------------------------------------------

_DEVICE_ORDER = (
    UPDATE, PRODUCTS, ATTENTION, ELEMENTWISE,
    "tensor parallel", "context parallel", "expert parallel", "data parallel", PIPELINE, WAIT,
    OTHERS, INPUT, OFFLOAD,
)  # fmt: skip
"""Order in which one of several concurrent kernels counts: compute hides overlapped exchange."""
_ATTENTION_KERNELS = ("flash", "fmha", "attention")
_PRODUCT_KERNELS = ("gemm", "nvjet", "cutlass", "conv", "wgrad", "dgrad", "implicit")


def _device_term(activity: _Activity, kernel: str | None) -> str:
    if kernel is not None:
        return kernel
    return INPUT if activity.term == INPUT else LAUNCH


def _on_device(trace: Trace) -> Sequence[TraceSegment]:
    at = {tid: _activity_lookup(spans, trace.seconds) for tid, spans in trace.ranges.items()}

    def launched_in(span: TraceSpan) -> _Activity:
        tid, at_s = trace.launches.get(span.correlation, (None, 0.0))
        return at[tid](at_s) if tid in at else _OUTSIDE

    labelled = [(span, _kernel_term(span, launched_in(span))) for span in trace.device]
    return tuple(side_by_side(labelled, trace.seconds, _DEVICE_ORDER))


def _activity_lookup(ranges: Sequence[TraceSpan], end_s: float) -> Callable[[float], _Activity]:
    """Return a function from a moment to the activity of our ranges of a thread."""
    found = tuple(nested(ranges, end_s, _OUTSIDE, _inside))
    begins_s = [piece.begin_s for piece in found]

    def lookup(at_s: float) -> _Activity:
        place = bisect_right(begins_s, at_s) - 1
        activity: _Activity = found[place].state if place >= 0 else _OUTSIDE
        return activity

    return lookup


def _kernel_term(span: TraceSpan, launched_in: _Activity) -> str:
    """Return the term of a kernel, by the range that launched it and by its name."""
    name = span.name.lower()
    if any(part in name for part in COLLECTIVE_KERNELS):
        if launched_in.weight == _WHOLE:
            return launched_in.term if launched_in.term in AXES.values() else OTHERS
        return AXES.get(span.group.removeprefix("mesh_"), OTHERS)
    if launched_in.term in (UPDATE, INPUT):
        return launched_in.term
    if name.startswith("memcpy") and ("htod" in name or "dtoh" in name):
        return OFFLOAD
    if any(part in name for part in _ATTENTION_KERNELS):
        return ATTENTION
    if any(part in name for part in _PRODUCT_KERNELS):
        return PRODUCTS
    return ELEMENTWISE
