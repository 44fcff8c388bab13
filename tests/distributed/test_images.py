"""Networks for images in every layout: losses, gradient norms and running statistics of one run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardyard.checkpoint.load import load_tensors, read_shapes
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lines import read_evaluations, read_steps
from shardyard.train.hooks import Hooks
from shardyard.train.loop import DRAINED, FINISHED
from shardyard.train.run import train
from tests.distributed.image_runs import make_image_run, write_network, write_pictures
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import train_here

STEPS = 5
DROPS = {"dropout": 0.2, "drop_path": 0.3}

Layouts = dict[str, tuple[int, dict[str, Any], dict[str, Any]]]
QUICK: Layouts = {
    "2 zero 3, recompute": (2, {"zero": 3, "dp_shard": 2}, {"recompute": "full"}),
}
MORE: Layouts = {
    "1, recompute": (1, {}, {"recompute": "full"}),
    "1, selective": (1, {}, {"recompute": "selective"}),
    "2 copies": (2, {"dp_replicate": 2, "dp_shard": 1}, {}),
    "2 zero 1": (2, {"zero": 1, "dp_shard": 2}, {}),
    "2 zero 2, recompute": (2, {"zero": 2, "dp_shard": 2}, {"recompute": 2}),
    "3 zero 3": (3, {"zero": 3, "dp_shard": 3}, {}),
    "3 zero 2, recompute": (3, {"zero": 2, "dp_shard": 3}, {"recompute": "full"}),
    "4 zero 1": (4, {"zero": 1, "dp_shard": 4}, {}),
    "4 hybrid, recompute": (
        4, {"zero": 3, "dp_shard": 2, "dp_replicate": 2}, {"recompute": "full"}
    ),
}  # fmt: skip
KINDS = ("resnet", "efficientnet", "vit")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("images") / "pictures")


def _sections(
    processes: int, parallel: dict[str, Any], memory: dict[str, Any], **model: Any
) -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": STEPS},
        "model": {**DROPS, **model},
        "parallel": parallel,
        "memory": memory,
        "cluster": {"devices": processes},
    }


def _steps(run_dir: RunDir) -> list[list[float]]:
    return [[line["loss"], line["grad_norm"]] for line in read_steps(run_dir.metrics)]


def _saved(run_dir: RunDir, step: int = STEPS) -> dict[str, Tensor]:
    path = run_dir.checkpoint(step)
    tensors: dict[str, Tensor] = {
        name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in read_shapes(path).items()
    }
    load_tensors(path, tensors, allow_extra=False)
    return tensors


def hold_to_one_process(kind: str, pictures: Path, folder: Path, layouts: Layouts) -> None:
    network = write_network(folder / "network", kind)
    # a step is 10 images: micro-batches of 4, 4 and 2, and a rank that has none
    alone = make_image_run(folder / "alone", pictures, network, _sections(1, {}, {}))
    run_on_ranks(train_here, 1, alone)
    expected, saved = _steps(alone), _saved(alone)
    judged = read_evaluations(alone.metrics)[-1]["eval"]
    assert len(expected) == STEPS and {"loss", "top1", "top5"} <= judged.keys()
    statistics = [name for name in saved if "running_" in name]
    assert bool(statistics) == (kind != "vit")
    for name, (processes, parallel, memory) in layouts.items():
        sections = _sections(processes, parallel, memory)
        run_dir = make_image_run(folder / name, pictures, network, sections)
        run_on_ranks(train_here, processes, run_dir)
        for found, wanted in zip(_steps(run_dir), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5), name
        others = _saved(run_dir)
        for each in statistics:
            torch.testing.assert_close(others[each], saved[each], rtol=1e-5, atol=1e-6, msg=each)
        counts = {int(t) for n, t in others.items() if n.endswith("num_batches_tracked")}
        assert counts <= {STEPS}, "recompute counts nothing twice"
        scored = read_evaluations(run_dir.metrics)[-1]["eval"]
        assert scored == pytest.approx(judged, rel=1e-5), name


def test_a_resnet_is_the_same_on_two_processes(pictures: Path, tmp_path: Path) -> None:
    hold_to_one_process("resnet", pictures, tmp_path, QUICK)


@pytest.mark.system
@pytest.mark.parametrize("kind", KINDS)
def test_a_network_is_the_same_in_every_layout(kind: str, pictures: Path, tmp_path: Path) -> None:
    hold_to_one_process(kind, pictures, tmp_path, {**QUICK, **MORE})


def _drains_at(run_dir: RunDir, attempt: int, step: int) -> str:
    calls = 0

    def drain_requested() -> bool:
        nonlocal calls
        calls += 1
        return calls >= step

    return train(
        run_dir, attempt, Hooks(generation=0, drain_requested=drain_requested, events=None)
    )


@pytest.mark.system
def test_a_drained_run_with_averages_goes_on_bit_for_bit(pictures: Path, tmp_path: Path) -> None:
    network = write_network(tmp_path / "network", "efficientnet")
    sections = _sections(2, {"zero": 3, "dp_shard": 2}, {})
    sections["optim"] = {"ema_decay": 0.5}
    whole = make_image_run(tmp_path / "whole", pictures, network, sections)
    parts = make_image_run(tmp_path / "parts", pictures, network, sections)
    run_on_ranks(train_here, 2, whole)
    assert run_on_ranks(_drains_at, 2, parts, 0, 2) == [DRAINED] * 2
    make_image_run(parts.path, pictures, network, sections, attempt=1)
    assert run_on_ranks(train_here, 2, parts, 1) == [FINISHED] * 2
    assert _steps(parts) == _steps(whole)
    assert read_evaluations(parts.metrics) == read_evaluations(whole.metrics)
    saved, expected = _saved(parts), _saved(whole)
    assert saved.keys() == expected.keys() and any("average.buffer" in name for name in saved)
    for name, tensor in expected.items():
        assert torch.equal(saved[name], tensor), name


@pytest.mark.system
def test_a_run_goes_on_with_three_processes(pictures: Path, tmp_path: Path) -> None:
    network = write_network(tmp_path / "network", "resnet")
    alone = make_image_run(tmp_path / "alone", pictures, network, _sections(1, {}, {}))
    run_on_ranks(train_here, 1, alone)
    two = _sections(2, {"zero": 3, "dp_shard": 2}, {})
    parts = make_image_run(tmp_path / "parts", pictures, network, two)
    assert run_on_ranks(_drains_at, 2, parts, 0, 2) == [DRAINED] * 2
    three = _sections(3, {"zero": 2, "dp_shard": 3}, {"recompute": "full"})
    make_image_run(parts.path, pictures, network, three, attempt=1)
    run_on_ranks(train_here, 3, parts, 1)
    for found, wanted in zip(_steps(parts), _steps(alone), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
