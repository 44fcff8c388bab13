"""Which node is slow, from how fast each pair of nodes was.

A node is judged by the best of its pairs: what is slow with every partner is slow itself, while a
sound node that met a slow one has other partners to show it. It is slow if that best stays below
SLOW_SHARE of the median of all nodes' bests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

SLOW_SHARE = 2 / 3
"""Sound links of one kind differ by less; a link that lost half of its rate is named."""

LEAST_NODES = 3
"""Of two nodes there is one pair, and nothing to hold either against."""

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What follows from a tournament."""

    best_gbs: tuple[float, ...]
    """Of each node: bus bandwidth of its best pair, GB/s."""
    usual_gbs: float
    slow_nodes: tuple[int, ...]
    slow_pairs: tuple[Pair, ...]
    """Slow although neither of their nodes is: what lies between these two."""


def judge(busbw_gbs: Mapping[Pair, float]) -> Verdict:
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
    return Verdict(
        best_gbs=tuple(best), usual_gbs=usual, slow_nodes=tuple(slow), slow_pairs=tuple(pairs)
    )


def lines(busbw_gbs: Mapping[Pair, float], names: Sequence[str], size_bytes: int) -> list[str]:
    """The tournament as a table, and who is slow.

    Args:
        names: Of the nodes.
        size_bytes: Of each rank's tensor.
    """
    verdict = judge(busbw_gbs)
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


def _words(verdict: Verdict, names: Sequence[str]) -> list[str]:
    if len(names) < LEAST_NODES:
        return [f"# of {len(names)} nodes none can be named slow: it takes {LEAST_NODES}"]
    usual = f"the median of all nodes' best is {verdict.usual_gbs:.3g}"
    found = [
        f"# slow: {names[node]}, {verdict.best_gbs[node]:.3g} GB/s with its best partner, where "
        f"{usual}"
        for node in verdict.slow_nodes
    ]
    found += [
        f"# slow between: {names[a]} and {names[b]}, each of which is sound with others"
        for a, b in verdict.slow_pairs
    ]
    return found or [f"# no node is slow: {usual} GB/s"]
