"""What a script may not do where ranks share parameters: each is rejected, with what to write."""

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import shardyard
from shardyard.errors import RecipeError, RequestError
from shardyard.library.fully_sharded import check_shardable
from tests.distributed.ranks import run_on_ranks


def _sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def _hooked() -> nn.Module:
    model = nn.Linear(4, 4)
    weight: Any = model.weight
    weight.register_hook(lambda grad: grad)
    return model


def _number() -> nn.Module:
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model


def _channels_last() -> nn.Module:
    model = nn.Conv2d(3, 4, 3)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


MODELS: dict[str, Callable[[], nn.Module]] = {
    "weight: has a hook, which would never be called": _hooked,
    "scale: is a single number": _number,
    "weight: is empty, of shape (0, 4)": lambda: nn.Linear(4, 0),
    "weight: is not contiguous": _channels_last,
    "weight: is of torch.complex64": lambda: nn.Linear(4, 4, dtype=torch.complex64),
    "0.weight is torch.float32, 1.weight is torch.float64": lambda: nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).double()
    ),
    "0: makes sparse gradients": lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True)),
    "1: is a batch normalisation": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("words", MODELS)
def test_parameters_that_cannot_be_shared_are_named_with_the_way_out(words: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(words)) as raised:
        check_shardable(MODELS[words](), [], ranks=2)
    assert "SHARDYARD_PARALLEL=dp_replicate=2,dp_shard=1" in str(raised.value)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "LBFGS: keeps parameters in _params": lambda model: torch.optim.LBFGS(model.parameters()),
    "AdamW: has state already": _stepped,
    "SGD: fused=True has no rule": lambda model: _sgd(model, fused=True),
}


@pytest.mark.parametrize("words", OPTIMIZERS)
def test_optimizers_that_would_step_something_else_are_named(words: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(RecipeError, match=re.escape(words)):
        check_shardable(model, [OPTIMIZERS[words](model)], ranks=2)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def save_pretrained(self, folder: str) -> None:
        raise AssertionError(folder)


def _refused(folder: str) -> list[str]:
    os.environ["SHARDYARD_PARALLEL"] = "dp_shard=2"
    torch.manual_seed(dist.get_rank())  # rank 0 is the one that counts
    model: Any = _Net()
    torch.manual_seed(0)
    first = _Net().state_dict()
    optimizer = _sgd(model)
    model, optimizer = shardyard.wrap(model, optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole: Any = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        assert all(torch.equal(whole[name], each) for name, each in first.items())
    kept = copy.deepcopy(model.state_dict())
    with model.no_sync():
        model.module(torch.ones(1, 4)).sum().backward()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    model.load_state_dict(kept)
    said = []
    for line in (
        lambda: torch.save(model.state_dict(), f"{folder}/model.pt"),
        lambda: torch.save({"model": model.state_dict()}, f"{folder}/model.pt"),
        lambda: copy.deepcopy(model),
        lambda: model.save_pretrained(folder),
        lambda: model.layers[0].weight.register_hook(print),
    ):
        with pytest.raises(RequestError) as raised:
            line()
        said.append(str(raised.value))
    return said


@pytest.mark.heavy
def test_what_would_use_one_ranks_share_says_what_to_write(tmp_path: Path) -> None:
    for saved, in_dict, copied, folder, hook in run_on_ranks(_refused, 2, str(tmp_path)):
        assert "holds one rank's shard of each parameter" in saved
        assert saved == in_dict and "full_state_dict=True" in saved
        assert "a copy of this _Net would hold one rank's shard" in copied
        assert "shardyard.export(model, folder)" in folder
        assert "a hook of layers.0.weight would never be called" in hook
