"""A wrapped script beside torch's DistributedDataParallel, in each layout: losses and norms."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import shardyard
from tests.distributed.ranks import run_on_ranks

pytestmark = pytest.mark.heavy

STEPS, MICRO_BATCHES = 20, 2
LAYOUTS = ("", "zero=1", "zero=2", "zero=3")


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def trained(model: Any, optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, in a loop as scripts have it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
    found = []
    for step in range(STEPS):
        total = torch.zeros(())
        for micro in range(MICRO_BATCHES):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            first = torch.randint(0, 61, (2, 1), generator=generator)
            tokens = (first + torch.arange(16)) % 61  # there is something to learn
            loss = model(input_ids=tokens, labels=tokens).loss / MICRO_BATCHES
            loss.backward()
            total += loss.detach() / ranks
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        found.append((float(total), float(norm)))
    return found


def both() -> dict[str, list[tuple[float, float]]]:
    """On each rank: torch's own, and wrapped."""
    plain = llama()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    found = {"plain": trained(DistributedDataParallel(plain), optimizer)}
    for words in LAYOUTS:
        os.environ["SHARDYARD_PARALLEL"] = words
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        again, same = shardyard.wrap(model, optimizer)
        assert again is model and same is optimizer
        found[words] = trained(model, optimizer)
    return found


def test_losses_and_norms_are_those_of_torchs_own_in_every_layout() -> None:
    """Norms tell a gradient that is a multiple of what it should be, which AdamW hides."""
    for found in run_on_ranks(both, 2):
        plain = found.pop("plain")
        assert plain[-1][0] < plain[0][0] - 0.5, "it learns"
        assert set(found) == set(LAYOUTS)
        for words, steps in found.items():
            for (loss, norm), (wanted, wanted_norm) in zip(steps, plain, strict=True):
                assert loss == pytest.approx(wanted, rel=1e-6), words
                assert norm == pytest.approx(wanted_norm, rel=1e-5), words
