"""Failure rates by size of the cluster, and the spare nodes that they require.

Measured mean times between failures (MTBF) do not follow 1 / nodes from one cluster to the
next. A shared cluster's jobs of 1,024 GPUs failed every 7.9 h, where its rate per node says
28.8 h. The estimate therefore interpolates between measured sizes, straight in log-log, and
uses 1 / nodes only outside. The range that other clusters' rates would give is next to it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardyard.errors import RequestError

DAY_S = 86_400.0
HOUR_S = 3_600.0

DEVICES_OF_A_NODE = 8
"""Devices of a node in every source below; a larger node counts as several."""


@dataclass(frozen=True, kw_only=True)
class NodeRate:
    """Failures of one node that stop the job, as a cluster or a run published them."""

    name: str
    per_1000_node_days: float
    source: str

    @property
    def per_node_second(self) -> float:
        """r_f of the formulas."""
        return self.per_1000_node_days / 1000 / DAY_S


RATES = {
    "rsc-1": NodeRate(
        name="Meta RSC-1, A100, 16k GPUs shared by many jobs, 11 months",
        per_1000_node_days=6.50,
        source="Kokolis et al., HPCA 2025, arXiv:2410.21680 (second hand)",
    ),
    "rsc-2": NodeRate(
        name="Meta RSC-2, A100, 8k GPUs shared by many jobs, 11 months",
        per_1000_node_days=2.34,
        source="Kokolis et al., HPCA 2025, arXiv:2410.21680 (second hand)",
    ),
    "llama3-405b": NodeRate(
        name="Llama 3 405B, 419 unexpected interruptions in 54 days on up to 2,048 nodes of H100",
        per_1000_node_days=419 / (54 * 2048) * 1000,
        source="arXiv:2407.21783, section 3.3.4",
    ),
    "bloom-176b": NodeRate(
        name="BLOOM 176B, about 1 GPU a week of 48 nodes of A100; only broken GPUs are counted",
        per_1000_node_days=1 / (7 * 48) * 1000,
        source="bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles.md",
    ),
    "opt-175b": NodeRate(
        name="OPT 175B, about 2 machines a day of 128, A100",
        per_1000_node_days=2 / 128 * 1000,
        source="facebookresearch/metaseq, projects/OPT/chronicles (56_percent, final_update)",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """MTBF that was measured for jobs of one size."""

    nodes: int
    mtbf_hours: float
    source: str


ANCHORS = (
    Anchor(nodes=1, mtbf_hours=47.7 * 24, source="RSC jobs of 8 GPUs, arXiv:2410.21680"),
    Anchor(nodes=128, mtbf_hours=7.9, source="RSC jobs of 1,024 GPUs, arXiv:2410.21680"),
    Anchor(nodes=2048, mtbf_hours=54 * 24 / 419, source="Llama 3 405B, arXiv:2407.21783"),
)
"""Sizes that were measured, not projected; RSC's second hand. Left out, to check the line with:
OPT 175B on 124 nodes, 7.5 h (the line says 8.2); ByteRobust on 1,200 to 2,048, 2.78 h (3.7 to 3.1).
"""

HARDWARE_SHARE = 0.78
"""Share of failures that take a node away; the others restart on the nodes they had.

Source: Llama 3 405B, arXiv:2407.21783, section 3.3.4 (confirmed or suspected hardware).
"""

SPOT_RECLAIMED_A_MONTH = 0.20
"""Share of spot instances that AWS takes back within a month. Its Spot Instance Advisor has bands:
15 to 20 % for p5, 5 to 10 % for p4d and g6 (read on 2026-02-24 by thundercompute.com, Cloud GPU
Spot Instance Availability); the upper end of the highest is taken for all types."""

MONTH_S = 30 * DAY_S

REPLACEMENT_HOURS = 24.0
"""Until a broken node or another in its place is back: parts on site are said to take "under a
day" (amcompute.com, When a GPU dies in production; a vendor). Shipped parts take days."""

SHORTAGE_RISK = 0.05
"""Accepted probability that the run waits for a node at least once."""


@dataclass(frozen=True, kw_only=True)
class Mtbf:
    """Mean time between failures that stop the job."""

    seconds: float
    low_s: float
    """By the worst published rate, or as ``seconds`` where that is worse."""
    high_s: float
    """By the best published rate."""
    reason: str
    node_share: float = HARDWARE_SHARE
    """Share of failures that take a node away."""


def estimate_mtbf(*, nodes: int, devices: int, hours_per_node: float | None = None) -> Mtbf:
    """MTBF of a job on these nodes.

    Args:
        devices: Of all nodes; 64 devices count as 8 nodes even where one chassis holds them.
        hours_per_node: Known MTBF of one node; then 1 / nodes holds and no range is given.

    Source: ``ANCHORS`` and ``RATES``.
    """
    if hours_per_node is not None:
        seconds = hours_per_node * HOUR_S / nodes
        reason = f"{hours_per_node:g} h per node, as given, / {nodes:,}"
        return Mtbf(seconds=seconds, low_s=seconds, high_s=seconds, reason=reason)
    size = max(float(nodes), devices / DEVICES_OF_A_NODE)
    seconds = _measured_mtbf_s(size)
    by_rate = [1 / (size * rate.per_node_second) for rate in RATES.values()]
    return Mtbf(
        seconds=seconds,
        # The estimate may lie outside of the published rates, and its own range must hold it.
        low_s=min(seconds, *by_rate),
        high_s=max(seconds, *by_rate),
        reason=f"{size:,g} x {DEVICES_OF_A_NODE} devices, {_between(size)}",
    )


def with_reclaims(mtbf: Mtbf, *, nodes: int) -> Mtbf:
    """The same job on spot instances, which AWS takes back as well."""
    # P(taken within a month) = 1 - exp(-rate x month), solved for the rate.
    reclaimed = -math.log1p(-SPOT_RECLAIMED_A_MONTH) / MONTH_S * nodes

    def both(seconds: float) -> float:
        # Failures and reclaims are independent, so their rates add up.
        return 1 / (1 / seconds + reclaimed)

    seconds = both(mtbf.seconds)
    return Mtbf(
        seconds=seconds,
        low_s=both(mtbf.low_s),
        high_s=both(mtbf.high_s),
        reason=f"{mtbf.reason}; and AWS takes {SPOT_RECLAIMED_A_MONTH:.0%} of spot instances back "
        "within a month (upper end of its Spot Instance Advisor's bands)",
        # Every reclaim takes a node away, but only a part of the failures does.
        node_share=(mtbf.node_share / mtbf.seconds + reclaimed) * seconds,
    )


def _measured_mtbf_s(size: float) -> float:
    points = [(float(anchor.nodes), anchor.mtbf_hours) for anchor in ANCHORS]
    nearest = min(max(size, points[0][0]), points[-1][0])
    return log_log(size, points) * HOUR_S * nearest / size  # outside the anchors: 1 / nodes


def _between(size: float) -> str:
    """Name the anchors from which a size is estimated."""
    if size < ANCHORS[0].nodes or size > ANCHORS[-1].nodes:
        anchor = ANCHORS[0] if size < ANCHORS[0].nodes else ANCHORS[-1]
        return f"by 1 / nodes from {anchor.mtbf_hours:.3g} h ({anchor.source})"
    upper = next(i for i in range(1, len(ANCHORS)) if size <= ANCHORS[i].nodes)
    a, b = ANCHORS[upper - 1], ANCHORS[upper]
    return f"between {a.mtbf_hours:,.4g} h ({a.source}) and {b.mtbf_hours:.3g} h ({b.source})"


def log_log(x: float, points: Sequence[tuple[float, float]]) -> float:
    """y at x on straight lines through points in log-log; the end points' y outside of them."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 * math.exp(math.log(y1 / y0) * math.log(x / x0) / math.log(x1 / x0))
    return points[-1][1]


def spare_nodes(
    *, failures_per_s: float, replacement_s: float, run_s: float, risk: float = SHORTAGE_RISK
) -> int:
    """Fewest spare nodes with which the run waits for none, but for ``risk``.

    Nodes that are out are Poisson with mean ``failures_per_s x replacement_s`` (independent
    failures, each replaced on its own). A failure meets their time average, so the run comes up
    short ``failures_per_s x run_s x P(exactly all spares are out)`` times.

    Args:
        failures_per_s: Of those that take a node away.
    """
    mean_out = failures_per_s * min(replacement_s, run_s)  # a short run begins with none out
    # The number of shortages is Poisson: P(none) = exp(-mean) must be at least 1 - risk.
    accepted = -math.log1p(-risk) / (failures_per_s * run_s)
    exponent, spares = -mean_out, 0  # logarithm of P(spares are out): exp(-mean) may underflow
    # The probability rises up to its mode, the mean's whole part: a small one below is not the end.
    while exponent > math.log(accepted) or spares < math.floor(mean_out):
        spares += 1
        exponent += math.log(mean_out / spares)
    return spares


def require_positive(where: str, **values: float) -> None:
    """Reject a value that is not a finite number above 0.

    Raises:
        RequestError: Names the first such value.
    """
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise RequestError(_out_of_range(where, name, value, "a finite number above 0"))


def require_not_negative(where: str, **values: float) -> None:
    """Check values like ``require_positive``, and allow 0."""
    for name, value in values.items():
        if not (value >= 0 and math.isfinite(value)):
            raise RequestError(_out_of_range(where, name, value, "a finite number, 0 or more"))


def _out_of_range(where: str, name: str, value: float, needed: str) -> str:
    why = f"A prediction of failures needs {needed} there."
    return f"{where}: {name}={value} is out of range. {why} Correct {name}."
