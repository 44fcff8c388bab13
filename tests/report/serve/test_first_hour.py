"""What somebody does in the first hour, with clicks and keys in a real browser, counted.

docs/verbs/serve.md has the same steps and numbers of clicks.
"""

import json
import math
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.browser import Page, browser
from shardyard.rundir.layout import RunDir
from tests.debian_packages import need
from tests.report.serve.runs import add_settings, line, make_run

pytestmark = pytest.mark.system

RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)
SLOW = "sweep-3"
DOCS = Path(__file__).parents[3] / "docs" / "verbs" / "serve.md"


def make_sweep(folder: Path) -> None:
    """Five runs that differ in their learning rate; the data of one comes slowly."""
    for number, rate in enumerate(RATES):
        run = make_run(folder, f"sweep-{number}", steps=0)
        add_settings(run, {"optim.lr": rate, "run.seed": 3})
        wait_s = 0.55 if run.run_id == SLOW else 0.01
        step_s = 0.31 + wait_s
        worst = abs(math.log10(rate / 0.003))
        with run.metrics.open("w") as file:
            for step in range(1, 401):
                loss = 2.2 + 0.5 * worst + 6 / (step + 2) + 0.03 * math.sin(step * (number + 1))
                speed = {
                    "step_time_s": step_s,
                    "data_wait_s": wait_s,
                    "tokens_per_s": 4096 / step_s,
                }
                more = {"loss": loss, "lr": rate, "world_size": 2, **speed}
                file.write(json.dumps(line(step, **more)) + "\n")
                if step % 100 == 0:
                    file.write(json.dumps({"step": step, "eval": {"loss": loss + 0.1}}) + "\n")


class Person:
    """Clicks where a button is, and counts."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.clicks = 0

    def click(self, script: str) -> None:
        """Click the middle of an element, which must be on the screen or scrolled to."""
        self.page.until(f"!!{script}")
        self.page.run(f"{script}.scrollIntoView({{block: 'center'}})")
        box = "(({left, top, width, height}) => [left + width / 2, top + height / 2])"
        x, y = self.page.run(f"{box}({script}.getBoundingClientRect())")
        on_top = f"document.elementFromPoint({x}, {y})"
        assert self.page.run(f"{script}.contains({on_top})"), self.page.run(f"{on_top}.outerHTML")
        self.page.click(x, y)
        self.clicks += 1

    def choose(self, name: str, value: str) -> None:
        """Choose in a list: one click to open it, one on the value."""
        select = f"document.getElementById('{name}')"
        self.page.until(f"[...{select}.options].some((each) => each.value === '{value}')")
        self.page.run(f"{select}.value = '{value}'; {select}.dispatchEvent(new Event('change'))")
        self.clicks += 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("hour") / "runs"
    make_sweep(runs)
    return runs


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "shardyard", "serve", str(folder), "--port", "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def person(url: str) -> Iterator[Person]:
    need("chromium")
    with browser() as page:
        page.size(1280, 900)
        page.open(url)
        page.until("document.body.dataset.looked >= 1")
        yield Person(page)
        assert page.problems == []


def documented_clicks(task: str) -> int:
    """Number of clicks that the page promises for a task."""
    (found,) = re.findall(rf"^\| {task} \|.*\| (\d+) \|$", DOCS.read_text(), re.MULTILINE)
    return int(found)


COLUMN = "document.querySelector('[data-column=\"{}\"]')"


def test_compare_five_runs_by_learning_rate(person: Person) -> None:
    page = person.page
    person.choose("label", "optim.lr")
    legend = "[...document.querySelectorAll('#legend button')].map((each) => each.textContent)"
    names = page.run(legend)
    assert [float(re.findall(r"[\d.e-]+", name)[0]) for name in names] == list(reversed(RATES))
    label = "document.querySelector('#grid canvas').ariaLabel"
    assert page.until(f"{label}.includes('lr 0.003 2.2') && {label}")
    person.click(COLUMN.format("eval_loss"))
    first = "document.querySelector('#rows .name button').textContent"
    assert page.until(f"{first} === 'sweep-2'")
    row = page.run("document.querySelector('#rows tr').innerText")
    assert "0.003" in row
    assert page.run("location.hash").count("run=") == 5
    assert person.clicks == documented_clicks("Find the best learning rate of five")


def test_find_why_one_is_slow(person: Person) -> None:
    page = person.page
    speeds = "[...document.querySelectorAll('#rows tr')].filter((each) => each.cells[5].innerText)"
    page.until(f"{speeds}.length === 5")  # measured between requests
    person.click(COLUMN.format("tokens_per_s"))
    page.until(f"document.querySelector('#rows .name button').textContent === '{SLOW}'")
    person.click("document.querySelector('#rows .name button')")
    found = "document.getElementById('run-findings').innerText"
    text = page.until(f"{found} && {found}")
    assert "data" in text.lower() and "wait" in text.lower()
    assert person.clicks == documented_clicks("Find out why one is slow")


def test_share_a_page(person: Person, folder: Path) -> None:
    page = person.page
    link = "document.getElementById('save')"
    page.until(f"!{link}.hidden && {link}.href")
    assert page.run(f"{link}.download") == "comparison.html"
    with urllib.request.urlopen(page.run(f"{link}.href"), timeout=60) as answer:
        content = answer.read().decode()
    person.clicks += 1  # the browser saves what the link leads to
    assert all(f"sweep-{number}" in content for number in range(5)) and "<svg" in content
    assert not re.findall(r'(?:src|href)="(?!#|data:)', content) and "<script" not in content
    assert person.clicks == documented_clicks("Send the comparison to somebody")
    assert not [each for each in folder.iterdir() if each.suffix == ".html"]
    assert RunDir(folder / SLOW).metrics.is_file()
