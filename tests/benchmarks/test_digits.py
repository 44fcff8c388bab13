"""The digits beside their neighbours: these as another computes them, and a run of one step."""

import json
from pathlib import Path

import pytest

from benchmarks.digits import main, nearest_neighbours


def test_neighbours_tell_as_many_as_scikit_learns() -> None:
    """KNeighborsClassifier(1, algorithm="brute") of scikit-learn 1.9.1 on the same split."""
    assert nearest_neighbours(1) == pytest.approx(357 / 359)


@pytest.mark.slow
def test_the_benchmark_writes_what_it_found(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    smaller = ["run.epochs=null", "run.steps=1", "optim.warmup_steps=0", "data.workers=1"]
    assert main(["--seeds", "1", "--out", str(out), "--set", *smaller]) == 1
    content = json.loads(out.read_text())
    assert content["runs"][0]["seed"] == 0 and content["runs"][0]["cpu_s"] > 0
    assert content["top1_mean"] == content["runs"][0]["top1"] < 0.9
    assert min(content["nearest_neighbours"].values()) > 0.98
