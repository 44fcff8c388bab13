"""The plan's page read back by a parser: its numbers, its pictures' sums, and text that is text."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from shardyard.config.cluster_choice import chosen_cluster
from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Parallel, Recipe
from shardyard.families.presets import PRESETS
from shardyard.hardware.machine import Machine
from shardyard.planner.effective_time import RecoverySettings
from shardyard.planner.format import settings_of
from shardyard.planner.instance_search import ClusterQuotes, quote_clusters
from shardyard.planner.layouts import Search, search
from shardyard.planner.memory import MemoryEstimate, memory
from shardyard.planner.plan import Plan, layout_name, plan_recipe
from shardyard.planner.step_time import NAMES
from shardyard.planner.workload import Workload, with_layout, workload_of
from shardyard.report.document import Text
from shardyard.report.plan.bars import MEMORY_COLOURS, TIME_COLOURS, memory_bars, time_bars
from shardyard.report.plan.charts import draw_memory, draw_quotes
from shardyard.report.plan.page import plan_page, tiles
from shardyard.units import format_count, format_seconds, format_usd
from tests.report.test_render import Page

HOSTILE = "x\"><script>alert(1)</script><b>$\\frac$ & 'co"
LAPTOP = Machine(
    device="cpu", name="CPU <b>", count=1, memory_bytes=16 * 2**30, cores=2, hostname="laptop"
)
SHAPE = PRESETS["llama3-8b"].shape


def recipe_of(**cluster: object) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"preset": "llama3-8b", "dropout": 0.0},
            "run": {"steps": 1000},
            "data": {"seq_len": 4096},
            "optim": {"global_batch": 64, "micro_batch": 1, "lr": 1e-4},
            "parallel": {"zero": 3, "dp_shard": 16},
            "memory": {"recompute": "full"},
            "precision": {"compute": "bf16"},
            "cluster": cluster or {"instance": "p5.48xlarge", "nodes": 2},
        }
    )


@cache
def planned() -> Plan:
    return plan_recipe(
        recipe_of(), shape=SHAPE, steps=1000, world_size=16, devices_per_node=8, machine=None
    )


@cache
def workload() -> Workload:
    layout = Layout(dp_replicate=1, dp_shard=16, zero=3)
    return workload_of(recipe_of(), SHAPE, layout)


@cache
def found() -> Search:
    cluster = chosen_cluster(recipe_of().cluster)
    assert cluster is not None
    return search(workload(), cluster, best=3, breadth="usual")


@cache
def needed() -> tuple[tuple[str, MemoryEstimate], ...]:
    return tuple(
        (
            layout_name(best.layout),
            memory(
                with_layout(
                    workload(),
                    best.layout,
                    micro_batch=best.micro_batch,
                    recompute=best.recompute,
                )
            ),
        )
        for best in found().best
    )


@cache
def rented() -> ClusterQuotes:
    return quote_clusters(
        workload(),
        steps=1000,
        checkpoint_bytes=planned().checkpoint_bytes,
        recovery=RecoverySettings(),
        deadline_s=6 * 3600,
        names=("g6e.48xlarge", "p4d.24xlarge", "p5.48xlarge", "trn1.32xlarge"),
    )


@cache
def whole_page() -> str:
    return plan_page(
        planned(), search=found(), quotes=rented(), bars=needed(), title="Plan of llama3-8b",
        deadline_s=6 * 3600,
    )  # fmt: skip


def on_cpu() -> Plan:
    return plan_recipe(
        recipe_of(device="cpu"), shape=SHAPE, steps=None, world_size=16, devices_per_node=16,
        machine=LAPTOP,
    )  # fmt: skip


def words(html: str) -> str:
    return " ".join("".join(Page(html).text).split())


@pytest.mark.heavy
def test_the_page_is_well_formed_whole_and_alone() -> None:
    page = Page(whole_page())
    assert page.open == []
    assert page.tags["svg"] == 3
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == 0
    assert all(address.startswith("#") for address in page.addresses), page.addresses
    assert "url(http" not in whole_page() and "#0a0a" not in whole_page()
    assert [name for name, times in Counter(page.ids).items() if times > 1] == []
    parts = (
        "recommendation",
        "pictures",
        "memory",
        "time",
        "layouts",
        "failures",
        "price",
        "offers",
        "rest",
    )
    assert {f"{part}-section" for part in parts} <= set(page.ids)


@pytest.mark.heavy
def test_the_same_plan_gives_the_same_page() -> None:
    again = plan_page(
        planned(), search=found(), quotes=rented(), bars=needed(), title="Plan of llama3-8b",
        deadline_s=6 * 3600,
    )  # fmt: skip
    assert again == whole_page()


def test_the_head_says_what_takes_ten_seconds_to_read() -> None:
    made = replace(
        planned(),
        device_bytes=60 * 2**30,
        memory_limit_bytes=80 * 2**30,
        speed=replace(planned().speed, tokens_per_s=160_000.0),
    )
    shown = {label: (value, below) for label, value, below in tiles(made)}
    assert shown["memory of a rank"] == ("75% full", "60.0 GiB of 80.0 GiB")
    assert shown["tokens per second"][0] == "160 K"
    assert shown["tokens per second"][1].startswith("10 K a device, ")
    assert shown["expected failures"][1].startswith("one every ")
    assert shown["time"][1].startswith("1,000 steps, with start, saves and failures; 80 %: ")
    assert "an hour" in shown["price"][1] and "a million tokens" in shown["price"][1]


def test_a_price_beyond_a_tile_is_shortened() -> None:
    failures, per_hour = planned().failures, planned().price.usd_per_hour
    assert failures is not None and per_hour is not None
    wall_s = 2.5e6 / per_hour * 3600
    dear = replace(planned(), failures=replace(failures, wall_s=wall_s))
    assert {label: value for label, value, _ in tiles(dear)}["price"] == "$2.5 M"


def test_every_term_stands_in_its_table_and_they_add_up() -> None:
    page, plan = Page(whole_page()), planned()
    cells = [(row[0], row[-1]) for row in page.rows if row]
    for name, reason in [(t.name, t.reason) for t in plan.memory] + [
        (t.name, t.reason) for t in plan.time
    ]:
        assert (name, reason) in cells
    shares = [float(page.row(term.name)[2].removesuffix(" %")) for term in plan.memory]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert page.row("limit")[1] == "80.0 GiB"
    assert "computes" in page.row("matrix products")
    assert "lost" in page.row("recompute")


def test_stacked_bars_are_as_long_as_their_totals() -> None:
    plan = planned()
    first, *rest = memory_bars(plan, found(), needed())
    assert first.total == plan.memory_bytes
    assert [bar.total for bar in rest] == [
        pytest.approx(memory_.allocated_bytes, abs=10) for _, memory_ in needed()
    ]
    first, *rest = time_bars(plan, found())
    assert first.total == plan.step_s
    assert [bar.total for bar in rest] == [pytest.approx(best.step_s) for best in found().best]


def test_drawn_parts_are_as_wide_as_their_bytes() -> None:
    bars = memory_bars(planned(), found(), needed())
    svg = draw_memory(bars, planned().memory_limit_bytes)
    part = (
        r'id="plan-memory-part-(\d+)-\d+"><title>.*?</title>\s*<path d="M ([\d.]+) .*?L ([\d.]+) '
    )
    widths = dict.fromkeys(range(len(bars)), 0.0)
    for number, left, right in re.findall(part, svg, flags=re.DOTALL):
        widths[int(number)] += float(right) - float(left)
    scale = bars[0].total / widths[0]
    assert [widths[n] * scale for n in range(len(bars))] == [
        pytest.approx(bar.total, rel=1e-3) for bar in bars
    ]


def test_a_part_tells_its_size_under_the_pointer() -> None:
    term = planned().memory[0]
    gib = f"{term.bytes / 2**30:.1f} GiB"
    assert f"<title>{term.name}: {gib}</title>" in whole_page()


def test_the_plan_is_not_drawn_twice_where_the_search_found_it() -> None:
    best = found().best[0]
    same = replace(
        planned(),
        layout=best.layout,
        micro_batch=best.micro_batch,
        recompute=str(best.recompute),
    )
    bars = memory_bars(same, found(), needed())
    assert len(bars) == len(found().best)
    assert bars[0].name.startswith("This plan, place 1 of the search: ")
    assert "(this plan)" in words(plan_page(same, search=found(), quotes=None, title="x"))


def test_every_term_has_a_colour_of_its_own_and_losses_look_like_losses() -> None:
    names = [name for name, _ in NAMES.values()]
    assert set(names) == set(TIME_COLOURS)
    assert len(set(TIME_COLOURS.values())) == len(names)
    lost = {name for name, variable in TIME_COLOURS.items() if variable.startswith("lost-")}
    assert set(names) - lost == {"matrix products", "attention", "memory-bound", "vocabulary"}
    assert {term.name for term in (*planned().memory, *on_cpu().memory)} <= set(MEMORY_COLOURS)


def test_a_hostile_recipe_stays_text() -> None:
    plan = replace(planned(), model=HOSTILE, device=HOSTILE, measured=(HOSTILE,))
    html = plan_page(plan, search=found(), quotes=None, bars=[(HOSTILE, needed()[0][1])],
                     title=HOSTILE)  # fmt: skip
    page = Page(html)
    assert page.open == []
    assert page.tags["script"] == 0
    assert "".join(page.text).count(HOSTILE) >= 4
    assert "<script" not in html


def test_layouts_come_with_reasons_and_losers_too() -> None:
    text = words(whole_page())
    best, loser = found().best[0], found().rejected[0]
    assert f"{found().fitting:,} of {found().legal:,} legal layouts fit." in text
    assert f"{layout_name(best.layout)}, micro-batch {best.micro_batch}" in text
    assert "of the step computes" in text
    assert loser.reason in Page(whole_page()).row(loser.family)


def test_where_nothing_fits_the_page_says_what_needs_least() -> None:
    nearest = replace(found().best[0], device_bytes=100 * 2**30, limit_bytes=80 * 2**30)
    none = replace(found(), best=(), nearest=nearest, fitting=0)
    text = words(plan_page(planned(), search=none, quotes=None, title="x"))
    assert "The nearest is " in text
    assert "100.0 GiB are 125% of 80.0 GiB" in text


def test_failures_show_their_range_and_every_phase() -> None:
    page, outlook = Page(whole_page()), planned().failures
    assert outlook is not None
    assert " to " in page.row("its range")[1]
    for phase in (*outlook.restart, outlook.replay):
        assert page.row(phase.name)[2:] == [phase.reason, phase.source]
    assert page.row("effective time (ETTR)")[1] == f"{100 * outlook.ettr:.1f} %"
    assert page.row("spare nodes")[1] == str(outlook.spare_nodes)


@pytest.mark.heavy
def test_offers_are_drawn_labelled_and_listed_and_the_pick_is_named() -> None:
    svg, text = draw_quotes(rented()), words(whole_page())
    for offer in rented().quotes:
        assert f"{offer.instance} x {offer.nodes}" in svg
        assert f"{offer.nodes} x {offer.instance}" in text
    assert "The cheapest within 6 h: " in text
    assert "Instance types in no offer: 1" in text
    assert len(Page(whole_page()).row("trn1.32xlarge")[1]) > 10
    none = replace(rented(), selected=None)
    html = plan_page(planned(), search=None, quotes=none, title="x", deadline_s=6 * 3600)
    assert "None is within 6 h. The cheapest is " in words(html)


def test_what_was_measured_is_named() -> None:
    assert "All of this is predicted" in words(whole_page())
    source = "time of a step: measured, run r1, attempt 0"
    plan = replace(planned(), measured=(source,))
    assert f"Measured, not looked up: {source}" in words(
        plan_page(plan, search=None, quotes=None, title="x")
    )


def test_a_cpu_plan_without_a_speed_has_a_page() -> None:
    html = plan_page(on_cpu(), search=None, quotes=None, title="x")
    page, text = Page(html), words(html)
    assert page.open == []
    assert page.tags["svg"] == 1
    assert "No speed: cannot be said without a peak." in text
    assert "that takes a speed, a length and a known cluster" in text
    assert "known once the data is prepared" in text
    assert page.row("process")[1] == "340.0 MiB"
    assert page.row("an hour")[1] == "-"


def test_an_unknown_limit_is_said_and_a_far_one_not_drawn() -> None:
    plan = replace(planned(), memory_limit_bytes=None, fits="unknown", fits_reason="not known")
    assert "the limit is not known" in words(plan_page(plan, search=None, quotes=None, title="x"))
    roomy = replace(planned(), memory_limit_bytes=4 * 2**40)
    text = words(plan_page(roomy, search=None, quotes=None, title="x"))
    assert "the limit, 4.0 TiB, is far to the right" in text


def test_the_page_leads_with_the_override_that_is_faster() -> None:
    slow = replace(planned(), micro_batch=planned().micro_batch + 1)
    assert slow.step_s is not None and found().best[0].step_s < slow.step_s
    html = plan_page(slow, search=found(), quotes=None, title="x")
    ids = Page(html).ids
    assert ids.index("recommendation-section") < ids.index("pictures-section")
    gain = f"{slow.step_s / found().best[0].step_s - 1:.0%} faster than this recipe."
    assert gain in words(html)
    override = " ".join(settings_of(found().best[0], Parallel()))
    assert f'<pre class="copy">{override}</pre>' in html


def test_speed_time_and_price_have_their_band_beside_them() -> None:
    made = planned()
    shown = {label: (value, below) for label, value, below in tiles(made)}
    value, below = shown["tokens per second"]
    band, wall_s, usd = made.tokens_per_s_band, made.wall_s_band, made.usd_band
    assert band is not None and wall_s is not None and usd is not None
    assert below.endswith(f"80 %: {format_count(band[0])} to {format_count(band[1])}")
    assert f"80 %: {format_seconds(wall_s[0])} to " in shown["time"][1]
    assert f"80 %: {format_usd(usd[0])} to " in shown["price"][1]
    assert isinstance(value, Text) and "published runs of this kind (Hopper" in value.source
    html = whole_page()
    best = found().best[0]
    assert best.band is not None
    low, high = best.band.of_rate(best.tokens_per_s)
    assert f"{format_count(low)} to {format_count(high)}" in words(html)
    assert f'title="{value.source}"' in whole_page()
