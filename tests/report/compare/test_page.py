"""The page of a comparison: what is on it, and what a real browser shows of it."""

import json
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shardyard.report.compare.comparison import RunComparison, compare
from shardyard.report.compare.curves import AXES
from shardyard.report.compare.line_styles import line_style_of
from shardyard.report.compare.page import render_comparison
from shardyard.report.run_data import RunRecord, read_run
from shardyard.rundir.layout import RunDir
from tests.debian_packages import need
from tests.report.compare.some_runs import record_of
from tests.report.synthetic import write_whole_run

WAIT_S = 60


def some(folder: Path) -> RunComparison:
    """A resumed run, one with another rate, one without a price."""
    records = [
        read_run(write_whole_run(folder)),
        record_of(folder, "hot", optim={"lr": 2e-3}, run={"target": {"loss": 4.0}}),
        record_of(folder, "free-of-charge", usd_per_hour=None),
    ]
    return compare([[record] for record in records], target={})


class Tags(HTMLParser):
    """Names of all elements, and what they load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        given = dict(attrs)
        self.ids += [value] if (value := given.get("id")) else []
        self.loads += [
            value
            for name in ("src", "href", "xlink:href")
            if (value := given.get(name)) and not value.startswith("#")
        ]


def test_the_page_needs_no_script_and_no_network_and_escapes_what_came_from_outside(
    tmp_path: Path,
) -> None:
    found = some(tmp_path)
    named = RunDir(tmp_path / "<script>alert(1)<")
    first = replace(found.sides[0].runs[0].record, run=named)
    found = compare([[first], [found.runs[1].record]], target={"loss": 4.0})
    page = render_comparison(found, {}, no_charts_reason="no & no")
    tags = Tags(page)
    assert "script" not in tags.names and tags.loads == []
    assert "&lt;script&gt;alert(1)&lt;" in page and "no &amp; no" in page


def test_what_is_told_is_on_the_page(tmp_path: Path) -> None:
    page = render_comparison(some(tmp_path), {}, no_charts_reason="")
    for words in (
        "optim.lr", "0.002", "inconclusive", "Steps left out", "loss 4", "hot",
        "what is inconclusive is not shown to be equal", "No run has finished a step",
    ):  # fmt: skip
        assert words in page, words


def drawn(comparison: RunComparison) -> tuple[dict[str, dict[str, str]], str]:
    from shardyard.report.compare.charts import render_charts

    found = render_charts(comparison)
    return found, render_comparison(comparison, found, no_charts_reason="")


@pytest.mark.heavy
def test_every_axis_has_its_pictures_and_each_run_its_curve_where_it_has_a_place(
    tmp_path: Path,
) -> None:
    found, page = drawn(some(tmp_path))
    assert list(found) == list(AXES)
    for axis in AXES:
        sides = {int(side) for side in re.findall(r"-side-(\d+)-run-", found[axis]["loss"])}
        assert sides == ({1} if axis == "dollars" else {0, 1, 2}), axis
    ids = Tags(page).ids
    assert len(ids) == len(set(ids))


@pytest.mark.heavy
def test_many_runs_are_all_drawn_and_each_looks_the_same_as_alone(tmp_path: Path) -> None:
    records: list[RunRecord] = [record_of(tmp_path, "a"), record_of(tmp_path, "b")]
    few = loss_of(compare([[record] for record in records], target={}))
    more = [replace(records[1], run=RunDir(tmp_path / f"r{n}")) for n in range(12)]
    many = compare([[record] for record in [*records, *more]], target={})
    svg = loss_of(many)
    assert {int(n) for n in re.findall(r"-side-(\d+)-run-", svg)} == set(range(14))
    assert "r11" in render_comparison(many, {}, no_charts_reason="")
    assert path_of(few, 0) == path_of(svg, 0)
    looks = [line_style_of(side) for side in range(40)]
    assert len(set(looks)) == 40


def loss_of(comparison: RunComparison) -> str:
    """The loss against steps, as drawn."""
    from shardyard.report.compare.charts import charted_metrics, render_chart

    return render_chart(comparison, charted_metrics(comparison)[0], "steps")


def path_of(svg: str, side: int) -> str:
    """The points of a side's raw curve, as drawn."""
    found = re.search(rf'-side-{side}-run-\d+-raw".*?d="([^"]+)"', svg, re.DOTALL)
    assert found
    return found[1]


LOOK = """
const seen = (what) => [...document.querySelectorAll(what)]
  .filter((each) => each.getClientRects().length > 0).map((each) => each.id);
const told = {};
for (const axis of document.querySelectorAll('[name=axis]')) {
  document.querySelector(`label[for=${axis.id}]`).click();
  told[axis.id] = seen('.panels');
}
document.getElementById('axis-steps').click();
const curves = () => seen('#against-steps [id*="-side-"]').filter((id) => id.startsWith('loss-'));
told.before = curves();
document.getElementById('show-1').click();
told.after = curves();
const wide = document.documentElement;
told.overflow = wide.scrollWidth - wide.clientWidth;
const result = document.createElement('pre');
result.id = 'told';
result.textContent = JSON.stringify(told);
document.body.append(result);
"""
"""Put into a copy of the page, which has no script itself: clicks as a reader would, and looks."""


def looked_at(page: str, folder: Path, *, width: int) -> dict[str, Any]:
    """What Chromium shows of a page."""
    file = folder / f"page-{width}.html"
    file.write_text(page.replace("</body>", f"<script>{LOOK}</script></body>"))
    done = subprocess.run(
        [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900",
            "--virtual-time-budget=5000", "--dump-dom", file.as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=WAIT_S,
    )  # fmt: skip
    found = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    told = json.loads(found[1])
    assert isinstance(told, dict)
    return told


@pytest.mark.system
@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_shows_one_axis_at_a_time_and_hides_runs(tmp_path: Path, width: int) -> None:
    need("chromium")
    _, page = drawn(some(tmp_path))
    told = looked_at(page, tmp_path, width=width)
    assert [told[f"axis-{axis}"] for axis in AXES] == [[f"against-{axis}"] for axis in AXES]
    assert {re.sub(r"\D*side-(\d+).*", r"\1", each) for each in told["before"]} == {"0", "1", "2"}
    assert told["after"] == [each for each in told["before"] if "-side-1-" not in each]
    assert told["overflow"] <= 0  # wide tables scroll by themselves
