"""The steps of a script, started again: exactly what an unbroken loop would have done."""

import logging
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardyard
from shardyard.library.generators import give_back_to_rank, once, states_of
from tests.distributed.ranks import run_on_ranks

CPU = torch.device("cpu")


def _drawn() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def test_generators_draw_again_what_they_would_have_drawn() -> None:
    states = states_of(CPU)
    wanted = _drawn()
    _drawn()
    give_back_to_rank(once([states, states]), CPU, rank=1)
    assert _drawn() == wanted


def test_a_rank_that_did_not_exist_draws_numbers_of_its_own() -> None:
    torch.manual_seed(1)
    first = states_of(CPU)
    torch.manual_seed(2)
    saved = once([first, states_of(CPU)])
    found = []
    for rank in range(4):
        give_back_to_rank(saved, CPU, rank=rank)
        found.append(tuple(_drawn()))
    assert len({drawn[0] for drawn in found}) == 4


class Net(nn.Module):
    """With dropout, and a module that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.nobody = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + nn.functional.dropout(torch.tanh(block(x)), 0.3)
        return x


def _trained(
    layout: str, folder: str, total: int, lr: float, killed_after: int | None
) -> tuple[dict[str, Tensor], list[str]]:
    os.environ["SHARDYARD_PARALLEL"] = layout
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer = shardyard.wrap(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    said: list[str] = []
    logger = logging.getLogger("shardyard")
    logger.addFilter(lambda record: said.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    for step in shardyard.steps(total, folder, model, optimizer, schedule, every=2):
        x = torch.randn(4, 8) + sum(_drawn())
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if killed_after == step + 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    weights = model.state_dict().items()
    return {n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in weights}, said


@pytest.mark.heavy
@pytest.mark.parametrize("layout", ["", "zero=3"])
def test_a_killed_script_ends_with_every_bit_of_an_unbroken_one(
    layout: str, tmp_path: Path
) -> None:
    unbroken, _ = run_on_ranks(_trained, 2, layout, str(tmp_path / "a"), 5, 0.1, None)[0]
    folder = str(tmp_path / "b")
    with pytest.raises(RuntimeError, match=r"ended without an answer|rank 0 failed"):
        run_on_ranks(_trained, 2, layout, folder, 5, 0.1, 3)
    weights, _ = run_on_ranks(_trained, 2, layout, folder, 5, 0.1, None)[0]
    assert {n: torch.equal(weights[n], each) for n, each in unbroken.items()} == dict.fromkeys(
        unbroken, True
    )
    _, said = run_on_ranks(_trained, 2, layout, folder, 5, 0.2, None)[0]
    assert "step-00000005 holds step 5. Nothing is left to train of steps(5, ...)." in said[0]
    assert "in the checkpoint are used: lr=0.1 (your script: 0.2)." in said[0]
    _, said = run_on_ranks(_trained, 1, "", folder, 6, 0.1, None)[0]
    assert "was to end at step 5; this one ends at 6" in said[0]
    assert "written by 2 ranks, these are 1. Weights, optimizer and step continue" in said[1]
