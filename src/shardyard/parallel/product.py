"""How a matrix multiplies: a module may be given a product of another precision (`float8.py`).

Tensor parallelism multiplies outside of the module's own forward method, with its own idea of what
is kept for the backward pass; so the two halves of a product can also be asked for one by one.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from shardyard.errors import RequestError
from shardyard.families.family import Family
from shardyard.models.submodules import blocks_of


class Product:
    """x W^T in the format of its arguments."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Args:
        x: (..., in features).
        weight: (out features, in features).
        """
        return F.linear(x, weight)

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Of x and of the weight, from that of the product."""
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


_EXACT = Product()


def product_of(module: nn.Module) -> Product:
    """What a linear module multiplies with."""
    found: Product = getattr(module, "product", _EXACT)
    return found


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes as its kind does, with a weight that is a parameter of its own.

    Else whoever multiplies by its weight instead of calling it would leave out what it adds.
    """
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and "forward" not in vars(module)  # a parametrized weight is a property of the class
        and "weight" in dict(module.named_parameters(recurse=False))
    )


def refuse_wrapped(model: nn.Module, family: Family, *, of_blocks_alone: bool) -> None:
    """Refuse a whole model whose matrices are wrapped (LoRA, quantization, ...).

    Args:
        of_blocks_alone: Not those of the table of tokens and the head.

    Raises:
        RequestError: There are some; its text names the first.
    """
    wanted: dict[str, type[nn.Module]] = {
        f"{block}.{path}": nn.Linear
        for block in blocks_of(model, family)
        for path in (*family.colwise, *family.rowwise)
    }
    if not of_blocks_alone:
        wanted |= {family.embedding.module: nn.Embedding, family.head.module: nn.Linear}
    named = dict(model.named_modules())
    wrong = [name for name, kind in wanted.items() if not is_plain(named.get(name, model), kind)]
    if wrong:
        first = wrong[0]
        found = f"a {type(named[first]).__name__}" if first in named else "not there"
        others = f", and {len(wrong) - 1} more are not what they were" if wrong[1:] else ""
        raise RequestError(
            f"{first} of this {type(model).__name__} is {found}{others}; it must be a plain "
            f"nn.{wanted[first].__name__}. parallel.tp and precision.compute=fp8 use its weight "
            "without it, so what a wrapper (LoRA, quantization) adds would be lost. Use tp=1 and "
            "another precision, or merge the wrapper into the weight first."
        )
