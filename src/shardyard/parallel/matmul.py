"""Matrix products of modules: a module may have one of another precision (``Float8Product``).

Tensor parallelism multiplies outside of the module's own forward method, and keeps other
tensors for the backward pass. It can therefore call the two halves of a product one by one.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import (
    Float8LinearConfig,
    LinearMMConfig,
    ScaledMMConfig,
    convert_to_float8_training,
)
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as _float8_matmul
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole

from shardyard.config.rules.layout import FP8_MULTIPLE
from shardyard.errors import RequestError
from shardyard.families.family import Family
from shardyard.models.submodules import blocks_of


class MatrixProduct:
    """x W^T in the format of its arguments."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Args:
        x: (..., in features).
        weight: (out features, in features).
        """
        return F.linear(x, weight)

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the weight, from the gradient of the product."""
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


_EXACT = MatrixProduct()


def matrix_product_of(module: nn.Module) -> MatrixProduct:
    """Return the product with which a linear module multiplies."""
    matmul: MatrixProduct = getattr(module, "product", _EXACT)
    return matmul


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Check whether a module computes as its kind does, with a weight that is its own parameter.

    Otherwise, code that multiplies by its weight instead of calling it would leave out what it
    adds.
    """
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and "forward" not in vars(module)  # a parametrized weight is a property of the class
        and "weight" in dict(module.named_parameters(recurse=False))
    )


def reject_wrapped(model: nn.Module, family: Family, *, blocks_only: bool) -> None:
    """Reject a whole model whose matrices are wrapped (LoRA, quantization, ...).

    Args:
        blocks_only: Not those of the table of tokens and the head.

    Raises:
        RequestError: There are some; its text names the first.
    """
    expected: dict[str, type[nn.Module]] = {
        f"{block}.{path}": nn.Linear
        for block in blocks_of(model, family)
        for path in (*family.colwise, *family.rowwise)
    }
    if not blocks_only:
        expected |= {family.embedding.module: nn.Embedding, family.head.module: nn.Linear}
    named = dict(model.named_modules())
    wrong = [name for name, kind in expected.items() if not is_plain(named.get(name, model), kind)]
    if wrong:
        first = wrong[0]
        found = f"a {type(named[first]).__name__}" if first in named else "not there"
        others = f", and {len(wrong) - 1} more are not what they were" if wrong[1:] else ""
        raise RequestError(
            f"{first} of this {type(model).__name__} is {found}{others}; it must be a plain "
            f"nn.{expected[first].__name__}. parallel.tp and precision.compute=fp8 use its weight "
            "without it, so what a wrapper (LoRA, quantization) adds would be lost. Use tp=1 and "
            "another precision, or merge the wrapper into the weight first."
        )


# torchao multiplies the matrices of blocks in fp8, at twice the peak rate of bf16 where supported.
#
# Only products are fp8. Master weights, gathered parameters, activations and gradients keep their
# formats. Each factor is scaled and cast just before the product, except for the weights of one
# rank, which stay cast for a step (``low_precision.py``). Parameters, their names and their places
# are therefore those of a bf16 run, and so are checkpoints and exports.
#
# Embedding, head and routers keep their format: they have few FLOP, or fp8 would harm them much.
# The experts' grouped products have no fp8 here.

_gradients = _float8_matmul.backward  # as a function, which a compiler reads


class _BackwardContext(NamedTuple):
    """Tensors and settings that torchao's product keeps for its backward pass, in its layout."""

    saved_tensors: tuple[Tensor, Tensor]
    linear_mm_config: LinearMMConfig
    config: Float8LinearConfig


class Float8Product(MatrixProduct):
    """x W^T, and both products of its backward pass, of factors cast to fp8."""

    def __init__(self, scaling: str, *, emulate: bool) -> None:
        """Args:
        scaling: As precision.fp8_scaling: one scale a tensor, or one a row.
        emulate: Round as fp8 does but multiply in the format of the arguments, for devices without.
        """
        self._config = Float8LinearConfig.from_recipe_name(scaling)
        gemms = (
            self._config.gemm_config_output,
            self._config.gemm_config_grad_input,
            self._config.gemm_config_grad_weight,
        )
        self._products = LinearMMConfig(
            *(ScaledMMConfig(emulate, gemm.use_fast_accum, False, False) for gemm in gemms)
        )

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.with_cast(x, weight.t())

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.gradients_with_cast(grad, x, weight.t())

    def cast(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """Cast W^T to fp8, laid out for ``with_cast`` and for ``gradients_with_cast``.

        Both have the same numbers. This holds only for one scale a tensor: by rows they are other
        numbers.
        """
        weight = self._config.cast_config_weight
        cast_IO: Tensor = hp_tensor_to_float8_dynamic(
            weight_OI.t(),
            weight.target_dtype,
            self._products,
            gemm_input_role=GemmInputRole.WEIGHT,
            round_scales_to_power_of_2=self._config.round_scales_to_power_of_2,
        )
        return cast_IO, cast_IO.contiguous()

    def with_cast(self, x: Tensor, weight_IO: Tensor) -> Tensor:
        """x W^T of W^T, cast or not."""
        product: Tensor = _float8_matmul.apply(x, weight_IO, self._products, self._config)
        return product

    def gradients_with_cast(
        self, grad: Tensor, x: Tensor, weight_IO: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the weight (O, I), by W^T, cast or not."""
        kept = _BackwardContext((x, weight_IO), self._products, self._config)
        grad_x, grad_weight_t, *_ = _gradients(kept, grad)
        return grad_x, grad_weight_t.t()


def float8_matrices(
    blocks: dict[str, nn.Module], family: Family, *, tp: int
) -> dict[str, nn.Linear]:
    """The matrices of blocks whose shapes fp8 kernels take, by full name.

    Args:
        blocks: By full name, with whole parameters: before tensor parallelism splits them.
        tp: Ranks that will split them.

    Raises:
        RequestError: There are none.
    """
    chosen: dict[str, nn.Linear] = {}
    for name, block in blocks.items():
        for path in (*family.colwise, *family.rowwise):
            module = block.get_submodule(path)
            assert isinstance(module, nn.Linear)
            out_split, in_split = (tp, 1) if path in family.colwise else (1, tp)
            sizes = (module.out_features / out_split, module.in_features / in_split)
            if all(size % FP8_MULTIPLE == 0 for size in sizes):
                chosen[f"{name}.{path}"] = module
    if blocks and not chosen:
        raise RequestError(
            f"precision.compute=fp8 but no matrix of a block has two sides of a multiple of "
            f"{FP8_MULTIPLE} on each rank, which fp8 products need. Use precision.compute=bf16, or "
            "less parallel.tp."
        )
    return chosen


def patch_compiler() -> None:
    """Let inductor cast to fp8 as torchao needs it; all else stays unchanged."""
    convert_to_float8_training(nn.Identity())


def multiply_with(module: nn.Linear, product: MatrixProduct) -> None:
    """Let a linear module multiply by another product."""

    def forward(x: Tensor) -> Tensor:
        result = product(x, module.weight)
        return result if module.bias is None else result + module.bias.to(result.dtype)

    changed: nn.Module = module
    changed.forward = forward
    changed.product = product  # type: ignore[assignment]
