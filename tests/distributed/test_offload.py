"""Offloaded activations in every layout: bit for bit the gradients of the same layout without."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardyard.parallel.gradients import local_part
from shardyard.parallel.offload import ActivationOffload
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run

LAYOUTS: list[tuple[int, dict[str, Any], Any, str]] = [
    # processes, parallel, recompute, preset
    (2, {"zero": 3, "dp_shard": 2}, "none", "llama-tiny"),
    (2, {"zero": 1, "dp_shard": 2}, "full", "llama-tiny"),
    (2, {"zero": 3, "dp_shard": 2}, "selective", "llama-tiny"),
    (2, {"zero": 2, "dp_shard": 2}, ["mlp"], "llama-tiny"),
    (2, {"tp": 2}, "none", "llama-tiny"),
    (2, {"tp": 2}, "selective", "llama-tiny"),
    (2, {"cp": 2}, "none", "llama-tiny"),
    (2, {"pp": 2}, "none", "llama-tiny-deep"),
    (2, {"pp": 2, "schedule": "zero-bubble", "zero": 2}, "none", "llama-tiny-deep"),
    (2, {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}, "full", "llama-tiny-deep"),
    (2, {"ep": 2}, "none", "mixtral-tiny"),
    (4, {"tp": 2, "dp_shard": 2}, "full", "llama-tiny"),
    (4, {"pp": 2, "dp_shard": 2}, "selective", "llama-tiny-deep"),
]


def _sections(
    processes: int, parallel: dict[str, Any], recompute: Any, preset: str, offload: str
) -> dict[str, dict[str, Any]]:
    return {
        "model": {"preset": preset, "dropout": 0.1},
        "data": {"seq_len": 128},
        "optim": {"global_batch": 8, "micro_batch": 2},
        "parallel": parallel,
        "memory": {"recompute": recompute, "offload": offload},
        "cluster": {"devices": processes},
    }


def _gradients(run_dir: RunDir) -> tuple[dict[str, Tensor], int]:
    """This rank's part of them, and the bytes that were moved."""
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run_dir, 0, hooks, local_rank=0)
    training.stepper.accumulate(next(training.loader))
    gradients = {}
    for name, param in training.task.model.named_parameters():
        assert param.grad is not None, name
        gradients[name] = local_part(param.grad).clone()
    offloads = [each for each in gc.get_objects() if type(each) is ActivationOffload]
    training.close()
    return gradients, sum(each.moved_bytes for each in offloads)


def _differing(pairs: list[tuple[RunDir, RunDir]]) -> list[tuple[list[str], int]]:
    """For each pair, the parameters whose gradients differ, and the bytes that were moved."""
    found = []
    for plain, offloaded in pairs:
        expected, moved_before = _gradients(plain)
        gradients, moved = _gradients(offloaded)
        assert gradients.keys() == expected.keys()
        names = [name for name in expected if not torch.equal(gradients[name], expected[name])]
        found.append((names, moved - moved_before))
        gc.collect()
    return found


@pytest.mark.parametrize(
    ("processes", "layouts"),
    [
        (2, LAYOUTS[:1]),
        pytest.param(2, LAYOUTS[1:11], marks=pytest.mark.slow),
        pytest.param(4, LAYOUTS[11:], marks=pytest.mark.system),
    ],
    ids=["one", "more", "four processes"],
)
def test_gradients_are_those_without_offload(
    corpus: Corpus,
    tmp_path: Path,
    processes: int,
    layouts: list[tuple[int, dict[str, Any], Any, str]],
) -> None:
    assert {layout[0] for layout in layouts} == {processes}
    pairs = []
    for number, layout in enumerate(layouts):
        plain, offloaded = (
            make_run(tmp_path / f"{number}-{offload}", corpus, _sections(*layout, offload))
            for offload in ("none", "activations")
        )
        pairs.append((plain, offloaded))
    by_rank = run_on_ranks(_differing, processes, pairs)
    for number, layout in enumerate(layouts):
        for names, moved in (found[number] for found in by_rank):
            assert not names, layout
            assert moved >= 2**16, layout
