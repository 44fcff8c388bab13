"""A study of real CPU processes: killed in the middle, gone on with, and its page in a browser."""

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.debian_packages import need
from tests.e2e.shardyard import Answer, Place, processes_left, wait_for, wait_for_step

STUDY = (
    "study", "tiny.yaml", "--nodes", "1,2", "--on", "local", "--yes", "--steps", "40",
    "optim.global_batch=8", "run.id=scaling",
)  # fmt: skip


def rows(place: Place) -> list[dict[str, Any]]:
    content = json.loads((place.folder / "runs" / "scaling" / "table.json").read_text())
    found: list[dict[str, Any]] = content["series"][0]["rows"]
    return found


def test_a_study_killed_in_the_middle_goes_on_to_its_page(place: Place, prepared: Answer) -> None:
    assert prepared.code == 0
    with place.start(*STUDY) as running:
        wait_for_step(place.run_dir("scaling-n1"), 2)
        running.process.send_signal(signal.SIGKILL)  # no word to anybody; the run goes on
        running.process.wait()
    first_again = place.run(*STUDY)
    assert first_again.code == 0, first_again.err
    assert not (place.folder / "runs" / "scaling-n1-try2").exists()
    found = rows(place)
    assert [(row["origin"], row["accelerators"]) for row in found] == [
        ("measured", 1), ("measured", 2)
    ]  # fmt: skip
    one, two = found
    assert one["efficiency"] == 1 and 0 < two["efficiency_low"] < two["efficiency"]
    assert one["memory_bytes"] > 0 and one["epoch_s"] > two["ideal_epoch_s"]
    assert set(one["terms"]) == {"computes and exchanges", "waits for data"}
    assert "| 2 | 2 | measured |" in first_again.out

    done = place.run(*STUDY, "--json")
    assert done.code == 0
    assert done.json["series"][0]["rows"] == found, "finished sizes are not run again"
    wait_for(lambda: not processes_left())


def test_the_page_opens_from_disk_in_a_browser(
    place: Place, prepared: Answer, tmp_path: Path
) -> None:
    """What Chromium makes of the file: the whole table, five pictures in view, nothing fetched."""
    need("chromium")
    assert prepared.code == 0
    assert place.run(*STUDY).code == 0
    page = place.folder / "runs" / "scaling" / "study.html"
    text = _chromium(page, "--dump-dom", profile=tmp_path / "profile")
    assert len(re.findall(r"<figure", text)) == 5
    assert "95 % interval by batch means" in text
    picture = tmp_path / "study.png"
    asked = (f"--screenshot={picture}", "--window-size=1200,1600")
    _chromium(page, *asked, profile=tmp_path / "profile")
    assert picture.stat().st_size > 30_000, "an empty page is smaller"


def _chromium(page: Path, *words: str, profile: Path) -> str:
    done = subprocess.run(
        [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", *words,
            page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.slow
def test_two_studies_agree_within_their_intervals(place: Place, prepared: Answer) -> None:
    assert prepared.code == 0
    found = []
    for name in ("twice-a", "twice-b"):
        words = [word.replace("run.id=scaling", f"run.id={name}") for word in STUDY]
        answer = place.run(*words, "--json", *("--steps", "100"))
        assert answer.code == 0, answer.err
        found.append(answer.json["series"][0]["rows"][1])
    one, other = found
    assert one["efficiency_low"] <= other["efficiency_high"]
    assert other["efficiency_low"] <= one["efficiency_high"]
