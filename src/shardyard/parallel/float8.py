"""Products of the matrices of blocks in fp8, by torchao.

They have twice the peak rate of bf16 where the device has them. Only products are fp8. Master
weights, gathered parameters, activations and gradients keep their
formats. Each factor is scaled and cast just before the product, except for the weights of one
rank, which stay cast for a step (``low_precision.py``). Parameters, their names and their places
are therefore those of a bf16 run, and so are checkpoints and exports.

Embedding, head and routers keep their format: they have few FLOP, or fp8 would harm them much.
The experts' grouped products have no fp8 here.

torchao is an extra, ``shardyard[fp8]``: only a recipe with ``precision.compute=fp8`` imports this.
"""

from typing import NamedTuple

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
from shardyard.parallel.matmul import MatrixProduct

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
