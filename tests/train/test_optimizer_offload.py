"""Optimizer state in host memory: the same updates, bit for bit, part by part."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardyard.config.schema.recipe import Optim
from shardyard.train.optim import ShardOptimizer
from shardyard.train.optimizer_offload import StatesOnHost

CPU = torch.device("cpu")
ADAMW: dict[str, Any] = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}
SGD: dict[str, Any] = {"name": "sgd", "lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}
LAMB: dict[str, Any] = {"name": "lamb", "lr": 1e-2, "weight_decay": 0.1}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 4, bias=False))


def _step(optimizer: ShardOptimizer, model: nn.Module, number: int) -> None:
    draw = torch.Generator().manual_seed(number)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=draw)
    one = torch.ones(())
    optimizer.step(lr=1e-2, divisor=2 * one, skip=torch.tensor(float(number == 2)))


@pytest.mark.parametrize("states", ["fp32", "bf16"])
@pytest.mark.parametrize("given", [ADAMW, SGD, LAMB], ids=lambda given: given["name"])
@pytest.mark.parametrize("moved_elements", [1, 150, 10**6])
def test_updates_are_those_without_offload(
    given: dict[str, Any], states: str, moved_elements: int
) -> None:
    models = [_model() for _ in range(2)]
    optim, on_host = Optim.model_validate(given), StatesOnHost(CPU)
    plain = ShardOptimizer(models[0], optim, states=states)
    offloaded = ShardOptimizer(
        models[1], optim, states=states, on_host=on_host, moved_elements=moved_elements
    )
    for number in range(4):
        _step(plain, models[0], number)
        _step(offloaded, models[1], number)
    offloaded.synchronize()
    expected, found = plain.tensors(), offloaded.tensors()
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    elements = sum(param.numel() for param in models[0].parameters())
    averages = 1 if given["name"] == "sgd" else 2
    assert on_host.moved_bytes == 4 * averages * elements * (4 if states == "fp32" else 2)


@pytest.mark.parametrize("given", [ADAMW, SGD], ids=lambda given: given["name"])
@pytest.mark.parametrize("moved_elements", [1, 150])
def test_weights_come_up_and_go_back_with_their_state(
    given: dict[str, Any], moved_elements: int
) -> None:
    models = [_model() for _ in range(2)]
    for model in models:  # one is frozen, and stays where it is
        model[2].requires_grad_(False)
    optim, on_host = Optim.model_validate(given), StatesOnHost(CPU, with_weights=True)
    plain = ShardOptimizer(models[0], optim, states="bf16")
    moved = ShardOptimizer(
        models[1], optim, states="bf16", on_host=on_host, moved_elements=moved_elements
    )
    where = {name: each.data_ptr() for name, each in moved.tensors().items()}
    for number in range(4):
        _step(plain, models[0], number)
        _step(moved, models[1], number)
    expected, found = plain.tensors(), moved.tensors()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert {name: each.data_ptr() for name, each in found.items()} == where
    assert all(each.grad is None for each in models[1].parameters() if each.requires_grad)
    trained = sum(each.numel() for each in models[1].parameters() if each.requires_grad)
    averages = 1 if given["name"] == "sgd" else 2
    assert on_host.moved_bytes == 4 * trained * (4 + 4 + 2 * averages)


def test_state_that_is_held_elsewhere_is_what_is_updated() -> None:
    """What a checkpoint was read into goes up, and the update's result comes down into it."""
    model = _model()
    optimizer = ShardOptimizer(model, Optim.model_validate(ADAMW), on_host=StatesOnHost(CPU))
    tensors = optimizer.tensors()
    name = "optim.exp_avg.0.weight"
    tensors[name].fill_(3.0)
    first = copy.deepcopy(tensors[name])
    _step(optimizer, model, 0)
    assert not torch.equal(tensors[name], first)
    assert float(tensors[name].mean()) > 2.0


class _Watched(StatesOnHost):
    """Counts the parts whose state is on the device at once."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.there = self.most = 0

    def _fetch(self, names: Any, host_state: Any) -> Any:
        self.there += 1
        self.most = max(self.most, self.there)
        return super()._fetch(names, host_state)

    def _release(self, states: dict[str, dict[str, Tensor]], copied_out: Any) -> None:
        super()._release(states, copied_out)
        assert not states
        self.there -= 1


def test_three_parts_are_on_the_device_at_most() -> None:
    model, watched = _model(), _Watched()
    optimizer = ShardOptimizer(
        model, Optim.model_validate(ADAMW), on_host=watched, moved_elements=1
    )
    _step(optimizer, model, 0)
    assert (watched.most, watched.there) == (3, 0)
