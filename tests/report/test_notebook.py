"""Values in a notebook: small, escaped, with the numbers of the run."""

import re
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import pytest

import shardyard
from shardyard.report.notebook import (
    MetricsTable,
    NotebookCurve,
    chart_html,
    details_html,
    downsampled,
    table_html,
)
from tests.report.real_runs import RECORDED

ODD = "<img src=x onerror=alert(1)>\x1b[2J"


class Tags(HTMLParser):
    """Tags of a fragment; fails on one that is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.opened: list[str] = []
        self.feed(html)
        self.close()
        assert not self.opened

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.names.add(tag)
        if "/>" not in (self.get_starttag_text() or ""):
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.opened and self.opened[-1] == tag:
            self.opened.pop()


def test_text_from_outside_stays_text() -> None:
    curve = NotebookCurve(ODD, [1.0, 2.0], [3.0, 4.0])
    html = (
        table_html((ODD,), [[ODD, ODD]], note=ODD)
        + details_html(ODD, [(ODD, ODD, ODD)], lead=ODD)
        + chart_html([curve, curve], title=ODD, x_title=ODD)
    )
    assert "img" not in Tags(html).names and "\x1b" not in html
    assert html.count("&lt;img") >= 9


def test_a_chart_has_a_label_and_its_points_inside() -> None:
    noise = Random(1)
    xs = [float(k) for k in range(5000)]
    ys = [noise.uniform(2, 3) for _ in xs]
    ys[1234], ys[4321] = 9.0, 0.5
    html = chart_html([NotebookCurve("loss", xs, ys)], title="Training loss", x_title="step")
    assert 'role="img" aria-label="Training loss over step, 1 curves. Last values: loss 2.' in html
    (points,) = re.findall(r'points="([^"]+)"', html)
    places = [tuple(map(float, each.split(","))) for each in points.split()]
    assert 300 <= len(places) <= 402
    assert all(0 <= x <= 560 and 0 <= y <= 210 for x, y in places)
    kept = downsampled(xs, ys)
    assert {0, 1234, 4321, 4999} <= set(kept) and kept == sorted(kept)
    for begin in range(0, 5000, 25):  # 200 stretches
        inside = [ys[k] for k in kept if begin <= k < begin + 25]
        assert min(inside) == min(ys[begin : begin + 25])
        assert max(inside) == max(ys[begin : begin + 25])


def test_a_constant_and_a_single_point_are_drawn() -> None:
    for xs, ys in (([1.0, 2.0], [0.0, 0.0]), ([5.0], [2.5]), ([1.0, 2.0], [1e9, 1e9])):
        assert "<polyline" in chart_html([NotebookCurve("a", xs, ys)], title="t", x_title="step")
    assert chart_html([NotebookCurve("a", [], [])], title="t", x_title="step") == ""


def test_a_run_shows_its_state_and_its_curve() -> None:
    runs = shardyard.runs(RECORDED)
    (plain,) = [run for run in runs if run.id == "plain"]
    assert repr(plain) == "<Run plain: finished, step 24>" and "plain" in repr(runs)
    assert "<svg" in plain._repr_html_() and "finished" in runs._repr_html_()
    metrics = plain.metrics()
    assert isinstance(metrics, MetricsTable) and repr(metrics) == (
        "<MetricsTable of 24 lines, steps 1 to 24>"
    )
    assert metrics.column("step") == list(range(1, 25))
    for html in (plain._repr_html_(), runs._repr_html_(), metrics._repr_html_()):
        assert {"img", "script", "style"}.isdisjoint(Tags(html).names)
    assert [line["eval"]["loss"] for line in plain.evaluations()][-1] == pytest.approx(
        next(row for row in shardyard.compare(plain).rows())["eval_loss"]
    )


def test_pandas_takes_the_metrics() -> None:
    pandas = pytest.importorskip("pandas")
    (plain,) = [run for run in shardyard.runs(RECORDED) if run.id == "plain"]
    frame = pandas.DataFrame(plain.metrics())
    assert list(frame["step"]) == list(range(1, 25)) and frame["loss"].dtype == float


def test_runs_are_compared_by_object_path_and_id() -> None:
    (plain,) = [run for run in shardyard.runs(RECORDED) if run.id == "plain"]
    found = shardyard.compare(plain, RECORDED / "lost", ["resumed"], runs_dir=RECORDED)
    rows = found.rows()
    assert [row["run"] for row in rows] == ["plain", "lost", "resumed"]
    assert [row["run.steps"] for row in rows] == ["24", "40", "400 -> 40"]
    assert found.best == min(rows, key=lambda row: row["eval_loss"])["run"]
    assert repr(found) == "<ComparedRuns of plain, lost, resumed>"
    html = found._repr_html_()
    assert html.count("<svg") == 2 and html.count("<polyline") == 6 and Tags(html).names


def test_a_comparison_writes_the_page_of_the_command(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    shardyard.compare(RECORDED / "plain", RECORDED / "lost", page=page)
    assert "plain" in page.read_text() and "lost" in page.read_text()


def test_a_plan_and_a_study_are_shown() -> None:
    recipe = {"model": {"preset": "llama2-7b"}, "cluster": {"instance": "p5.48xlarge"}}
    plan = shardyard.plan(recipe, "cluster.nodes=2", "run.steps=1000")
    assert repr(plan).startswith("<Prediction: llama2-7b 6.74 B parameters")
    assert "tokens/s" in plan._repr_html_() and Tags(plan._repr_html_()).names
    scaling = shardyard.study(recipe, "run.steps=1000", nodes=[1, 2])
    assert [row["nodes"] for row in scaling.rows()] == [1, 2] and "<Scaling of" in repr(scaling)
    assert "predicted" in scaling._repr_html_()


def test_completion_shows_public_names_only() -> None:
    assert set(shardyard.__all__) <= set(dir(shardyard))
    assert [name for name in dir(shardyard) if not name.startswith("_")] == shardyard.__all__
