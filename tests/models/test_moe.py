"""A mixture of experts is the function of transformers' own; its losses are those of papers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from shardyard.config.model.source import read_shape
from shardyard.config.schema.recipe import Model
from shardyard.families.presets import PRESETS
from shardyard.families.registry import family_of
from shardyard.families.shape import ModelShape
from shardyard.models import init
from shardyard.models.attention import SampleAttention
from shardyard.models.build import build_on_meta, fill_weights, hf_config, materialize
from shardyard.models.forward import ForwardPass
from shardyard.models.moe import RouterLoss, RouterTotals, SparseMLP, grouped_product
from shardyard.models.random import SampleKeys

SPARSE = ("mixtral-tiny", "qwen3-moe-tiny")
SHAPES = {name: replace(PRESETS[name].shape, vocab_size=300) for name in SPARSE}
SHAPES["qwen3"] = replace(
    PRESETS["llama-tiny"].shape, vocab_size=300, model_type="qwen3", head_dim=32, rms_norm_eps=1e-6
)


def _theirs(shape: ModelShape) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(hf_config(shape), attn_implementation="eager")


def _ours(shape: ModelShape, folder: Path) -> Any:
    model = build_on_meta(shape)
    materialize(model, torch.device("cpu"))
    fill_weights(model, folder=folder, seed=0)
    model.forward = ForwardPass(
        model,
        family_of(shape.model_type),
        keys=SampleKeys(),
        attention=lambda *_: SampleAttention(None, is_causal=True),
    )
    return model


@pytest.mark.parametrize("name", SHAPES)
def test_a_loaded_model_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    theirs = _theirs(SHAPES[name])
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")  # several files and an index
    shape = read_shape(Model(path=str(tmp_path)), tmp_path, 0)
    assert shape.parameters == sum(param.numel() for param in theirs.parameters())
    ours = _ours(shape, tmp_path)
    tokens = torch.arange(48).reshape(2, 24) * 5 % 300
    positions = torch.arange(24).expand(2, -1)
    logits = ours(tokens, positions, torch.arange(2))
    torch.testing.assert_close(logits, theirs(input_ids=tokens).logits)


@pytest.mark.parametrize("name", SPARSE)
def test_a_block_has_the_gradients_of_transformers_own(name: str, tmp_path: Path) -> None:
    theirs = _theirs(SHAPES[name])
    theirs.save_pretrained(tmp_path)
    block = _ours(SHAPES[name], tmp_path).model.layers[0].mlp
    oracle = theirs.model.layers[0].mlp
    x, x_too = (torch.linspace(-1, 1, 2 * 24 * 64).sin().view(2, 24, 64) for _ in range(2))
    y, expected = block(x.requires_grad_()), oracle(x_too.requires_grad_())
    torch.testing.assert_close(y, expected)
    direction = torch.linspace(0, 9, y.numel()).cos().view(y.shape)
    y.backward(direction)
    expected.backward(direction)
    gate, up = oracle.experts.gate_up_proj.grad.chunk(2, dim=1)
    for found, wanted in [
        (x.grad, x_too.grad),
        (block.router.weight.grad, oracle.gate.weight.grad),
        (block.experts.gate.grad, gate),
        (block.experts.up.grad, up),
        (block.experts.down.grad, oracle.experts.down_proj.grad),
    ]:
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "width", "inner"), [(10, 16, 24), (7, 6, 5), (0, 16, 24)], ids=str
)
def test_a_grouped_product_is_one_product_an_expert(rows: int, width: int, inner: int) -> None:
    counts = [min(3, rows), 0, rows - min(3, rows)]  # an expert without rows among them
    x = torch.randn(rows, width, requires_grad=True)
    w = torch.randn(3, inner, width, requires_grad=True)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    y = grouped_product(x, w, ends)
    pieces = torch.split(x, counts)
    expected = torch.cat([piece @ each.T for piece, each in zip(pieces, w, strict=True)])
    direction = torch.randn_like(expected)
    torch.testing.assert_close(y, expected)
    found = torch.autograd.grad(y, (x, w), direction)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (x, w), direction))


def _mlp(
    *, balance: float, z: float, samples: list[int], lengths: list[int] | None = None
) -> tuple[SparseMLP, RouterTotals]:
    torch.manual_seed(0)
    mlp = SparseMLP(SHAPES["mixtral-tiny"])
    for param in mlp.parameters():
        torch.nn.init.normal_(param, std=0.1)
    keys, totals = SampleKeys(), RouterTotals(blocks=1, experts=8)
    keys.samples_B = torch.tensor(samples)
    keys.lengths_B = None if lengths is None else torch.tensor(lengths)
    mlp.router_loss = RouterLoss(block=0, balance=balance, z=z, keys=keys, totals=totals)
    return mlp.train(), totals


def _router_gradient(mlp: SparseMLP, x: Tensor) -> Tensor:
    """Of the losses alone: what the block returns gets no gradient."""
    mlp.zero_grad()
    y = mlp(x)
    y.backward(torch.zeros_like(y))
    assert mlp.router.weight.grad is not None
    return mlp.router.weight.grad.clone()


def _losses(mlp: SparseMLP, x_LD: Tensor) -> tuple[Tensor, Tensor]:
    """Load-balance loss by transformers' own function, which counts visits, not shares; z-loss."""
    logits = x_LD @ mlp.router.weight.T
    balance = load_balancing_loss_func((logits,), 8, 2)
    assert isinstance(balance, Tensor)
    return balance / 2, (logits.exp().sum(dim=1).log() ** 2).mean()


def test_the_losses_of_a_sample_are_those_of_the_papers_times_its_tokens() -> None:
    x = torch.randn(2, 24, 64)
    mlp, totals = _mlp(balance=0.3, z=0.7, samples=[4, 9])
    found = _router_gradient(mlp, x)
    pairs = [_losses(mlp, sample) for sample in x]
    whole = sum(24 * (0.3 * balance + 0.7 * z) for balance, z in pairs)
    (expected,) = torch.autograd.grad(whole, mlp.router.weight)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)
    statistics = totals.statistics(totals.take(torch.device("cpu")))
    assert statistics.balance_loss == pytest.approx(sum(b.item() for b, _ in pairs) / 2)
    assert statistics.z_loss == pytest.approx(sum(z.item() for _, z in pairs) / 2)
    assert 1 < statistics.largest_load < 8
    assert not totals.take(torch.device("cpu")).any()  # they begin anew


def test_padding_counts_for_nothing() -> None:
    x = torch.randn(2, 24, 64)
    alone, totals_alone = _mlp(balance=0.3, z=0.7, samples=[4])
    padded, totals_padded = _mlp(balance=0.3, z=0.7, samples=[4, -1])
    torch.testing.assert_close(_router_gradient(padded, x), _router_gradient(alone, x[:1]))
    found, expected = (each.take(torch.device("cpu")) for each in (totals_padded, totals_alone))
    torch.testing.assert_close(found, expected)


def test_padding_inside_a_sample_is_what_transformers_leaves_out_by_its_mask() -> None:
    x, length = torch.randn(1, 24, 64), 7
    mlp, totals = _mlp(balance=1.0, z=0.0, samples=[4], lengths=[length])
    found = _router_gradient(mlp, x)
    logits, mask = x[0] @ mlp.router.weight.T, (torch.arange(24) < length).long()[None]
    balance = load_balancing_loss_func((logits,), 8, 2, mask)
    assert isinstance(balance, Tensor)
    (expected,) = torch.autograd.grad(length * balance / 2, mlp.router.weight)
    torch.testing.assert_close(found, expected)
    statistics = totals.statistics(totals.take(torch.device("cpu")))
    visits = logits[:length].topk(2).indices.flatten().bincount(minlength=8)
    assert statistics.largest_load == pytest.approx(float(visits.max()) / (2 * length / 8))
    assert statistics.balance_loss == pytest.approx(balance.item() / 2)


def test_an_evaluation_counts_nothing() -> None:
    mlp, totals = _mlp(balance=0.3, z=0.7, samples=[0])
    mlp.eval()(torch.randn(1, 24, 64)).sum().backward()
    assert not totals.take(torch.device("cpu")).any()


def test_weights_do_not_depend_on_the_size_of_the_pieces_they_are_made_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def experts() -> Tensor:
        model = build_on_meta(SHAPES["mixtral-tiny"])
        materialize(model, torch.device("cpu"))
        fill_weights(model, folder=None, seed=0)
        gate: Tensor = model.model.layers[1].mlp.experts.gate
        return gate

    whole = experts()
    assert abs(whole.std().item() - 0.02) < 1e-3
    monkeypatch.setattr(init, "_PIECE", 1000)
    assert torch.equal(experts(), whole)
