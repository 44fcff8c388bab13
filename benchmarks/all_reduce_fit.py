"""The collective model against a published all-reduce table: 2 x p4d.24xlarge, 16 ranks, 4 EFA.

One rate and one latency between nodes are fitted to the rows from 64 KiB on; every row is printed
with its error, beside what the datasheet alone would have said. The same source gives the average
and the best bus bandwidth with 1 EFA and over sockets: they are set beside the model, which knows
no more of them than their nominal rate; and, since neither reaches that, beside a link slowed until
its best is the measured best, which leaves the average to be predicted.

    python -m benchmarks.all_reduce_fit
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.record import write_result
from shardyard.hardware.catalogue import instance
from shardyard.hardware.cluster import ClusterHardware, cluster_of
from shardyard.planner.collectives import Group, all_reduce_s
from shardyard.planner.measured_network import LEAST_BYTES, CollectiveTable, fit_link

TABLE = Path(__file__).parent / "groundtruth" / "nccl_all_reduce_2x_p4d_4efa.csv"

BAR = 0.15
"""Largest error a row from 64 KiB on may have."""

MEASURED_BUS_GBS = {"4 EFA": (8.24, 42.04), "1 EFA": (3.02, 5.89), "sockets": (0.97, 2.38)}
"""Average over all sizes and best. Source: Distributed training with Amazon EKS and Torch
Distributed Elastic, AWS 2022: the log of the table above for 4 EFA, the text for the others."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, print, write the result file; returns 1 if a row misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, default=TABLE, help="nccl-tests' columns as CSV")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args(arguments)
    result = fit(CollectiveTable.read(args.table))
    write_result("all-reduce-fit", result, args.out)
    print("\n".join(render(result)))
    return 0 if result["worst_error"] <= BAR else 1


def fit(table: CollectiveTable) -> dict[str, Any]:
    """The fitted link, each row with its error, and the other networks of the same source."""
    nominal = cluster_of(instance("p4d.24xlarge"), nodes=2)
    group = table.group(nominal)
    fitted = replace(nominal, between=fit_link(table, cluster=nominal))
    rows = [
        {
            "size_bytes": nbytes,
            "measured_us": time_s * 1e6,
            "model_us": all_reduce_s(nbytes, group, fitted) * 1e6,
            "error": all_reduce_s(nbytes, group, fitted) / time_s - 1,
            "datasheet_error": all_reduce_s(nbytes, group, nominal) / time_s - 1,
        }
        for nbytes, time_s in table.rows
    ]
    sizes = [nbytes for nbytes, _ in table.rows]
    return {
        "table": table.source,
        "ranks": group.size,
        "bar": BAR,
        "latency_s": fitted.between.latency_s,
        "bytes_per_s_per_device": fitted.between.bytes_per_s,
        "floor_us": all_reduce_s(1, group, fitted) * 1e6,
        "worst_error": max(abs(row["error"]) for row in rows if row["size_bytes"] >= LEAST_BYTES),
        "rows": rows,
        "networks": [
            _network(name, sizes, group, fitted, cards=4 if name == "4 EFA" else 1)
            for name in MEASURED_BUS_GBS
        ],
    }


def _network(
    name: str, sizes: Sequence[float], group: Group, fitted: ClusterHardware, *, cards: int
) -> dict[str, Any]:
    """Bus bandwidths of the model over so many cards of 100 Gb/s.

    First at the share of their rate that 4 EFA reached, then slowed until the best is the measured
    one. The latency is that of 4 EFA: none other is known.
    """
    measured_average, measured_best = MEASURED_BUS_GBS[name]
    link = fitted.between
    share = replace(fitted, between=replace(link, bytes_per_s=link.bytes_per_s * cards / 4))
    average, best = _bus_gbs(sizes, group, share)
    slowed = share
    for _ in range(20):  # the best is nearly in proportion to the rate: this converges at once
        _, now = _bus_gbs(sizes, group, slowed)
        rate = slowed.between.bytes_per_s * measured_best / now
        slowed = replace(slowed, between=replace(link, bytes_per_s=rate))
    return {
        "network": name,
        "measured_average_gbs": measured_average,
        "measured_best_gbs": measured_best,
        "model_average_gbs": average,
        "model_best_gbs": best,
        "average_if_best_is_met_gbs": _bus_gbs(sizes, group, slowed)[0],
    }


def _bus_gbs(sizes: Sequence[float], group: Group, cluster: ClusterHardware) -> tuple[float, float]:
    """Average and best bus bandwidth over the sizes, as nccl-tests prints them.

    Source: nccl-tests, doc/PERFORMANCE.md: 2 (n - 1) / n of size over time.
    """
    moved = 2 * (group.size - 1) / group.size
    rates = [moved * size / all_reduce_s(size, group, cluster) / 1e9 for size in sizes]
    return mean(rates), max(rates)


def render(result: dict[str, Any]) -> list[str]:
    """The result as text."""
    lines = [f"{result['table']}, {result['ranks']} ranks", ""]
    lines.append(
        f"{'bytes':>13} {'measured us':>12} {'model us':>10} {'error':>7} {'datasheet':>10}"
    )
    for row in result["rows"]:
        is_fitted = row["size_bytes"] >= LEAST_BYTES
        lines.append(
            f"{row['size_bytes']:>13,.0f} {row['measured_us']:>12,.1f} {row['model_us']:>10,.1f} "
            f"{row['error']:>+7.1%} {row['datasheet_error']:>+10.1%}"
            f"{'' if is_fitted else '  not fitted'}"
        )
    lines += [
        "",
        f"between nodes: {result['bytes_per_s_per_device'] / 1e9:.2f} GB/s a device, "
        f"{result['floor_us']:,.0f} us before the first byte; worst row from 64 KiB on "
        f"{result['worst_error']:.1%}, bar {result['bar']:.0%}",
        "",
        "bus bandwidth, GB/s       measured         model   average, were",
        "                      average  best  average  best  the best met",
    ]
    for row in result["networks"]:
        lines.append(
            f"{row['network']:<20} {row['measured_average_gbs']:>8.2f} "
            f"{row['measured_best_gbs']:>5.2f} {row['model_average_gbs']:>8.2f} "
            f"{row['model_best_gbs']:>5.2f} {row['average_if_best_is_met_gbs']:>13.2f}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
