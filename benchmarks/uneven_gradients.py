"""Ranks that use different parameters, compared with DistributedDataParallel and a plain loop.

A small network calls experts, branches, outputs and blocks that differ by rank, step and
micro-batch. ``shardyard.wrap`` is compared with DistributedDataParallel(find_unused_parameters) on
2 and 4 ranks, the long form (as recipes with ``model.module`` train) with one process. The figure
is the largest relative difference of a loss or of a parameter after three steps of SGD with
momentum and weight decay.

    python -m benchmarks.uneven_gradients
"""

import sys
from typing import Any

from benchmarks.record import write_result
from tests.distributed.ranks import run_on_ranks
from tests.parallel.test_uneven_gradients import (
    CASES,
    LAYOUTS,
    LONG_FORM,
    of_the_long_form,
    of_wrapped,
)

BAR = 1e-6


def main() -> int:
    """Train, compare, print the table, write the result file; returns 1 if the bar is missed."""
    rows: list[dict[str, Any]] = [
        {"api": "wrap", "reference": "DistributedDataParallel", "ranks": ranks, **row}
        for ranks, layouts in LAYOUTS.items()
        for row in _rows(run_on_ranks(of_wrapped, ranks, tuple(CASES), layouts))
    ]
    rows += [
        {"api": "parallelize", "reference": "one process, plain loop", "ranks": 2, **row}
        for row in _rows(run_on_ranks(of_the_long_form, 2, LONG_FORM))
    ]
    for row in rows:
        print("{api:12} {ranks}  {layout:40} {case:24} {difference:.1e}".format(**row))
    largest = max(row["difference"] for row in rows)
    write_result("uneven-gradients", {"bar": BAR, "largest": largest, "rows": rows})
    return int(largest > BAR)


def _rows(by_rank: list[dict[tuple[str, str], float]]) -> list[dict[str, Any]]:
    """One row a case and layout, of the rank that is farthest off."""
    return [
        {
            "case": case,
            "layout": layout,
            "difference": max(found[case, layout] for found in by_rank),
        }
        for case, layout in by_rank[0]
    ]


if __name__ == "__main__":
    sys.exit(main())
