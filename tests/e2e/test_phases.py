"""A run of two phases on a mixture whose processes are killed in each and between them."""

import os
import signal
from pathlib import Path

import pytest

from shardyard.rundir.jsonl import read_lines, read_steps
from shardyard.rundir.layout import RunDir
from tests.e2e.shardyard import Answer, Place, events, wait_for

PHASES = """\
phases:
  - {run: {steps: 10}, data: {seq_len: 32}, optim: {lr: 1e-2}}
  - {run: {steps: 10}, data: {seq_len: 64}, optim: {lr: 3e-3, global_batch: 4}}
"""
SOURCES = "{name: web, source: ./web, weight: 0.7}, {name: code, source: ./code, weight: 0.3}"
STEPS = 20


def _recipe(place: Place) -> None:
    """That of all e2e tests, in two phases and with its text as two sources of unequal weight."""
    for number, file in enumerate(sorted((place.folder / "text").iterdir())):
        part = place.folder / ("web" if number % 3 else "code")
        part.mkdir(exist_ok=True)
        (part / file.name).write_bytes(file.read_bytes())
    lines = (place.folder / "tiny.yaml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("run:", "optim:", "data:", "task:"))]
    data = f"data: {{mixture: [{SOURCES}], vocab_size: 512, workers: 1, eval_fraction: 0.1}}"
    text = "\n".join([*kept, data, "optim: {global_batch: 6, micro_batch: 1}", PHASES])
    (place.folder / "phases.yaml").write_text(text.replace("{every: 8}", "{every: 4}"))


def _kill(run_dir: RunDir, rank: int) -> None:
    """The rank of the newest generation."""
    workers = [e["workers"] for e in read_lines(run_dir.events) if e.get("workers")][-1]
    os.kill(workers[rank]["pid"], signal.SIGKILL)


def _tensors(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


@pytest.mark.slow
def test_kills_in_both_phases_and_between_them_change_no_bit(
    place: Place, prepared: Answer
) -> None:
    assert prepared.code == 0
    _recipe(place)
    whole, parts = place.run_dir("whole-phases"), place.run_dir("parts-phases")
    done = place.run("train", "phases.yaml", "run.id=whole-phases", "--json")
    assert done.code == 0, done.err
    assert "phase 2 of 2, samples of 64 tokens" in done.err

    with place.start("train", "phases.yaml", "run.id=parts-phases", "--json") as running:
        wait_for(lambda: bool(events(parts, "checkpoint_durable")))
        _kill(parts, 1)  # in the first phase
        wait_for(lambda: any(e["phase"] == 2 for e in events(parts, "phase_started")))
        _kill(parts, 0)  # as the second begins
        wait_for(lambda: events(parts, "checkpoint_durable")[-1]["step"] > 10)
        _kill(parts, 1)  # in the second
        finished = running.wait()
    assert finished.code == 0, finished.err

    losses = [[line["loss"] for line in read_steps(run.metrics)] for run in (whole, parts)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    assert _tensors(whole.checkpoint(STEPS)) == _tensors(parts.checkpoint(STEPS))
    assert len(events(parts, "worker_lost")) >= 3

    # nothing is left to do, until the last phase is made longer
    assert "is finished: step 20 of 20" in place.run("resume", "whole-phases", "--dry-run").out
    more = place.run("resume", "whole-phases", "phases.2.run.steps=12", "--json")
    assert more.code == 0, more.err
    assert [line["phase"] for line in read_steps(whole.metrics)] == [1] * 10 + [2] * 12
    page = place.run("report", "whole-phases")
    assert page.code == 0, page.err
    assert "phase 2" in whole.report_html.read_text()
