"""Matrix products of modules: a module may have one of another precision (``float8.py``).

Tensor parallelism multiplies outside of the module's own forward method, and keeps other
tensors for the backward pass. It can therefore call the two halves of a product one by one.
"""

import torch.nn.functional as F
from torch import Tensor, nn

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


def multiply_with(module: nn.Linear, product: MatrixProduct) -> None:
    """Let a linear module multiply by another product."""

    def forward(x: Tensor) -> Tensor:
        result = product(x, module.weight)
        return result if module.bias is None else result + module.bias.to(result.dtype)

    changed: nn.Module = module
    changed.forward = forward
    changed.product = product  # type: ignore[assignment]
