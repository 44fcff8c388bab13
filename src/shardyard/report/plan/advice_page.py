"""The part of a plan's page that gives advice: what each technique and each lever would do.

One picture, memory beside step time, a bar for each technique; then tables with the same numbers,
and why.
"""

from collections.abc import Callable, Sequence

from shardyard.planner.advice import Advice, Change
from shardyard.planner.effect import IN_USE
from shardyard.planner.format import mark_of, unmeasured_words
from shardyard.planner.plan import Plan
from shardyard.report.format import ABSENT
from shardyard.report.markup import esc, render_section, render_table
from shardyard.report.plan.plan_bars import Bar, bars_of
from shardyard.units import format_bytes, format_count, format_seconds, format_usd

Cells = tuple[str, ...]

THIS = "this recipe"

_MOST_OF_LIMIT = 1.5
"""Where bars of memory are cut off: what is far from fitting would leave no room for what fits."""


def advice_sections(advice: Advice, *, has_picture: bool) -> list[str]:
    """Techniques, then levers, as HTML."""
    picture = _picture(advice) if has_picture else ""
    note = (
        '<p class="note">Each row is this recipe with the settings of its row, planned again; the '
        "micro-batch and the batch stay.</p>"
    )
    techniques = f"{picture}{_card(advice, advice.techniques, note)}"
    return [
        render_section("techniques", "What each technique would do", techniques),
        render_section("levers", "What each lever would do", _card(advice, advice.levers, note)),
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


def _picture(advice: Advice) -> str:
    from shardyard.report.plan.plan_pictures import (
        side_by_side,  # only here: matplotlib is an extra
    )

    memory, steps = technique_bars(advice)
    limit = advice.now.memory_limit_bytes
    most = None if limit is None else _MOST_OF_LIMIT * limit
    return side_by_side(memory, steps, limit, prefix="technique-", most_bytes=most)


def _card(advice: Advice, changes: Sequence[Change], note: str) -> str:
    heads = ["", "#device", "#fits", "#step", f"#{advice.now.units}/s", "#price", ""]
    rows = [_row(THIS, advice.now, "")]
    rows += [_row(change.name, change.plan, _words(change)) for change in changes if change.plan]
    table = render_table(heads, rows) + _unmeasured(advice, changes)
    refused = [(esc(each.name), esc(each.refused)) for each in changes if each.plan is None]
    if refused:
        table += f'<p class="note">Not here:</p>{render_table(["", ""], refused)}'
    return f'<div class="card" style="margin-top:12px">{note}{table}</div>'


def _row(name: str, plan: Plan, words: str) -> Cells:
    return tuple(
        esc(cell)
        for cell in (
            name,
            format_bytes(plan.device_bytes),
            plan.fits,
            _marked(plan, plan.step_s, format_seconds),
            _marked(plan, plan.speed.tokens_per_s, format_count),
            _marked(plan, plan.usd, format_usd),
            words,
        )
    )


def _marked(plan: Plan, value: float | None, written: Callable[[float], str]) -> str:
    return ABSENT if value is None else f"{written(value)}{mark_of(plan)}"


def _unmeasured(advice: Advice, changes: Sequence[Change]) -> str:
    plans = [advice.now, *(change.plan for change in changes if change.plan is not None)]
    found = dict.fromkeys(plan.speed.unmeasured for plan in plans if plan.speed.unmeasured)
    return "".join(f'<p class="note">{esc(unmeasured_words(why))}</p>' for why in found)


def _words(change: Change) -> str:
    """What it is, what it does here and why, and what to write."""
    assert change.effect is not None  # it has a plan
    parts = [f"{change.what}: {change.effect.words()}"]
    parts += [change.note] if change.note else []
    parts += [f"set {' '.join(change.settings)}"]
    if change.measured is not None:
        step = format_seconds(change.measured.step_s)
        parts.append(f"{change.measured.run_id} measured {step} a step")
    return "; ".join(parts)
