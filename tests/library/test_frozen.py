"""What a user has frozen stays frozen in every layout, and what is trained trains as it did."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

import shardyard
from shardyard.errors import RequestError
from shardyard.families.presets import PRESETS
from shardyard.families.registry import family_of
from shardyard.library.supported import request
from shardyard.parallel import apply
from tests.distributed.ranks import run_on_ranks
from tests.library import runs, test_custom_module

SOURCE = Path(shardyard.__file__).parent

TRAINED: dict[str, Callable[[str], bool]] = {
    "norms": lambda name: "norm" in name,
    "last block": lambda name: ".layers.1." in name,
    "head": lambda name: name == "lm_head.weight",
    "all but experts": lambda name: "experts" not in name,
    "bert's second block": lambda name: ".layer.1." in name,
}
"""What is left trainable, by name of a parameter; all else is frozen."""

Numbers = tuple[list[tuple[float, float]], set[str], set[str], set[str]]
"""Loss and norm of each step; names that are trainable, had gradients, have optimizer state."""


def _freeze(model: nn.Module, trained: str) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(TRAINED[trained](name))


def _sharded(cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]]) -> list[Numbers]:
    found = []
    for preset, trained, degrees, given in cases:
        settings = dict(given)
        model = runs.build(preset, tied=settings.pop("tied", False))
        _freeze(model, trained)
        mesh = shardyard.build_mesh(**degrees)
        model = shardyard.parallelize(model, mesh, seq_len=runs.SEQ_LEN, **settings)
        params = dict(model.named_parameters())
        optimizer = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
        before = {name: _local(param).clone() for name, param in params.items()}
        steps = runs.take_steps(model, mesh, optimizer, range(2))
        shardyard.accumulate(model, runs.batches(mesh, 2))
        trainable = {name for name, param in params.items() if param.requires_grad}
        with_gradient = {name for name, param in params.items() if param.grad is not None}
        with_state = {name for name, param in params.items() if optimizer.state.get(param)}
        for name in params.keys() - trainable:
            assert torch.equal(_local(params[name]), before[name]), name
        found.append((steps, trainable, with_gradient, with_state))
    return found


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _transformers(preset: str, trained: str, *, tied: bool) -> list[tuple[float, float]]:
    """transformers' own forward pass and torch's own clipping, in one process."""
    model = runs.build(preset, tied=tied)
    _freeze(model, trained)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(2):
        loss = model(**runs.samples(step)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return found


CASES: dict[int, list[tuple[str, str, dict[str, Any], dict[str, Any]]]] = {
    1: [
        ("llama-tiny", "norms", {}, {}),
        ("mixtral-tiny", "head", {}, {}),
        ("mixtral-tiny", "all but experts", {}, {}),
    ],
    2: [
        ("llama-tiny", "norms", {"dp_shard": 2}, {"recompute": "full"}),
        ("llama-tiny", "norms", {"tp": 2}, {}),
        ("llama-tiny", "last block", {"tp": 2}, {"tied": True, "recompute": "selective"}),
        ("llama-tiny", "last block", {"pp": 2}, {"tied": True}),
        ("llama-tiny", "norms", {"pp": 2}, {"tied": True}),
        ("llama-tiny", "norms", {"cp": 2}, {}),
        ("mixtral-tiny", "all but experts", {"tp": 2}, {}),
        ("mixtral-tiny", "head", {"ep": 2}, {}),
        ("qwen3-moe-tiny", "norms", {"dp_replicate": 2, "dp_shard": 1}, {}),
        ("bert-tiny", "bert's second block", {"tp": 2}, {}),
    ],
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("processes", CASES)
def test_what_is_frozen_stays_frozen_and_has_neither_gradient_nor_state(processes: int) -> None:
    answers = run_on_ranks(_sharded, processes, CASES[processes])
    for number, (preset, trained, degrees, settings) in enumerate(CASES[processes]):
        case = (preset, trained, degrees)
        names = set(dict(runs.build(preset, tied=settings.get("tied", False)).named_parameters()))
        wanted = {name for name in names if TRAINED[trained](name)}
        wanted = {name.replace(".mlp.gate.", ".mlp.router.") for name in wanted}
        found = [answer[number] for answer in answers]
        for _steps, trainable, with_gradient, with_state in found:
            assert trainable == with_gradient == with_state, case
            if degrees.get("pp", 1) == 1:
                assert trainable == wanted, case
        assert set.union(*(each[1] for each in found)) == wanted, case
        expected = _transformers(preset, trained, tied=settings.get("tied", False))
        for pair, pair_wanted in zip(found[-1][0], expected, strict=True):
            assert pair == pytest.approx(pair_wanted, rel=1e-5), case


def _from_meta() -> set[str]:
    with torch.device("meta"):
        model = runs.build("mixtral-tiny", tied=True)
    _freeze(model, "norms")
    model = shardyard.parallelize(model, shardyard.build_mesh(tp=2), seq_len=runs.SEQ_LEN)
    return {name for name, param in model.named_parameters() if param.requires_grad}


@pytest.mark.heavy
def test_what_is_frozen_on_the_meta_device_is_frozen_with_storage() -> None:
    names = dict(runs.build("mixtral-tiny", tied=True).named_parameters())
    wanted = {name for name in names if TRAINED["norms"](name)}
    assert run_on_ranks(_from_meta, 2) == [wanted, wanted]


def _own(degrees: dict[str, Any], tied: bool) -> set[str]:
    model = test_custom_module.build(tied=tied)
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
    mesh = shardyard.build_mesh(**degrees)
    plan = test_custom_module.PLAN if mesh.layout.tp > 1 else None
    model = shardyard.parallelize(model, mesh, blocks="layers", plan=plan)
    shardyard.accumulate(model, [test_custom_module.samples(0)], test_custom_module.loss_sum)
    trainable = {name for name, param in model.named_parameters() if param.requires_grad}
    assert {name for name, param in model.named_parameters() if param.grad is not None} == trainable
    return trainable


@pytest.mark.heavy
@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_leaves_frozen_what_is_frozen(tied: bool) -> None:
    wanted = {name for name, _ in test_custom_module.build().named_parameters() if "norm" in name}
    for processes, degrees in ((1, {}), (2, {"tp": 2})):
        assert run_on_ranks(_own, processes, degrees, tied) == [wanted] * processes


class _Lora(nn.Linear):
    """A wrapper as LoRA libraries make them: a matrix, and a small one that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.added = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x) + self.added(x)
        return y


def _wrapped() -> dict[str, str]:
    """Messages of models in which something is wrapped, or all is frozen."""
    found = {}

    def refused(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except RequestError as error:
            found[name] = str(error)

    def lora(preset: str = "llama-tiny") -> Any:
        model = runs.build(preset)
        for layer in model.model.layers:
            layer.self_attn.q_proj = _Lora(layer.self_attn.q_proj)
        return model

    split, tp, one = shardyard.parallelize, shardyard.build_mesh(tp=2), shardyard.build_mesh()
    refused("tp", lambda: split(lora(), tp, seq_len=runs.SEQ_LEN))
    shape = PRESETS["llama-tiny"].shape
    recipe = request(one, {}, shape=shape, seq_len=runs.SEQ_LEN)
    fp8 = recipe.precision.model_copy(update={"compute": "fp8"})  # of a CPU's, parallelize() says
    asked: dict[str, Any] = {"recipe": recipe.model_copy(update={"precision": fp8}), "shape": shape}
    refused("fp8", lambda: apply.parallelize(lora(), one, family=family_of("llama"), **asked))
    model = lora("mixtral-tiny")
    model.model.layers[1].mlp.experts.register_parameter("bias", nn.Parameter(torch.zeros(1)))
    refused("experts", lambda: split(model, one))
    other = lora("mixtral-tiny")
    other.model.layers[0].mlp = nn.Sequential(other.model.layers[0].mlp)
    refused("mixture", lambda: split(other, one))
    table = runs.build("llama-tiny")
    parametrize.register_parametrization(table.model.embed_tokens, "weight", nn.Identity())
    refused("table", lambda: split(table, tp, seq_len=runs.SEQ_LEN))
    own = test_custom_module.build()
    parametrize.register_parametrization(own.head, "weight", nn.Identity())
    refused("plan", lambda: split(own, tp, blocks="layers", plan=test_custom_module.PLAN))
    frozen = runs.build("llama-tiny").requires_grad_(False)
    frozen = split(frozen, one)
    assert float(shardyard.evaluate(frozen, runs.batches(one, 0))) > 0
    refused("frozen", lambda: shardyard.accumulate(frozen, runs.batches(one, 0)))
    return found


@pytest.mark.heavy
def test_a_wrapped_matrix_is_refused_by_name_where_its_wrapper_would_be_lost() -> None:
    q_proj = "model.layers.0.self_attn.q_proj of this"
    expected = {
        "tp": (f"{q_proj} LlamaForCausalLM is a _Lora, and 1 more", "Use tp=1"),
        "fp8": (f"{q_proj} LlamaForCausalLM is a _Lora", "merge the wrapper into the weight"),
        "experts": ("there is model.layers.1.mlp.experts.bias, which", "Merge it"),
        "mixture": ("there is a Sequential at model.layers.0.mlp, which", "Merge it"),
        "table": ("model.embed_tokens of this", "ParametrizedEmbedding", "a plain nn.Embedding"),
        "plan": ("head is a ParametrizedLinear. What is split must be a plain",),
        "frozen": ("every parameter of this FSDPLlama", "is frozen", "use evaluate()"),
    }
    for found in run_on_ranks(_wrapped, 2):
        assert found.keys() == expected.keys()
        for name, parts in expected.items():
            assert [part for part in parts if part not in found[name]] == [], found[name]


def _train_lora(degrees: dict[str, Any]) -> tuple[list[tuple[float, float]], set[str]]:
    model = runs.build("llama-tiny").requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = _Lora(layer.self_attn.q_proj)
        layer.self_attn.q_proj.added.weight.data.zero_()
    mesh = shardyard.build_mesh(**degrees)
    model = shardyard.parallelize(model, mesh, seq_len=runs.SEQ_LEN, recompute="full")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = runs.take_steps(model, mesh, optimizer, range(2))
    return steps, {name for name, param in model.named_parameters() if param.requires_grad}


@pytest.mark.heavy
def test_a_wrapped_matrix_trains_alike_where_modules_call_it() -> None:
    alone, names = run_on_ranks(_train_lora, 1, {})[0]
    assert names == {f"model.layers.{i}.self_attn.q_proj.added.weight" for i in range(2)}
    for degrees in ({"dp_shard": 2}, {"cp": 2}, {"pp": 2}):
        steps = run_on_ranks(_train_lora, 2, degrees)[-1][0]
        assert np.allclose(steps, alone, rtol=1e-5, atol=0), degrees


@pytest.mark.heavy
def test_parameters_are_made_anew_in_few_places_alone() -> None:
    """``nn.Parameter(part)`` forgets what the whole carried: whoever splits uses one function."""
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in (
                "Parameter", "nn.Parameter", "torch.nn.Parameter"
            ):  # fmt: skip
                found.append(file.relative_to(SOURCE).as_posix())
    # a mixture's experts are new, a base is filled apart from ranks to be merged, pieces that an
    # update is given, what an own optimizer is tried on and what nothing uses are no model's; all
    # other parameters stand for one that was there
    assert set(found) == {
        "checkpoint/export_formats.py", "library/replicated.py", "models/local_shard.py",
        "models/moe.py", "train/optimizers/trial.py", "train/optimizers/whole_vectors.py",
    }  # fmt: skip
