"""One rank in copies of its weights beside the same sharded over itself, and as a run."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardyard.config.layout import Layout
from shardyard.data.loader import MicroBatch
from shardyard.families.presets import PRESETS
from shardyard.models.build import fill_weights
from shardyard.parallel.low_precision import low_precision_copies_of
from shardyard.parallel.mesh import build_mesh
from shardyard.rundir.layout import RunDir
from shardyard.train.build import build_optimizer, build_sharded
from shardyard.train.hooks import Hooks
from shardyard.train.loop import FINISHED
from shardyard.train.setup import set_up
from shardyard.train.step import Stepper
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here
from tests.planner.recipes import resolved_recipe

pytestmark = pytest.mark.heavy

ONE = Layout(dp_replicate=1, dp_shard=1, zero=3)
SHAPE = dataclasses.replace(PRESETS["llama-tiny"].shape, vocab_size=300)
LENGTH = 16
OPTIM = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1, "global_batch": 4, "micro_batch": 2}


def _batch(number: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(SHAPE.vocab_size, (2, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(2, -1).contiguous()
    fields = {"tokens": ids, "targets": ids.roll(-1, 1), "positions": positions}
    return MicroBatch(fields=fields, samples_B=torch.arange(2), work=ids.numel())


def _train(
    sections: dict[str, Any], *, steps: int, may_copy: bool
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Loss and norm of each step, and all that a checkpoint would hold, whole."""
    recipe = resolved_recipe(
        model={"preset": "llama-tiny", **sections.get("model", {})},
        data={"seq_len": LENGTH},
        precision={"compute": "bf16", "reduce": "fp32", **sections.get("precision", {})},
        memory={"recompute": "none", "loss_chunk": "none", **sections.get("memory", {})},
        optim=OPTIM,
    )
    device = torch.device("cpu")
    mesh = build_mesh(ONE, "cpu")
    task = build_sharded(recipe, SHAPE, mesh, device=device, may_copy=may_copy)
    assert (low_precision_copies_of(task.model) is not None) == may_copy
    optimizer = build_optimizer(recipe, task, mesh, device=device)
    fill_weights(task.model, folder=None, seed=0)
    stepper = Stepper(task, optimizer, mesh, device=device, grad_clip=1.0)
    found = []
    for step in range(steps):
        result = stepper.run([_batch(2 * step), _batch(2 * step + 1)], lr=1e-3, drain=False).read()
        found.append((result.loss, result.grad_norm))
    held: dict[str, Any] = stepper.state_tensors()
    return found, {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).clone()
        for name, each in held.items()
    }


CHANGED: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective": {"memory": {"recompute": "selective"}},
    "chunks": {"memory": {"loss_chunk": 8}},
    "fp8": {"precision": {"compute": "fp8"}, "memory": {"recompute": "selective"}},
}


def _both_ways() -> list[Any]:
    return [
        [
            _train(sections, steps=20 if name == "plain" else 4, may_copy=may_copy)
            for may_copy in (True, False)
        ]
        for name, sections in CHANGED.items()
    ]


def test_twenty_steps_are_those_of_one_that_shards_over_itself() -> None:
    pairs = run_on_ranks(_both_ways, 1)[0]
    for name, ((found, tensors), (expected, others)) in zip(CHANGED, pairs, strict=True):
        # before weights move apart, a forward pass has the same numbers, also those cast to fp8
        assert found[0][0] == expected[0][0], name
        # fp8 rounds what is near to either side: later steps tell of it
        most = 1e-2 if name == "fp8" else 3e-3
        for step, (mine, its) in enumerate(zip(found, expected, strict=True)):
            assert mine[0] == pytest.approx(its[0], rel=2e-4), step
            assert mine[1] == pytest.approx(its[1], rel=1e-2), step
        assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {
            n: (t.shape, t.dtype) for n, t in others.items()
        }
        for key in (key for key in tensors if key.startswith("model.")):
            apart = (tensors[key] - others[key]).norm() / others[key].norm()
            assert apart < most, (name, key, apart)  # Adam moves by 1e-3 a step, and std is 0.02


def _compiled(_: None) -> tuple[list[Any], int, dict[str, Any]]:
    from functools import partialmethod

    from torch._dynamo.utils import counters

    eager = partialmethod(nn.Module.compile, backend="aot_eager")
    before, nn.Module.compile = nn.Module.compile, eager  # type: ignore[method-assign,assignment]
    try:
        found = [
            _train({"model": {"compile": on}, **sections}, steps=3, may_copy=True)
            for sections in (CHANGED["plain"], CHANGED["selective"], CHANGED["fp8"])
            for on in (True, False)
        ]
    finally:
        nn.Module.compile = before  # type: ignore[method-assign]
    return found, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.slow
def test_compiled_blocks_are_whole_graphs_and_take_the_same_steps() -> None:
    found, graphs, breaks = run_on_ranks(_compiled, 1, None)[0]
    assert graphs == 3 and not breaks  # one for all blocks, of each run that compiles
    for compiled, plain in (found[:2], found[2:4], found[4:]):
        assert compiled[0] == plain[0]
        assert all(compiled[1][name].equal(each) for name, each in plain[1].items())


# --- as a run ------------------------------------------------------------------------------------


def _held(run_dir: RunDir, attempt: int) -> tuple[bool, dict[str, torch.Tensor]]:
    """Whether it computes with copies, and what was loaded, whole."""
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run_dir, attempt, hooks, local_rank=torch.distributed.get_rank())
    tensors: dict[str, Any] = training.tensors
    whole = {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).clone()
        for name, each in tensors.items()
    }
    copies = low_precision_copies_of(training.task.model) is not None
    training.close()
    return copies, whole


def _sections(processes: int, steps: int) -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": steps},
        "optim": {"ema_decay": 0.9, "decay_steps": 9},
        "precision": {"compute": "bf16", "reduce": "fp32"},
        "checkpoint": {"every": 2},
        "cluster": {"devices": processes},
    }


def test_a_checkpoint_of_one_is_that_of_two_and_back_and_a_resume_is_bit_equal(
    corpus: Corpus, tmp_path: Path
) -> None:
    whole = make_run(tmp_path / "whole", corpus, _sections(1, 4))
    assert run_on_ranks(train_here, 1, whole) == [FINISHED]
    parts = make_run(tmp_path / "parts", corpus, _sections(1, 2))
    assert run_on_ranks(train_here, 1, parts) == [FINISHED]
    make_run(parts.path, corpus, _sections(2, 4), attempt=1)
    on_two = run_on_ranks(_held, 2, parts, 1)
    make_run(parts.path, corpus, _sections(1, 4), attempt=2)
    copies, on_one = run_on_ranks(_held, 1, parts, 2)[0]
    assert copies and not any(copies_of_two for copies_of_two, _ in on_two)
    for _, found in on_two:
        assert found.keys() == on_one.keys()
        assert all(found[name].equal(each) for name, each in on_one.items())
    assert run_on_ranks(train_here, 1, parts, 2) == [FINISHED]
    names = ("rank-00000.safetensors",)
    for name in names:
        files = [(run.checkpoint(4) / name).read_bytes() for run in (whole, parts)]
        assert files[0] == files[1]
    # and from two to one
    other = make_run(tmp_path / "other", corpus, _sections(2, 2))
    assert run_on_ranks(train_here, 2, other) == [FINISHED] * 2
    make_run(other.path, corpus, _sections(2, 4), attempt=1)
    (_, of_two), _ = run_on_ranks(_held, 2, other, 1)
    make_run(other.path, corpus, _sections(1, 4), attempt=2)
    copies, found = run_on_ranks(_held, 1, other, 2)[0]
    assert copies
    assert all(found[name].equal(each) for name, each in of_two.items())
