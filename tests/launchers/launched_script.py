"""A training script of a user's own, as launchers run it, and what plain torch computes of it."""

import pytest
import torch
from torch import nn

from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir

STEPS = 30
WAIT_AT_STEP = 8
"""Step after which a first attempt waits at each step, so that a test can stop it."""
SCRIPT = f"""
import sys, time
import torch, torch.distributed as dist
from torch import nn
import shardyard

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = shardyard.wrap(model, optimizer)
first, rank, ranks = None, dist.get_rank(), dist.get_world_size()
with shardyard.run("mine", {{"lr": 0.1}}) as run:
    for step in shardyard.steps({STEPS}, run.checkpoints, model, optimizer, every=5):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, generator=draw)[rank::ranks]
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() / ranks
        dist.all_reduce(loss)
        run.log(step=step + 1, loss=loss)
        first = step if first is None else first
        if first == 0 and step + 1 >= {WAIT_AT_STEP}:
            time.sleep(float(sys.argv[1]))
print("the script is done", flush=True)
dist.destroy_process_group()
"""


def plain_losses() -> list[float]:
    torch.manual_seed(0)
    model, found = nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def assert_losses_are_those_of_plain_torch(run: RunDir) -> None:
    """Compare all steps of a finished run, each as it was computed last."""
    found = [line["loss"] for line in read_steps(run.metrics)]
    assert found == pytest.approx(plain_losses(), rel=1e-5)
