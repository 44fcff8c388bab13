"""Headline numbers of five real runs against an independent second count of their files."""

import json
import re
import shutil
from pathlib import Path

import pytest

from shardyard.report.page import tiles, write_report
from shardyard.report.run_data import read_run
from shardyard.report.summary import Summary, summarize
from shardyard.rundir.layout import RunDir
from tests.e2e.shardyard import make_place
from tests.report.real_runs import NAMES, RECORDED, make
from tests.report.recompute import recompute

UNITS = {
    "d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "K": 1e3, "M": 1e6,
    "MiB": 2.0**20, "GiB": 2.0**30, "%": 0.01, "": 1.0,
}  # fmt: skip
ROUNDING = 0.006
"""Three digits; of two units of time, the smaller one."""


def value_of(text: str) -> float:
    """The number that a tile shows: ``2 min 12 s`` is 132."""
    return sum(
        float(number.replace(",", "")) * UNITS[unit]
        for number, unit in re.findall(r"([\d.,]+) ?([A-Za-z%]*)", text)
    )


def check(run: RunDir) -> Summary:
    """Compare the report's JSON and its tiles with the second count."""
    counted, summary = recompute(run.path), summarize(read_run(run))
    content = json.loads(json.dumps(summary.to_json()))
    for name in ("steps_done", "peak_memory_bytes"):
        assert content[name] == counted[name], name
    for name in (
        "trained_s", "running_s", "between_s", "wall_s", "effective_share", "step_time_s",
        "tokens_per_s",
    ):  # fmt: skip
        assert content[name] == pytest.approx(counted[name], rel=2e-4, abs=1e-3), name
    assert [attempt["ranks"] for attempt in content["attempts"]] == counted["ranks"]
    assert [attempt["steps"] for attempt in content["attempts"]] == counted["steps"]
    assert sum(attempt["trained_s"] for attempt in content["attempts"]) == pytest.approx(
        counted["trained_s"], rel=1e-3
    )
    shown = {label: (value, below) for label, value, below in tiles(summary)}
    for label, name in (
        ("time trained", "trained_s"), ("wall time", "wall_s"), ("step time", "step_time_s"),
        (f"{summary.unit}s per second", "tokens_per_s"), ("peak memory", "peak_memory_bytes"),
    ):  # fmt: skip
        assert value_of(shown[label][0]) == pytest.approx(counted[name], rel=ROUNDING), label
    ranks, steps = counted["main_ranks"], counted["main_steps"]
    several = f" of {counted['steps_done']}" if len(summary.paces) > 1 else ""
    words = f"median, {steps}{several} steps on {ranks} rank{'s' * (ranks > 1)}"
    assert shown["step time"][1] == words
    share, running = shown["time trained"][1].split(" of ", 1)
    assert value_of(share) == pytest.approx(counted["effective_share"], abs=6e-4)
    running = running.removesuffix(" running time (effective share)")
    assert value_of(running) == pytest.approx(counted["running_s"], rel=ROUNDING)
    return summary


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_run_is_counted_as_an_independent_count_does(name: str) -> None:
    check(RunDir(RECORDED / name))


def test_the_recorded_runs_are_the_five_kinds() -> None:
    found = {name: check(RunDir(RECORDED / name)) for name in NAMES}
    assert len(found["resumed"].attempts) == 2 and found["resumed"].between_s > 0
    assert [pace.ranks for pace in found["resumed"].paces] == [2, 1]
    assert found["lost"].restarts == 1 and found["lost"].phases["detect"] > 0
    assert found["images"].unit == "image"
    record = read_run(RunDir(RECORDED / "chat"))
    assert record.resolved is not None and record.resolved.recipe.model.lora.rank == 4


@pytest.mark.heavy
@pytest.mark.parametrize("name", NAMES)
def test_page_and_markdown_show_the_same_tiles(name: str, tmp_path: Path) -> None:
    shutil.copytree(RECORDED / name, tmp_path / name)
    run = RunDir(tmp_path / name)
    summary = write_report(run)
    page, markdown = run.report_html.read_text(), run.report_markdown.read_text()
    for label, value, below in tiles(summary):
        assert f'<div class="label">{label}</div><div class="value">{value}</div>' in page
        assert f"| {label} | {value} | {below} |".replace("_", "\\_") in markdown


@pytest.mark.slow
def test_five_runs_made_now_are_counted_as_an_independent_count_does(tmp_path: Path) -> None:
    with make_place(tmp_path) as place:
        make(place)
        for name in NAMES:
            check(place.run_dir(name))
