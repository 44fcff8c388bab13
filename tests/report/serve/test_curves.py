"""Curves are thinned by places in the file; what was done twice stands as it was done last."""

import json
from pathlib import Path

import pytest

from shardyard.report.compare.curves import curves_of
from shardyard.report.run_data import read_run
from shardyard.report.serve import curves as curves_module
from shardyard.report.serve.curves import Curves, can_draw
from shardyard.report.serve.index import Index
from shardyard.report.walltime import account
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
        assert 900 <= len(curve["x"]) <= 1010
        gaps = [b - a for a, b in zip(curve["x"], curve["x"][1:], strict=False)]
        assert min(gaps) >= 1 and max(gaps) <= 9
        assert curve["x"][0] == 1 and curve["x"][-1] == 4000


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
        monkeypatch.setattr(curves_module, "_SCAN_BYTES", size)
        found = Curves().read([run], y="eval_loss", x="tokens")["a"]["x"]
        assert found == [4096 * step for step in range(3, 41, 3)], size


def test_fewer_points_where_more_runs_share_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", steps=4000)
    found = Curves().read([run], y="loss", x="step", sharing=200)["a"]["x"]
    assert 190 <= len(found) <= 210 and found[-1] == 4000


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
