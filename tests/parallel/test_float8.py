"""Products in fp8: near the exact ones, but not them; names and exact parts stay."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardyard.errors import RequestError
from shardyard.families.presets import PRESETS
from shardyard.families.registry import family_of
from shardyard.models.build import build_on_meta
from shardyard.models.submodules import blocks_of
from shardyard.parallel.matmul import MatrixProduct, matrix_product_of, multiply_with

pytest.importorskip("torchao", reason="pip install 'shardyard[fp8]'")
from shardyard.parallel.float8 import Float8Product, float8_matrices

SCALINGS = ("tensorwise", "rowwise")


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.detach() - exact).norm() / exact.norm())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_three_products_are_rounded_by_some_percent(scaling: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.bfloat16)

    product = Float8Product(scaling, emulate=True)
    x, weight, grad = numbers(2, 32, 64), numbers(48, 64), numbers(2, 32, 48)
    asked = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = product(*asked)
    out.backward(grad)  # type: ignore[no-untyped-call]
    exact = MatrixProduct()
    wanted = [exact(x, weight), *exact.gradients(grad, x, weight)]
    for found, expected in zip([out, asked[0].grad, asked[1].grad], wanted, strict=True):
        assert found is not None
        # e4m3 keeps 4 bits: 2 % a factor on average; e5m2, of tensorwise gradients, 3: 5 %
        assert 0.01 < _error(found.float(), expected.float()) < 0.1
    # asked for one by one, as tensor parallelism does
    for found, of_autograd in zip(product.gradients(grad, x, weight), asked, strict=True):
        assert of_autograd.grad is not None
        assert torch.equal(found, of_autograd.grad)


@pytest.mark.heavy
def test_a_compiler_can_look_into_a_product() -> None:
    product = Float8Product("tensorwise", emulate=True)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.eye(64).bfloat16().requires_grad_()
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    found, expected = compiled(x, weight), product(x, weight)
    assert torch.equal(found, expected)
    for out in (found, expected):
        out.square().sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None


def test_a_scale_a_row_is_closer_where_rows_differ() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) ** 3
    x = x * torch.logspace(-9, 0, 32)[:, None]
    weight = torch.eye(64)
    small = slice(0, 8)
    errors = [
        _error(Float8Product(scaling, emulate=True)(x, weight)[small], x[small])
        for scaling in SCALINGS
    ]
    assert errors[1] < 0.1 < errors[0]


def _llama(**degrees: Any) -> tuple[nn.Module, list[str], set[str]]:
    model = build_on_meta(replace(PRESETS["llama-tiny"].shape, vocab_size=512))
    family = family_of("llama")
    names = {name for name, _ in model.named_parameters()}
    product = Float8Product("tensorwise", emulate=True)
    chosen = float8_matrices(blocks_of(model, family), family, **degrees)
    for module in chosen.values():
        multiply_with(module, product)
    return model, list(chosen), names


def test_only_matrices_of_blocks_with_sides_of_sixteen_are_chosen() -> None:
    model, chosen, names = _llama(tp=1)
    # of llama-tiny the inner width is 172, which 16 does not divide
    assert chosen == [
        f"model.layers.{block}.self_attn.{part}_proj" for block in (0, 1) for part in "qkvo"
    ]
    assert {name for name, _ in model.named_parameters()} == names
    exact = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(matrix_product_of(module)) is MatrixProduct
    ]
    assert "lm_head" in exact and len(exact) == 7


def test_tensor_parallelism_makes_sides_shorter() -> None:
    _, chosen, _ = _llama(tp=4)  # keys have 32 outputs in all, 8 on each rank
    assert {name.rpartition(".")[2] for name in chosen} == {"q_proj", "o_proj"}
    with pytest.raises(RequestError, match=r"two sides of a multiple of 16 on each rank"):
        _llama(tp=8)
