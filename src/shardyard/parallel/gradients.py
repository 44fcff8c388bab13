"""The norm of the gradients of all ranks, in every layout."""

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def square_sum(params: Mapping[str, Tensor], *, held_twice: Collection[str] = ()) -> Tensor:
    """This rank's share of the squared global norm of the gradients, fp64.

    Each element counts once over all ranks: one that several hold counts in parts.

    Args:
        held_twice: Names of parameters that two pipeline stages hold, with equal gradients.
    """
    by_holders: dict[int, list[Tensor]] = {}
    for name, param in params.items():
        if param.grad is not None:
            holders = _holders(param) * (2 if name in held_twice else 1)
            by_holders.setdefault(holders, []).append(local_part(param.grad))
    norms = {n: torch.nn.utils.get_total_norm(found) for n, found in by_holders.items()}
    shares = [norm.double() ** 2 / holders for holders, norm in norms.items()]
    return torch.stack(shares).sum()


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _holders(param: Tensor) -> int:
    """How many ranks hold the same part of a parameter."""
    if not isinstance(param, DTensor):
        return 1
    sizes = zip(param.placements, param.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())
