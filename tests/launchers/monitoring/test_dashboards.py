"""Dashboards ask only for what somebody exports, and show all of it."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from shardyard.launchers.monitoring.alerts import DEVICES, LABELS, counters
from shardyard.launchers.monitoring.dashboards import ALL, CLUSTER, RUN, Dashboard, Panel, render
from shardyard.rundir.metrics import ALL as RUN_METRICS
from tests.launchers.monitoring.queries import metrics_of, unknown_in


def queries(*boards: Dashboard) -> Iterator[tuple[str, str]]:
    for board in boards:
        yield from (query for panel in board.panels for query in panel.queries)


@pytest.mark.parametrize("board", ALL, ids=lambda board: board.name)
def test_no_panel_asks_for_what_nobody_exports(board: Dashboard) -> None:
    unknown = {expr: found for expr, shown in queries(board) if (found := unknown_in(expr, shown))}
    assert unknown == {}
    assert all(metrics_of(expr) for expr, _ in queries(board))


@pytest.mark.parametrize(
    ("query", "shown", "unknown"),
    [
        ("max(DCGM_FI_MEM_COPY_UTIL)", "", "DCGM_FI_MEM_COPY_UTIL"),  # as S1 misspells it
        ('max(shardyard_loss{run="$run"})', "", "run"),
        ("max by (run_id, rank) (shardyard_rank_step)", "", "rank"),
        ("shardyard_loss", "{{pod}}", "pod"),
    ],
)
def test_a_panel_that_would_stay_empty_is_found(query: str, shown: str, unknown: str) -> None:
    assert unknown_in(query, shown) == {unknown}


def test_all_that_is_exported_is_shown() -> None:
    def shown(board: Dashboard) -> set[str]:
        return set().union(*(metrics_of(expr) for expr, _ in queries(board)))

    assert shown(RUN) == {metric.name for metric in RUN_METRICS}
    assert shown(CLUSTER) == {metric.name for metric in DEVICES}
    assert shown(RUN) | shown(CLUSTER) == LABELS.keys()


def test_the_exporter_of_devices_collects_exactly_what_is_shown() -> None:
    rows = [line.split(", ") for line in counters().splitlines()]
    assert [row[:2] for row in rows] == [[metric.name, "gauge"] for metric in DEVICES]
    assert all(len(row) == 3 for row in rows), "its form wants two commas"


def sources(content: Any) -> Iterator[dict[str, str]]:
    """Every data source that is named anywhere."""
    if isinstance(content, dict):
        if "datasource" in content:
            yield content["datasource"]
        content = list(content.values())
    if isinstance(content, list):
        for item in content:
            yield from sources(item)


@pytest.mark.parametrize("board", ALL, ids=lambda board: board.name)
def test_which_prometheus_is_asked_is_chosen_on_the_page(board: Dashboard) -> None:
    made = render(board)
    assert {tuple(source.items()) for source in sources(made)} == {
        (("type", "prometheus"), ("uid", "${source}"))
    }
    first, second = made["templating"]["list"]
    assert (first["name"], first["type"], first["query"]) == ("source", "datasource", "prometheus")
    assert second["query"]["query"] == board.variable.query
    assert unknown_in(board.variable.query) == set()


@pytest.mark.parametrize("board", ALL, ids=lambda board: board.name)
def test_panels_lie_side_by_side_on_the_grid(board: Dashboard) -> None:
    panels = render(board)["panels"]
    assert len({panel["id"] for panel in panels}) == len(board.panels)
    cells = [
        {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        for place in (panel["gridPos"] for panel in panels)
    ]
    assert max(x for cell in cells for x, _ in cell) < 24
    assert not any(one & other for one, other in combinations(cells, 2))


def test_a_stat_shows_a_name_or_a_value() -> None:
    by_title = {panel["title"]: panel for panel in render(RUN)["panels"][:2]}
    assert by_title["State"]["options"]["textMode"] == "name"
    assert by_title["Step"]["options"]["textMode"] == "value"
    assert Panel(title="", queries=()).kind == "timeseries"
