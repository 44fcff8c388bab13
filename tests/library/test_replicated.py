"""wrap() without a layout beside DistributedDataParallel: what its scripts do is the same here."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaConfig, LlamaForCausalLM

import shardyard
from shardyard.errors import StorageError
from tests.distributed.ranks import run_on_ranks

Trained = tuple[dict[str, Tensor], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.b = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.b(x)
        return out


class Branches(Net):
    """Each rank uses another layer."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.layers[dist.get_rank()](self.a(x))))
        return out


class Normalised(Net):
    scale: Tensor

    """Running statistics, and a scale that each rank makes of its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x))
        if self.training:
            with torch.no_grad():
                self.scale.lerp_(x.abs().mean(0), 0.5)
        out: Tensor = self.b(x / self.scale)
        return out


def _channels_last(module: nn.Module) -> nn.Module:
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


class Odd(nn.Module):
    """A sparse table, two formats, nothing, a single number, and channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6, sparse=True)
        self.wide = nn.Linear(6, 4).double()
        self.none = nn.Linear(6, 0)
        self.number = nn.Parameter(torch.tensor(0.5))
        self.conv = _channels_last(nn.Conv2d(2, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x.abs().argmax(1))
        image = x[:, :2, None, None].expand(-1, -1, 3, 3)
        mapped = self.conv(image.contiguous(memory_format=torch.channels_last)).flatten(1)
        wide = self.wide(rows.double()).float() * self.number
        out: Tensor = wide + mapped + self.none(x).sum()
        return out


def _batch(step: int) -> tuple[Tensor, Tensor]:
    """Of this rank."""
    generator = torch.Generator().manual_seed(100 + 10 * step + dist.get_rank())
    x = torch.randn(8, 6, generator=generator) * (1 + dist.get_rank())
    return x, torch.randint(0, 4, (8,), generator=generator)


def _ready(kind: str, make: Callable[[], nn.Module], *, seed: int = 0) -> tuple[Any, Any, Any]:
    """The model to call, the module with parameters, and its optimizer."""
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True), model, optimizer
    again, same = shardyard.wrap(model, optimizer)
    assert again is model and same is optimizer
    return model, model, optimizer


def _steps(called: Any, model: nn.Module, optimizer: Any, steps: int = 3) -> dict[str, Tensor]:
    for step in range(steps):
        x, y = _batch(step)
        _backward(cross_entropy(called(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return _copied(model)


def _copied(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = whole.detach().clone()
    return found


def _backward(loss: Any) -> None:
    loss.backward()


def _plain(make: Callable[[], nn.Module], kind: str) -> Trained:
    return _steps(*_ready(kind, make)), None


def _seeded_by_rank(kind: str) -> Trained:
    return _steps(*_ready(kind, Net, seed=dist.get_rank())), None


def _accumulated(kind: str) -> Trained:
    called, model, optimizer = _ready(kind, Net)
    alone: list[float] = []
    for step in range(2):
        with called.no_sync():
            _backward(cross_entropy(called(_batch(step)[0]), _batch(step)[1]))
        if not os.environ.get("SHARDYARD_PARALLEL"):
            alone = [float(p.grad.sum()) for p in model.parameters()]
        _backward(cross_entropy(called(_batch(step + 5)[0]), _batch(step + 5)[1]))
        optimizer.step()
        optimizer.zero_grad()
    return _copied(called.module), alone


def _by_lbfgs(kind: str) -> Trained:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    if kind == "ddp":
        called: Any = DistributedDataParallel(model)
    else:
        called, optimizer = shardyard.wrap(model, optimizer)

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = cross_entropy(called(_batch(0)[0]), _batch(0)[1])
        _backward(found)
        return found

    step: Any = optimizer.step
    losses = [step(loss).item() for _ in range(3)]
    return _copied(model), losses


def _with_hooks(kind: str) -> Trained:
    called, model, optimizer = _ready(kind, Net)
    calls: list[int] = []

    def halve(grad: Tensor) -> Tensor:
        calls.append(1)
        return grad / 2

    model.layers[0].weight.register_hook(halve)
    return _steps(called, model, optimizer), len(calls)


def _averaged(kind: str) -> Trained:
    """By an average made before, and one made afterwards."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    before = AveragedModel(model, multi_avg_fn=average)
    called: Any = model
    if kind == "ddp":
        called = DistributedDataParallel(model)
    else:
        shardyard.wrap(model, optimizer)
    after = AveragedModel(model, multi_avg_fn=average)
    for step in range(3):
        _backward(cross_entropy(called(_batch(step)[0]), _batch(step)[1]))
        optimizer.step()
        optimizer.zero_grad()
        before.update_parameters(model)
        after.update_parameters(model)
    assert type(after.module) is Net
    found = {f"before {name}": each for name, each in _copied(before).items()}
    return {**found, **_copied(after)}, after(_batch(0)[0]).flatten().tolist()


def _on_rank_0(kind: str) -> Trained:
    """Evaluates and saves where the others wait."""
    called, model, optimizer = _ready(kind, Normalised)
    _steps(called, model, optimizer, steps=2)
    seen = None
    if dist.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            seen = (called if kind == "wrap" else model)(_batch(0)[0]).flatten().tolist()
        model.train()
        torch.save(model.state_dict(), "model.pt")
        plain = Normalised()
        plain.load_state_dict(torch.load("model.pt"))
        if kind == "wrap":
            torch.save(model, "whole.pt")
            whole = torch.load("whole.pt", weights_only=False)
            assert type(whole) is Normalised
    dist.barrier()
    return _steps(called, model, optimizer, steps=1), seen


def _joined(kind: str) -> Trained:
    """One rank has twice as many batches."""
    called, model, optimizer = _ready(kind, Net)
    with Join([called]):
        _steps(called, model, optimizer, steps=2 + 2 * dist.get_rank())
    return _copied(model), None


def _freed(kind: str) -> Trained:
    """A part that is frozen at first."""
    torch.manual_seed(0)
    model = Net()
    model.layers.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called: Any = DistributedDataParallel(model) if kind == "ddp" else model
    if kind == "wrap":
        shardyard.wrap(model, optimizer)
    _steps(called, model, optimizer, steps=1)
    model.layers.requires_grad_(True)
    called = DistributedDataParallel(model) if kind == "ddp" else model
    return _steps(called, model, optimizer, steps=2), None


def _frozen_later(kind: str) -> Trained:
    """A part that is frozen after a step, where momentum would still move it."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called: Any = DistributedDataParallel(model) if kind == "ddp" else model
    if kind == "wrap":
        shardyard.wrap(model, optimizer)
    _steps(called, model, optimizer, steps=1)
    model.layers.requires_grad_(False)
    called = DistributedDataParallel(model) if kind == "ddp" else model
    return _steps(called, model, optimizer, steps=2), None


def _grown(kind: str) -> Trained:
    """With a module that comes after wrap(), and its parameters in a group of their own."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "wrap":
        shardyard.wrap(model, optimizer)
    model.layers.append(nn.Linear(16, 16))
    optimizer.add_param_group({"params": list(model.layers[2].parameters()), "lr": 0.05})
    called: Any = DistributedDataParallel(model) if kind == "ddp" else model
    return _steps(called, model, optimizer), None


def _in_autocast(kind: str) -> Trained:
    """With a scaler, clipped."""
    called, model, optimizer = _ready(kind, Net)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(3):
        x, y = _batch(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(called(x), y)
        _backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return _copied(model), scaler.get_scale()


def _initialised(kind: str) -> Trained:
    """Initialised and written by the script after wrap(), from numbers all ranks draw alike."""
    called, model, optimizer = _ready(kind, Net)
    torch.manual_seed(5)

    def begin(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight)
            nn.init.normal_(module.bias, std=0.1)

    model.layers.apply(begin)
    model.a.reset_parameters()
    model.b.weight.data = torch.randn(4, 16)
    model.b.bias.data.fill_(0.5)
    with torch.no_grad():
        model.a.weight.copy_(torch.randn(16, 6))
        model.a.bias += torch.randn(16)
    return _steps(called, model, optimizer), None


def _of_a_vector(kind: str) -> Trained:
    """Parameters written from one vector."""
    called, model, optimizer = _ready(kind, Net)
    torch.manual_seed(5)
    numbers = sum(param.numel() for param in model.parameters())
    torch.nn.utils.vector_to_parameters(torch.randn(numbers) / 4, model.parameters())
    return _steps(called, model, optimizer), None


def _decayed(kind: str) -> Trained:
    """The loss has the parameters' squares, and how far they are from what they were."""
    before = [param.detach().clone() for param in _net().parameters()]
    called, model, optimizer = _ready(kind, Net)
    losses = []
    for step in range(3):
        x, y = _batch(step)
        squares: Any = sum(param.pow(2).sum() for param in model.parameters())
        loss = cross_entropy(called(x), y) + 0.1 * squares
        pairs = zip(model.parameters(), before, strict=True)
        loss += 0.1 * sum((param - was).square().sum() for param, was in pairs)
        loss += 0.1 * sum(param.norm(1) for param in model.parameters())
        _backward(loss)
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return _copied(model), losses


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _loaded(kind: str) -> Trained:
    """From what one process saved of the model and the optimizer."""
    torch.manual_seed(3)
    saved = Net()
    of_saved = torch.optim.AdamW(saved.parameters(), lr=0.01)
    _backward(saved(torch.ones(2, 6)).square().mean())
    of_saved.step()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    called: Any = DistributedDataParallel(model) if kind == "ddp" else model
    if kind == "wrap":
        shardyard.wrap(model, optimizer)
    model.load_state_dict(saved.state_dict())
    optimizer.load_state_dict(of_saved.state_dict())
    return _steps(called, model, optimizer), None


def _in_parts(kind: str) -> Trained:
    """A part called by itself, and gradients by parameters, which no framework averages."""
    called, model, optimizer = _ready(kind, Net)
    with torch.no_grad():
        hidden = model.a(_batch(0)[0])
    out = called(_batch(0)[0]).square().mean()
    found = torch.autograd.grad(out, list(model.parameters()), retain_graph=True)
    _backward(out)
    optimizer.step()
    return _copied(model), [float(hidden.sum()), *(float(each.sum()) for each in found)]


def _by_two_optimizers(kind: str) -> Trained:
    torch.manual_seed(0)
    model = Net()
    matrices = [param for param in model.parameters() if param.dim() == 2]
    rest = [param for param in model.parameters() if param.dim() == 1]
    both: list[Any] = [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(rest, lr=0.01)]
    called: Any = DistributedDataParallel(model) if kind == "ddp" else model
    steps: Any = range(4)
    if kind == "wrap":
        assert shardyard.wrap(model, both) == (model, both)
        steps = shardyard.steps(4, "kept", model, both, every=2)
    for step in steps:
        _backward(cross_entropy(called(_batch(step)[0]), _batch(step)[1]))
        for each in both:
            each.step()
            each.zero_grad()
    if kind == "wrap":
        assert list(shardyard.steps(4, "kept", model, both, every=2)) == []
    return _copied(model), None


def _penalised(kind: str) -> Trained:
    """By the gradient of an input, and with what the model is called by name."""
    called, model, optimizer = _ready(kind, Net)
    for step in range(2):
        x, y = _batch(step)
        x.requires_grad_(True)
        out = called(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (_backward(cross_entropy(out, y) + slope.square().mean()))
        optimizer.step()
        optimizer.zero_grad()
    return _copied(model), None


def _with_other_tensors(kind: str) -> Trained:
    """Calls the model with tensors made of its parameters."""
    called, model, optimizer = _ready(kind, Net)
    for step in range(2):
        prefix = "module." if kind == "ddp" else ""
        halves = {f"{prefix}{name}": param * 0.5 for name, param in model.named_parameters()}
        out: Any = torch.func.functional_call(called, halves, (_batch(step)[0],))
        _backward(cross_entropy(out, _batch(step)[1]))
        optimizer.step()
        optimizer.zero_grad()
    return _copied(model), None


def _converted(kind: str) -> Trained:
    """In another format after wrap(), where DistributedDataParallel stops to average."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "wrap":
        shardyard.wrap(model, optimizer)
    model.double()
    called: Any = DistributedDataParallel(model) if kind == "ddp" else model
    return _steps(lambda x: called(x.double()), model, optimizer), None


HABITS: dict[str, Callable[[str], Trained]] = {
    "plain": lambda kind: _plain(Net, kind),
    "branches": lambda kind: _plain(Branches, kind),
    "buffers": lambda kind: _plain(Normalised, kind),
    "odd parameters": lambda kind: _plain(Odd, kind),
    "seeded by rank": _seeded_by_rank,
    "no_sync": _accumulated,
    "LBFGS": _by_lbfgs,
    "hooks of parameters": _with_hooks,
    "averages of weights": _averaged,
    "rank 0 alone": _on_rank_0,
    "Join": _joined,
    "frozen at first": _freed,
    "frozen later": _frozen_later,
    "added later": _grown,
    "autocast": _in_autocast,
    "initialised later": _initialised,
    "written from a vector": _of_a_vector,
    "decay in the loss": _decayed,
    "loaded": _loaded,
    "in parts": _in_parts,
    "two optimizers": _by_two_optimizers,
    "gradients of inputs": _penalised,
    "functional_call": _with_other_tensors,
    "converted later": _converted,
}


_OF_A_STEP = ("scale", "running_mean", "running_var")
"""Buffers: DistributedDataParallel gives ranks those of rank 0 before the next forward pass."""


STAY_SHARDED = (
    "plain", "seeded by rank", "no_sync", "frozen at first", "frozen later", "autocast",
    "initialised later", "written from a vector", "decay in the loss", "loaded",
)  # fmt: skip
"""Habits that are the same where ranks share the parameters."""
LAYOUTS = {"zero=2": (*STAY_SHARDED, "branches"), "zero=3": STAY_SHARDED}


def _each_habit(folder: str, names: tuple[str, ...], layout: str) -> dict[str, list[str]]:
    """What of a habit differs from DistributedDataParallel."""
    os.chdir(folder)
    os.environ["SHARDYARD_PARALLEL"] = layout
    found = {}
    for name in names:
        habit = HABITS[name]
        wanted, of_both = habit("ddp")
        weights, seen = habit("wrap")
        for key, each in weights.items():  # after a step each rank has those of rank 0
            if dist.get_rank() and key.rpartition(".")[2] in _OF_A_STEP:
                wanted[key] = each
        off = [key for key in wanted if not torch.allclose(weights[key], wanted[key], rtol=1e-5)]
        is_same = seen == (of_both if of_both is None else pytest.approx(of_both, rel=1e-5))
        found[name] = [*off, *([] if is_same else ["seen"])]
    return found


@pytest.mark.heavy
def test_a_habit_of_ddp_does_what_it_does_there(tmp_path: Path) -> None:
    for found in run_on_ranks(_each_habit, 2, str(tmp_path), tuple(HABITS), "", timeout_s=120):
        assert found == {name: [] for name in HABITS}


@pytest.mark.heavy
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_habit_stays_where_ranks_share_the_parameters(layout: str, tmp_path: Path) -> None:
    for found in run_on_ranks(_each_habit, 2, str(tmp_path), LAYOUTS[layout], layout):
        assert found == {name: [] for name in LAYOUTS[layout]}


def _of_transformers(folder: str, layout: str) -> float:
    os.environ["SHARDYARD_PARALLEL"] = layout
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = shardyard.wrap(model, optimizer)
    tokens = torch.arange(16).view(2, 8) + dist.get_rank()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    if not layout and dist.get_rank() == 0:
        assert model.generate(tokens, max_new_tokens=2).shape == (2, 10)
        model.save_pretrained(folder)
    if layout:
        with pytest.raises(StorageError, match=r"could not write .*/model.pt"):
            Path(folder, "model.pt").touch()
            shardyard.export(model, Path(folder, "model.pt"))
        shardyard.export(model, folder)
    dist.barrier()
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


@pytest.mark.heavy
@pytest.mark.parametrize("layout", ["", "zero=3"])
def test_a_folder_of_transformers_holds_the_trained_weights(layout: str, tmp_path: Path) -> None:
    """Rank 0 writes it alone where it has all weights, and all ranks together else."""
    found = run_on_ranks(_of_transformers, 2, str(tmp_path), layout)
    again: Any = LlamaForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        loss = float(again(input_ids=tokens, labels=tokens).loss)
    assert found == pytest.approx([loss, loss], rel=1e-6)
    assert again.config.architectures == ["LlamaForCausalLM"]


def _alone() -> None:
    model = Net()
    wrapped = shardyard.wrap(model)
    assert wrapped is model and type(model).__name__ == "Net"
    assert not hasattr(model.module, "module")  # scripts unwrap in a loop
    assert type(copy.deepcopy(model)) is Net
    assert type(nn.Sequential(*model.layers)[:1]) is nn.Sequential


@pytest.mark.heavy
def test_a_wrapped_module_stays_itself() -> None:
    run_on_ranks(_alone, 1)
