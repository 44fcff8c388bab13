"""Does `shardyard bench network` report what a plain torch loop takes? 2, 4 and 8 gloo processes.

Both time the same collective in the same processes, alternately (A B, B A, ...), so that whatever
else the machine does falls on both alike: the benchmark's own row, and a loop as anybody writes it
(a barrier, the clock, many calls, the clock). The bar: the median ratio of 20 pairs is within 5 %
of 1, at 2 and 4 processes. 8 are reported and have no bar: on two cores they wait for each other.

    python -m benchmarks.network_loop
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.record import write_result
from benchmarks.step_overhead import interval
from shardyard.elastic.bench_worker import CollectiveCase, measure_row
from shardyard.rundir.network import COLLECTIVES, Collective, NetworkBench
from tests.distributed.ranks import run_on_ranks

BAR = 0.05
BARRED = (2, 4)
PROCESSES = (2, 4, 8)
SIZES = (1024, 64 * 1024, 1024 * 1024)
_FEWEST_CALLS, _MOST_CALLS = 20, 200
_CPU = torch.device("cpu")


def main() -> int:
    """Measure, print, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20, help="alternating runs of each row")
    parser.add_argument("--processes", type=int, action="append", help="these alone")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    rows = []
    for processes in args.processes or PROCESSES:
        rows += measure(processes, pairs=args.pairs)
    for row in rows:
        low, high = row["ratio_95"]
        verdict = "no bar" if row["is_met"] is None else "met" if row["is_met"] else "MISSED"
        print(
            f"{row['processes']} processes, {row['collective']}, {row['size_bytes']:,} bytes: "
            f"{row['ratio']:.3f} of the loop ({low:.3f} to {high:.3f}), {verdict}"
        )
    is_met = all(row["is_met"] is not False for row in rows)
    write_result("network-loop", {"is_met": is_met, "bar": BAR, "rows": rows}, args.out)
    return 0 if is_met else 1


def measure(
    processes: int,
    *,
    pairs: int,
    sizes: tuple[int, ...] = SIZES,
    collectives: tuple[Collective, ...] = COLLECTIVES,
) -> list[dict[str, Any]]:
    """A row for each collective and size: median ratio with its 95 % interval, and all times."""
    load = os.getloadavg()
    by_rank = run_on_ranks(_measure, processes, collectives, sizes, pairs, timeout_s=3600.0)
    rows = []
    for place, (collective, size, calls, bench_s, _) in enumerate(by_rank[0]):
        # the benchmark's time is the mean over ranks already; so let the loop's be
        loop_s = np.mean([rows_of[place][4] for rows_of in by_rank], axis=0)
        ratios = np.array(bench_s) / loop_s
        ratio = float(np.median(ratios))
        rows.append(
            {
                "processes": processes,
                "collective": collective,
                "size_bytes": size,
                "calls": calls,
                "load_average_before": load,
                "ratio": ratio,
                "ratio_95": list(interval(ratios)),
                "is_met": abs(ratio - 1) <= BAR if processes in BARRED else None,
                "bench_s": [round(seconds, 9) for seconds in bench_s],
                "loop_s": [round(float(seconds), 9) for seconds in loop_s],
            }
        )
    return rows


def _measure(
    collectives: tuple[Collective, ...], sizes: tuple[int, ...], pairs: int
) -> list[tuple[str, int, int, list[float], list[float]]]:
    """On one rank: seconds of a call by both, of each pair."""
    return [_row(collective, size, pairs) for collective in collectives for size in sizes]


def _row(
    collective: Collective, size: int, pairs: int
) -> tuple[str, int, int, list[float], list[float]]:
    calls = int(min(_MOST_CALLS, max(_FEWEST_CALLS, 4 * 2**20 // size)))
    bench = NetworkBench(
        collectives=(collective,), begin_bytes=size, end_bytes=size, warmup=5, iterations=calls,
        is_pairs=False, processes=1,
    )  # fmt: skip
    case, call = CollectiveCase(collective, size, device=_CPU), _plain(collective, size // 4)
    # torch's own all-reduce is in place; of the others the usual call is out of place
    key = "in_s" if collective == "all_reduce" else "out_s"
    bench_s: list[float] = []
    loop_s: list[float] = []
    for pair in range(pairs + 1):
        turns: list[Callable[[], None]] = [
            lambda: bench_s.append(float(measure_row(case, bench, _CPU)[key] or 0)),
            lambda: loop_s.append(_loop(call, calls, warmup=bench.warmup)),
        ]
        for turn in turns if pair % 2 else reversed(turns):
            turn()
    return collective, size, calls, bench_s[1:], loop_s[1:]  # the first pair opens connections


def _loop(call: Callable[[], object], calls: int, *, warmup: int) -> float:
    """What anybody writes to see how long a collective takes."""
    for _ in range(warmup):
        call()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def _plain(collective: Collective, count: int) -> Callable[[], object]:
    ranks = dist.get_world_size()
    count = count // ranks * ranks
    whole, other, part = torch.ones(count), torch.ones(count), torch.ones(count // ranks)
    # torch 2.13 has renamed them and warns at every use of the older name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[Collective, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: scatter(part, whole),
        "alltoall": lambda: dist.all_to_all_single(other, whole),
    }
    return calls[collective]


if __name__ == "__main__":
    sys.exit(main())
