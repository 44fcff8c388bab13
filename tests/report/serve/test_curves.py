"""Curves are thinned by places in the file; what was done twice stands as it was done last."""

import json
from pathlib import Path

from shardyard.report.serve.index import Curves, Index
from tests.report.serve.runs import line, make_run


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
