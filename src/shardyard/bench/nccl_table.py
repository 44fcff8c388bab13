"""Measured collectives: slow nodes from the bandwidth of pairs, and nccl-tests' own tables.

A node is judged by the best of its pairs. A slow node is slow with every partner, while a sound
node that met a slow one has other partners to show it. It is slow if that best stays below
SLOW_SHARE of the median of all nodes' bests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, assert_never

from shardyard.hardware.network_counters import EFA
from shardyard.rundir.network import COLLECTIVES, Collective, NetworkBench
from shardyard.units import format_bytes

SLOW_SHARE = 2 / 3
"""Sound links of one kind differ by less; a link that lost half of its rate is named."""

LEAST_NODES = 3
"""Fewest nodes for a verdict: two nodes form one pair, with no other to compare it with."""

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PairwiseResult:
    """Verdict of a tournament."""

    best_gbs: tuple[float, ...]
    """Bus bandwidth of each node's best pair, GB/s."""
    median_gbs: float
    slow_nodes: tuple[int, ...]
    slow_pairs: tuple[Pair, ...]
    """Slow although neither of their nodes is: what lies between these two."""


def evaluate_pairs(busbw_gbs: Mapping[Pair, float]) -> PairwiseResult:
    """Judge a whole tournament.

    Args:
        busbw_gbs: Of each pair of nodes, GB/s.
    """
    nodes = sorted({node for pair in busbw_gbs for node in pair})
    best = [max(rate for pair, rate in busbw_gbs.items() if node in pair) for node in nodes]
    usual = median(best)
    bar = SLOW_SHARE * usual
    slow = [node for node, rate in zip(nodes, best, strict=True) if rate < bar]
    if len(nodes) < LEAST_NODES:
        slow = []
    pairs = [
        pair for pair, rate in sorted(busbw_gbs.items()) if rate < bar and not set(pair) & set(slow)
    ]
    return PairwiseResult(
        best_gbs=tuple(best), median_gbs=usual, slow_nodes=tuple(slow), slow_pairs=tuple(pairs)
    )


def lines(busbw_gbs: Mapping[Pair, float], names: Sequence[str], size_bytes: int) -> list[str]:
    """The tournament as a table, and who is slow.

    Args:
        names: Of the nodes.
        size_bytes: Of each rank's tensor.
    """
    verdict = evaluate_pairs(busbw_gbs)
    widest = max(4, *(len(name) for name in names))
    found = [
        f"# pairs of nodes: all-reduce of {size_bytes} bytes in place, busbw in GB/s",
        f"# {'node':>{widest}}  {'best':>8}  with each other node, in the order of the nodes",
    ]
    for node, name in enumerate(names):
        others = [
            "-" if node == other else f"{busbw_gbs[min(node, other), max(node, other)]:.3g}"
            for other in range(len(names))
        ]
        found.append(
            f"# {name:>{widest}}  {verdict.best_gbs[node]:8.3g}  "
            + " ".join(f"{each:>8}" for each in others)
        )
    return found + _words(verdict, names)


def _words(result: PairwiseResult, names: Sequence[str]) -> list[str]:
    if len(names) < LEAST_NODES:
        return [f"# of {len(names)} nodes none can be named slow: it takes {LEAST_NODES}"]
    usual = f"the median of all nodes' best is {result.median_gbs:.3g}"
    found = [
        f"# slow: {names[node]}, {result.best_gbs[node]:.3g} GB/s with its best partner, where "
        f"{usual}"
        for node in result.slow_nodes
    ]
    found += [
        f"# slow between: {names[a]} and {names[b]}, each of which is sound with others"
        for a, b in result.slow_pairs
    ]
    return found or [f"# no node is slow: {usual} GB/s"]


# Measured collectives as nccl-tests print them, to the column.
#
# Form: NVIDIA/nccl-tests, src/util.cu and src/common.cu of 2.13 and later. Bus bandwidth: its
# doc/PERFORMANCE.md, and the GetBw functions of src/all_reduce.cu, all_gather.cu, reduce_scatter.cu
# and alltoall.cu.


@dataclass(frozen=True, kw_only=True)
class CollectiveTiming:
    """One row: out of place and in place."""

    collective: Collective
    size_bytes: int
    count: int
    out_s: float
    out_wrong: int
    in_s: float
    in_wrong: int | None
    """None: in place it is only timed."""

    def busbw_gbs(self, ranks: int) -> tuple[float, float]:
        """Bus bandwidth out of place and in place, GB/s."""
        factor = bus_factor(self.collective, ranks)
        return (
            factor * self.size_bytes / self.out_s / 1e9,
            factor * self.size_bytes / self.in_s / 1e9,
        )

    @property
    def incorrect_values(self) -> int:
        """Values that were not what they must be."""
        return self.out_wrong + (self.in_wrong or 0)


def bus_factor(collective: Collective, ranks: int) -> float:
    """Bus over algorithm bandwidth; the latter is the size of a row over its time.

    The size is that of the larger buffer of a rank, so all ranks' parts together where they are
    gathered or scattered.
    """
    match collective:
        case "all_reduce":
            return 2 * (ranks - 1) / ranks
        case "all_gather" | "reduce_scatter" | "alltoall":
            return (ranks - 1) / ranks
        case _:
            assert_never(collective)


def collective_named(name: object) -> Collective:
    """One of those that are measured."""
    for known in COLLECTIVES:
        if name == known:
            return known
    raise ValueError(f"{name!r} is not a collective; use one of {', '.join(COLLECTIVES)}")


def preamble(
    collective: Collective, bench: NetworkBench, ranks: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The lines above the rows.

    Args:
        ranks: Of each its node, pid, device and kind.
    """
    lines = [
        f"# Collective test starting: {collective}_perf",
        f"# nThread 1 nGpus 1 minBytes {bench.begin_bytes} maxBytes {bench.end_bytes} step: "
        f"2(factor) warmup iters: {bench.warmup} iters: {bench.iterations} agg iters: 1 "
        "validation: 1 graph: 0",
        "#",
        "# Using devices",
    ]
    lines += [
        f"#  Rank {rank:2} Group  0 Pid {each['pid']:6} on {each['node']:>10} device "
        f"{each['device']:2} [0x00] {each['kind']}"
        for rank, each in enumerate(ranks)
    ]
    columns = ("time", "algbw", "busbw", "#wrong")
    units = ("(us)", "(GB/s)", "(GB/s)", "")
    head = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}".format
    half = "  {:>7}  {:>6}  {:>6} {:>6}".format
    where = f"{'out-of-place':>23}{'in-place':>31}{'':10}"
    return [
        *lines,
        "#",
        head("", "", "", "", "") + where,
        head("size", "count", "type", "redop", "root") + 2 * half(*columns),
        head("(B)", "(elements)", "", "", "") + 2 * half(*units),
    ]


def row(measured: CollectiveTiming, ranks: int) -> str:
    """One line of numbers."""
    redop = "sum" if measured.collective in ("all_reduce", "reduce_scatter") else "none"
    size, count = measured.size_bytes, measured.count
    bus = measured.busbw_gbs(ranks)
    return f"{size:12}  {count:12}  {'float':>8}  {redop:>6}  {-1:6}" + "".join(
        f"  {_microseconds(seconds):>7}  {size / seconds / 1e9:6.2f}  {busbw:6.2f}  "
        f"{'N/A' if wrong is None else wrong:>5}"
        for seconds, busbw, wrong in (
            (measured.out_s, bus[0], measured.out_wrong),
            (measured.in_s, bus[1], measured.in_wrong),
        )
    )


def ending(rows: Sequence[CollectiveTiming], ranks: int) -> list[str]:
    """The lines below the rows."""
    wrong = sum(each.incorrect_values for each in rows)
    return [
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# Avg bus bandwidth    : {average_busbw_gbs(rows, ranks):g} ",
        "#",
    ]


def average_busbw_gbs(rows: Sequence[CollectiveTiming], ranks: int) -> float:
    """Return the mean bus bandwidth of all rows, GB/s, out of place and in place alike."""
    both = [value for each in rows for value in each.busbw_gbs(ranks)]
    return sum(both) / len(both) if both else 0.0


def _microseconds(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 10_000 else f"{us:.1f}" if us >= 100 else f"{us:.2f}"


# --- proof --------------------------------------------------------------------------------------


def bytes_between_nodes(collective: Collective, size_bytes: int, *, ranks: int, nodes: int) -> int:
    """Return the bytes that all nodes together must send in one call, by any algorithm.

    At best, a node holds the sum of its own ranks. An all-reduce then gathers nodes - 1 of these
    and hands the total to nodes - 1. In an all-gather, a node lacks the parts of all others; in a
    reduce-scatter, it sends its share of theirs. An all-to-all sends each part once.
    """
    match collective:
        case "all_reduce":
            return 2 * (nodes - 1) * size_bytes
        case "all_gather" | "reduce_scatter":
            return (nodes - 1) * size_bytes
        case "alltoall":
            return (ranks - ranks // nodes) * size_bytes
        case _:
            assert_never(collective)


def required_send_bytes(
    collective: Collective, calls: Mapping[int, int], *, ranks: int, nodes: int
) -> int:
    """Bytes that all nodes together must have sent out.

    Args:
        calls: Size of a row -> how often it was called.
    """
    return sum(
        count * bytes_between_nodes(collective, size, ranks=ranks, nodes=nodes)
        for size, count in calls.items()
    )


def bytes_by_interface(sent: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Bytes by interface of all nodes together, those of EFA as one.

    Args:
        sent: Of each node its interfaces' bytes.
    """
    totals: dict[str, int] = {}
    for node in sent:
        for name, size in node.items():
            kind = EFA if name.startswith(f"{EFA}/") else name
            totals[kind] = totals.get(kind, 0) + size
    return totals


def traffic_check_lines(sent: Mapping[str, int], must: int) -> list[str]:
    """List what interfaces carried next to what they had to: ``bytes_by_interface`` and
    ``required_send_bytes``."""
    return [
        f"# {kind} carried {format_bytes(size)} of {format_bytes(must)} that nodes must send"
        for kind, size in sorted(sent.items(), key=lambda item: -item[1])
    ]
