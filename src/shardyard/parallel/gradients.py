"""The norm of the gradients of all ranks, in every layout.

torch adds up a tensor's squares in fp32, on a CPU one after the other: 1 M elements are 1e-5 off,
128 M 1.4 %, and a share of them is off by less than the whole. So rows of a large tensor are added
up apart, and their sums in fp64, which reads it once and copies nothing.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardyard.torch_private import foreach_norm, placed_as

_ROW = 1024
"""Elements added up in fp32: within 5e-8 of exact."""
_SMALL = 2**14
"""Elements of tensors that are one row each: within 1e-7."""


def square_sum(params: Mapping[str, Tensor], *, held_twice: Collection[str] = ()) -> Tensor:
    """This rank's share of the squared global norm of the gradients, fp64.

    Each element counts once over all ranks: one that several hold counts in parts.

    Args:
        held_twice: Names of parameters that two pipeline stages hold, with equal gradients.
    """
    by_holders: dict[int, list[Tensor]] = {}
    for name, param in params.items():
        if param.grad is not None:
            number = holders(param) * (2 if name in held_twice else 1)
            by_holders.setdefault(number, []).append(local_part(param.grad))
    shares = [_squares(found) / number for number, found in by_holders.items()]
    if not shares:  # a pipeline stage of which nothing is trained
        return torch.zeros((), dtype=torch.float64, device=next(iter(params.values())).device)
    return torch.stack(shares).sum()


def square_sums(parts: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements of each, fp64."""
    by_rows, rest = _norms(parts)
    sums = list(rest.double().square().unbind())
    for index, norms in by_rows.items():
        sums[index] = sums[index] + norms.double().square().sum()
    return torch.stack(sums)


def _squares(parts: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements of all, fp64."""
    by_rows, rest = _norms(parts)
    return torch.cat([*by_rows.values(), rest]).double().square().sum()


def _norms(parts: Sequence[Tensor]) -> tuple[dict[int, Tensor], Tensor]:
    """Norms of the rows of each large part, by its index; and of what is left of every part."""
    by_rows: dict[int, Tensor] = {}
    rest: list[Tensor] = []
    for index, part in enumerate(parts):
        flat = part.reshape(-1)
        dtype = torch.promote_types(part.dtype, torch.float32)
        end = len(flat) - len(flat) % _ROW if len(flat) > _SMALL else 0
        if end:
            rows = flat[:end].view(-1, _ROW)
            by_rows[index] = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
        rest.append(flat[end:].to(dtype))
    return by_rows, torch.stack(foreach_norm(rest))


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def holders(param: Tensor) -> int:
    """How many ranks hold the same part of a parameter; what is no DTensor all of them hold."""
    if not isinstance(param, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    sizes = zip(param.placements, param.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def placed_like(param: Tensor, value: Tensor) -> Tensor:
    """State of a parameter, with its place in the whole; a scalar has none."""
    if not isinstance(param, DTensor) or value.dim() == 0:
        return value
    if value.device.type != param.device_mesh.device_type:
        return placed_as(param, value)
    return DTensor.from_local(
        value,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
