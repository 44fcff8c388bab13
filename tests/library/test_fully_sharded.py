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
from torch.optim.swa_utils import AveragedModel

import shardyard
from shardyard.errors import RecipeError, RequestError, TrainingError
from shardyard.library.fully_sharded import check_shardable
from shardyard.parallel import rank_agreement
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


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS: keeps parameters in _params": lambda model: torch.optim.LBFGS(model.parameters()),
    "AdamW: has state already": _stepped,
    "Muon: takes norms and signs of whole matrices": lambda model: torch.optim.Muon([model.weight]),
    "Adafactor: takes norms and signs": lambda model: torch.optim.Adafactor(model.parameters()),
    "Rprop: takes norms and signs": lambda model: torch.optim.Rprop(model.parameters()),
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
    optimizer = _sgd(model, momentum=0.9)
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
        lambda: torch.save({n: v.cpu() for n, v in model.state_dict().items()}, f"{folder}/m.pt"),
        lambda: torch.save(dict(model.named_parameters()), f"{folder}/model.pt"),
        lambda: torch.save(model.layers[0].state_dict(), f"{folder}/model.pt"),
        lambda: torch.save({"optimizer": optimizer.state_dict()}, f"{folder}/model.pt"),
        lambda: torch.save(model, f"{folder}/model.pt"),
        lambda: torch.save(model.module, f"{folder}/model.pt"),
        lambda: model.layers[0].weight.detach().numpy(),
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
    for said in run_on_ranks(_refused, 2, str(tmp_path)):
        saved, in_dict, *by_hand, whole, view, numbers, copied, folder, hook = said
        assert "holds one rank's shard of each parameter" in saved
        for text in by_hand:
            assert "holds one rank's shard of it" in text and "full_state_dict=True" in text
            assert "get_optimizer_state_dict" in text and "shardyard.save_checkpoint" in text
        assert len(by_hand) == 4
        assert "a file of this _Net would hold one rank's shard" in whole
        assert "a file of this Linear would hold one rank's shard" in view
        assert "param.full_tensor().numpy()" in numbers
        assert saved == in_dict and "full_state_dict=True" in saved
        assert "a copy of this _Net would hold one rank's shard" in copied
        assert "shardyard.export(model, folder)" in folder
        assert "a hook of layers.0.weight would never be called" in hook


def _wrapped(layout: str = "zero=3") -> tuple[Any, torch.optim.Optimizer]:
    os.environ["SHARDYARD_PARALLEL"] = layout
    torch.manual_seed(0)
    model = _Net()
    return shardyard.wrap(model, _sgd(model))


def _call_with_halves() -> None:
    model, _ = _wrapped()
    halves = {name: param * 0.5 for name, param in model.named_parameters()}
    torch.func.functional_call(model, halves, (torch.ones(1, 4),))


def _penalise() -> None:
    model, _ = _wrapped()
    x = torch.ones(1, 4, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


def _convert() -> None:
    model, _ = _wrapped()
    model.to(model.layers[0].weight.dtype)  # nothing changes
    model.to(torch.bfloat16)


def _add_module() -> None:
    model, optimizer = _wrapped()
    model.layers[1] = nn.Linear(4, 4)
    optimizer.add_param_group({"params": list(model.layers[1].parameters())})
    model(torch.ones(1, 4))


def _add_parameter() -> None:
    model, optimizer = _wrapped()
    model.layers[1].scale = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [model.layers[1].scale]})
    loss: Any = model(torch.ones(1, 4)).sum() + model.layers[1].scale.sum()
    loss.backward()
    optimizer.step()


def _differentiate(**settings: Any) -> None:
    model, _ = _wrapped()
    torch.autograd.grad(model(torch.ones(1, 4)).sum(), list(model.parameters()), **settings)


def _average_of_before() -> None:
    os.environ["SHARDYARD_PARALLEL"] = "zero=3"
    model = _Net()
    average = AveragedModel(model)
    shardyard.wrap(model)
    average.update_parameters(model)


def _change_format() -> None:
    model, _ = _wrapped()
    model.layers[0].weight.data = model.layers[0].weight.data.half()


class _InParts(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.encoder(x))


def _in_parts() -> Any:
    os.environ["SHARDYARD_PARALLEL"] = "zero=3"
    return shardyard.wrap(_InParts())


LATER: dict[str, Callable[[], None]] = {
    "functional_call with another tensor than the parameter weight of layers.0": _call_with_halves,
    "create_graph=True: a second backward pass": _penalise,
    "Call model.to(torch.bfloat16) before wrap()": _convert,
    "layers.1 was not in this _Net when it was sharded": _add_module,
    "of shape (3,) that was not in the model when it was wrapped": _add_parameter,
    "torch.autograd.grad by parameters of a sharded model": _differentiate,
    "Call loss.backward() and read param.grad": lambda: _differentiate(allow_unused=True),
    "this AveragedModel was made before wrap()": _average_of_before,
    "Change its shape or format before wrap()": _change_format,
    "encoder is called by itself": lambda: _in_parts().encoder(torch.ones(1, 4)),
    "call in place of model.forward": lambda: _in_parts().forward(torch.ones(1, 4)),
}


def _said_later() -> list[str]:
    said = []
    for line in LATER.values():
        with pytest.raises(RequestError) as raised:
            line()
        said.append(str(raised.value))
    return said


@pytest.mark.heavy
def test_what_would_train_otherwise_after_wrap_is_rejected() -> None:
    for said in run_on_ranks(_said_later, 2):
        assert all(words in text for words, text in zip(LATER, said, strict=True)), said


def _numbers_of_gradients() -> tuple[list[float], list[float]]:
    model, _ = _wrapped("zero=2")
    model(torch.ones(1, 4)).sum().backward()
    weight = model.layers[0].weight
    numbers: list[Callable[[Any], Any]] = [
        lambda grad: grad.norm(), lambda grad: grad.abs().max(), lambda grad: grad.sum(),
        lambda grad: grad.mean(),
    ]  # fmt: skip
    for number in numbers:
        for read in (float, bool, int, lambda share: share.item()):
            with pytest.raises(RequestError, match=r"one rank's share.*full_tensor"):
                read(number(weight.grad))
    whole = weight.grad.full_tensor()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, error_if_nonfinite=True)
    found = [number(weight.grad).full_tensor().item() for number in numbers]
    return found, [number(whole).item() for number in numbers]


@pytest.mark.heavy
def test_a_number_of_sharded_gradients_is_the_whole_one_or_an_error() -> None:
    for found, whole in run_on_ranks(_numbers_of_gradients, 2):
        assert found == pytest.approx(whole, rel=1e-6)


def _on_rank_0_alone() -> str:
    vars(rank_agreement)["group_timeout"] = lambda _group: 2.0
    model, _ = _wrapped()
    said = ""
    if dist.get_rank() == 0:
        with torch.no_grad(), pytest.raises(TrainingError) as raised:
            model(torch.ones(1, 4))
        said = str(raised.value)
    dist.barrier()
    return said


@pytest.mark.heavy
def test_an_evaluation_on_one_rank_alone_ends_before_the_others_barrier_does() -> None:
    said = run_on_ranks(_on_rank_0_alone, 2)[0]
    assert "rank 0 calls the model without gradients, and other ranks do not" in said
    assert "take the call out of `if rank == 0:`" in said
    assert "SHARDYARD_PARALLEL=dp_replicate=2,dp_shard=1" in said
