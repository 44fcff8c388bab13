"""Each expert of a block has a norm, and so a rate, of its own, however the experts are split."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardyard.config.schema.recipe import Optim
from shardyard.parallel.gradients import ParamNorms
from shardyard.train.optim import ShardOptimizer
from tests.distributed.ranks import run_on_ranks
from tests.train.lamb import Lamb
from tests.train.lars import Lars


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.experts: Any = nn.Module()
        scale = torch.tensor([1.0, 0.1, 3.0])[:, None, None]  # unlike norms
        self.experts.up = nn.Parameter(scale * torch.randn(3, 6, 5, generator=draw))
        self.router = nn.Parameter(torch.randn(3, 5, generator=draw))
        self.bias = nn.Parameter(torch.randn(5, generator=draw))


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_a_step_of_experts_is_that_of_a_matrix_for_each_by_hand(name: str) -> None:
    block = _Block()
    alone = [*block.experts.up.detach().clone().unbind(), block.router.detach().clone(),
             block.bias.detach().clone()]  # fmt: skip
    optim = Optim.model_validate(
        {"name": name, "lr": 0.1, "weight_decay": 0.1, "betas": [0.9, 0.99], "momentum": 0.9}
    )
    by_hand: Any = Lamb(alone, lr=0.1, decay=0.1, betas=(0.9, 0.99), eps=optim.eps)
    if name == "lars":
        trust = optim.trust_coefficient
        by_hand = Lars(alone, lr=0.1, decay=0.1, momentum=0.9, trust=trust)
    optimizer = ShardOptimizer(block, optim)
    for step in range(3):
        grads = [torch.randn(x.shape, generator=torch.Generator().manual_seed(step)) for x in alone]
        for x, grad in zip(alone, grads, strict=True):
            x.grad = grad.clone()
        block.experts.up.grad = torch.stack(grads[:3])
        block.router.grad, block.bias.grad = grads[3].clone(), grads[4].clone()
        optimizer.step(lr=0.1, divisor=torch.ones(()), skip=torch.zeros(()))
        by_hand.step()
    found = [*block.experts.up.detach().unbind(), block.router.detach(), block.bias.detach()]
    for mine, theirs in zip(found, alone, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def _norms(dim: int) -> list[tuple[Tensor, ...]]:
    mesh = init_device_mesh("cpu", (2,))
    block = _Block()
    whole = block.experts.up.detach()
    up = distribute_tensor(whole, mesh, [Shard(dim)])
    params = {"mlp.experts.up": up, "mlp.router": block.router.detach()}
    norms = ParamNorms(params)
    found = norms.of(list(params), [up.to_local(), params["mlp.router"]])
    factors = norms.by_name(list(params), found[0])
    assert factors[0].shape == (len(up.to_local()), 1, 1)
    return [tuple(each.flatten() for each in factors)]


@pytest.mark.heavy
@pytest.mark.parametrize("dim", [0, 1])
def test_norms_of_split_experts_are_those_of_whole_ones(dim: int) -> None:
    by_rank = [found[0] for found in run_on_ranks(_norms, 2, dim)]
    block = _Block()
    expected = block.experts.up.detach().flatten(1).double().norm(dim=1)
    of_experts = [found[0] for found in by_rank]
    torch.testing.assert_close(torch.cat(of_experts) if dim == 0 else of_experts[1], expected)
    torch.testing.assert_close(by_rank[1][1][0], block.router.detach().double().norm())
