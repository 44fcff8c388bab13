"""Gradients summed as 64-bit integers: the same bits on any number of ranks, in any order.

A micro-batch's contribution to a gradient is the same on every rank. Only the order in
which ranks and micro-batches are added up differs. Each contribution is therefore rounded
to whole multiples of a power of two, one for each parameter, and these are added up. The
first sum is over the micro-batches of a rank. The second is over the ranks that split the
parameter (once a step with zero 1, else once a micro-batch). The last is over replicas
(once a step). Integer sums have no order.

Bits of the 62: those that the number of summands takes, ``HEADROOM`` above the largest
contribution of the step before, and all others below it. The largest contribution of a step
shows whether it exceeds the headroom, before any sum is used. Such a step is computed again
(``train/reproducible_step.py``).

Hooks on the parameters that FSDP gathers take the gradients before FSDP sees them: it finds
none, and sums none.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardyard.parallel.collectives import reduce_scatter_into
from shardyard.parallel.gradients import local_part, placed_like
from shardyard.parallel.mesh import Mesh

BITS = 62
"""Bits of a sum, without its sign; one more is left."""
HEADROOM = 10
"""Bits by which a contribution may exceed the largest one of the step before: 1,024 times."""
LEAST_BITS = 32
"""Below the largest contribution of the step before; an fp32 number has 24."""
MOST_SUMMANDS = 2 ** (BITS - HEADROOM - LEAST_BITS)
"""Micro-batches of a step."""

_LARGEST_SHIFT = 127
"""Largest exponent of 2 in fp32. Parameters with all gradients below 2^-76 keep fewer bits."""


class ExactGradients:
    """The gradients of a sharded model that has its storage."""

    def __init__(self, model: nn.Module, mesh: Mesh, *, summands: int) -> None:
        """Take the gradients of a model from FSDP. All ranks call it together.

        Args:
            summands: Micro-batches of a step, over all ranks.
        """
        self._bits = bits_below(summands)
        sharded = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._params = sharded
        self._is_first_replica = mesh.dense.get_local_rank("dp_replicate") == 0
        self.exponents: dict[str, int] = {}
        """Exponent per parameter: the last step's largest contribution was below 2^exponent."""
        self._largest: dict[str, Tensor] = {}
        self._groups = [
            _Group(self, found, mesh, only_last=mesh.layout.zero == 1)
            for found in _gathered(model, sharded)
        ]

    @property
    def names(self) -> Sequence[str]:
        """The parameters, in one order on all ranks."""
        return list(self._params)

    def begin(self) -> None:
        """A step begins, or begins again: what was added up is gone."""
        self._largest = {}
        for group in self._groups:
            group.clear()

    def before_backward(self, *, is_last: bool) -> None:
        """Call before the backward pass of each micro-batch."""
        for group in self._groups:
            group.is_last = is_last

    def after_backward(self) -> None:
        """Call after it: sums what waits for parameters that got no gradient."""
        for group in self._groups:
            group.flush()

    def largest(self) -> Tensor:
        """Return the largest contribution to each parameter and the largest element of its sum.

        Values are this rank's, fp64 (2, parameters), without sign. The sum is the part that this
        rank has. Infinity marks values that are not finite.
        """
        device = next(iter(self._params.values())).device
        zero = torch.zeros((), device=device)
        contributions = torch.stack([self._largest.get(name, zero) for name in self._params])
        of_sums = {name: each for group in self._groups for name, each in group.largest_sums()}
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        sums = torch.stack([of_sums.get(name, nothing) for name in self._params])
        found = torch.stack([contributions.double(), sums])
        return torch.where(found.isfinite(), found, math.inf)  # a maximum may pass NaN over

    def fits(self, contributions: Mapping[str, float]) -> bool:
        """Whether all contributions were within what their scales leave room for."""
        return all(
            largest == 0.0
            or (name in self.exponents and largest < 2.0 ** (self.exponents[name] + HEADROOM))
            for name, largest in contributions.items()
        )

    def follow(self, contributions: Mapping[str, float]) -> None:
        """Scale the next step, or this one again, by the largest contributions of this one.

        A parameter that got none keeps its scale.
        """
        for name, largest in contributions.items():
            if largest > 0.0:
                self.exponents[name] = math.frexp(largest)[1]

    def hand_over(self) -> None:
        """Give each parameter the sum as its gradient, fp32."""
        for group in self._groups:
            group.hand_over()

    def own(self, name: str) -> Tensor:
        """Return the part of a handed-over gradient for which this rank is responsible, flat.

        Of several replicas, the first is responsible.
        """
        param = self._params[name]
        if param.grad is None or not self._is_first_replica:
            return torch.empty(0, device=param.device)
        return local_part(param.grad).view(-1)

    def shift(self, name: str) -> int:
        """Contributions are multiples of 2^-shift."""
        return min(self._bits - self.exponents.get(name, 0), _LARGEST_SHIFT)

    def note(self, name: str, grad: Tensor) -> None:
        """See how large a contribution is."""
        least, most = grad.aminmax()
        found = torch.maximum(-least, most).float()  # keeps NaN
        before = self._largest.get(name)
        self._largest[name] = found if before is None else torch.maximum(before, found)


def bits_below(summands: int) -> int:
    """Bits below the largest contribution of the step before, so that no sum can wrap."""
    assert summands <= MOST_SUMMANDS, "such a recipe is refused"
    return BITS - HEADROOM - (summands - 1).bit_length()


def _gathered(
    model: nn.Module, sharded: Mapping[str, nn.Parameter]
) -> list[dict[str, tuple[nn.Parameter, nn.Parameter]]]:
    """Map names to the gathered and the split parameter, for each group of FSDP."""
    groups: list[dict[str, tuple[nn.Parameter, nn.Parameter]]] = []
    left = dict(sharded)
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.unshard()
        whole = dict(model.named_parameters())
        found = {name: (whole[name], p) for name, p in left.items() if whole[name] is not p}
        module.reshard()
        if found:  # else all of it is of a group that several modules share
            groups.append(found)
        left = {name: p for name, p in left.items() if name not in found}
    assert not left, "every parameter is of a group"
    return groups


@dataclass(frozen=True, kw_only=True)
class _ParamRange:
    """Place of a parameter in what a group sends: ranks x elements of a rank."""

    start: int
    each: int
    """Elements that a rank has of it, padding included."""
    own: int
    """Elements that this rank has of it."""


class _Group:
    """Parameters that are gathered together and summed together."""

    def __init__(
        self,
        gradients: ExactGradients,
        params: Mapping[str, tuple[nn.Parameter, nn.Parameter]],
        mesh: Mesh,
        *,
        only_last: bool,
    ) -> None:
        """Args:
        only_last: Whether ranks sum once a step, whole gradients waiting for it.
        """
        self.is_last = False
        self._gradients = gradients
        self._sharded = {name: sharded for name, (_, sharded) in params.items()}
        self._shards, self._replicas = mesh.group("fsdp"), mesh.group("dp_replicate")
        self._ranks = dist.get_world_size(self._shards)
        self._only_last = only_last or self._ranks == 1
        self._ranges: dict[str, _ParamRange] = {}
        self._size = 0
        for name, (whole, sharded) in params.items():
            rows = -(-whole.shape[0] // self._ranks)
            each = rows * (whole.numel() // whole.shape[0])
            own = local_part(sharded.detach()).numel()
            self._ranges[name] = _ParamRange(start=self._size, each=each, own=own)
            self._size += each
            take: Callable[[Tensor], None] = partial(self._take, name)
            whole.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
        self._arrived = 0
        self._is_done = False
        self._whole_RS: Tensor | None = None
        """Sum of this rank for all ranks' parts (ranks, size)."""
        self._sum_S: Tensor | None = None
        """Sum of all ranks for this rank's part (size)."""

    def clear(self) -> None:
        """Forget what was added up."""
        self._arrived, self._is_done, self._whole_RS, self._sum_S = 0, False, None, None

    @torch.no_grad()
    def _take(self, name: str, param: Tensor) -> None:
        """A micro-batch has added to a gradient; FSDP shall not see it."""
        grad, param.grad = param.grad, None
        assert grad is not None
        self._gradients.note(name, grad)
        scale = 2.0 ** self._gradients.shift(name)
        self._add(self._ranges[name], grad.reshape(-1).float(), scale)
        self._arrived += 1
        if self._arrived == len(self._ranges):
            self._sum()

    def _add(self, param_range: _ParamRange, grad: Tensor, scale: float) -> None:
        """Add a whole gradient, as integers, to what all ranks get of it."""
        if self._whole_RS is None:
            size = (self._ranks, self._size)
            self._whole_RS = torch.zeros(size, dtype=torch.int64, device=grad.device)
        integers = (grad * scale).round_().to(torch.int64)
        here_RS = self._whole_RS[:, param_range.start : param_range.start + param_range.each]
        full = len(grad) // param_range.each
        here_RS[:full] += integers[: full * param_range.each].view(full, param_range.each)
        rest = integers[full * param_range.each :]
        if len(rest):
            here_RS[full, : len(rest)] += rest

    def flush(self) -> None:
        """The backward pass is over."""
        if self._arrived or (self.is_last and not self._is_done):
            self._sum()

    def _sum(self) -> None:
        """Sum over ranks what is to be summed after this micro-batch."""
        self._arrived, self._is_done = 0, self.is_last
        if self._only_last and not self.is_last:
            return
        whole_RS, self._whole_RS = self._whole_RS, None
        if whole_RS is not None:
            part_S = whole_RS[0]
            if self._ranks > 1:
                part_S = torch.empty_like(part_S)
                reduce_scatter_into(part_S, whole_RS.view(-1), self._shards)
            self._sum_S = part_S if self._sum_S is None else self._sum_S.add_(part_S)
        if self.is_last and self._sum_S is not None and dist.get_world_size(self._replicas) > 1:
            dist.all_reduce(self._sum_S, group=self._replicas)

    def largest_sums(self) -> list[tuple[str, Tensor]]:
        """The largest element of this rank's part of each sum, without sign, fp64."""
        found = []
        for name, place in self._ranges.items():
            if self._sum_S is not None and place.own:
                least, most = self._own(place, self._sum_S).aminmax()
                unit = 2.0 ** -self._gradients.shift(name)
                found.append((name, torch.maximum(-least, most).double() * unit))
        return found

    def hand_over(self) -> None:
        """The sums become gradients."""
        sum_S, self._sum_S = self._sum_S, None
        if sum_S is None:
            return
        for name, place in self._ranges.items():
            sharded = self._sharded[name]
            unit = 2.0 ** -self._gradients.shift(name)
            value = (self._own(place, sum_S).double() * unit).float()
            local = value.view(local_part(sharded.detach()).shape)
            sharded.grad = placed_like(sharded, local)

    def _own(self, param_range: _ParamRange, sum_S: Tensor) -> Tensor:
        return sum_S[param_range.start : param_range.start + param_range.own]


# Sums of fp64 numbers come out the same in any order.
#
# Each number becomes whole multiples of fixed powers of two, 31 bits each. These are added up as
# 64-bit integers, whose sums do not depend on the order. Bits of a number from 2^62 down to 2^-93
# are exact; smaller ones are cut off before the addition, on every rank alike. Up to 2^31 summands
# fit.

_UNITS = tuple(2.0**exponent for exponent in (31, 0, -31, -62, -93))
"""Value of one in each place, largest first."""
_TOO_LARGE = 2.0**62

PLACES = len(_UNITS) + 1
"""Integers for one number: its multiples, and how many summands were none (NaN, infinity)."""


def to_integers(x_n: Tensor) -> Tensor:
    """The integers (n, PLACES) of fp64 numbers (n); add them up as they are."""
    has_value_n = x_n.abs() < _TOO_LARGE  # false of NaN too
    rest_n = torch.where(has_value_n, x_n, 0.0)
    places = []
    for unit in _UNITS:  # both steps are exact: the quotient's bits are a part of the number's
        place_n = (rest_n / unit).trunc()
        rest_n = rest_n - place_n * unit
        places.append(place_n.to(torch.int64))
    places.append((~has_value_n).to(torch.int64))
    return torch.stack(places, dim=1)


def of_integers(sums_nP: Tensor) -> Tensor:
    """The sums (n), fp64, of added integers; NaN where a summand was none."""
    *places, without_value = sums_nP.unbind(dim=1)
    total_n = torch.zeros_like(places[0], dtype=torch.float64)
    for unit, place_n in zip(reversed(_UNITS), reversed(places), strict=True):  # smallest first
        total_n = total_n + place_n.double() * unit
    return total_n.masked_fill(without_value > 0, math.nan)
