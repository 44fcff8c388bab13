"""One rank in a copy of its weights: what moves, and that the step is the same."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Recipe
from shardyard.parallel.low_precision import (
    LowPrecisionCopies,
    can_hold_copies,
    low_precision_copies_of,
    matrix_of,
)
from shardyard.torch_private import TorchDispatchMode, tree_leaves
from shardyard.train.optim import ShardOptimizer

VOCAB, WIDTH, TOKENS = 48, 32, 6
MATRIX = WIDTH * WIDTH
PRODUCTS = {"mm", "addmm", "addmm_"}


class Model(nn.Module):
    """A table, two matrices with a norm between them, and a head tied to the table."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        y: Tensor = self.head(x + self.down(self.norm(torch.relu(self.up(x)))))
        return y


def _model(*, tied: bool = True) -> Model:
    torch.manual_seed(0)
    return Model(tied=tied)


def _recipe(compute: str = "bf16", **sections: Any) -> Recipe:
    precision = {"compute": compute, "reduce": "fp32", "output": "fp32"}
    optim = {
        "name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 0, "decay_steps": 9,
        "eps": 1e-3,  # else Adam divides noise by itself where a gradient is small
    }  # fmt: skip
    precision = {**precision, **sections.pop("precision", {})}
    optim = {**optim, **sections.pop("optim", {})}
    cluster = sections.pop("cluster", {"device": "cpu"})
    return Recipe.model_validate(
        {"precision": precision, "optim": optim, "cluster": cluster, **sections}
    )


def _backward(model: nn.Module, number: int, micro_batches: int = 2) -> list[float]:
    losses = []
    for index in range(micro_batches):
        generator = torch.Generator().manual_seed(7 * number + index)
        ids, targets = torch.randint(VOCAB, (2, 2, TOKENS), generator=generator)
        logits = model(ids).float().flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
    return losses


def _train(model: nn.Module, recipe: Recipe, steps: int = 20) -> list[tuple[float, float]]:
    """Loss sum and norm of each step."""
    optimizer = ShardOptimizer(model, recipe.optim, copies=low_precision_copies_of(model))
    found = []
    for number in range(steps):
        losses = _backward(model, number)
        norm = float(optimizer.square_sum().sqrt())
        divisor = torch.tensor(4.0 * TOKENS, dtype=torch.float64)
        optimizer.step(lr=1e-2, divisor=divisor, skip=torch.tensor(number == 3))
        found.append((sum(losses), norm))
    return found


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("tied", [True, False])
def test_in_fp32_twenty_steps_are_those_without_copies(*, name: str, tied: bool) -> None:
    recipe = _recipe("fp32", optim={"name": name, "lr": 1e-2})
    plain, copied = _model(tied=tied), _model(tied=tied)
    LowPrecisionCopies(copied, recipe)
    expected, found = _train(plain, recipe), _train(copied, recipe)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-6)
    for (key, weight), other in zip(plain.named_parameters(), copied.parameters(), strict=True):
        # Adam divides what is next to nothing by itself: 20 steps of 1e-2 may move by rounding
        torch.testing.assert_close(other, weight, rtol=1e-5, atol=1e-5, msg=key)
        assert other.dtype == torch.float32


def test_in_bf16_twenty_steps_are_those_of_a_plain_loop() -> None:
    """fp32 weights, a bf16 model that they are copied into, and torch's own AdamW."""
    recipe = _recipe()
    ours = _model()
    LowPrecisionCopies(ours, recipe)
    found = _train(ours, recipe)
    weights = dict(_model().named_parameters())
    computing = _model().bfloat16()
    groups: list[dict[str, Any]] = [
        {"params": [w for w in weights.values() if w.dim() > 1]},
        {"params": [w for w in weights.values() if w.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=1e-2, betas=recipe.optim.betas, eps=1e-3, weight_decay=0.1
    )
    expected = []
    for number in range(20):
        sums: dict[str, Tensor] = {}
        loss = 0.0
        for index in range(2):
            generator = torch.Generator().manual_seed(7 * number + index)
            ids, targets = torch.randint(VOCAB, (2, 2, TOKENS), generator=generator)
            logits = computing(ids).float().flatten(0, 1)
            of_batch = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
            of_batch.backward()  # type: ignore[no-untyped-call]
            loss += float(of_batch.detach())
            for name, param in computing.named_parameters():
                assert param.grad is not None
                sums[name] = sums.get(name, torch.zeros(())) + param.grad.float()
            computing.zero_grad()
        expected.append((loss, float(torch.stack([s.norm() for s in sums.values()]).norm())))
        if number == 3:
            continue
        for name, weight in weights.items():
            weight.grad = sums[name] / (4.0 * TOKENS)
        optimizer.step()
        computing.load_state_dict({**computing.state_dict(), **weights})
    # gradients there are rounded to bf16 once more, of 8 bits, and so 4e-3 off: norms follow
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-2, atol=0.0)
    assert found[-1][0] < 0.7 * found[0][0]


# --- what moves ----------------------------------------------------------------------------------


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of tensors as large as a matrix that operators other than products read and write.

    On a CPU a product of 16-bit matrices cannot add to fp32: `add_product` makes them fp32 first.
    Those are activations, of fewer elements than a matrix here, and so not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved: dict[str, int] = {}

    def __torch_dispatch__(
        self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = operator(*args, **(kwargs or {}))
        name = operator.overloadpacket.__name__
        is_view = operator.is_view or name in ("detach", "empty_like")
        if not is_view and name not in PRODUCTS:
            for each in tree_leaves((args, found)):
                if isinstance(each, Tensor) and each.numel() >= MATRIX:
                    self.moved[name] = self.moved.get(name, 0) + each.nbytes
        return found


def _moved(run: Callable[[], object]) -> dict[str, int]:
    with _Traffic() as traffic:
        run()
    found: dict[str, int] = traffic.moved
    return found


def test_a_micro_batch_moves_nothing_as_large_as_a_matrix_outside_of_products() -> None:
    model, recipe = _model(tied=False), _recipe()
    LowPrecisionCopies(model, recipe)
    _backward(model, 0, 1)  # of a step's first micro-batch the table's sum is made
    moved = _moved(lambda: _backward(model, 1, 1))
    # a gradient's rows are added to those of the table's sum: as many as there are tokens
    assert moved.keys() == {"embedding", "index_add_"}, moved
    plain = _model(tied=False).bfloat16()
    _backward(plain, 0, 1)
    assert {"add_", "embedding_dense_backward"} <= _moved(lambda: _backward(plain, 1, 1)).keys()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_copies_are_cast_where_an_update_has_not_written_them(name: str) -> None:
    model, recipe = _model(tied=False), _recipe(optim={"name": name, "lr": 1e-2})
    LowPrecisionCopies(model, recipe)
    optimizer = ShardOptimizer(model, recipe.optim, copies=low_precision_copies_of(model))
    forward = lambda: model(torch.ones(1, 2, dtype=torch.int64))  # noqa: E731
    assert "copy_" in _moved(forward)  # they are made
    assert "copy_" not in _moved(forward)
    _backward(model, 0)
    optimizer.step(lr=1e-2, divisor=torch.ones((), dtype=torch.float64), skip=torch.tensor(0.0))
    assert ("copy_" in _moved(forward)) == (name != "adamw")
    for module in (model.table, model.up, model.down, model.head):
        assert matrix_of(module).equal(module.weight.bfloat16())


def test_a_matrix_is_cast_to_fp8_once_a_step_and_laid_out_for_both_products() -> None:
    float8 = pytest.importorskip("shardyard.parallel.float8", reason="shardyard[fp8]")
    product = float8.Float8Product("tensorwise", emulate=True)
    cast, product.cast = product.cast, Mock(side_effect=product.cast)
    model, recipe = _model(tied=False), _recipe("fp8")
    LowPrecisionCopies(model, recipe, in_float8=[model.up, model.down], float8=product)
    optimizer = ShardOptimizer(model, recipe.optim, copies=low_precision_copies_of(model))
    assert low_precision_copies_of(model).tensors().keys() == {"table.weight", "head.weight"}  # type: ignore[union-attr]
    for step in range(2):
        _backward(model, step, micro_batches=3)
        assert product.cast.call_count == 2 * (step + 1)
        of_step = cast(model.up.weight.detach().bfloat16())
        held: tuple[Any, Any] = (model.up.cast_IO, model.up.cast_for_gradient_IO)
        for each, expected in zip(held, of_step, strict=True):
            assert torch.equal(each.to_original_precision(), expected.to_original_precision())
        # each product's second factor has its columns together
        assert held[0].t().is_contiguous() and held[1].is_contiguous()
        optimizer.step(lr=1e-2, divisor=torch.ones((), dtype=torch.float64), skip=torch.tensor(0.0))


def test_copies_follow_what_a_load_or_averages_put_into_weights() -> None:
    model, recipe = _model(), _recipe()
    LowPrecisionCopies(model, recipe)
    optimizer = ShardOptimizer(model, recipe.optim, copies=low_precision_copies_of(model))
    ids = torch.ones(1, 2, dtype=torch.int64)
    model(ids)
    for tensor in optimizer.tensors().values():  # as a checkpoint is read into
        tensor.copy_(torch.full_like(tensor, 0.3))
    model(ids)
    assert matrix_of(model.up).eq(torch.tensor(0.3).bfloat16()).all()


def test_rows_of_padding_get_no_gradient() -> None:
    model = _model(tied=False)
    LowPrecisionCopies(model, _recipe())
    model(torch.tensor([[0, 1]])).sum().backward()
    assert model.table.weight.grad is not None
    assert not model.table.weight.grad[0].any() and model.table.weight.grad[1].any()


# --- who computes so -----------------------------------------------------------------------------

ONE = Layout(dp_replicate=1, dp_shard=1, zero=3)


@pytest.mark.parametrize(
    ("sections", "held"),
    [
        ({}, True),
        ({"optim": {"name": "lamb"}}, True),
        ({"memory": {"recompute": "selective"}}, True),
        ({"precision": {"compute": "fp32"}}, False),
        ({"precision": {"compute": "fp16"}}, False),
        ({"precision": {"compute": "fp8"}}, True),
        ({"precision": {"compute": "fp8", "fp8_scaling": "rowwise"}}, False),
        ({"precision": {"reduce": "bf16"}}, False),
        ({"precision": {"reduce": "exact"}}, False),
        ({"memory": {"offload": "optimizer"}}, False),
        ({"model": {"compile": True}}, True),
        ({"model": {"frozen": ["*"]}}, False),
        ({"model": {"lora": {"rank": 2}}}, False),
    ],
)
def test_all_else_is_sharded_as_before(sections: dict[str, Any], *, held: bool) -> None:
    given: dict[str, Any] = {name: dict(each) for name, each in sections.items()}
    recipe = _recipe("bf16", **given)
    mesh: Any = SimpleNamespace(layout=ONE)
    assert can_hold_copies(_model(), mesh, recipe) == held
    two: Any = SimpleNamespace(layout=Layout(dp_replicate=2, dp_shard=1, zero=3))
    assert not can_hold_copies(_model(), two, recipe)


def test_where_it_has_never_run_only_who_tries_it_asks_for_it() -> None:
    mesh: Any = SimpleNamespace(layout=ONE)
    recipe = _recipe(cluster={"device": "cuda"})
    assert not can_hold_copies(_model(), mesh, recipe)
    assert can_hold_copies(_model(), mesh, recipe, anywhere=True)


def test_a_model_with_a_matrix_of_another_kind_or_frozen_is_sharded_as_before() -> None:
    mesh: Any = SimpleNamespace(layout=ONE)
    frozen, convolving, limited = _model(), _model(), _model()
    frozen.up.requires_grad_(requires_grad=False)
    convolving.up = nn.Conv1d(2, 2, 1)  # type: ignore[assignment]
    limited.table.max_norm = 1.0
    for model in (frozen, convolving, limited, _model().bfloat16()):
        assert not can_hold_copies(model, mesh, _recipe())
