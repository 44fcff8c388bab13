"""A loop of accelerate, and the same one with two lines of ours: weights, losses and metrics."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardyard
from tests.distributed.ranks import run_on_ranks

pytestmark = pytest.mark.heavy


def parts() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator)
    samples = TensorDataset(x, x[:, :3].argmax(dim=1))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return model, optimizer, samples, schedule


def by_accelerate() -> tuple[dict[str, Tensor], float]:
    model, optimizer, samples, schedule = parts()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
    )
    loader = DataLoader(samples, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _epoch in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    schedule.step()
    right = [(model(x).argmax(dim=1) == y) for x, y in loader]
    share = accelerator.gather_for_metrics(torch.cat(right)).float().mean()
    return accelerator.unwrap_model(model).state_dict(), float(share)


def by_wrap() -> tuple[dict[str, Tensor], float]:
    model, optimizer, samples, schedule = parts()
    model, optimizer = shardyard.wrap(model, optimizer)
    # accelerate deals whole batches in turn
    batches = [torch.arange(first, first + 4) for first in range(0, 64, 4)]
    mine = batches[dist.get_rank() :: dist.get_world_size()]
    loader = DataLoader(samples, batch_sampler=[batch.tolist() for batch in mine])
    for _epoch in range(2):
        for number, (x, y) in enumerate(loader):
            loss: Any = nn.functional.cross_entropy(model(x), y) / 2
            loss.backward()
            if number % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    with torch.no_grad():
        right = torch.cat([(model(x).argmax(dim=1) == y) for x, y in loader]).float()
    found = [torch.empty_like(right) for _ in range(dist.get_world_size())]
    dist.all_gather(found, right)
    return model.state_dict(), float(torch.cat(found).mean())


def both() -> list[tuple[dict[str, Tensor], float]]:
    os.environ |= {"SHARDYARD_PARALLEL": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return [by_accelerate(), by_wrap()]


def test_a_loop_of_accelerate_trains_the_same() -> None:
    for (theirs, share), (ours, own_share) in run_on_ranks(both, 2):
        assert theirs.keys() == ours.keys()
        assert all(torch.allclose(theirs[name], ours[name], atol=1e-6) for name in ours)
        assert share == own_share
