"""Details of `shardyard plan --details`: rank placement, and settings to change."""

import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise

from shardyard.io.terminal import echo, print_table
from shardyard.planner.format import mark_of, unmeasured_words
from shardyard.planner.plan import Plan
from shardyard.planner.plan_diff import Advice, Change, RunMeasurement
from shardyard.planner.ranks import Axis, RankPlacement
from shardyard.units import format_bytes, format_count, format_seconds, format_usd

MOST_RANKS = 64
"""Most ranks with a line each; above it, each node has one."""

MOST_NODES = 128
"""Most nodes with a line each; above it, only the first and the last have one."""

_FIRST_NODES = 8
_MOST_IN_WORDS = 8
"""Numbers that are listed one by one."""

_WIDE_COLUMNS = 112
"""Columns of a terminal that holds numbers and settings side by side."""

Row = tuple[str, ...]


def show_advice(advice: Advice) -> None:
    """Ranks, levers, techniques."""
    show_ranks(advice.ranks)
    _show_levers(advice)
    _show_techniques(advice)


def show_ranks(ranks: RankPlacement) -> None:
    """Rank -> node, device, and its group and place on each axis that is split."""
    axes = ranks.axes
    if axes:
        echo()
        rows = [_axis_row(axis, ranks) for axis in axes]
        print_table(("axis", "ranks", "groups", "ranks of group 0", "a group is"), rows)
    echo()
    names = [axis.name for axis in axes]
    if ranks.count <= MOST_RANKS:
        note = "group:place on each axis" if axes else ""
        rows = [_rank_row(rank, ranks, axes) for rank in range(ranks.count)]
        print_table(("rank", "node", "device", *names, note), [(*row, "") for row in rows])
        return
    if ranks.nodes <= MOST_NODES:
        rows = [_node_row(node, ranks, axes) for node in range(ranks.nodes)]
    else:
        rows = [_node_row(node, ranks, axes) for node in range(_FIRST_NODES)]
        rows.append(("...", *[""] * (len(names) + 2)))
        rows.append(_node_row(ranks.nodes - 1, ranks, axes))
    note = "groups:places on each axis; --json has every rank"
    print_table(("node", "ranks", "devices", *names, note), [(*row, "") for row in rows])


def spans(numbers: Sequence[int]) -> str:
    """Rising numbers in words: ``0-7``, ``0, 8, ..., 56``, ``3``."""
    if len(numbers) == 1:
        return str(numbers[0])
    steps = {after - before for before, after in pairwise(numbers)}
    if steps == {1}:
        return f"{numbers[0]}-{numbers[-1]}"
    if len(steps) == 1 and len(numbers) > 3:
        return f"{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}"
    if len(numbers) <= _MOST_IN_WORDS:
        return ", ".join(map(str, numbers))
    return f"{len(numbers)} from {numbers[0]} to {numbers[-1]}"


def _axis_row(axis: Axis, ranks: RankPlacement) -> Row:
    nodes = ranks.nodes_of(axis)
    where = "inside a node" if nodes == 1 else f"on {nodes} nodes"
    groups = f"{ranks.count // axis.degree:,}"
    return (axis.name, str(axis.degree), groups, spans(axis.ranks(0)), where)


def _rank_row(rank: int, ranks: RankPlacement, axes: Sequence[Axis]) -> Row:
    places = [f"{axis.group(rank)}:{axis.coordinate(rank)}" for axis in axes]
    return (str(rank), str(ranks.node(rank)), str(ranks.device(rank)), *places)


def _node_row(node: int, ranks: RankPlacement, axes: Sequence[Axis]) -> Row:
    here = ranks.on_node(node)
    places = [
        f"{spans(sorted({axis.group(rank) for rank in here}))}:"
        f"{spans(sorted({axis.coordinate(rank) for rank in here}))}"
        for axis in axes
    ]
    return (str(node), spans(here), spans([ranks.device(rank) for rank in here]), *places)


# --- levers and techniques ----------------------------------------------------------------------


def _show_levers(advice: Advice) -> None:
    now = advice.now
    echo("\nThis recipe with other settings, planned again; the batch stays:\n")
    planned = [(change, change.plan) for change in advice.levers if change.plan is not None]
    rows = [("this recipe", *_numbers(now))]
    rows += [(change.name, *_numbers(plan, now)) for change, plan in planned]
    heads = ("lever", "device", "", "fits", "step", "", f"{now.units}/s", "price")
    settings = ["", *(_settings(change) for change, _ in planned)]
    if _is_narrow():
        print_table(heads, rows)
        echo()
        print_table(("lever", "settings"), [(c.name, _settings(c)) for c, _ in planned])
    else:
        wide = [(*row, words) for row, words in zip(rows, settings, strict=True)]
        print_table((*heads, "settings"), wide)
    _show_unmeasured(advice, advice.levers)
    _show_rejected("lever", advice.levers)
    _show_measured(advice)


def _is_narrow() -> bool:
    """Check whether settings next to the numbers would be broken within words."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return is_terminal and shutil.get_terminal_size().columns < _WIDE_COLUMNS


def _show_techniques(advice: Advice) -> None:
    echo()
    rows = [
        (change.name, _device(change.plan), _step(change.plan), _change_reason(change))
        for change in advice.techniques
        if change.plan is not None
    ]
    this = ("this recipe", _device(advice.now), _step(advice.now), "")
    print_table(("technique", "device", "step", "what it does here, and why"), [this, *rows])
    _show_unmeasured(advice, advice.techniques)
    _show_rejected("technique", advice.techniques)


def _show_unmeasured(advice: Advice, changes: Sequence[Change]) -> None:
    plans = [advice.now, *(change.plan for change in changes if change.plan is not None)]
    for why in dict.fromkeys(plan.speed.unmeasured for plan in plans if plan.speed.unmeasured):
        echo(unmeasured_words(why))


def _show_rejected(kind: str, changes: Sequence[Change]) -> None:
    refused = [(change.name, change.rejection_reason) for change in changes if change.plan is None]
    if refused:
        echo()
        print_table((f"{kind}, not here", "why"), refused)


def _show_measured(advice: Advice) -> None:
    """Show measured values next to predicted ones, where an earlier run had these settings."""
    found = [("this recipe", advice.now, advice.measured)]
    found += [
        (each.name, each.plan, each.measured) for each in advice.levers if each.plan is not None
    ]
    rows = [
        _measured_row(name, plan, measured)
        for name, plan, measured in found
        if measured is not None
    ]
    if rows:
        echo()
        heads = ("measured", "step", "planned", "tensors", "planned", "run")
        print_table(heads, rows)


def _measured_row(name: str, plan: Plan, measured: RunMeasurement) -> Row:
    tensors = "-" if measured.memory_bytes is None else format_bytes(measured.memory_bytes)
    run = f"{measured.run_id}, median of {measured.steps} steps"
    return (
        name, format_seconds(measured.step_s), _step(plan), tensors,
        format_bytes(plan.memory_bytes), run,
    )  # fmt: skip


def _numbers(plan: Plan, now: Plan | None = None) -> Row:
    """Device, step, rate and price, with the difference where there is something to compare."""
    rate = plan.speed.tokens_per_s
    return (
        format_bytes(plan.device_bytes),
        "" if now is None else _change(plan.device_bytes, now.device_bytes),
        plan.fits,
        _step(plan),
        "" if now is None else _change(plan.step_s, now.step_s),
        "-" if rate is None else f"{format_count(rate)}{mark_of(plan)}",
        "-" if plan.usd is None else f"{format_usd(plan.usd)}{mark_of(plan)}",
    )


def _change(then: float | None, now: float | None) -> str:
    return "" if not then or not now else f"{then / now - 1:+.0%}"


def _device(plan: Plan) -> str:
    return f"{format_bytes(plan.device_bytes)} {plan.fits}"


def _step(plan: Plan) -> str:
    return "-" if plan.step_s is None else f"{format_seconds(plan.step_s)}{mark_of(plan)}"


def _settings(change: Change) -> str:
    written = " ".join(change.settings)
    return f"{written} ({change.note})" if change.note else written


def _change_reason(change: Change) -> str:
    assert change.effect is not None  # it has a plan
    return f"{change.what}. {_sentence(change.effect.words())}: {_settings(change)}"


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]
