"""Matrix products of blocks in fp8, by torchao: twice the peak rate of bf16 on devices that can.

Only products are fp8. Master weights, gathered parameters, activations and gradients keep their
formats; each factor is scaled and cast just before it is multiplied. So parameters, their names and
their places are those of a bf16 run, and so are checkpoints and exports.

Embedding, head and routers stay as they are: few FLOP, or much harm. Experts too: their grouped
products have no fp8 here.
"""

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torchao.float8 import (
    Float8LinearConfig,
    LinearMMConfig,
    ScaledMMConfig,
    convert_to_float8_training,
)
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as _float8_matmul

from shardyard.config.legality import FP8_MULTIPLE
from shardyard.errors import RequestError
from shardyard.families.family import Family
from shardyard.parallel.product import Product


class Float8Product(Product):
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
        product: Tensor = _float8_matmul.apply(x, weight.t(), self._products, self._config)
        return product

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        kept: Any = SimpleNamespace(
            saved_tensors=(x, weight.t()), linear_mm_config=self._products, config=self._config
        )
        grad_x, grad_weight_t, *_ = _float8_matmul.backward(kept, grad)
        return grad_x, grad_weight_t.t()


def compute_in_float8(
    blocks: dict[str, nn.Module], family: Family, product: Float8Product, *, tp: int
) -> list[str]:
    """Let the matrices of blocks multiply in fp8, those whose shapes fp8 kernels take.

    Args:
        blocks: By full name, with whole parameters: before tensor parallelism splits them.
        tp: Ranks that will split them.

    Returns:
        Full names of the modules that now do.

    Raises:
        RequestError: There are none.
    """
    convert_to_float8_training(nn.Identity())  # mends inductor's fp8 casts; there is nothing else
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
    for module in chosen.values():
        _multiply_with(module, product)
    return list(chosen)


def _multiply_with(module: nn.Linear, product: Product) -> None:
    def forward(x: Tensor) -> Tensor:
        result = product(x, module.weight)
        return result if module.bias is None else result + module.bias.to(result.dtype)

    changed: nn.Module = module
    changed.forward = forward
    changed.product = product  # type: ignore[assignment]
