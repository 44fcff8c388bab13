"""Values that the charts of a plan show: stacked bars of memory and of step time.

Their sums can be checked without a drawing, and the page's tables have the same colours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardyard.planner.layouts import Candidate, Search
from shardyard.planner.memory import MemoryEstimate
from shardyard.planner.plan import Plan, layout_name
from shardyard.planner.step_time import NAMES
from shardyard.units import format_bytes, format_count, format_seconds

MEMORY_COLOURS = {
    "parameters": "blue",
    "gradients": "teal",
    "optimizer": "green",
    "gathered parameters": "purple",
    "unreduced gradients": "pink",
    "activations": "orange",
    "logits and loss": "amber",
    "in flight": "amber",
    "running statistics": "red",
    "checkpoint copy": "brown",
    "process": "grey",
    "parked process": "grey",
}
"""Term -> variable of the style sheet."""

OWN_COLOURS = {
    "matrix products": "own-1",
    "attention": "own-2",
    "memory-bound": "own-3",
    "vocabulary": "own-4",
}
LOST_COLOURS = {
    "recompute": "lost-1",
    "launch": "lost-2",
    "tensor parallel": "lost-3",
    "context parallel": "lost-4",
    "expert parallel": "lost-5",
    "data parallel": "lost-6",
    "pipeline bubble": "lost-7",
    "pipeline sends": "lost-8",
    "optimizer": "lost-9",
    "offload": "lost-10",
    "stragglers": "lost-11",
    "data": "lost-12",
}
TIME_COLOURS = {**OWN_COLOURS, **LOST_COLOURS}
"""Term -> variable of the style sheet: what computes is blue, what is lost is red to yellow."""

OWN_NAMES = tuple(OWN_COLOURS)
"""The model's own work; the rest of a step is lost to something else."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One stacked bar: ``parts`` by name, of bytes or seconds, and the text above it."""

    name: str
    numbers: str
    parts: tuple[tuple[str, float], ...]
    reserved: float = 0.0
    device: float = 0.0

    @property
    def total(self) -> float:
        """The length of the bar."""
        return sum(size for _, size in self.parts)


def is_planned(candidate: Candidate, plan: Plan) -> bool:
    """Whether a candidate of a search is what is planned."""
    is_same = (candidate.layout, candidate.micro_batch, str(candidate.recompute)) == (
        plan.layout,
        plan.micro_batch,
        plan.recompute,
    )
    return is_same and not candidate.more


def memory_bars(
    plan: Plan, search: Search | None, bars: Sequence[tuple[str, MemoryEstimate]]
) -> tuple[Bar, ...]:
    """The plan's memory and that of the search's best, without the plan's own among them."""
    drawn = [bars_of(_planned_name(plan, search), plan)[0]]
    best = search.best if search is not None else ()
    for place, (candidate, (name, needed)) in enumerate(zip(best, bars, strict=False), start=1):
        if not is_planned(candidate, plan):
            drawn.append(
                Bar(
                    name=_candidate_name(candidate, place, name=name),
                    numbers=_memory_numbers(
                        needed.allocated_bytes, needed.reserved_bytes, needed.device_bytes
                    ),
                    parts=tuple((term.name, term.bytes) for term in needed.terms),
                    reserved=needed.reserved_bytes,
                    device=needed.device_bytes,
                )
            )
    return tuple(drawn)


def time_bars(plan: Plan, search: Search | None) -> tuple[Bar, ...]:
    """The plan's step and those of the search's best; empty where no speed can be said."""
    drawn: list[Bar] = []
    if plan.step_s is not None:
        drawn.append(bars_of(_planned_name(plan, search), plan)[1])
    for place, candidate in enumerate(search.best if search is not None else (), start=1):
        if plan.step_s is not None and is_planned(candidate, plan):
            continue
        parts = tuple(
            (NAMES[key][0], seconds)
            for key, seconds in candidate.parts._asdict().items()
            if seconds > 0
        )
        name = _candidate_name(candidate, place, name=layout_name(candidate.layout))
        numbers = _time_numbers(parts, candidate.tokens_per_s, plan.units)
        drawn.append(Bar(name=name, numbers=numbers, parts=parts))
    return tuple(drawn)


def bars_of(name: str, plan: Plan) -> tuple[Bar, Bar]:
    """A plan's memory and its step, under one name; without a speed the second has no parts."""
    memory = Bar(
        name=name,
        numbers=_memory_numbers(plan.memory_bytes, plan.reserved_bytes, plan.device_bytes),
        parts=tuple((term.name, term.bytes) for term in plan.memory),
        reserved=plan.reserved_bytes,
        device=plan.device_bytes,
    )
    parts = tuple((term.name, term.seconds) for term in plan.time)
    numbers = _time_numbers(parts, plan.speed.tokens_per_s, plan.units) if parts else ""
    return memory, Bar(name=name, numbers=numbers, parts=parts)


def own_share(parts: Sequence[tuple[str, float]]) -> float:
    """Share of a step that is the model's own work."""
    own_s = sum(seconds for name, seconds in parts if name in OWN_NAMES)
    return own_s / sum(seconds for _, seconds in parts)


def _planned_name(plan: Plan, search: Search | None) -> str:
    best = search.best if search is not None else ()
    places = [n for n, candidate in enumerate(best, start=1) if is_planned(candidate, plan)]
    place = f", place {places[0]} of the search" if places else ""
    return (
        f"This plan{place}: {layout_name(plan.layout)}, micro-batch {plan.micro_batch}, "
        f"recompute {plan.recompute}"
    )


def _candidate_name(candidate: Candidate, position: int, *, name: str) -> str:
    how = f"micro-batch {candidate.micro_batch}, recompute {candidate.recompute}"
    return f"{position}. {name}, {how}"


def _memory_numbers(allocated: float, reserved: float, device: float) -> str:
    if allocated == reserved == device:
        return f"{format_bytes(allocated)} in all"
    return (
        f"tensors {format_bytes(allocated)}, reserved {format_bytes(reserved)}, device "
        f"{format_bytes(device)}"
    )


def _time_numbers(
    parts: Sequence[tuple[str, float]], tokens_per_s: float | None, units: str
) -> str:
    step_s = sum(seconds for _, seconds in parts)
    rate = f", {format_count(tokens_per_s)} {units}/s" if tokens_per_s is not None else ""
    return f"{format_seconds(step_s)}{rate}, {own_share(parts):.0%} computes"
