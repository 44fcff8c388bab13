"""Models of torch's own tests, in each layout: as by DistributedDataParallel and one process."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardyard
from shardyard.errors import ShardyardError
from tests.distributed.ranks import run_on_ranks
from tests.library.torch_cases import CASES, Case

STEPS = 3
LAYOUTS = {
    2: ("dp_replicate=2,dp_shard=1", "zero=1", "zero=2", "zero=3"),
    4: (
        "dp_replicate=4,dp_shard=1", "zero=1", "zero=2", "zero=3",
        "dp_replicate=2,dp_shard=2,zero=1", "dp_replicate=2,dp_shard=2,zero=3",
    ),
}  # fmt: skip
Trained = tuple[list[float], dict[str, Tensor]]
"""Losses, and parameters and buffers."""


def _built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make()


def _inputs(case: Case, step: int, rank: int) -> Any:
    torch.manual_seed(100 * step + rank + 1)
    return case.inputs(step, rank)


def _trained(case: Case, model: nn.Module, optimizer: Any, called: Any) -> Trained:
    """By a loop as scripts have it."""
    losses = []
    for step in range(STEPS):
        inputs = _inputs(case, step, dist.get_rank())
        loss: Any = case.loss(called(*inputs), inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, _whole(model)


def _whole(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = whole.detach().clone()
    return found


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.SGD(trained, lr=0.01, momentum=0.9)


def _by_ddp(case: Case) -> Trained:
    model = _built(case)
    called = DistributedDataParallel(model, find_unused_parameters=True)
    return _trained(case, model, _optimizer(model), called)


def _by_one_process(case: Case) -> dict[str, Tensor]:
    """All ranks' samples at once."""
    ranks = dist.get_world_size()
    model = _built(case)
    optimizer = _optimizer(model)
    for step in range(STEPS):
        of_ranks = zip(*(_inputs(case, step, rank) for rank in range(ranks)), strict=True)
        inputs = tuple(torch.cat(each) for each in of_ranks)
        loss: Any = case.loss(model(*inputs), inputs) / (1 if case.is_mean else ranks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return _whole(model)


def _by_wrap(case: Case, layout: str) -> Trained:
    os.environ["SHARDYARD_PARALLEL"] = layout
    model = _built(case)
    optimizer = _optimizer(model)
    shardyard.wrap(model, optimizer)
    return _trained(case, model, optimizer, model)


def _differences(ours: Trained, theirs: Trained, union: dict[str, Tensor] | None) -> list[str]:
    (losses, weights), (wanted_losses, wanted) = ours, theirs
    found = []
    if losses != pytest.approx(wanted_losses, rel=1e-6):
        found.append(f"losses {losses} for {wanted_losses}")
    if weights.keys() != wanted.keys():
        found.append(f"{weights.keys()} for {wanted.keys()}")
    for name, each in wanted.items():
        if dist.get_rank() and "running" in name:
            continue  # after a step it is rank 0's; DistributedDataParallel waits for the next pass
        if (off := _off(weights[name], each)) > 1e-6:
            found.append(f"{name} is {off:.1e} off DistributedDataParallel's")
        if union is not None and (off := _off(weights[name], union[name])) > 1e-6:
            found.append(f"{name} is {off:.1e} off one process's")
    return found


def _off(ours: Tensor, theirs: Tensor) -> float:
    """Relative difference; of zeros the difference itself."""
    off, size = (ours - theirs).double().norm(), theirs.double().norm()
    return float(off / size if size else off)


def _outcomes(layouts: Sequence[str]) -> dict[tuple[str, str], Any]:
    """By case and layout: what differs, or what wrap() says."""
    found: dict[tuple[str, str], Any] = {}
    for name, case in CASES.items():
        theirs = None if case.rejected else _by_ddp(case)
        union = _by_one_process(case) if case.has_union and not case.rejected else None
        for layout in layouts:
            try:
                ours = _by_wrap(case, layout)
            except ShardyardError as error:
                found[name, layout] = str(error)
            else:
                found[name, layout] = (
                    ["was trained"] if theirs is None else _differences(ours, theirs, union)
                )
    return found


def _check(found: dict[tuple[str, str], Any], name: str, layouts: Sequence[str]) -> None:
    case = CASES[name]
    for layout in layouts:
        wanted = case.rejected or ("dp_shard=1" not in layout and case.rejected_sharded)
        outcome = found[name, layout]
        if wanted:
            assert wanted in outcome, layout
        else:
            assert outcome == [], layout


@pytest.fixture(scope="module")
def on_two_ranks() -> Any:
    return run_on_ranks(_outcomes, 2, LAYOUTS[2])


@pytest.fixture(scope="module")
def on_four_ranks() -> Any:
    return run_on_ranks(_outcomes, 4, LAYOUTS[4], timeout_s=600)


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_a_model_of_torchs_tests_trains_the_same_on_two_ranks(name: str, on_two_ranks: Any) -> None:
    for found in on_two_ranks:
        _check(found, name, LAYOUTS[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_of_torchs_tests_trains_the_same_on_four_ranks(
    name: str, on_four_ranks: Any
) -> None:
    for found in on_four_ranks:
        _check(found, name, LAYOUTS[4])
