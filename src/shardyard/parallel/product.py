"""How a matrix multiplies: a module may be given a product of another precision (`float8.py`).

Tensor parallelism multiplies outside of the module's own forward method, with its own idea of what
is kept for the backward pass; so the two halves of a product can also be asked for one by one.
"""

import torch.nn.functional as F
from torch import Tensor, nn


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
