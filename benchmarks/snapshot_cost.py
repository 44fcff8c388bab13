"""What a snapshot in the agent's memory costs a step, beside one plain copy of the same bytes.

Both are taken in turn in one process, each followed by a step's worth of work, as the snapshot's
thread seals the slot while the next step computes:

    OMP_NUM_THREADS=1 python -m benchmarks.snapshot_cost
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.record import write_result
from shardyard.checkpoint.save_interval import Interval
from shardyard.checkpoint.snapshots.take import Snapshots
from shardyard.checkpoint.staging import HostCopy
from shardyard.config.formulas import slot_labels
from shardyard.elastic.shared_memory import AgentMemory, attach

TENSORS = 90
"""Of llama-tiny, with both of AdamW's averages; each of the same size here."""
SHARE = 0.03
"""Of the throughput that snapshots may cost."""
_WARM_UP = 4
"""Pairs that are not counted: each slot's pages are mapped once."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one size; seconds are medians."""

    mib: float
    pairs: int
    plain_s: float
    """One copy into buffers of the process's own."""
    snapshot_s: float
    """That training stands still for a snapshot."""
    ratio: float
    """Median of the snapshot over the copy beside it."""
    step_s: float
    """The work after a copy."""
    step_while_sealed_s: float
    """The same work while the thread seals the slot."""
    least_every: int
    """Steps between snapshots at which all of it costs no more than ``SHARE`` of the throughput."""


def measure(mib: float, *, pairs: int, step_s: float) -> Cost:
    """Copies and snapshots in turn, each followed by a step of about so many seconds."""
    tensors = {
        f"model.{number}": torch.rand(max(1, round(mib * 2**20 / 4 / TENSORS)))
        for number in range(TENSORS)
    }
    memory = [AgentMemory.create(label) for label in slot_labels(0)]
    assert all(memory), "snapshots need Linux"
    snapshots = Snapshots(
        tensors, attach, local_rank=0, rank=0, world_size=1, generation=0, names=len(tensors),
        restored=None, interval=Interval(1),
    )  # fmt: skip
    plain, passes = HostCopy(), _passes(step_s)
    found: list[tuple[float, float, float, float]] = []
    for number in range(_WARM_UP + pairs):
        copy_s = _seconds_of_copy(plain, tensors)
        after_copy_s = _work(passes)
        snapshot_s = snapshots.take(number, tensors, {})
        found.append((copy_s, after_copy_s, snapshot_s, _work(passes)))
    snapshots.close()
    counted = found[_WARM_UP:]
    plain_s, work_s, snapshot_s, sealed_s = map(statistics.median, zip(*counted, strict=True))
    costs_s = snapshot_s + max(0.0, sealed_s - work_s)
    return Cost(
        mib=mib,
        pairs=pairs,
        plain_s=plain_s,
        snapshot_s=snapshot_s,
        ratio=statistics.median(taken / copied for copied, _, taken, _ in counted),
        step_s=work_s,
        step_while_sealed_s=sealed_s,
        least_every=max(1, -int(-costs_s // (SHARE * work_s))),
    )


def _seconds_of_copy(plain: HostCopy, tensors: dict[str, Tensor]) -> float:
    started = time.perf_counter()
    plain.take_for_save(0, tensors, "")
    return time.perf_counter() - started


_FACTOR = torch.rand(256, 256)


def _work(passes: int) -> float:
    """What a step computes, as long as this machine takes for it now."""
    started = time.perf_counter()
    for _ in range(passes):
        torch.mm(_FACTOR, _FACTOR)
    return time.perf_counter() - started


def _passes(step_s: float) -> int:
    _work(20)
    return max(1, round(step_s / (_work(50) / 50)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, nargs="+", default=[1.0, 10.0, 100.0])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    costs = [measure(mib, pairs=args.pairs, step_s=args.step_ms / 1e3) for mib in args.mib]
    for cost in costs:
        print(
            f"{cost.mib:g} MiB: a copy {cost.plain_s * 1e3:.2f} ms, a snapshot "
            f"{cost.snapshot_s * 1e3:.2f} ms ({cost.ratio:.2f} x); a step {cost.step_s * 1e3:.1f} "
            f"ms, {cost.step_while_sealed_s * 1e3:.1f} while it is sealed; at most {SHARE:.0%} of "
            f"throughput from elastic.snapshot_every={cost.least_every} on"
        )
    write_result("snapshot-cost", {"costs": [asdict(cost) for cost in costs]}, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
