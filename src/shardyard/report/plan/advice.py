"""Effect of each technique and lever on a plan, and the place of each rank, as blocks."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from shardyard.planner.format import mark_of, unmeasured_words
from shardyard.planner.plan import Plan
from shardyard.planner.plan_diff import IN_USE, NOTABLE, Advice, Change, RunMeasurement
from shardyard.planner.ranks import Axis, RankPlacement
from shardyard.report.document import Block, PageSection, Paragraph, Table, Text, only_in
from shardyard.report.plan.bars import Bar, bars_of
from shardyard.units import ABSENT, format_bytes, format_count, format_seconds, format_usd

THIS = "this recipe"

_MOST_OF_LIMIT = 1.5
"""Factor of the limit at which memory bars are cut off, to leave room for plans that fit."""

Row = tuple[str, ...]
Column = tuple[str, Callable[[Plan, Change | None], str]]
"""Head and the text of a cell; without a change, the recipe's own."""


def advice_sections(advice: Advice, *, has_charts: bool) -> list[PageSection]:
    """Techniques, then levers, for the page."""
    picture = [_chart(advice)] if has_charts else []
    note = Paragraph(
        "Each row is this recipe with its override, planned again; the batch stays. Choose a head "
        "to sort by it.",
        kind="note",
    )
    return [
        PageSection("techniques", "What each technique would do",
                [note, *_changes("technique", advice), *picture]),
        PageSection("levers", "What each lever would do", [note, *_changes("lever", advice)]),
    ]  # fmt: skip


def advice_blocks(advice: Advice, *, is_narrow: bool) -> list[Block]:
    """Ranks, levers and techniques, for the terminal.

    Args:
        is_narrow: Whether settings next to the numbers would be broken within words.
    """
    levers = _changes("lever", advice, has_settings=not is_narrow)
    if is_narrow:
        rows = [(each.name, _settings(each)) for each in advice.levers if each.plan is not None]
        levers.insert(1, Table(("lever", "settings"), rows))
    lead = Paragraph("This recipe with other settings, planned again; the batch stays:")
    return [
        PageSection("ranks", "", ranks_blocks(advice.ranks)),
        PageSection("levers", "", [lead, *levers, *_measured(advice)]),
        PageSection("techniques", "", _changes("technique", advice)),
    ]


def technique_bars(advice: Advice) -> tuple[list[Bar], list[Bar]]:
    """Memory and step of the recipe and of every technique that is another plan."""
    named = [(THIS, advice.now)]
    named += [
        (f"{change.name}: {' '.join(change.settings)}", change.plan)
        for change in advice.techniques
        if change.plan is not None and change.effect is not None and change.effect.verdict != IN_USE
    ]
    pairs = [bars_of(name, plan) for name, plan in named]
    steps = [step for _, step in pairs if step.parts]
    return [memory for memory, _ in pairs], steps


def _chart(advice: Advice) -> Block:
    from shardyard.report.plan.charts import side_by_side  # only here: matplotlib is an extra

    memory, steps = technique_bars(advice)
    limit = advice.now.memory_limit_bytes
    most = None if limit is None else _MOST_OF_LIMIT * limit
    return side_by_side(memory, steps, limit, prefix="technique-", most_bytes=most)


# --- tables -------------------------------------------------------------------------------------


def _changes(kind: str, advice: Advice, *, has_settings: bool = True) -> list[Block]:
    """The table of levers or techniques, its footnotes, and those that cannot be planned."""
    changes = advice.levers if kind == "lever" else advice.techniques
    columns = _columns(kind, advice.now, has_settings=has_settings)
    planned = [(change.plan, change) for change in changes if change.plan is not None]
    rows = [
        [cell(plan, change) for _, cell in columns]
        for plan, change in [(advice.now, None), *planned]
    ]
    heads = [head for head, _ in columns]
    blocks: list[Block] = [Table(heads, rows, is_sortable=True, name=kind)]
    plans = [advice.now, *(plan for plan, _ in planned)]
    unmeasured = dict.fromkeys(plan.speed.unmeasured for plan in plans if plan.speed.unmeasured)
    blocks += [Paragraph(unmeasured_words(why), kind="note") for why in unmeasured]
    refused = [(each.name, each.rejection_reason) for each in changes if each.plan is None]
    if refused:
        blocks.append(Table((f"{kind}, not here", "why"), refused))
    return blocks


def _columns(kind: str, now: Plan, *, has_settings: bool) -> list[Column]:
    """Return the columns of levers or techniques.

    A terminal shows the differences and the settings of levers, and the reasons of techniques.
    """
    is_lever = kind == "lever"
    some = "" if is_lever else "+"
    columns: list[Column | None] = [
        (kind, lambda _, change: THIS if change is None else Text(change.name, source=change.what)),
        ("#device", _device),
        _difference("device_bytes", now) if is_lever else None,
        ("fits", lambda plan, _: plan.fits),
        ("#step", lambda plan, change: _step(plan, "" if change is None else _effect(change))),
        _difference("step_s", now) if is_lever else None,
        (f"{some}#{now.units}/s", lambda plan, _: _rate(plan)),
        (f"{some}#price", lambda plan, _: _price(plan)),
        ("+plus", lambda plan, change: _sides(plan, change, now)[0]),
        ("+minus", lambda plan, change: _sides(plan, change, now)[1]),
        ("+override", lambda _, change: _override(change)),
    ]
    if not is_lever:
        columns.append(("-what it does here, and why", lambda _, change: _reason(change)))
    elif has_settings:
        columns.append(("-settings", lambda _, change: "" if change is None else _settings(change)))
    return [column for column in columns if column is not None]


def _difference(name: str, now: Plan) -> Column:
    """The change of one number against the recipe's own."""
    return (
        "-#",
        lambda plan, change: (
            "" if change is None else _change(getattr(plan, name), getattr(now, name))
        ),
    )


def _device(plan: Plan, _: Change | None) -> str:
    return Text(format_bytes(plan.device_bytes), source=plan.fits_reason, order=plan.device_bytes)


def _step(plan: Plan, source: str = "") -> str:
    if plan.step_s is None:
        return ABSENT
    written = f"{format_seconds(plan.step_s)}{mark_of(plan)}"
    return Text(written, source=source, order=plan.step_s)


def _rate(plan: Plan) -> str:
    rate = plan.speed.tokens_per_s
    return ABSENT if rate is None else Text(f"{format_count(rate)}{mark_of(plan)}", order=rate)


def _price(plan: Plan) -> str:
    usd = plan.usd
    if usd is None:
        return ABSENT
    return Text(f"{format_usd(usd)}{mark_of(plan)}", source=plan.price.source, order=usd)


def _change(then: float | None, now: float | None) -> str:
    return "" if not then or not now else f"{then / now - 1:+.0%}"


def _sides(plan: Plan, change: Change | None, now: Plan) -> tuple[str, str]:
    """Return what gets better, and what gets worse."""
    if change is None:
        return "", ""
    if change.effect is not None and change.effect.verdict == IN_USE:
        return "in use", ""
    plus: list[str] = []
    minus: list[str] = []
    if plan.fits != now.fits:
        (minus if plan.fits in ("tight", "does not fit") else plus).append(plan.fits)
    for name, then, before in (
        ("memory", plan.device_bytes, now.device_bytes), ("step", plan.step_s, now.step_s)
    ):  # fmt: skip
        if then and before and abs(then / before - 1) > NOTABLE:
            words = f"{name} {_change(then, before)}"
            if name == "step" and before / then > 1 + NOTABLE:
                words = f"{before / then - 1:.0%} faster"
            (plus if then < before else minus).append(words)
    if change.note:
        minus.append(change.note)
    return Text(", ".join(plus), kind="good"), Text(", ".join(minus), kind="worse")


def _override(change: Change | None) -> str:
    return "" if change is None else Text(" ".join(change.settings), kind="copy")


def _settings(change: Change) -> str:
    written = " ".join(change.settings)
    return f"{written} ({change.note})" if change.note else written


def _effect(change: Change) -> str:
    assert change.effect is not None  # it has a plan
    words = f"{change.what}: {change.effect.words()}"
    if change.measured is None:
        return words
    step = format_seconds(change.measured.step_s)
    return f"{words}; {change.measured.run_id} measured {step} a step"


def _reason(change: Change | None) -> str:
    if change is None:
        return ""
    assert change.effect is not None  # it has a plan
    words = change.effect.words()
    return f"{change.what}. {words[:1].upper()}{words[1:]}: {_settings(change)}"


def _measured(advice: Advice) -> list[Block]:
    """Measured values next to predicted ones, where an earlier run had these settings."""
    found = [(THIS, advice.now, advice.measured)]
    found += [
        (each.name, each.plan, each.measured) for each in advice.levers if each.plan is not None
    ]
    rows = [
        _measured_row(name, plan, measured)
        for name, plan, measured in found
        if measured is not None
    ]
    heads = ("measured", "#step", "#planned", "#tensors", "#planned", "run")
    return only_in("terminal", Table(heads, rows)) if rows else []


def _measured_row(name: str, plan: Plan, measured: RunMeasurement) -> Row:
    tensors = ABSENT if measured.memory_bytes is None else format_bytes(measured.memory_bytes)
    run = f"{measured.run_id}, median of {measured.steps} steps"
    return (
        name, format_seconds(measured.step_s), _step(plan), tensors,
        format_bytes(plan.memory_bytes), run,
    )  # fmt: skip


# --- ranks --------------------------------------------------------------------------------------

MOST_RANKS = 64
"""Most ranks with a line each; above it, each node has one."""

MOST_NODES = 128
"""Most nodes with a line each; above it, only the first and the last have one."""

_FIRST_NODES = 8
_MOST_IN_WORDS = 8
"""Numbers that are listed one by one."""


def ranks_blocks(ranks: RankPlacement) -> list[Block]:
    """Rank -> node, device, and its group and place on each axis that is split."""
    axes = ranks.axes
    blocks: list[Block] = []
    if axes:
        axis_heads = ("axis", "ranks", "groups", "ranks of group 0", "a group is")
        blocks.append(Table(axis_heads, [_axis_row(axis, ranks) for axis in axes]))
    names = [axis.name for axis in axes]
    if ranks.count <= MOST_RANKS:
        note = "group:place on each axis" if axes else ""
        rows = [_rank_row(rank, ranks, axes) for rank in range(ranks.count)]
        heads = ["rank", "node", "device", *names, note]
    else:
        shown = range(ranks.nodes if ranks.nodes <= MOST_NODES else _FIRST_NODES)
        rows = [_node_row(node, ranks, axes) for node in shown]
        if len(shown) < ranks.nodes:
            rows.append(("...", *[""] * (len(names) + 2)))
            rows.append(_node_row(ranks.nodes - 1, ranks, axes))
        note = "groups:places on each axis; --json has every rank"
        heads = ["node", "ranks", "devices", *names, note]
    return [*blocks, Table(heads, [(*row, "") for row in rows])]


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
