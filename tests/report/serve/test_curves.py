"""Curves are thinned by places in the file; what was done twice stands as it was done last."""

import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from shardyard.report.compare.curves import curves_of
from shardyard.report.run_data import read_run
from shardyard.report.serve import sampling
from shardyard.report.serve.curves import Curves, can_draw
from shardyard.report.serve.index import Index
from shardyard.report.walltime import account
from shardyard.rundir.layout import RunDir
from tests.report.serve.runs import add_telemetry, line, make_run


def test_a_short_run_is_drawn_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", steps=30, every=10)
    curves = Curves()
    (found,) = curves.read([run], y="loss", x="tokens").values()
    assert found["x"] == [4096 * step for step in range(1, 31)]
    assert found["y"][0] == 8.0
    assert curves.read([run], y="eval_loss", x="step")["a"]["x"] == [10, 20, 30]


def test_a_long_run_is_spread_evenly_and_ends_with_its_last_step(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, f"r{k}", steps=4000) for k in range(40)]
    found = Curves().read(runs, y="loss", x="step")
    for curve in found.values():
        assert 240 <= len(curve["x"]) <= 260
        gaps = [b - a for a, b in zip(curve["x"], curve["x"][1:], strict=False)]
        assert min(gaps) >= 1 and max(gaps) <= 33
        assert curve["x"][0] == 1 and curve["x"][-1] == 4000


def spiked(folder: Path, name: str, *, steps: int = 6000, first: int = 1, **more: Any) -> RunDir:
    """A long run: its loss is noise with two spikes, its gradient norm has one of its own."""
    run, noise = make_run(folder, name, steps=0), Random(name)
    with run.metrics.open("a") as file:
        for step in range(first, steps + 1):
            loss = {3333: 50.0, 4444: 0.01}.get(step, noise.uniform(2, 3))
            norm = 900.0 if step == 2222 else noise.uniform(1, 2)
            content = line(step, loss=loss, grad_norm=norm, mfu=None, **more)
            file.write(json.dumps(content) + "\n")
    return run


def extremes_are_kept(curve: dict[str, Any], key: str, run: RunDir, *, stretch: int) -> None:
    """Each stretch of the run's steps has its least and greatest value in the curve, exactly."""
    lines = [json.loads(text) for text in run.metrics.read_text().splitlines()]
    values = {each["step"]: float(f"{each[key]:.5g}") for each in lines}
    drawn = dict(zip(curve["x"], curve["y"], strict=True))
    assert curve["x"] == sorted(drawn) and drawn.items() <= values.items()
    steps = sorted(values)
    for begin in range(0, len(steps), stretch):
        inside = [values[step] for step in steps[begin : begin + stretch]]
        shown = [drawn[step] for step in steps[begin : begin + stretch] if step in drawn]
        assert min(shown) == min(inside) and max(shown) == max(inside), begin


def test_a_refined_long_run_keeps_the_extremes_of_each_stretch(tmp_path: Path) -> None:
    run, curves = spiked(tmp_path, "a"), Curves()
    asked: dict[str, Any] = {"x": "step", "sharing": 100}
    rough = curves.read([run], y="loss", **asked)["a"]
    assert len(rough["x"]) < 110 and max(rough["y"]) < 4 and curves.refinements("a") == 0
    assert curves.refine() and not curves.refine() and curves.refinements("a") == 1
    for key, spikes in (("loss", {3333: 50.0, 4444: 0.01}), ("grad_norm", {2222: 900.0})):
        found = curves.read([run], y=key, **asked)["a"]
        assert 200 <= len(found["x"]) <= 402 and found["x"][0] == 1 and found["x"][-1] == 6000
        assert spikes.items() <= dict(zip(found["x"], found["y"], strict=True)).items()
        extremes_are_kept(found, key, run, stretch=32)  # 188 stretches of at most 200
    assert "grad_norm" in curves.keys([run], sharing=100)
    assert "mfu" not in curves.keys([run], sharing=100)
    tokens = curves.read([run], y="loss", x="tokens", sharing=100)["a"]
    assert dict(zip(tokens["x"], tokens["y"], strict=True))[4096 * 3333] == 50.0


def test_what_is_appended_to_a_refined_run_is_read_without_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, curves = spiked(tmp_path, "a"), Curves()
    asked: dict[str, Any] = {"y": "loss", "x": "step", "sharing": 100}
    curves.read([run], **asked)
    curves.refine()
    offsets: list[int] = []
    pread = os.pread

    def noted(file: int, count: int, offset: int) -> bytes:
        if os.path.sameopenfile(file, metrics.fileno()):
            offsets.append(offset)
        return pread(file, count, offset)

    metrics = run.metrics.open("rb")
    monkeypatch.setattr(os, "pread", noted)
    size = run.metrics.stat().st_size
    with run.metrics.open("a") as file:
        for step in range(6001, 9001):
            file.write(json.dumps(line(step, loss=70.0 if step == 7777 else 2.5)) + "\n")
        file.write('{"step": 9001, "lo')
    found = curves.read([run], **asked)["a"]
    drawn = dict(zip(found["x"], found["y"], strict=True))
    assert drawn[3333] == 50.0 and drawn[7777] == 70.0 and found["x"][-1] == 9000
    assert 200 <= len(drawn) <= 402 and min(offsets) == size
    assert not curves.refine()
    metrics.close()


def test_lost_steps_are_no_extremes(tmp_path: Path) -> None:
    run, curves = spiked(tmp_path, "a", steps=5000), Curves()
    asked: dict[str, Any] = {"y": "loss", "x": "step", "sharing": 100}
    curves.read([run], **asked)
    curves.refine()
    start = {"attempt": 1, "generation": 0}
    with run.events.open("a") as file:  # all after step 3000 is lost, with both spikes
        for event in ({"kind": "checkpoint_loaded", "step": 3000}, {"kind": "model_ready"}):
            file.write(json.dumps({"t": 1.0, **start, **event}) + "\n")
    with run.metrics.open("a") as file:
        for step in range(3001, 4001):
            file.write(json.dumps(line(step, loss=2.5, **start)) + "\n")
    curves.read([run], **asked)
    assert curves.refine()
    found = curves.read([run], **asked)["a"]
    assert found["x"][-1] == 4000 and found["x"] == sorted(set(found["x"]))
    assert 2 < max(found["y"]) < 4 and min(found["y"]) >= 2


def test_a_long_run_that_repeats_steps_without_a_word_stays_rough(tmp_path: Path) -> None:
    run, curves = spiked(tmp_path, "a", steps=5000), Curves()
    with run.metrics.open("a") as file:
        file.write(json.dumps(line(4990, loss=1.0)) + "\n")
    asked: dict[str, Any] = {"y": "loss", "x": "step", "sharing": 100}
    curves.read([run], **asked)
    assert curves.refine() and curves.refinements("a") == 0
    found = curves.read([run], **asked)["a"]
    assert len(found["x"]) < 110 and not curves.refine()


def test_steps_that_were_done_again_stand_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", steps=10)
    with run.metrics.open("a") as file:
        for step in (8, 9, 10, 11):
            file.write(json.dumps(line(step, loss=1.0)) + "\n")
        file.write("torn")
    (found,) = Curves().read([run], y="loss", x="step").values()
    assert found["x"] == list(range(1, 12))
    assert found["y"][7:] == [1.0] * 4


def test_lost_steps_and_evaluations_that_were_never_repeated_are_left_out(tmp_path: Path) -> None:
    run, curves = make_run(tmp_path, "a", steps=30, every=10), Curves()
    assert curves.read([run], y="eval_loss", x="step")["a"]["x"] == [10, 20, 30]
    with run.events.open("a") as file:
        start = {"attempt": 1, "generation": 0}
        for event in ({"kind": "checkpoint_loaded", "step": 14}, {"kind": "model_ready"}):
            file.write(json.dumps({"t": 1.0, **start, **event}) + "\n")
    assert curves.read([run], y="loss", x="step")["a"]["x"] == list(range(1, 15))
    with run.metrics.open("a") as file:
        file.write(json.dumps({**line(15), **start}) + "\n")
    assert curves.read([run], y="loss", x="step")["a"]["x"] == list(range(1, 16))
    assert curves.read([run], y="eval_loss", x="step")["a"]["x"] == [10]
    (row,) = Index(tmp_path).rows()
    assert (row.step, row.eval_loss) == (15, json.loads(run.metrics.read_text().split("\n")[10])
            ["eval"]["loss"])  # fmt: skip


def test_what_is_not_known_is_a_gap(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", steps=2)
    assert Curves().read([run], y="mfu", x="step")["a"] == {"x": [1, 2], "y": [None, None]}
    (tmp_path / "b").mkdir()
    run.metrics.unlink()
    assert Curves().read([run], y="loss", x="step")["a"] == {"x": [], "y": []}


def test_a_file_that_grows_is_read_again(tmp_path: Path) -> None:
    run, curves = make_run(tmp_path, "a", steps=2), Curves()
    curves.read([run], y="loss", x="step")
    with run.metrics.open("a") as file:
        file.write(json.dumps(line(3)) + "\n")
    assert curves.read([run], y="loss", x="step")["a"]["x"] == [1, 2, 3]


def test_a_long_run_shows_all_of_its_evaluations(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, f"r{k}", steps=4000, every=37) for k in range(2)]
    curves = Curves()
    for x, factor in (("step", 1), ("tokens", 4096)):
        found = curves.read(runs, y="eval_loss", x=x, sharing=200)
        assert found["r0"]["x"] == [factor * step for step in range(37, 4001, 37)]
    with runs[0].metrics.open("a") as file:
        file.write(json.dumps(line(4001)) + "\n" + '{"step": 4001, "eval": {"lo')
    assert curves.read(runs, y="eval_loss", x="step")["r0"]["x"][-1] == 3996
    with runs[0].metrics.open("a") as file:
        file.write('ss": 1.5}}\n')
    curve = curves.read(runs, y="eval_loss", x="tokens")["r0"]
    assert curve["x"][-1] == 4096 * 4001 and curve["y"][-1] == 1.5
    assert len(curve["x"]) == len(range(37, 4001, 37)) + 1
    runs[0].metrics.write_text("")
    assert curves.read(runs, y="eval_loss", x="step")["r0"]["x"] == []


def test_evaluations_are_found_across_the_blocks_of_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "a", steps=40, every=3)
    for size in (1, 100, 617, 5000):
        monkeypatch.setattr(sampling, "_SCAN_BYTES", size)
        found = Curves().read([run], y="eval_loss", x="tokens")["a"]["x"]
        assert found == [4096 * step for step in range(3, 41, 3)], size


def test_fewer_points_where_more_runs_share_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", steps=4000)
    found = Curves().read([run], y="loss", x="step", sharing=200)["a"]["x"]
    assert 45 <= len(found) <= 60 and found[-1] == 4000


def test_hours_are_those_of_the_comparison(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", steps=100, every=10)
    events = [json.loads(each) for each in run.events.read_text().splitlines()]
    place = {"attempt": 0, "generation": 0}
    began_t = events[2]["t"]
    for number in range(1, 11):  # an evaluation of 5 s after each 10 steps of 0.62 s
        t = began_t + number * 10 * 0.62 - 0.62 + (number - 1) * 5.0
        mark = {"kind": "checkpoint_started", **place, "step": 10 * number, "blocked_s": 5.0}
        events.insert(2 + number, {"t": t + 5.0, **mark})
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    found = Curves().read([run], y="loss", x="hours")["a"]["x"]
    record = read_run(run)
    theirs = curves_of(record, account(record)).of_steps("loss").positions
    for mine, position in zip(found, theirs, strict=True):
        hours = position["hours"]
        assert hours is not None and abs(mine - hours) < 5.5 / 3600
    assert found == sorted(found)


def test_utilisation_is_the_mean_of_the_devices_on_any_axis(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", steps=100)
    curves = Curves()
    assert curves.read([run], y="utilisation", x="step")["a"] == {"x": [], "y": []}
    add_telemetry(run, steps=100)
    add_telemetry(run, steps=100, node=1)
    found = curves.read([run], y="utilisation", x="step")["a"]
    assert found == {"x": list(range(10, 101, 10)), "y": [0.9] * 10}
    tokens = curves.read([run], y="utilisation", x="tokens")["a"]["x"]
    assert tokens == [4096 * step for step in range(10, 101, 10)]
    hours = curves.read([run], y="utilisation", x="hours")["a"]["x"]
    assert hours[0] == round(12 / 3600, 6) and hours == sorted(hours)


@pytest.mark.parametrize(("y", "x"), [("attempt", "step"), ("loss", "dollars"), ("__class__", "x")])
def test_only_known_names_can_be_drawn(y: str, x: str) -> None:
    assert not can_draw(y, x)
    assert can_draw("utilisation", "hours") and can_draw("eval_top1", "epoch")
