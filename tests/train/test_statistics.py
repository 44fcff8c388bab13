"""What modules count in a step: summed over ranks with the step's own numbers, told if skipped."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.setup import set_up
from shardyard.train.step import StepResult
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import make_run, prepare_corpus

pytestmark = pytest.mark.heavy


class Seen:
    """Counts steps, and keeps a running mean of them as batch normalisation would."""

    metrics = ("steps_of_ranks",)
    size = 2

    def __init__(self) -> None:
        self.rows_taken = 0
        self.kept = torch.zeros((), dtype=torch.float64)

    def take(self, device: torch.device) -> Tensor:
        self.rows_taken += 1
        row = [float(self.rows_taken), self.rows_taken * 10.0 ** dist.get_rank()]
        return torch.tensor(row, dtype=torch.float64, device=device)

    def give_back(self, summed: Tensor, *, skipped: Tensor) -> Sequence[Tensor]:
        self.kept = torch.where(skipped, self.kept, summed[1])
        return [summed[0]]


def _steps(run_dir: RunDir) -> tuple[list[StepResult], list[float], int]:
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run_dir, 0, hooks, local_rank=0)
    seen = Seen()
    training.task.computation.statistics = [seen]
    reductions = 0
    all_reduce = dist.all_reduce

    def counted(tensor: Tensor, *given: object, **named: object) -> object:
        nonlocal reductions
        reductions += 1
        return all_reduce(tensor, *given, **named)  # type: ignore[arg-type]

    results, kept = [], []
    for poisoned in (False, True, False):
        batches = next(training.loader)
        dist.all_reduce = counted
        pending = training.stepper.run(batches, lr=1e-3, drain=False, poisoned=poisoned)
        dist.all_reduce = all_reduce
        results.append(pending.read())
        kept.append(float(seen.kept))
    training.close()
    return results, kept, reductions


def test_a_row_joins_the_one_all_reduce_and_is_not_kept_of_a_skipped_step(tmp_path: Path) -> None:
    sections = {"parallel": {"dp_shard": 2}, "cluster": {"devices": 2}}
    run_dir = make_run(tmp_path / "run", prepare_corpus(tmp_path), sections)
    for results, kept, reductions in run_on_ranks(_steps, 2, run_dir):
        assert [each.counted for each in results] == [
            {"steps_of_ranks": 2.0}, {"steps_of_ranks": 4.0}, {"steps_of_ranks": 6.0}
        ]  # fmt: skip
        assert [each.skipped_in_row for each in results] == [0, 1, 0]
        assert kept == [11.0, 11.0, 33.0]
        assert reductions == 3
    assert results[0].targets == pytest.approx(6 * 32)
