"""Two lines for a model of one's own under tp and ep, beside plain torch in one process.

Each rank reads samples of its own; the one process reads those of all ranks.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

import shardyard
from shardyard.errors import RecipeError, RequestError
from tests.distributed.ranks import run_on_ranks
from tests.library.test_custom_module import PLAN
from tests.library.test_custom_module import Model as Dense

WIDTH, WORDS, EXPERTS = 16, 40, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.up(x)))
        return y


class Mixture(nn.Module):
    """The loop that most models have: tokens of each expert, weighted by the router."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            place, which = (chosen == index).nonzero(as_tuple=True)
            if len(place):
                out = out.index_add(0, place, expert(flat[place]) * weights[place, which, None])
        return x + out.view_as(x)


class Sparse(nn.Module):
    """Returns logits alone, or with labels also the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "dense": (lambda: Dense(tied=False), {"plan": PLAN}),
    "sparse": (Sparse, {"experts": "layers.*.experts"}),
}


def _built(name: str) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(0)
    build, how = MODELS[name]
    model = build()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4), how


def _batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    first = torch.randint(0, WORDS, (2, 1), generator=generator)
    return (first + torch.arange(8)) % WORDS


def _steps(model: Any, optimizer: Any, read: Callable[[int], Tensor]) -> list[tuple[float, float]]:
    found = []
    for step in range(3):
        total = 0.0
        for micro in range(2):
            tokens = read(2 * step + micro)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / 2).backward()  # type: ignore[no-untyped-call]
            total += float(loss) / 2
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found.append((total, float(norm.full_tensor() if isinstance(norm, DTensor) else norm)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def _whole(model: nn.Module) -> dict[str, Tensor]:
    tensors = {name: param.detach() for name, param in model.named_parameters()}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}


def _trained(name: str, words: str) -> tuple[Any, Any, dict[str, float], int]:
    """Steps in one process and on all ranks, how far weights are apart, and how many are here."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone, optimizer, how = _built(name)
    wanted = _steps(
        alone, optimizer, lambda step: torch.cat([_batch(step, rank) for rank in range(ranks)])
    )
    os.environ["SHARDYARD_PARALLEL"] = words
    model, optimizer, _ = _built(name)
    model, optimizer = shardyard.wrap(model, optimizer, **how)
    found = torch.tensor(_steps(model, optimizer, lambda step: _batch(step, rank)))
    dist.all_reduce(found)
    there, here = dict(alone.named_parameters()), _whole(model)
    apart = {key: float((there[key] - here[key]).abs().max()) for key in here}
    return wanted, (found / ranks).tolist(), apart, len(here) - len(there)


_SLOW = pytest.mark.slow


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "words", "ranks", "elsewhere"),
    [
        ("dense", "tp=2", 2, 0),
        ("sparse", "ep=2", 2, 2 * 2 * 4),
        pytest.param("dense", "tp=2,dp_shard=2", 4, 0, marks=_SLOW),
        pytest.param("dense", "tp=2,dp_replicate=2", 4, 0, marks=_SLOW),
        pytest.param("sparse", "ep=4", 4, 2 * 3 * 4, marks=_SLOW),
        pytest.param("sparse", "ep=2,dp_shard=4", 4, 2 * 2 * 4, marks=_SLOW),
        pytest.param("sparse", "ep=2,dp_shard=4,zero=1", 4, 2 * 2 * 4, marks=_SLOW),
        pytest.param("sparse", "ep=2,dp_shard=2,dp_replicate=2", 4, 2 * 2 * 4, marks=_SLOW),
        pytest.param("sparse", "dp_replicate=2,dp_shard=1", 2, 0, marks=_SLOW),
    ],
)
def test_a_model_of_ones_own_trains_as_in_one_process(
    name: str, words: str, ranks: int, elsewhere: int
) -> None:
    for wanted, found, apart, more in run_on_ranks(_trained, ranks, name, words):
        assert wanted[-1][0] < wanted[0][0] - 0.1, "it learns"
        for (loss, norm), (wanted_loss, wanted_norm) in zip(found, wanted, strict=True):
            assert loss == pytest.approx(wanted_loss, rel=1e-6)
            assert norm == pytest.approx(wanted_norm, rel=2e-6)
        assert max(apart.values()) < 2e-5, apart
        assert -more == elsewhere


def _used(folder: str, name: str, words: str) -> list[bool]:
    """Unequal numbers of samples, a loss inside, evaluation, and a checkpoint."""
    os.environ["SHARDYARD_PARALLEL"] = words
    rank = dist.get_rank()
    alone, _, how = _built(name)
    model, optimizer, _ = _built(name)
    model, optimizer = shardyard.wrap(model, optimizer, **how)
    tokens = _batch(0, rank).repeat(1 + rank, 1)
    with torch.no_grad():
        found = [torch.allclose(model(tokens), alone(tokens), atol=1e-6)]
    if name == "sparse":
        every = torch.cat([_batch(0, each).repeat(1 + each, 1) for each in range(2)])
        output = model(tokens, labels=tokens)
        wanted = alone(every, labels=every)["loss"]
        found.append(abs(float(output["loss"] - wanted)) < 1e-6)
        found.append(output["logits"].shape[:2] == tokens.shape)
    for step in shardyard.steps(2, folder, model, optimizer, every=1):
        model(_batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    here = _whole(model)
    again, optimizer, _ = _built(name)
    again, optimizer = shardyard.wrap(again, optimizer, **how)
    left = list(shardyard.steps(2, folder, again, optimizer, every=1))
    there = _whole(again)
    os.environ["SHARDYARD_PARALLEL"] = "dp_shard=2"
    other, _, _ = _built(name)
    other = shardyard.wrap(other)
    shardyard.load_checkpoint(folder, other)
    sharded = _whole(other)
    return [
        *found, not left, here.keys() == there.keys(),
        all(torch.equal(here[key], there[key]) for key in here),
        all(torch.equal(here[key], sharded[key]) for key in here),
    ]  # fmt: skip


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:.*No step is left to train")
@pytest.mark.parametrize(("name", "words"), [("dense", "tp=2"), ("sparse", "ep=2")])
def test_samples_losses_and_checkpoints_of_a_model_of_ones_own(
    name: str, words: str, tmp_path: Path
) -> None:
    for found in run_on_ranks(_used, 2, str(tmp_path), name, words):
        assert all(found), found


class OwnPretrained(PreTrainedModel):  # type: ignore[misc]
    """A model of one's own in the form of transformers."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(Mixture() for _ in range(2))
        self.post_init()


def _exported(folder: str) -> bool:
    os.environ["SHARDYARD_PARALLEL"] = "ep=2"
    torch.manual_seed(0)
    model = OwnPretrained(PretrainedConfig())
    wanted = {name: param.detach().clone() for name, param in model.named_parameters()}
    model = shardyard.wrap(model, experts="layers.*.experts")
    shardyard.export(model, folder)
    found = dict(OwnPretrained.from_pretrained(folder).named_parameters())
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


@pytest.mark.heavy
def test_an_export_holds_the_experts_of_all_ranks(tmp_path: Path) -> None:
    assert all(run_on_ranks(_exported, 2, str(tmp_path)))


class Odd(nn.Module):
    """With lists that cannot be dealt out."""

    def __init__(self) -> None:
        super().__init__()
        self.three = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.unlike = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 3)])
        self.counts = nn.ModuleList(nn.BatchNorm1d(2, affine=False) for _ in range(2))
        self.tied = nn.ModuleList([self.three[0], nn.Linear(2, 2)])
        self.rows = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))


def _problems(words: str, **how: Any) -> str:
    os.environ["SHARDYARD_PARALLEL"] = words
    with pytest.raises(RecipeError) as raised:
        shardyard.wrap(Odd(), **how)
    return str(raised.value)


def _refused() -> list[str]:
    lists = ["none.*", "three", "unlike", "counts", "tied", "rows"]
    plan = {"nowhere": "columns"}
    return [
        _problems("ep=2", experts=lists),
        _problems("cp=2", plan={"rows.0": "columns"}),
        _problems("pp=2", experts="three"),
        _problems("tp=2", experts="tied", plan=plan),
        _problems("ep=2", plan=plan),
        _problems("tp=2", experts="unlike"),
    ]


@pytest.mark.heavy
def test_what_cannot_be_split_is_named_with_what_to_do() -> None:
    wanted = [
        [
            "experts='none.*' names no nn.ModuleList. The model has three, unlike, counts, tied",
            "experts='three': ep=2 does not divide its 3 experts. Every rank holds equally many. "
            "Use an ep of 1, 3.",
            "experts='unlike': expert 1 has ('weight', (3, 2), 'torch.float32') and expert 0 has",
            "experts='counts': 0.running_mean is a buffer of an expert",
            "share a parameter: three.0.weight and tied.0.weight",
            "experts='rows': rows is a Sequential. Experts are the modules of an nn.ModuleList",
            "model: drops at rows.1: the ranks of ep",
        ],
        ["parallel.cp=2: in a module of your own attention would have to exchange keys"],
        ["parallel.pp=2: in a module of your own where it can be cut"],
        ["plan['nowhere']: names no module"],
        ["parallel.ep=2 but no list of experts is named. Give experts="],
        ["parallel.tp=2 but no plan says what it splits. Give plan="],
    ]
    for said in run_on_ranks(_refused, 2):
        for text, parts in zip(said, wanted, strict=True):
            assert [part for part in parts if part not in text] == [], text


class Reads(Sparse):
    """Reads what an expert has, or returns what has no samples."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        if labels is None:
            return self.table(tokens).flatten(0, 1)
        return [expert.up for expert in self.layers[0].experts]  # type: ignore[union-attr]


def _wrong_calls() -> list[str]:
    os.environ["SHARDYARD_PARALLEL"] = "ep=2"
    model = shardyard.wrap(Reads(), experts="layers.*.experts")
    rank = dist.get_rank()
    tokens = _batch(0, rank)
    uses: list[Callable[[], Any]] = [
        lambda: model(tokens),
        lambda: model(tokens[:, : 3 + rank]),
        lambda: model(tokens, torch.tensor(rank)),
        lambda: model(tokens, torch.ones(2, requires_grad=True)),
        lambda: model(tokens, tokens),
    ]
    said = []
    for use in uses:
        with pytest.raises((RequestError, AttributeError)) as raised:
            use()
        said.append(str(raised.value))
    return said


@pytest.mark.heavy
def test_a_call_that_ranks_cannot_share_says_what_to_change() -> None:
    wanted = [
        "returns a tensor of (32, 16) for 4 samples of its ranks",
        "shapes [[(2, 3)], [(2, 4)]]. All give tensors with their samples first",
        "the same values in a tensor that has no samples",
        "is called with a tensor that needs a gradient",
        "is on rank ",
    ]
    for said in run_on_ranks(_wrong_calls, 2):
        for text, part in zip(said, wanted, strict=True):
            assert part in text
