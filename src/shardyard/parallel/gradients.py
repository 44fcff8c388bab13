"""Norm of the gradients of all ranks, in every layout.

torch adds up a tensor's squares in fp32, on a CPU one after the other: 1 M elements are
1e-5 off, 128 M 1.4 %. A share of them is off by less than the whole. Rows of a large tensor
are therefore added up separately, and their sums in fp64. This reads the tensor once and
copies none of it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardyard.config.optimizers import Form, shape_of_state
from shardyard.models.local_shard import local_shard
from shardyard.torch_private import dtensor_like, foreach_norm, is_strided, strided_in

_ROW = 1024
"""Elements added up in fp32: within 5e-8 of exact."""
_SMALL = 2**14
"""Elements of tensors that are one row each: within 1e-7."""


def square_sum(params: Mapping[str, Tensor], *, tied_across_stages: Collection[str] = ()) -> Tensor:
    """This rank's share of the squared global norm of the gradients, fp64.

    Each element counts once over all ranks: one that several hold counts in parts.

    Args:
        tied_across_stages: Names of parameters that two pipeline stages hold, with equal gradients.
    """
    by_holders: dict[int, list[Tensor]] = {}
    for name, param in params.items():
        if param.grad is not None:
            number = holders(param) * (2 if name in tied_across_stages else 1)
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
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def holders(param: Tensor) -> int:
    """Count the ranks that hold the same part of a parameter; all ranks if it is no DTensor."""
    if not isinstance(param, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    sizes = zip(param.placements, param.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def placed_like(param: Tensor, value: Tensor, form: Form = "element") -> Tensor:
    """State of a parameter, with its place in the whole; a scalar has none."""
    if not isinstance(param, DTensor) or value.dim() == 0:
        return value
    placements = [placement_of_state(each, param.dim(), form) for each in param.placements]
    shape = torch.Size(shape_of_state(form, tuple(param.shape)))
    if value.device.type != param.device_mesh.device_type:
        return dtensor_like(param, value, placements, shape)
    stride = param.stride() if form == "element" else torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value, param.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def placement_of_state(placement: Placement, dims: int, form: Form) -> Placement:
    """Place of a state on an axis: numbers of rows are split where rows are, else each has all.

    Args:
        placement: The parameter's.
        dims: Its dimensions.
    """
    if placement.is_replicate() or form == "element":
        return placement
    dim: int = placement.dim  # type: ignore[attr-defined]
    rows, columns = dims - 2, dims - 1
    if dim == (columns if form == "row" else rows):
        return Replicate()
    if dim != columns:
        return placement
    return strided_in(placement, rows) if is_strided(placement) else Shard(rows)


# ``ParamNorms`` computes norms of whole parameters from the ranks' parts, in one all-reduce.
#
# A parameter may be split over dp_shard, cp, tp and ep, replicated over dp_replicate, and held by
# one pipeline stage or by two. Every rank fills rows of numbers with a place for each matrix or
# vector of the model, so that one sum over the world serves all of them. A place stays 0 on a rank
# that holds no part.
#
# The experts of a block are one parameter (E, ...) but E matrices, each with its own norm.


class ParamNorms:
    """Knows who else holds what this rank holds."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        *,
        names: Collection[str] | None = None,
        tied_across_stages: Collection[str] = (),
    ) -> None:
        """Prepare the norm of these gradients.

        Args:
            params: Parameters of this rank, as they are split.
            names: Parameters of all stages of a pipeline, the same on every rank; None: only these.
            tied_across_stages: Names of parameters that two pipeline stages hold, equal on both.
        """
        names = params if names is None else names
        self.params = params
        """Parameters of this rank, as they are split."""
        self.is_split = len(names) > len(params) or any(map(_is_split, params.values()))
        """Whether a rank holds parts of parameters, or only some of them."""
        self._device = next((param.device for param in params.values()), torch.device("cpu"))
        # every stage of a pipeline has experts, and as many in each block
        stacks = {name: param for name, param in params.items() if _is_stack(name, param)}
        experts = max((len(param) for param in stacks.values()), default=1)
        sizes = {name: experts if _of_experts(name) else 1 for name in sorted(names)}
        ends = accumulate(sizes.values())
        self._index_of = {name: end - sizes[name] for name, end in zip(sizes, ends, strict=True)}
        self._num_norms = sum(sizes.values())
        self._experts_of = {name: _own_experts(param) for name, param in stacks.items()}
        self._holders_of = {
            name: holders(param) * (2 if name in tied_across_stages else 1)
            for name, param in params.items()
        }
        self._cache: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    def of(self, names: Sequence[str], *kinds: Sequence[Tensor]) -> Tensor:
        """Norms of whole matrices, fp64. All ranks call it, with as many kinds.

        Args:
            names: Of this rank's parameters, any of them, or none.
            kinds: Each a list by ``names``: what lies where this rank's part of the parameter does.

        Returns:
            (kinds, matrices): one for each name, and of experts one for each of which this rank has
            a part. ``by_name`` takes them apart.
        """
        rows = torch.zeros(len(kinds), self._num_norms, dtype=torch.float64, device=self._device)
        places, shares = self._on_device(tuple(names))
        for row, parts in zip(rows, kinds, strict=True):
            matrices = [
                matrix
                for name, part in zip(names, parts, strict=True)
                for matrix in (part.unbind() if name in self._experts_of else (part,))
            ]
            if matrices:
                row[places] = square_sums(matrices) / shares
        if dist.is_initialized():
            dist.all_reduce(rows)
        return rows[:, places].sqrt()

    def by_name(self, names: Sequence[str], of_matrices: Tensor) -> list[Tensor]:
        """Numbers of matrices as factors of the parameters: (), of experts (E, 1, 1)."""
        sizes = [len(self._experts_of.get(name, range(1))) for name in names]
        return [
            part.view(-1, 1, 1) if name in self._experts_of else part.view(())
            for name, part in zip(names, torch.split(of_matrices, sizes), strict=True)
        ]

    def per_matrix(self, names: Sequence[str], numbers: Mapping[str, float]) -> Tensor:
        """Numbers of parameters for each of their matrices, in the order of ``of``, fp64."""
        found = [numbers[name] for name in names for _ in self._experts_of.get(name, range(1))]
        return torch.tensor(found, dtype=torch.float64, device=self._device)

    def _on_device(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Places and numbers of holders, copied there once: a copy waits for the device."""
        if names not in self._cache:
            own = {name: self._experts_of.get(name, range(1)) for name in names}
            places = [self._index_of[name] + expert for name in names for expert in own[name]]
            shares = [self._holders_of[name] for name in names for _ in own[name]]
            self._cache[names] = (
                torch.tensor(places, dtype=torch.int64, device=self._device),
                torch.tensor(shares, dtype=torch.float64, device=self._device),
            )
        return self._cache[names]


def _is_split(param: Tensor) -> bool:
    if not isinstance(param, DTensor):
        return False
    sizes = zip(param.placements, param.device_mesh.shape, strict=True)
    return any(size > 1 and not placement.is_replicate() for placement, size in sizes)


def _of_experts(name: str) -> bool:
    return "experts" in name.split(".")


def _is_stack(name: str, param: Tensor) -> bool:
    """Whether a parameter holds one matrix of each expert."""
    return _of_experts(name) and param.dim() == 3


def _own_experts(param: Tensor) -> range:
    """Experts of which this rank has a part."""
    own = local_shard(param).slices[0]
    return range(own.start, own.stop)
