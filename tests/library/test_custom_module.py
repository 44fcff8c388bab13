"""A module of the user's own, sharded and split by a plan, trains as it does in one process."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardyard
from shardyard.errors import RequestError
from shardyard.parallel.custom_module import names_matching
from tests.distributed.ranks import run_on_ranks
from tests.distributed.whole import whole
from tests.library import runs

WIDTH, HEADS, WORDS = 24, 4, 40


class Block(nn.Module):
    """Attention with a norm of each head, and an MLP; sizes are taken from the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)  # head by head: query, key, value
        self.head_norm = nn.LayerNorm(WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, WIDTH // HEADS)).transpose(1, 2)
        q, k, v = self.head_norm(heads).unbind(3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(x)))
        return y


class Model(nn.Module):
    """A small language model of one's own, with a parameter of its own too."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.start = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.start
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


PLAN = {
    "table": "vocabulary",
    "head": "vocabulary",
    "layers.*.qkv": "columns",
    "layers.*.out": "rows",
    "layers.*.up": "columns",
    "layers.*.down": "rows",
}


def build(*, tied: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(tied=tied)


def loss_sum(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    logits = model(tokens[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return losses, tokens[:, 1:].numel()


def samples(step: int) -> Tensor:
    return torch.randint(0, WORDS, (4, 9), generator=torch.Generator().manual_seed(step))


Numbers = tuple[list[tuple[float, float]], dict[str, Any]]


def _copy(grad: Any) -> Any:
    return grad.numpy().copy()


def train_alone(*, tied: bool) -> Numbers:
    """Five steps in one process without the library, and the gradients of the first."""
    model = build(tied=tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    found, first = [], {}
    for step in range(5):
        total, count = loss_sum(model, samples(step))
        (total / count).backward()  # type: ignore[no-untyped-call]
        if not step:
            first = {
                n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None
            }
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((total.item() / count, float(norm)))
    return found, first


def train_sharded(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Numbers]:
    results = []
    for degrees, given in cases:
        settings = dict(given)
        model = build(tied=settings.pop("tied", False))
        mesh = shardyard.build_mesh(**degrees)
        plan = PLAN if mesh.layout.tp > 1 else None
        model = shardyard.parallelize(model, mesh, blocks="layers", plan=plan, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        found, first = [], {}
        for step in range(5):
            mine = samples(step)[mesh.data_rank :: mesh.layout.data_ranks]
            loss = shardyard.accumulate(model, mine.chunk(len(mine)), loss_sum)
            if not step:
                first = {n: _whole(p.grad) for n, p in model.named_parameters()}
            norm = shardyard.clip_gradients(model, 1.0)
            assert float(shardyard.clip_gradients(model, 1.0)) <= 1.0 + 1e-6
            optimizer.step()
            optimizer.zero_grad()
            found.append((float(loss), float(norm)))
        last = shardyard.evaluate(model, mine.chunk(len(mine)), loss_sum)
        assert 0 < float(last) < found[-1][0]
        results.append((found, first))
    return results


def _whole(grad: Any) -> Any:
    return whole(grad).numpy()  # clipping scales it in place


CASES: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    1: [({}, {"recompute": "full"})],
    2: [
        ({"dp_shard": 2}, {"recompute": 2}),
        ({"tp": 2}, {}),
        ({"tp": 2}, {"tied": True, "recompute": ("up",)}),
        ({"dp_replicate": 2, "dp_shard": 1}, {"tied": True}),
    ],
    4: [({"dp_shard": 2, "tp": 2}, {}), ({"dp_shard": 2, "tp": 2, "zero": 1}, {"tied": True})],
}


@pytest.mark.heavy
@pytest.mark.parametrize("processes", [1, 2, pytest.param(4, marks=pytest.mark.system)])
def test_a_plan_changes_neither_values_nor_gradients(processes: int) -> None:
    cases = CASES[processes]
    alone = {tied: train_alone(tied=tied) for tied in (False, True)}
    for case, result in zip(cases, run_on_ranks(train_sharded, processes, cases)[-1], strict=True):
        (found, first), (expected, expected_first) = result, alone[case[1].get("tied", False)]
        for pair, wanted in zip(found, expected, strict=True):
            assert pair == pytest.approx(wanted, rel=1e-5), case
        norm = np.sqrt(sum((gradient**2).sum() for gradient in expected_first.values()))
        assert first.keys() == expected_first.keys()
        for name, gradient in expected_first.items():
            assert np.linalg.norm(first[name] - gradient) <= 1e-5 * norm, (case, name)


OF_TRANSFORMERS = {
    "model.embed_tokens": "vocabulary",
    "model.layers.*.self_attn.[qkv]_proj": "columns",
    "model.layers.*.self_attn.o_proj": "rows",
    "model.layers.*.mlp.gate_proj": "columns",
    "model.layers.*.mlp.up_proj": "columns",
    "model.layers.*.mlp.down_proj": "rows",
    "lm_head": "vocabulary",
}


def _transformers_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    count = int((batch["labels"][:, 1:] != -100).sum())
    return model(**batch).loss * count, count


def _planned_transformers(degrees: dict[str, Any]) -> tuple[float, float]:
    mesh = shardyard.build_mesh(**degrees)
    model = runs.build("llama-tiny")
    model = shardyard.parallelize(model, mesh, blocks="model.layers", plan=OF_TRANSFORMERS)
    loss = shardyard.accumulate(model, runs.batches(mesh, 0), _transformers_loss)
    return float(loss), float(shardyard.clip_gradients(model, 1.0))


@pytest.mark.heavy
def test_a_transformers_model_may_have_a_plan() -> None:
    alone = run_on_ranks(_planned_transformers, 1, {})[0]
    assert alone[0] == pytest.approx(runs.build("llama-tiny")(**runs.samples(0)).loss.item())
    assert run_on_ranks(_planned_transformers, 2, {"tp": 2})[1] == pytest.approx(alone, rel=1e-5)


def test_a_star_stands_for_one_step_of_a_name() -> None:
    names = ["layers.0.up", "layers.0.mlp.up", "layers.10.upper", "up"]
    assert names_matching("layers.*.up", names) == ["layers.0.up"]
    assert names_matching("layers.1*.up*", names) == ["layers.10.upper"]


def _in_bf16() -> tuple[float, str]:
    model = build()
    mesh = shardyard.build_mesh()
    model = shardyard.parallelize(model, mesh, blocks=("layers.*",), compute="bf16")
    loss = shardyard.accumulate(model, [samples(0)], loss_sum)
    return float(loss), str(model.start.dtype)


@pytest.mark.heavy
def test_compute_sets_the_format_of_products() -> None:
    loss, master = run_on_ranks(_in_bf16, 1)[0]
    expected = train_alone(tied=False)[0][0][0]
    assert loss != expected and loss == pytest.approx(expected, rel=1e-2)
    assert master == "torch.float32"


def _refusals() -> dict[str, str]:
    found = {}

    def refused(name: str, call: Any) -> None:
        try:
            call()
        except RequestError as error:
            found[name] = str(error)

    mesh = shardyard.build_mesh(tp=2)
    split = shardyard.parallelize
    plan = {
        "layer.*.up": "columns",
        "layers.*.down": "diagonals",
        "layers.0.norm": "rows",
        "odd": "columns",
        "layers.*.up": "columns",
        "layers.1.up": "rows",
    }
    model: Any = build()
    model.odd = nn.Linear(2, 9)
    model.drop = nn.Dropout(0.1)
    model.mha = nn.MultiheadAttention(8, 2)
    refused("plan", lambda: split(model, mesh, blocks="layer", plan=plan))
    refused("no plan", lambda: split(build(), mesh, blocks="layers"))
    refused("cp", lambda: split(build(), shardyard.build_mesh(cp=2), blocks="layers"))
    refused("pp", lambda: split(build(), shardyard.build_mesh(pp=2), blocks="layers"))
    refused("ep", lambda: split(build(), shardyard.build_mesh(ep=2), blocks="layers"))
    mesh = shardyard.build_mesh()
    tied = build(tied=True)
    refused("shared", lambda: split(tied, mesh, blocks=("table", "layers")))
    refused("nested", lambda: split(build(), mesh, blocks=("layers", "layers.0.up")))
    refused("setting", lambda: split(build(), mesh, blocks="layers", schedule="gpipe"))
    refused("length", lambda: split(build(), mesh, blocks="layers", seq_len=8))
    with torch.device("meta"):
        empty = build()
    refused("meta", lambda: split(empty, mesh, blocks="layers"))
    torch.manual_seed(0)
    half = Model(tied=False)
    half.head = nn.Linear(WIDTH, WORDS, device="meta")
    refused("half", lambda: split(half, mesh, blocks="layers"))
    whole = split(build(), mesh, blocks="layers")
    refused("no loss", lambda: shardyard.accumulate(whole, [samples(0)]))
    mean: Any = lambda model, tokens: model(tokens).mean()  # noqa: E731
    refused("mean", lambda: shardyard.accumulate(whole, [samples(0)], mean))
    refused("fill", lambda: shardyard.fill_weights(whole))
    return found


@pytest.mark.heavy
def test_wrong_plans_and_blocks_say_what_is_wrong_and_what_to_do() -> None:
    expected = {
        "plan": (
            "parallelize() has 8 problems",
            "plan['layer.*.up']: names no module. Did you mean one of: layers.",
            "plan['layers.*.down']='diagonals' is not a way to split a module. Use columns, rows",
            "plan['layers.0.norm']='rows': layers.0.norm is a LayerNorm. What is split must",
            "plan['odd']='columns': tp=2 does not divide out_features=9 of odd",
            "Use a tp of 1, 3, 9, or pad out_features",
            "plan['layers.1.up']='rows', but another pattern says 'columns' of layers.1.up",
            "blocks='layer' names no module. The model has layers.",
            "model: drops at drop:",
            "model: has mha, an nn.MultiheadAttention",
        ),
        "no plan": ("parallel.tp=2 but no plan says", "plan="),
        "cp": ("parallel.cp=2: in a module of your own attention", "Use dp_replicate"),
        "pp": ("parallel.pp=2: in a module of your own where",),
        "ep": ("parallel.ep=2: in a module of your own which",),
        "shared": ("blocks: keep table.weight and head.weight apart", "Leave their modules out"),
        "nested": ("blocks: name layers.0.up and a module around it. Name one.",),
        "setting": ("schedule is for models of a known family", "It takes blocks, plan, compile"),
        "length": ("seq_len is for models of a known family",),
        "meta": ("model: is on the meta device", "Build it with its weights"),
        "half": ("parameters are on the meta device", "head.weight"),
        "no loss": ("what the loss of a FSDPModel is, only you know", "Give loss="),
        "mean": ("loss= must return two things", "not their mean"),
        "fill": ("before parallelize()",),
    }
    for found in run_on_ranks(_refusals, 2):
        assert found.keys() == expected.keys()
        for name, parts in expected.items():
            assert [part for part in parts if part not in found[name]] == [], found[name]
