"""The advice on a plan's page: the same numbers as the plans, one picture, text that is text."""

import re
from dataclasses import replace
from functools import cache
from html import escape

import pytest

from shardyard.control.plan import predict
from shardyard.planner.plan_diff import IN_USE, Advice, Change
from shardyard.report.document import Document
from shardyard.report.html import render_html
from shardyard.report.plan.advice import THIS, advice_sections, technique_bars
from shardyard.report.plan.charts import side_by_side
from shardyard.report.plan.page import plan_page
from shardyard.units import format_bytes, format_seconds
from tests.report.test_render import Page

HOSTILE = "<script>alert(1)</script>"


@cache
def advice() -> Advice:
    found = predict(
        {
            "model": {"preset": "llama2-7b"},
            "run": {"steps": 500},
            "optim": {"global_batch": 64, "micro_batch": 1},
            "cluster": {"nodes": 2, "instance": "p5.48xlarge"},
        },
        layouts=0,
        details=True,
    ).advice
    assert found is not None
    return found


def sections(given: Advice, *, has_picture: bool) -> str:
    found = advice_sections(given, has_charts=has_picture)
    return render_html(Document(title="x", kind="", heading="x", head=[], body=found, footer=()))


def test_the_picture_has_the_recipe_and_each_technique_that_is_another_plan() -> None:
    memory, steps = technique_bars(advice())
    others = [
        change
        for change in advice().techniques
        if change.plan is not None and change.effect is not None and change.effect.verdict != IN_USE
    ]
    assert len(others) > 10
    assert [bar.name for bar in memory] == [bar.name for bar in steps]
    assert memory[0].name == THIS
    assert memory[0].total == advice().now.memory_bytes
    for change, bar, step in zip(others, memory[1:], steps[1:], strict=True):
        assert change.plan is not None
        assert bar.name == f"{change.name}: {' '.join(change.settings)}"
        assert (bar.total, step.total) == (change.plan.memory_bytes, change.plan.step_s)
        assert bar.device == change.plan.device_bytes


@pytest.mark.heavy
def test_the_page_has_one_picture_more_and_is_whole() -> None:
    with_it, without = (
        plan_page(advice().now, search=None, quotes=None, title="x", advice=each)
        for each in (advice(), None)
    )
    page = Page(with_it)
    assert page.open == []
    assert page.tags["svg"] == Page(without).tags["svg"] + 2
    assert len(page.ids) == len(set(page.ids))
    assert {"techniques-section", "levers-section"} <= set(page.ids)
    drawn = set(re.findall(r'id="technique-plan-memory-part-(\d+)-', with_it))
    assert len(drawn) == len(technique_bars(advice())[0])
    assert "techniques-section" not in without


@pytest.mark.heavy
def test_bars_far_beyond_the_limit_are_cut_and_it_is_said() -> None:
    limit = advice().now.memory_limit_bytes
    bars, _ = technique_bars(advice())
    assert limit is not None and max(bar.device for bar in bars) > 1.5 * limit
    assert "goes on" in sections(advice(), has_picture=True)
    near = [bar for bar in bars if bar.device <= limit]
    (figure,) = side_by_side(near, [], limit, most_bytes=1.5 * limit).figures
    assert "goes on" not in str(figure.keys)


def test_each_change_is_a_row_with_its_numbers_and_why() -> None:
    html = sections(advice(), has_picture=False)
    page = Page(html)
    (full,) = [change for change in advice().levers if change.name == "recompute full"]
    assert full.plan is not None and full.effect is not None
    now = advice().now
    assert full.plan.step_s is not None and now.step_s is not None
    rows = [row for row in page.rows if row and row[0] == "recompute full"]
    for _, device, fits, step, _, _, plus, minus, override in rows:
        assert (device, fits) == (format_bytes(full.plan.device_bytes), "fits")
        assert step == format_seconds(full.plan.step_s)
        assert plus == f"memory {full.plan.device_bytes / now.device_bytes - 1:+.0%}"
        assert minus == f"step {full.plan.step_s / now.step_s - 1:+.0%}"
        assert override == "memory.recompute=full"
    assert len(rows) == 2, "a lever and a technique"
    assert f'title="{escape(full.what)}: {escape(full.effect.words())}"' in html
    assert page.row("expert parallel")[1].startswith("parallel.ep=2 but the model has no experts")


def test_a_plan_without_a_speed_has_memory_alone() -> None:
    def slow(change: Change) -> Change:
        return replace(change, plan=change.plan and replace(change.plan, time=()))

    given = replace(
        advice(),
        now=replace(advice().now, time=()),
        techniques=tuple(slow(each) for each in advice().techniques),
    )
    memory, steps = technique_bars(given)
    assert memory and steps == []


def test_hostile_text_stays_text() -> None:
    first, *rest = advice().techniques
    changed = replace(
        advice(), techniques=(replace(first, plan=None, rejection_reason=HOSTILE), *rest)
    )
    html = sections(changed, has_picture=False)
    assert "<script" not in html and HOSTILE in "".join(Page(html).text)


def test_a_choice_of_a_head_sorts_the_techniques_without_a_script() -> None:
    html = sections(advice(), has_picture=False)
    steps = [change.plan.step_s for change in advice().techniques if change.plan is not None]
    least = sorted([advice().now.step_s or 0, *(step or 0 for step in steps)])
    rows = re.findall(r'<tr style="([^"]*)"[^>]*>(.*?)</tr>', html.partition('id="levers')[0])
    ranks = {int(re.findall(r"--s4:(\d+);", style)[0]): cells for style, cells in rows}
    assert sorted(ranks) == list(range(len(steps) + 1))
    for rank, step in enumerate(least):
        assert format_seconds(step) in ranks[rank]
    assert Page(html).tags["script"] == 0
