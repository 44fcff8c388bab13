"""The page in a real browser: rows, curves, and text of runs that stays text."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.rundir.layout import RunDir
from tests.debian_packages import need
from tests.report.serve.runs import make_run

pytestmark = pytest.mark.system

BROWSER = (
    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    make_run(tmp_path / "runs", "first", steps=300, every=50)
    make_run(tmp_path / "runs", "second", steps=80, end="failed")
    make_run(tmp_path / "runs", "<img src=x onerror=alert(1)>", steps=3)
    process = subprocess.Popen(
        [sys.executable, "-m", "shardyard", "serve", "runs", "--port", "0"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        assert process.wait(10) == 0
        assert process.stdout is not None
        process.stdout.close()
    assert (tmp_path / "runs" / ".shardyard-runs.json").is_file()


def seen(url: str, *words: str) -> str:
    """The page after its script has run."""
    need("chromium")
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [*BROWSER, f"--user-data-dir={profile}", "--virtual-time-budget=4000", *words, url],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    return done.stdout


def test_the_page_shows_rows_and_keys_of_curves(url: str, tmp_path: Path) -> None:
    page = seen(url, "--dump-dom")
    assert "3 runs, 0 of them running" in page
    rows = re.search(r'<tbody id="rows">(.*?)</tbody>', page, re.DOTALL)
    assert rows is not None
    assert rows[1].count("<tr>") == 3 and ">first</button>" in rows[1]
    assert "badge finished" in rows[1] and "badge failed" in rows[1]
    keys = re.search(r'id="keys" class="keys">(.*?)</div>', page, re.DOTALL)
    assert keys is not None and "first" in keys[1] and "second" in keys[1]
    assert "<img src=x" not in page and "&lt;img src=x" in page
    assert RunDir(tmp_path / "runs" / "first").metrics.is_file()


def test_curves_are_drawn(url: str, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    seen(url, f"--screenshot={picture}", "--window-size=1200,1000")
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 20_000
