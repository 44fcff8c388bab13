"""Averaged weights: by hand, in every layout, and where they are judged and exported."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shardyard.checkpoint.export import export
from shardyard.checkpoint.load import load_tensors, read_shapes
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.ema import WeightEma
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here

STEPS = 4
DECAY = 0.4


def _run(folder: Path, corpus: Corpus, parallel: dict[str, Any], decay: float | None) -> RunDir:
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS},
        "optim": {"ema_decay": decay},
        "checkpoint": {"every": 1, "keep_last": STEPS},
        "parallel": parallel,
        "cluster": {"devices": 2 if parallel else 1},
    }
    run_dir = make_run(folder, corpus, sections)
    run_on_ranks(train_here, sections["cluster"]["devices"], run_dir)
    return run_dir


def _saved(run_dir: RunDir, step: int) -> dict[str, Tensor]:
    path = run_dir.checkpoint(step)
    tensors: dict[str, Tensor] = {
        name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in read_shapes(path).items()
    }
    load_tensors(path, tensors, allow_extra=False)
    return tensors


def test_averages_follow_the_weights_and_stand_for_them(corpus: Corpus, tmp_path: Path) -> None:
    run_dir = _run(tmp_path / "sharded", corpus, {"zero": 3, "dp_shard": 2}, DECAY)
    saved = [_saved(run_dir, step) for step in range(1, STEPS + 1)]
    names = [name for name in saved[0] if name.startswith("model.")]
    for n, (before, after) in enumerate(pairwise(saved), start=2):
        decay = min(DECAY, (1 + n) / (10 + n))
        assert float(after["average.steps"]) == n
        for name in names:
            average = f"average.{name}"
            expected = decay * before[average] + (1 - decay) * after[name]
            torch.testing.assert_close(after[average], expected, rtol=1e-5, atol=1e-7)
    last = saved[-1]
    assert any((last[f"average.{name}"] - last[name]).abs().max() > 1e-3 for name in names)

    export(run_dir.checkpoint(STEPS), read_resolved(run_dir.resolved(0)), tmp_path / "exported")
    for name, weight in load_file(tmp_path / "exported" / "model.safetensors").items():
        assert torch.equal(weight, last[f"average.model.{name}"]), name

    plain = _run(tmp_path / "plain", corpus, {}, None)
    losses = [[line["loss"] for line in read_steps(each.metrics)] for each in (run_dir, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # what is learnt is the same
    judged = [read_evaluations(each.metrics)[-1]["eval"]["loss"] for each in (run_dir, plain)]
    assert judged[0] != pytest.approx(judged[1], rel=1e-3)


@pytest.mark.system
def test_averages_are_the_same_in_every_layout(corpus: Corpus, tmp_path: Path) -> None:
    alone = _run(tmp_path / "alone", corpus, {}, DECAY)
    expected = _saved(alone, STEPS)
    judged = read_evaluations(alone.metrics)[-1]["eval"]["loss"]
    for name, parallel in {
        "zero 1": {"zero": 1, "dp_shard": 2}, "zero 2": {"zero": 2, "dp_shard": 2},
        "copies": {"dp_replicate": 2, "dp_shard": 1}, "tp": {"tp": 2}, "pp": {"pp": 2, "zero": 1},
    }.items():  # fmt: skip
        run_dir = _run(tmp_path / name, corpus, parallel, DECAY)
        found = read_evaluations(run_dir.metrics)[-1]["eval"]["loss"]
        assert found == pytest.approx(judged, rel=1e-5), name
        saved = _saved(run_dir, STEPS)
        assert saved.keys() == expected.keys()


def test_running_statistics_are_averaged_and_what_is_frozen_is_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    averages = WeightEma(model, decay=0.25)
    averages.begin()
    followed = {name for name in averages.tensors() if not name.endswith("steps")}
    assert followed == {
        "average.model.1.weight", "average.model.1.bias", "average.model.2.weight",
        "average.model.2.bias", "average.buffer.1.running_mean", "average.buffer.1.running_var",
    }  # fmt: skip
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None
    norm.running_mean.fill_(8.0)
    averages.follow(skip=torch.tensor(True))
    assert averages.tensors()["average.buffer.1.running_mean"].tolist() == [0.0, 0.0]
    averages.follow(skip=torch.tensor(False))  # 2/11 is less than a quarter
    mean = averages.tensors()["average.buffer.1.running_mean"].clone()
    torch.testing.assert_close(mean, torch.full((2,), 8.0 * 9 / 11))
    with averages.swapped_in():
        assert torch.equal(norm.running_mean, mean)
    assert norm.running_mean.tolist() == [8.0, 8.0]
    assert torch.equal(averages.tensors()["average.buffer.1.running_mean"], mean)
