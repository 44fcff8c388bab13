"""The one sum over ranks of a step: losses, how many there are, and what modules counted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.parallel.step_counters import Statistics
from shardyard.tasks.loss_computation import LossSums


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over all ranks, on the device; fp64, as fp32 would round counts."""

    loss_sum: Tensor
    divisor: Tensor
    sums: Mapping[str, Tensor]
    """Sums counted in addition to the loss, by name."""
    others: Tensor
    """Sums that the caller added."""
    rows: Sequence[tuple[Statistics, Tensor]]

    def give_back(self, *, skipped: Tensor) -> list[Tensor]:
        """Return step statistics to the modules that counted them, and return their metrics."""
        given = (statistics.give_back(row, skipped=skipped) for statistics, row in self.rows)
        return [number for numbers in given for number in numbers]


def sum_over_ranks(
    part: LossSums,
    *,
    device: torch.device,
    others: Sequence[float | Tensor] = (),
    statistics: Sequence[Statistics] = (),
) -> Totals:
    """Add up what each rank has of a step, in one all-reduce. All ranks call it together."""
    numbers = torch.zeros(2 + len(others), dtype=torch.float64, device=device)
    # One by one: torch.tensor() of a list would read each number from the device on the host.
    for place, number in enumerate((part.loss_sum, part.divisor, *others)):
        numbers[place] = number
    counted = [each.flatten() for each in part.sums.values()]
    sizes = [len(numbers), *map(len, counted), *(each.size for each in statistics)]
    # All in one tensor: a collective this small costs its latency, whatever it carries.
    if len(sizes) > 1:
        numbers = torch.cat([numbers, *counted, *(each.take(device) for each in statistics)])
    dist.all_reduce(numbers)
    numbers, *rest = torch.split(numbers, sizes)
    sums = {name: rest[place].view_as(each) for place, (name, each) in enumerate(part.sums.items())}
    return Totals(
        loss_sum=numbers[0],
        divisor=numbers[1],
        sums=sums,
        others=numbers[2:],
        rows=list(zip(statistics, rest[len(sums) :], strict=True)),
    )
