"""The page of a study, read back by a parser: whole, alone, escaped, and its pictures drawn."""

import re
from pathlib import Path

import pytest

from shardyard.report.study.charts import panels
from shardyard.report.study.page import render, write_study
from shardyard.report.study.published import read_table
from shardyard.report.study.rows import ScalingSeries
from tests.report.study.test_scaling import forecast as made_forecast
from tests.report.study.test_scaling import planned, row, series
from tests.report.test_render import Page

HOSTILE = 'x"><script>alert(1)</script>'
SCALING = Path(__file__).parents[3] / "benchmarks" / "groundtruth" / "scaling"


def studied() -> ScalingSeries:
    """Something of everything: measured with a plan, failed, not run, extrapolated."""
    one = made_forecast(1.0, best_s=1.0, worst_s=1.0, nodes=1)
    two = made_forecast(1.02, best_s=1.0, worst_s=1.2, nodes=2)
    more = {"terms": (("computes and exchanges", 0.9), ("waits for data", 0.1))}
    rows = (
        row(
            1, 64.0, forecast=one, memory_bytes=2**31, epoch_samples=1000, usd_per_hour=4.0, **more
        ),
        row(2, 120.0, forecast=two, memory_bytes=2**30, usd_per_hour=8.0, **more),
        row(4, None, "failed", note=HOSTILE),
        row(8, None, "extrapolated"),
    )
    return series(*rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    published = read_table(SCALING / "s4-bert-1.5b.csv")
    write_study(folder, HOSTILE, [studied(), published], [f"1 of 2 sizes are done {HOSTILE}."])
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "study.html").read_text())


@pytest.mark.heavy
def test_the_page_is_whole_and_needs_no_network_and_no_script(page: Page, folder: Path) -> None:
    assert page.open == []
    assert page.tags["script"] == 0
    assert len(page.ids) == len(set(page.ids))
    text = (folder / "study.html").read_text()
    assert all(address.startswith("#") for address in page.addresses)
    assert not re.search(r"@import|url\((?!#)", text)


@pytest.mark.heavy
def test_text_from_outside_is_text(page: Page, folder: Path) -> None:
    assert HOSTILE in "".join(page.text)
    assert HOSTILE not in (folder / "study.html").read_text()
    assert "<script" not in (folder / "table.md").read_text().replace("\\<script", "")


@pytest.mark.heavy
def test_every_picture_that_there_are_numbers_for_is_drawn(page: Page) -> None:
    drawn = {name for name in page.ids if re.fullmatch(r"[a-z]+-[01]", name)} - {"series-0"}
    assert {"efficiency-0", "throughput-0", "epoch-0", "memory-0", "step-0"} <= drawn
    assert {"efficiency-1", "throughput-1"} <= drawn
    assert "epoch-1" not in drawn  # its source gives no samples of an epoch
    words = " ".join(page.text)
    for legend in ("ideal", "predicted", "extrapolated", "failed"):
        assert legend in words


@pytest.mark.heavy
def test_the_page_has_the_numbers_of_the_table(page: Page, folder: Path) -> None:
    cells = page.row("8")  # nodes of the published second size
    markdown = (folder / "table.md").read_text()
    assert "85.11 %" in " ".join(" ".join(row) for row in page.rows)
    assert "| 8 | 64 | published |" in markdown and "85.11 %" in markdown
    assert cells


def test_a_page_without_pictures_says_what_to_install() -> None:
    text = render("x", [studied()], {}, no_charts_reason="matplotlib is not installed <b>")
    page = Page(text)
    assert "matplotlib is not installed <b>" in "".join(page.text)
    assert page.tags["svg"] == 0


def test_a_study_of_one_size_has_a_table_and_no_pictures(tmp_path: Path) -> None:
    one = series(planned(1, 64.0, made_forecast(1.0, best_s=1.0, worst_s=1.0, nodes=1)))
    write_study(tmp_path, "one", [one], [])
    assert Page((tmp_path / "study.html").read_text()).tags["svg"] == 0
    assert "| 1 | 1 | measured |" in (tmp_path / "table.md").read_text()


def test_predicted_memory_is_drawn_where_no_speed_is_known() -> None:
    rows = (
        row(1, None, "predicted", memory_bytes=2**31),
        row(2, None, "predicted", memory_bytes=2**30),
    )
    drawn = panels(series(*rows), "study")
    assert list(drawn) == ["memory"]
    assert "predicted" in drawn["memory"]
