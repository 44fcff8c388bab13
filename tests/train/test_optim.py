"""The optimizers against torch's own, or by hand."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor as TransformersAdafactor

from shardyard.config.optimizers import OPTIMIZERS, OptimizerName, readers_of
from shardyard.config.schema.recipe import Optim
from shardyard.errors import RequestError
from shardyard.parallel.gradients import ParamNorms
from shardyard.train.optim import ShardOptimizer
from tests.train.adafactor import Adafactor
from tests.train.lamb import Lamb
from tests.train.lars import Lars
from tests.train.lion import Lion
from tests.train.muon import Muon
from tests.train.schedule_free import ScheduleFree


@pytest.mark.parametrize(
    "optim",
    [
        Optim(lr=0.1, weight_decay=0.5),
        Optim(name="sgd", lr=0.1, weight_decay=0.5, momentum=0.9, nesterov=True),
        Optim(name="lamb", lr=0.1, weight_decay=0.5),
        Optim(name="lars", lr=0.1, weight_decay=0.5, momentum=0.9),
        Optim(name="lion", lr=0.1, weight_decay=0.5),
        Optim(name="muon", lr=0.1, weight_decay=0.5),
        Optim(name="schedule_free_adamw", lr=0.1, weight_decay=0.5, betas=(0.9, 0.99)),
    ],
)
@pytest.mark.parametrize("widened_elements", [1, 2**20])
def test_averages_held_in_bf16_are_rounded_between_exact_updates(
    optim: Optim, widened_elements: int
) -> None:
    models = _twins()
    ours = ShardOptimizer(models[0], optim, states="bf16", widened_elements=widened_elements)
    naive = ShardOptimizer(models[1], optim)
    ours.begin()
    naive.begin()
    exact = (".step.", ".weight_sum.", ".lr_max.", ".z.")  # numbers, and other weights
    for _ in range(3):
        _step_of(ours, models[0])
        _step_of(naive, models[1])
        for name, tensor in naive.tensors().items():
            if name.startswith("optim.") and not any(each in name for each in exact):
                tensor.copy_(tensor.bfloat16())
    found, expected = ours.tensors(), naive.tensors()
    states = [name for name in found if name.startswith("optim.")]
    averages = [name for name in states if not any(each in name for each in exact)]
    assert {found[name].dtype for name in averages} == {torch.bfloat16}
    assert {found[name].dtype for name in states if ".z." in name} <= {torch.float32}
    for name, tensor in found.items():
        assert torch.equal(tensor.float(), expected[name].float()), name


def test_bf16_averages_take_half_the_memory() -> None:
    def state_bytes(states: str) -> int:
        optim = Optim(lr=0.1, weight_decay=0.1)
        tensors = ShardOptimizer(nn.Linear(100, 100), optim, states=states).tensors()
        return sum(held.nbytes for name, held in tensors.items() if "exp_avg" in name)

    assert (state_bytes("fp32"), state_bytes("bf16")) == (80_800, 40_400)


def _step_of(optimizer: ShardOptimizer, model: nn.Module) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    model(x).square().sum().backward()
    optimizer.step(lr=0.1, divisor=torch.tensor(4.0), skip=torch.tensor(0.0))


def _steps_of(
    ours: ShardOptimizer,
    theirs: torch.optim.Optimizer | Adafactor | Lamb | Lars | Lion | Muon | ScheduleFree,
    models: tuple[nn.Module, nn.Module],
) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    ours.begin()
    for _ in range(3):
        for model in models:
            model(x).square().sum().backward()
        ours.step(lr=0.1, divisor=torch.tensor(4.0), skip=torch.tensor(0.0))
        for param in models[1].parameters():
            assert param.grad is not None
            param.grad /= 4
        theirs.step()
        theirs.zero_grad()


def _twins() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)  # a bias near 0 differs by more than 1e-6 of itself
    first, second = (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2))
    second.load_state_dict(first.state_dict())
    return first, second


def test_adamw_steps_as_torch_does_with_divided_gradients_and_decay_of_matrices_alone() -> None:
    models = _twins()
    decayed = [param for param in models[1].parameters() if param.dim() == 2]
    others = [param for param in models[1].parameters() if param.dim() < 2]
    theirs = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
    )
    _steps_of(ShardOptimizer(models[0], Optim(lr=0.1, weight_decay=0.5)), theirs, models)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())


def test_adamw_decays_norms_and_biases_where_it_is_asked_to() -> None:
    models = _twins()
    theirs = torch.optim.AdamW(models[1].parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    optim = Optim(lr=0.1, weight_decay=0.5, decay_vectors=True)
    _steps_of(ShardOptimizer(models[0], optim), theirs, models)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())


class _DecoupledSGD(torch.optim.SGD):
    """Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 1: decay beside the averaging."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data -= group["lr"] * group["decay"] * param.data
        super().step(closure)


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_steps_as_torch_does_with_decoupled_decay_of_matrices(
    momentum: float, nesterov: bool, decay: float
) -> None:
    models = _twins()
    settings = Optim(name="sgd", lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    params = list(models[1].parameters())
    groups = [
        {"params": [param for param in params if param.dim() == 2], "decay": decay},
        {"params": [param for param in params if param.dim() < 2], "decay": 0.0},
    ]
    theirs = _DecoupledSGD(groups, lr=0.1, momentum=momentum, nesterov=nesterov)
    _steps_of(ShardOptimizer(models[0], settings), theirs, models)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_lamb_steps_as_the_paper_says(decay: float) -> None:
    models = _twins()
    theirs = Lamb(models[1].parameters(), lr=0.1, decay=decay)
    optim = Optim(name="lamb", lr=0.1, weight_decay=decay)
    _steps_of(ShardOptimizer(models[0], optim), theirs, models)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-6, atol=1e-7)


def test_a_matrix_of_zeros_moves_under_lamb_as_under_adam() -> None:
    models = _twins()
    for model in models:
        model.get_parameter("2.weight").data.zero_()
    theirs = Lamb(models[1].parameters(), lr=0.1, decay=0.0)
    _steps_of(ShardOptimizer(models[0], Optim(name="lamb", lr=0.1, weight_decay=0)), theirs, models)
    assert float(models[0].get_parameter("2.weight").detach().norm()) > 0.1
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lars_steps_as_the_paper_says(momentum: float, decay: float) -> None:
    models = _twins()
    theirs = Lars(models[1].parameters(), lr=0.1, decay=decay, momentum=momentum, trust=0.02)
    optim = Optim(
        name="lars", lr=0.1, weight_decay=decay, momentum=momentum, trust_coefficient=0.02
    )
    _steps_of(ShardOptimizer(models[0], optim), theirs, models)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_lion_steps_as_the_paper_says(decay: float) -> None:
    models = _twins()
    theirs = Lion(models[1].parameters(), lr=0.1, decay=decay)
    optim = Optim(name="lion", lr=0.1, weight_decay=decay)
    _steps_of(ShardOptimizer(models[0], optim), theirs, models)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-6, atol=1e-6)


def test_lion_decays_norms_and_biases_where_the_recipe_says_so() -> None:
    models = _twins()
    theirs = Lion(models[1].parameters(), lr=0.1, decay=0.5, decays_vectors=True)
    optim = Optim(name="lion", lr=0.1, weight_decay=0.5, decay_vectors=True)
    _steps_of(ShardOptimizer(models[0], optim), theirs, models)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_muon_steps_as_its_author_says(momentum: float, decay: float) -> None:
    models = _twins()
    named = dict(models[1].named_parameters())
    theirs = Muon(named, lr=0.1, decay=decay, momentum=momentum)
    optim = Optim(name="muon", lr=0.1, weight_decay=decay, momentum=momentum)
    _steps_of(ShardOptimizer(models[0], optim), theirs, models)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-5, atol=1e-6)


def test_muon_steps_as_torch_does_up_to_its_bf16_products() -> None:
    layers = [nn.Linear(64, 48, bias=False), nn.Linear(48, 96, bias=False)]
    ours = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    theirs = copy.deepcopy(ours)
    optim = Optim(name="muon", lr=0.1, weight_decay=0.5)
    mine = ShardOptimizer(ours, optim)
    torchs: Any = torch.optim.Muon(
        theirs.parameters(), lr=0.1, weight_decay=0.5, adjust_lr_fn="match_rms_adamw"
    )
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        before = [each.detach().clone() for each in theirs.parameters()]
        for model in (ours, theirs):
            model(x).square().sum().backward()
        mine.step(lr=0.1, divisor=torch.tensor(1.0), skip=torch.tensor(0.0))
        torchs.step()
        torchs.zero_grad()
        for own, other, old in zip(ours.parameters(), theirs.parameters(), before, strict=True):
            apart = (own - other).detach().norm() / (other - old).detach().norm()
            assert float(apart) < 0.05  # bf16 rounds each product by 2^-9
        ours.load_state_dict(theirs.state_dict())


def test_muon_holds_momentum_of_matrices_in_blocks_and_moments_of_the_rest() -> None:
    blocks = nn.ModuleList([nn.Linear(4, 4)])
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "layers": blocks, "head": nn.Linear(4, 5)})
    tensors = ShardOptimizer(model, Optim(name="muon", lr=0.1, weight_decay=0.1)).tensors()
    held = {name.removeprefix("optim.") for name in tensors if name.startswith("optim.")}
    others = ("embed.weight", "layers.0.bias", "head.weight", "head.bias")
    moments = {f"{state}.{name}" for state in ("exp_avg", "exp_avg_sq") for name in others}
    counts = {f"step.{name}" for name in (*others, "layers.0.weight")}
    assert held == {"momentum_buffer.layers.0.weight"} | moments | counts


@pytest.mark.parametrize("decays_vectors", [False, True])
def test_schedule_free_adamw_steps_and_averages_as_the_paper_says(decays_vectors: bool) -> None:
    models = _twins()
    theirs = ScheduleFree(models[1].parameters(), lr=0.1, decay=0.5, decays_vectors=decays_vectors)
    optim = Optim(
        name="schedule_free_adamw", lr=0.1, weight_decay=0.5, decay_vectors=decays_vectors
    )
    ours = ShardOptimizer(models[0], optim)
    _steps_of(ours, theirs, models)
    trained = copy.deepcopy(models[0].state_dict())
    torch.testing.assert_close(trained, models[1].state_dict(), rtol=1e-6, atol=1e-6)
    with ours.evaluation_weights():
        for param, average in zip(models[0].parameters(), theirs.x, strict=True):
            torch.testing.assert_close(param.detach(), average.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(models[0].state_dict(), trained, rtol=0, atol=0)


PUBLISHED = ([0.6238389470615517, -1.4822686743835474], [0.6399163678107521, -1.5051712917801985])
"""What AdamWScheduleFree of schedulefree 1.4.1 trains and evaluates, in fp64, after five steps down
w^2 with a warm-up of three and the settings of the test."""


def test_schedule_free_adamw_is_rejected_with_running_statistics_of_other_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    message = r"\(1\) are of the trained ones. Use optim.name=adamw with optim.ema_decay=0.9999"
    with pytest.raises(RequestError, match=message):
        ShardOptimizer(model, Optim(name="schedule_free_adamw", lr=0.1, weight_decay=0))


def test_schedule_free_adamw_steps_as_its_authors_package_did() -> None:
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    model = nn.ParameterDict({"w": weight})
    optimizer = ShardOptimizer(model, Optim(name="schedule_free_adamw", lr=0.1, weight_decay=0.5))
    optimizer.begin()
    for step in range(1, 6):
        weight.square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step(
            lr=0.1 * min(1.0, step / 3), divisor=torch.tensor(1.0), skip=torch.tensor(0.0)
        )
    torch.testing.assert_close(weight.detach(), torch.tensor([PUBLISHED[0]]), rtol=1e-6, atol=0)
    with optimizer.evaluation_weights():
        torch.testing.assert_close(weight.detach(), torch.tensor([PUBLISHED[1]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("decays_vectors", [False, True])
def test_adafactor_steps_as_the_paper_says(decays_vectors: bool) -> None:
    models = _twins()
    named = dict(models[1].named_parameters())
    theirs = Adafactor(named, lr=0.1, decay=0.5, decays_vectors=decays_vectors)
    optim = Optim(name="adafactor", lr=0.1, weight_decay=0.5, decay_vectors=decays_vectors)
    _steps_of(ShardOptimizer(models[0], optim), theirs, models)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-6, atol=1e-6)


def test_adafactor_steps_as_transformers_does_under_a_schedule() -> None:
    models = _twins()
    optimizer: Any = TransformersAdafactor(
        models[1].parameters(), lr=0.1, weight_decay=0.5, scale_parameter=False, relative_step=False
    )
    optim = Optim(name="adafactor", lr=0.1, weight_decay=0.5, decay_vectors=True)
    _steps_of(ShardOptimizer(models[0], optim), optimizer, models)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-5, atol=1e-6)


def test_adafactor_holds_rows_and_columns_of_matrices_and_elements_of_the_rest() -> None:
    model = nn.ModuleDict({"linear": nn.Linear(4, 5), "conv": nn.Conv1d(2, 3, 7, bias=False)})
    optim = Optim(name="adafactor", lr=0.1, weight_decay=0.0)
    tensors = ShardOptimizer(model, optim).tensors().items()
    held = {name: tuple(each.shape) for name, each in tensors if name.startswith("optim.")}
    assert {name: shape for name, shape in held.items() if ".step." not in name} == {
        "optim.exp_avg_sq_row.linear.weight": (5,),
        "optim.exp_avg_sq_col.linear.weight": (4,),
        "optim.exp_avg_sq.linear.bias": (5,),
        "optim.exp_avg_sq.conv.weight": (3, 2, 7),
    }


class Halved:
    """An update for a row that is no optimizer's: each step halves what has a gradient."""

    most_elements = 1

    def __init__(
        self, shards: Mapping[str, nn.Parameter], _optim: Optim, _norms: ParamNorms
    ) -> None:
        self.shards = shards

    def begin(self, **_step: Any) -> None:
        """Whatever the step."""

    def update(self, names: Sequence[str], states: Mapping[str, dict[str, Tensor]]) -> None:
        assert len(names) == 1 and set(states[names[0]]) == {"half", "step"}
        self.shards[names[0]].data.mul_(0.5)

    def finish(self) -> None:
        for shard in self.shards.values():
            shard.grad = None


def test_an_optimizer_is_added_by_a_row_and_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    average = replace(OPTIMIZERS["adamw"].state_tensors[0], name="half")
    row = replace(
        OPTIMIZERS["adamw"],
        state_tensors=(average,),
        update=f"{Halved.__module__}:{Halved.__name__}",
    )
    monkeypatch.setitem(OPTIMIZERS, "halved", row)  # type: ignore[misc]
    optim = Optim(lr=0.1, weight_decay=0.1).model_copy(update={"name": "halved"})
    model, before = _twins()
    optimizer = ShardOptimizer(model, optim, states="bf16")
    _step_of(optimizer, model)
    for param, was in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(param, was / 2)
    of_state = {name.split(".")[1] for name in optimizer.tensors() if name.startswith("optim.")}
    assert of_state == {"half", "step"}


def test_no_other_optimizer_is_made_for_a_name_that_has_no_row() -> None:
    other = Optim(lr=0.1, weight_decay=0.1).model_copy(update={"name": "nonesuch"})
    message = f"no optimizer is called 'nonesuch': {', '.join(OPTIMIZERS)}"
    with pytest.raises(LookupError, match=message):
        ShardOptimizer(nn.Linear(2, 2), other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_frozen_has_no_state_and_does_not_move(name: OptimizerName) -> None:
    model, _ = _twins()
    model[0].requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    momentum = 0.9 if name in readers_of("momentum") else 0.0
    settings = {"name": name, "lr": 0.1, "momentum": momentum, "weight_decay": 0.1}
    optim = Optim.model_validate(settings)
    optimizer = ShardOptimizer(model, optim)
    _step_of(optimizer, model)
    moved = {
        key for key, value in model.state_dict().items() if not torch.equal(value, before[key])
    }
    assert moved == {"2.weight", "2.bias"}
    names = optimizer.tensors().keys()
    assert {key for key in names if key.startswith("model.")} == {f"model.{key}" for key in before}
    of_state = {".".join(key.split(".")[2:]) for key in names if key.startswith("optim.")}
    assert of_state == {"2.weight", "2.bias"}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_a_skipped_step_changes_neither_weights_nor_state(states: str, name: OptimizerName) -> None:
    model, untouched = _twins()
    momentum = 0.9 if name in readers_of("momentum") else 0.0
    optim = {"name": name, "lr": 0.1, "weight_decay": 0.1, "momentum": momentum}
    optimizer = ShardOptimizer(model, Optim.model_validate(optim), states=states)
    _step_of(optimizer, model)
    untouched.load_state_dict(model.state_dict())
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    for average in OPTIMIZERS[name].state_tensors:
        assert any(key.startswith(f"optim.{average.name}.") for key in before)
    model(torch.full((1, 3), torch.inf)).sum().backward()
    optimizer.step(lr=0.1, divisor=torch.tensor(1.0), skip=torch.tensor(1.0))
    torch.testing.assert_close(optimizer.tensors(), before, rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), untouched.state_dict(), rtol=0, atol=0)
    assert all(param.grad is None for param in model.parameters())
