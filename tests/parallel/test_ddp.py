"""Gradients of what all ranks hold whole: one sum a step, bucket by bucket, and no copy on one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Recipe
from shardyard.parallel import ddp
from shardyard.parallel.fsdp import GradientSync, backward_all
from shardyard.parallel.mesh import build_mesh
from tests.distributed.ranks import run_on_ranks

WIDTH = 16


class Model(nn.Module):
    """Of five parameters, one used twice and one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.frozen(self.twice(torch.relu(self.twice(self.first(x)))))
        return y.square().sum()


def _samples() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, WIDTH) for _ in range(4)]


def _model() -> Model:
    torch.manual_seed(0)
    return Model()


def _gradients(bucket_bytes: int) -> tuple[dict[str, Any], list[bool], int]:
    """Of two micro-batches a rank; whether ranks waited in each sum; storages of the gradients."""
    awaited: list[bool] = []
    reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        awaited.append(not async_op)
        return reduce(tensor, group=group, async_op=async_op)

    ddp.BUCKET_BYTES = bucket_bytes
    ddp.dist.all_reduce = counted  # type: ignore[attr-defined]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layout = Layout(dp_replicate=ranks, dp_shard=1, cp=1, tp=1, pp=1, ep=1, zero=1)
    model = _model()
    sync = GradientSync(model, build_mesh(layout, "cpu"))
    mine = _samples()[rank::ranks]
    for _ in range(2):  # a step leaves nothing behind
        model.zero_grad()
        awaited.clear()
        backward_all((model(x) for x in mine), sync, number=len(mine))
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    storages = {
        p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None
    }
    return grads, awaited, len(storages)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("ranks", "bucket_bytes", "sums", "storages"),
    [
        (1, 2**20, 0, 3),
        (2, 2**20, 1, 1),
        (2, 4 * WIDTH * WIDTH, 3, 3),  # a matrix each, and the bias
    ],
)
def test_gradients_are_those_of_all_micro_batches(
    ranks: int, bucket_bytes: int, sums: int, storages: int
) -> None:
    model = _model()
    for x in _samples():
        model(x).backward()
    for grads, awaited, found in run_on_ranks(_gradients, ranks, bucket_bytes):
        assert len(awaited) == sums
        # whoever waits for a slower rank does so where its notes see it: in the last one
        assert awaited == [False] * (sums - 1) + [True] * bool(sums)
        assert found == storages
        for name, param in model.named_parameters():
            if param.grad is None:
                assert grads[name] is None, name
            else:
                torch.testing.assert_close(grads[name], param.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "whole"),
    [
        ({}, True),
        ({"precision": {"compute": "bf16"}}, False),
        ({"precision": {"reduce": "bf16"}}, False),
        ({"precision": {"reduce": "exact"}}, False),
        ({"precision": {"output": "bf16"}}, False),
        ({"memory": {"offload": "params"}}, False),
        ({"memory": {"offload": "optimizer"}}, True),
    ],
)
def test_what_is_split_or_changes_its_format_is_sharded(
    changed: dict[str, dict[str, str]], whole: bool
) -> None:
    fp32 = {"compute": "fp32", "reduce": "fp32", "output": "fp32"}
    sections = {**changed, "precision": {**fp32, **changed.get("precision", {})}}
    recipe = Recipe.model_validate(sections)
    mesh: Any = SimpleNamespace(layout=SimpleNamespace(dp_replicate=2, world_size=2))
    assert ddp.is_replicated(_model(), mesh, recipe) == whole
    assert not ddp.is_replicated(_model().bfloat16(), mesh, recipe)
    mesh.layout.world_size = 4
    assert not ddp.is_replicated(_model(), mesh, recipe)
