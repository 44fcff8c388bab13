"""The page in a real browser: charts, hover, list, one run in detail, and text that stays text."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.browser import Page, browser
from shardyard.rundir.layout import RunDir
from tests.debian_packages import need
from tests.report.serve.runs import add_log, add_settings, add_telemetry, line, make_run

pytestmark = pytest.mark.system

ODD = "<img src=x onerror=alert(1)>"
FIGURES = "[...document.querySelectorAll('#grid figure:not([hidden])')]"
IDS = "[...document.querySelectorAll('#rows .name button')].map((each) => each.textContent)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("serve") / "runs"
    first = make_run(runs, "first", steps=300, every=50)
    add_settings(first, {"optim.lr": 0.001, "run.seed": 3})
    add_telemetry(first, steps=300)
    add_log(first, rank=0, text="step 1\n<b>last line</b>\n")
    first.report_html.write_text("<!DOCTYPE html><title>Report of first</title><p>page</p>")
    add_settings(make_run(runs, "second", steps=80, end="failed"), {"optim.lr": 0.1, "run.seed": 3})
    make_run(runs, ODD, steps=3)
    return runs


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "shardyard", "serve", "runs", "--port", "0"],
        cwd=folder.parent, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        assert process.wait(10) == 0
        assert process.stdout is not None
        process.stdout.close()
    assert (folder / ".shardyard-runs.json").is_file()


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    need("chromium")
    with browser() as found:
        found.size(1280, 900)
        yield found


def opened(page: Page, url: str, view: str = "") -> Page:
    """The page with its charts drawn and its list read."""
    page.problems.clear()
    page.open(f"{url}{view}")
    page.until("document.body.dataset.looked >= 1")
    return page


def test_the_grid_shows_a_chart_for_each_metric_that_has_data(page: Page, url: str) -> None:
    opened(page, url)
    titles = page.run(f"{FIGURES}.map((each) => each.dataset.metric)")
    assert titles == ["loss", "eval_loss", "tokens_per_s", "utilisation", "step_time_s"]
    label = page.run(f"{FIGURES}[0].querySelector('canvas').getAttribute('aria-label')")
    assert label.startswith("Training loss in nats over step, 3 runs.") and "first 3.0167" in label
    assert page.run("document.getElementById('summary').textContent") == "3 runs, 0 running"
    legend = page.run("document.getElementById('legend').textContent")
    assert "first" in legend and "second" in legend and ODD in legend
    assert page.run("document.querySelectorAll('main img').length") == 0
    assert page.problems == []


def test_hover_shows_the_values_of_the_metrics_file(page: Page, url: str, folder: Path) -> None:
    opened(page, url, "#run=first&run=second")
    page.until(f"{FIGURES}.length >= 2")
    box = page.run(
        f"(({{left, top, width, height}}) => [left, top, width, height])"
        f"({FIGURES}[0].querySelector('.plot').getBoundingClientRect())"
    )
    page.move(box[0] + 0.3 * box[2], box[1] + 0.5 * box[3])
    tip = "document.querySelector('.tip:not([hidden])')"
    lines = page.until(
        f"{tip} && [{tip}.querySelector('b'), ...{tip}.querySelectorAll('div')]"
        ".map((each) => [...each.childNodes].map((one) => one.textContent))"
    )
    step = int(lines[0][0].removeprefix("step: ").removesuffix(" · nats"))
    losses = {}
    for name in ("first", "second"):
        rows = map(json.loads, RunDir(folder / name).metrics.read_text().splitlines())
        row = next(row for row in rows if row["step"] == step and "eval" not in row)
        losses[name] = float(f"{row['loss']:.5g}")
    assert {words[1]: float(words[2]) for words in lines[1:]} == losses

    page.run(f"{FIGURES}[0].querySelector('canvas').focus()")
    page.press("End")
    page.until("document.getElementById('spoken').textContent.includes('step: 300')")


def test_filter_sort_and_settings_columns(page: Page, url: str) -> None:
    opened(page, url)
    assert len(page.run(IDS)) == 3
    heads = "[...document.querySelectorAll('#heads button')].map((each) => each.textContent)"
    assert page.until(f"{heads}.includes('optim.lr') && {heads}")[-1] == "optim.lr"
    page.run("document.querySelector('[data-column=\"loss\"]').click()")
    assert page.run(IDS) == ["first", "second", ODD]
    page.run("document.querySelector('[data-column=\"loss\"]').click()")
    assert page.run(IDS) == [ODD, "second", "first"]
    sorted_by = "document.querySelector('[aria-sort]')"
    assert page.run(f"{sorted_by}.getAttribute('aria-sort')") == "descending"
    for words, ids in (("sec", ["second"]), ("failed", ["second"]), ("optim.lr<0.01", ["first"]),
                       ("loss>3 state=finished", [ODD, "first"])):  # fmt: skip
        page.run(
            f"((field) => {{ field.value = {json.dumps(words)};"
            "field.dispatchEvent(new Event('input')); })(document.getElementById('filter'))"
        )
        assert page.run(IDS) == ids, words
    assert page.run("document.getElementById('shown').textContent").startswith("2 runs shown")


def test_the_address_restores_the_view(page: Page, url: str) -> None:
    opened(page, url)
    page.run("document.querySelector('[aria-label=\"Chart second\"]').click()")
    page.run(
        "((field) => { field.value = 0.9; field.dispatchEvent(new Event('input')); })"
        "(document.getElementById('smooth'))"
    )
    page.run(
        "((field) => { field.value = 'hours'; field.dispatchEvent(new Event('change')); })"
        "(document.getElementById('x'))"
    )
    page.run(f"{FIGURES}[0].querySelector('figcaption button').click()")
    page.run("document.querySelector('[data-column=\"step\"]').click()")
    address = page.run("location.hash")
    opened(page, url, address)
    page.until("document.querySelectorAll('#legend button').length === 2")
    assert page.run("document.getElementById('smooth').value") == "0.9"
    assert page.run("document.getElementById('x').value") == "hours"
    assert page.run(IDS) == [ODD, "second", "first"]
    button = page.until(f"{FIGURES}.length && {FIGURES}[0].querySelector('button').ariaPressed")
    assert button == "true"


def test_a_run_shows_its_events_log_and_report(page: Page, url: str) -> None:
    opened(page, url)
    page.run("[...document.querySelectorAll('#rows .name button')]"
             ".find((each) => each.textContent === 'first').click()")  # fmt: skip
    page.until("document.querySelectorAll('#events tr').length === 5")
    text = page.run("document.getElementById('events').textContent")
    assert "attempt_ended" in text and "rank 1 <b>was</b> lost" in text
    assert "<b>last line</b>" in page.until("document.getElementById('log').textContent")
    address = page.until("document.querySelector('#run-pages a').href")
    assert page.run("document.querySelectorAll('#log b, #events b').length") == 0
    assert page.problems == []
    page.open(address)
    assert page.run("document.title") == "Report of first"


def test_the_sweep_has_a_line_a_run_and_curves_grow(page: Page, url: str, folder: Path) -> None:
    opened(page, url, "#run=second")
    words = page.until("document.querySelector('#parallel canvas').ariaLabel")
    assert words.startswith("Parallel coordinates of 2 runs: optim.lr")
    with RunDir(folder / "second").metrics.open("a") as file:
        file.write(json.dumps(line(81, loss=1.25)) + "\n")
    page.until(f"{FIGURES}[0].querySelector('canvas').ariaLabel.includes('second 1.25')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_only_inside_tables(
    page: Page, url: str, tmp_path: Path, scheme: str
) -> None:
    page.size(400, 800)
    page.scheme(scheme)
    opened(page, url)
    page.until(f"{FIGURES}.length >= 4")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    position = "getComputedStyle(document.querySelector('#rows th')).position"
    assert page.run(position) == "sticky"
    time.sleep(0.2)
    page.picture(tmp_path / "page.png")
    assert len((tmp_path / "page.png").read_bytes()) > 15_000
    page.size(1280, 900)
