"""Augmented and mixed images: the same pixels and losses in every layout, resumed anywhere."""

from pathlib import Path
from typing import Any

import pytest

from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.run import train
from tests.distributed.image_runs import make_image_run, write_network, write_pictures
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import train_here

EVERYTHING = {"size": 16, "rand_augment": 2, "erase": 0.5, "mixup": 0.4, "cutmix": 1.0}
SHARDED = {"zero": 3, "dp_shard": 2}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("images") / "pictures")


def _sections(*, processes: int = 1, steps: int = 5, **images: Any) -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": steps},
        "task": {"label_smoothing": 0.1},
        "data": {"images": {**EVERYTHING, **images}},
        "parallel": SHARDED if processes > 1 else {},
        "cluster": {"devices": processes},
    }


def _steps(run_dir: RunDir) -> list[list[float]]:
    return [[line["loss"], line["grad_norm"]] for line in read_steps(run_dir.metrics)]


def _two_steps(run_dir: RunDir) -> str:
    calls = iter(range(100))
    hooks = Hooks(generation=0, drain_requested=lambda: next(calls) >= 1, events=None)
    return train(run_dir, 0, hooks)


@pytest.mark.system
def test_two_processes_learn_from_the_same_mixtures(pictures: Path, tmp_path: Path) -> None:
    network = write_network(tmp_path / "network", "resnet")
    # a step is 10 images: micro-batches of 4, 4 and 2, and a rank that has none
    alone = make_image_run(tmp_path / "alone", pictures, network, _sections(threads=1))
    two = _sections(processes=2, threads=3)
    both = make_image_run(tmp_path / "both", pictures, network, two)
    run_on_ranks(train_here, 1, alone)
    run_on_ranks(train_here, 2, both)
    for found, wanted in zip(_steps(both), _steps(alone), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    plain = make_image_run(
        tmp_path / "plain", pictures, network, _sections(steps=1, mixup=0.0, cutmix=0.0)
    )
    run_on_ranks(train_here, 1, plain)
    assert abs(_steps(plain)[0][0] / _steps(alone)[0][0] - 1) > 1e-3


@pytest.mark.system
@pytest.mark.slow
def test_a_resumed_run_draws_what_it_would_have_drawn(pictures: Path, tmp_path: Path) -> None:
    network, two = write_network(tmp_path / "network", "resnet"), _sections(processes=2)
    whole = make_image_run(tmp_path / "whole", pictures, network, two)
    parts = make_image_run(tmp_path / "parts", pictures, network, two)
    run_on_ranks(train_here, 2, whole)
    run_on_ranks(_two_steps, 2, parts)
    assert len(_steps(parts)) < 5
    make_image_run(parts.path, pictures, network, two, attempt=1)
    run_on_ranks(train_here, 2, parts, 1)
    assert _steps(parts) == _steps(whole)


@pytest.mark.system
def test_what_is_mixed_holds_the_micro_batch(pictures: Path, tmp_path: Path) -> None:
    network = write_network(tmp_path / "network", "vit")  # without batch normalisation
    run = make_image_run(tmp_path / "run", pictures, network, _sections())
    run_on_ranks(_two_steps, 1, run)
    other = {**_sections(), "optim": {"micro_batch": 5}}
    make_image_run(run.path, pictures, network, other, attempt=1)
    with pytest.raises(RuntimeError, match=r"optim.micro_batch: 4 -> 5.*mixed with others of"):
        run_on_ranks(train_here, 1, run, 1)


@pytest.mark.system
def test_smoothed_labels_are_learnt_from_and_not_judged_by(pictures: Path, tmp_path: Path) -> None:
    network = write_network(tmp_path / "network", "vit")
    runs = []
    for smoothing in (0.0, 0.5):
        sections = _sections(steps=1, mixup=0.0, cutmix=0.0)
        sections |= {"task": {"label_smoothing": smoothing}, "optim": {"lr": 1e-12}}
        run = make_image_run(tmp_path / str(smoothing), pictures, network, sections)
        run_on_ranks(train_here, 1, run)
        runs.append((_steps(run)[0][0], read_evaluations(run.metrics)[-1]["eval"]["loss"]))
    (loss, judged), (smoothed, judged_then) = runs
    assert judged == pytest.approx(judged_then, rel=1e-7)
    assert loss != pytest.approx(smoothed, rel=1e-6)
