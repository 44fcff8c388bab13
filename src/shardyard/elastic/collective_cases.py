"""One collective at one size on this rank: what it sends, what must come out, and the call.

Values are small whole numbers with a period of 13, so that fp32 sums of them are exact, and the
values of every rank are known to all.
"""

from typing import assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.parallel.collectives import all_gather_into, reduce_scatter_into
from shardyard.rundir.network_bench import ELEMENT_BYTES, Collective

_PERIOD = 13


class Case:
    """Buffers of one row of the table."""

    def __init__(
        self,
        collective: Collective,
        size_bytes: int,
        *,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Args:
        size_bytes: Of the largest buffer of a rank; cut to what all ranks can share.
        """
        self._collective = collective
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        whole = size_bytes // ELEMENT_BYTES
        self._part = whole // self._ranks
        """Elements that one rank gives or gets, where they are split."""
        self._whole = whole if collective == "all_reduce" else self._part * self._ranks
        self._device = device
        self._source = torch.empty(self._given, device=device)
        self._target = torch.empty(self._gotten, device=device)

    @property
    def size_bytes(self) -> int:
        """As nccl-tests print it: of the larger of what is sent and received. 0: too small."""
        return self._whole * ELEMENT_BYTES

    @property
    def count(self) -> int:
        """As nccl-tests print it: elements that the call is told."""
        return self._whole if self._collective == "all_reduce" else self._part

    @property
    def checks_in_place(self) -> bool:
        """nccl-tests time an all-to-all in place, which no library promises to be right."""
        return self._collective != "alltoall"

    def fill(self) -> None:
        """Put the known values where either call reads them."""
        self._source.copy_(self._values(self._rank, self._given))
        self._target.zero_()
        if self._collective == "all_gather":
            self._own_part(self._target).copy_(self._source)
        elif self._gotten == self._given:
            self._target.copy_(self._source)

    def run(self, *, in_place: bool) -> Tensor:
        """Call it; returns what came out.

        torch has no all-reduce from one buffer into another, so out of place is a copy before it.
        """
        source, target, group = self._source, self._target, self._group
        match self._collective:
            case "all_reduce":
                if not in_place:
                    target.copy_(source)
                dist.all_reduce(target, group=group)
            case "all_gather":
                source = self._own_part(target) if in_place else source
                all_gather_into(target, source, group)
            case "reduce_scatter":
                target = self._own_part(source) if in_place else target
                reduce_scatter_into(target, source, group)
            case "alltoall":
                source = target if in_place else source
                dist.all_to_all_single(target, source, group=group)
            case _:
                assert_never(self._collective)
        return target

    def wrong(self, *, in_place: bool) -> int:
        """Call it once with known values; how many results of this rank are wrong."""
        self.fill()
        found = self.run(in_place=in_place)
        return int((found != self._expected()).sum())

    @property
    def _given(self) -> int:
        return self._part if self._collective == "all_gather" else self._whole

    @property
    def _gotten(self) -> int:
        return self._part if self._collective == "reduce_scatter" else self._whole

    def _own_part(self, whole: Tensor) -> Tensor:
        return whole[self._rank * self._part : (self._rank + 1) * self._part]

    def _expected(self) -> Tensor:
        ranks = range(self._ranks)
        match self._collective:
            case "all_reduce" | "reduce_scatter":
                total = sum((_pattern(rank) for rank in ranks), torch.zeros(_PERIOD))
                whole = _repeated(total, self._whole, self._device)
                return whole if self._collective == "all_reduce" else self._own_part(whole)
            case "all_gather":
                return torch.cat([self._values(rank, self._part) for rank in ranks])
            case "alltoall":
                return torch.cat([self._own_part(self._values(r, self._whole)) for r in ranks])
            case _:
                assert_never(self._collective)

    def _values(self, rank: int, count: int) -> Tensor:
        return _repeated(_pattern(rank), count, self._device)


def _pattern(rank: int) -> Tensor:
    """Element i of a rank's values is (i + 7 rank) mod 13."""
    return (torch.arange(_PERIOD, dtype=torch.float32) + 7 * rank) % _PERIOD


def _repeated(pattern: Tensor, count: int, device: torch.device) -> Tensor:
    return pattern.to(device).repeat(count // _PERIOD + 1)[:count]
