"""The example of images as a user runs it, to a share of digits that it knows."""

import json
from pathlib import Path

import pytest

from shardyard.rundir.jsonl import read_lines, read_steps
from tests.e2e.shardyard import Place

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.yaml"


def test_a_run_ends_at_its_target_and_keeps_its_best_checkpoint(place: Place) -> None:
    answer = place.run(
        "train", str(EXAMPLE), "--json", "run.id=digits", "run.target={top1: 0.5}",
        "task.eval_every_epochs=null", "task.eval_every_steps=20", "cluster.devices=1",
        "optim.micro_batch=64", "data.workers=1", "observe.peak_tflops=2",
    )  # fmt: skip
    assert (answer.code, answer.json["outcome"]) == (0, "finished"), answer.err
    steps = answer.json["steps_done"]
    assert steps % 20 == 0 and steps < 400  # of 675
    run = place.run_dir("digits")
    *before, last = [line["eval"] for line in read_lines(run.metrics) if "eval" in line]
    assert last["top1"] >= 0.5 and all(scores["top1"] < 0.5 for scores in before)
    assert last["top1"] < last["top5"] <= 1
    assert round(last["top1"] * 359, 6) % 1 == 0  # of all that is held out, each once
    assert run.best.read_text().strip() == f"step-{steps:08d}"
    plan = json.loads(run.plan(0).read_text())
    for line in read_steps(run.metrics):
        used_flops_per_s = plan["flops_per_token"]["full"] * line["samples_per_s"]  # of one device
        assert line["mfu"] == pytest.approx(used_flops_per_s / 2e12)
