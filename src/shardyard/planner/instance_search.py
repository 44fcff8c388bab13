"""Search for an instance type and a node count: time and price of one run on all rentable types.

The search covers each EC2 type with a price and known rates, and each number of nodes. The
fastest layout that fits is timed with its failures. An offer that is cheaper and faster
than another dominates it; the rest is the Pareto front. A deadline or a budget picks one.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardyard.errors import RequestError
from shardyard.hardware.catalogue import instance, instance_names, rate_of
from shardyard.hardware.cluster import ClusterHardware, cluster_of
from shardyard.planner.dispatch import Work, work_on_devices, work_with
from shardyard.planner.effective_time import NoProgressError, RecoverySettings, SaveCost
from shardyard.planner.failures import FailureForecast, failure_plan
from shardyard.planner.kernels import missing_rate
from shardyard.planner.layouts import Candidate, Relief, Reliefs, search
from shardyard.planner.reference_pass import ReferencePass
from shardyard.planner.throughput import UNMEASURED, Price, Range, price_range

NODES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class ClusterQuote:
    """One cluster, the best way to train on it, and what the whole run comes to."""

    instance: str
    nodes: int
    device: str
    devices: int
    candidate: Candidate
    failures: FailureForecast
    usd_per_hour: float
    """Price of its nodes, as they are rented, without spare ones."""
    steps: int
    """Optimizer steps of the run on this cluster."""
    unmeasured: str = ""
    """Why the rate of products it rests on is no measurement; empty: somebody timed them."""

    @property
    def name(self) -> str:
        """``p5.48xlarge x 16``."""
        return f"{self.instance} x {self.nodes}"

    @property
    def wall_s(self) -> float:
        """The run with start, saves and failures."""
        return self.failures.wall_s

    @property
    def usd(self) -> float:
        """Its price, with the spare nodes that its time assumes."""
        price = Price(usd_per_hour=self.usd_per_hour, source="")
        usd = price.of(self.wall_s, nodes=self.nodes, spares=self.failures.spare_nodes)
        assert usd is not None
        return usd

    @property
    def wall_s_band(self) -> Range | None:
        """80 % band of the run's time."""
        band = self.candidate.band
        if band is None:
            return None
        steps_s = self.steps * self.candidate.step_s + self.failures.reference_s
        return band.of_time(self.wall_s, steps_s=steps_s)

    @property
    def usd_band(self) -> Range | None:
        """80 % band of its price."""
        band = self.wall_s_band
        return None if band is None else price_range(self.usd, self.wall_s, band)

    @property
    def mark(self) -> str:
        """Mark of an unmeasured time and price; empty if the products were timed."""
        return UNMEASURED if self.unmeasured else ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "instance": self.instance,
            "nodes": self.nodes,
            "device": self.device,
            "devices": self.devices,
            "wall_s": self.wall_s,
            "usd": self.usd,
            "bands": {
                name: None if band is None else list(band)
                for name, band in (("wall_s", self.wall_s_band), ("usd", self.usd_band))
            },
            "usd_per_hour": self.usd_per_hour,
            "spare_nodes": self.failures.spare_nodes,
            "unmeasured": self.unmeasured or None,
            "candidate": self.candidate.to_json(),
            "failures": asdict(self.failures),
        }


@dataclass(frozen=True, kw_only=True)
class ClusterQuotes:
    """All that can be rented for one run."""

    quotes: tuple[ClusterQuote, ...]
    """The Pareto front: cheapest first, each next one faster."""
    considered: int
    passed_over: tuple[tuple[str, str], ...]
    """Instance -> why it is in no offer."""
    selected: ClusterQuote | None
    """The cheapest in time, or the fastest in budget; None: no offer meets what was asked."""
    has_deadline: bool = False

    @property
    def recommended(self) -> ClusterQuote:
        """Picked offer; else the fastest if there is a deadline, and the cheapest if not."""
        return self.selected or self.quotes[-1 if self.has_deadline else 0]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "offers": [offer.to_json() for offer in self.quotes],
            "considered": self.considered,
            "passed_over": dict(self.passed_over),
            "picked": self.selected.to_json() if self.selected else None,
        }


def quote_clusters(
    workload: Work,
    *,
    steps: int,
    checkpoint_bytes: int,
    recovery: RecoverySettings,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
    names: Sequence[str] = (),
    capacity: str = "on-demand",
    variants: Sequence[Relief] = (),
    reliefs: Reliefs = tuple,
    reference: ReferencePass | None = None,
) -> ClusterQuotes:
    """Time and price a run on every instance type and number of nodes.

    Args:
        workload: Model, batch, formats and techniques.
        steps: Optimizer steps of the run, each of the workload's batch.
        recovery: The run's settings against failures.
        deadline_s: Longest wall time; the cheapest offer within it is picked.
        budget_usd: Highest price; the fastest offer within it is picked.
        names: Instance types to look at; none: all of the catalogue.
        capacity: Kind of rental: ``on-demand`` or ``spot``.
        variants: The same training with other settings, of which the fastest counts.
        reliefs: Gives settings to try where no layout fits.
        reference: Pass over the data before the first step; None: there is none.

    Raises:
        RequestError: No instance that can be rented trains it.
    """
    quotes: list[ClusterQuote] = []
    passed: list[tuple[str, str]] = []
    asked = _QuoteRequest(
        workload=workload, steps=steps, checkpoint_bytes=checkpoint_bytes, recovery=recovery,
        capacity=capacity, variants=variants, reliefs=reliefs, reference=reference,
    )  # fmt: skip
    for name in names or instance_names():
        made, why = _of_instance(name, asked)
        quotes += made
        if not made:
            passed.append((name, why))
    if not quotes:
        reasons = "; ".join(f"{name}: {why}" for name, why in passed[:3])
        raise RequestError(
            f"no instance type trains this within {NODES[-1]} nodes ({reasons}, ...). Use a "
            "smaller model, shorter samples or memory.recompute=full, or describe a cluster of "
            "your own with cluster.file."
        )
    front = _front(quotes)
    return ClusterQuotes(
        quotes=tuple(front),
        considered=len(quotes),
        passed_over=tuple(passed),
        selected=_pick(quotes, deadline_s=deadline_s, budget_usd=budget_usd),
        has_deadline=deadline_s is not None,
    )


@dataclass(frozen=True, kw_only=True)
class _QuoteRequest:
    """Request for every instance type."""

    workload: Work
    steps: int
    checkpoint_bytes: int
    recovery: RecoverySettings
    capacity: str
    variants: Sequence[Relief]
    reliefs: Reliefs
    reference: ReferencePass | None


def _of_instance(name: str, request: _QuoteRequest) -> tuple[list[ClusterQuote], str]:
    """Offers of one type by number of nodes; or why there is none."""
    kind, workload = instance(name), request.workload
    usd = rate_of(kind, request.capacity).usd_per_hour
    if usd is None:
        return [], f"no {request.capacity} price is known"
    why_not = missing_rate(kind.accelerator, workload.formats.compute)
    if why_not:
        return [], why_not
    made, why = [], "the model does not fit"
    for nodes in NODES:
        cluster = cluster_of(kind, nodes)
        try:
            best = _fastest(request, cluster)
        except RequestError:
            # More nodes only mean more ranks, so larger clusters of this type fail too.
            why = "more data-parallel ranks than samples in a step"
            break
        # The model does not fit yet, but more nodes split it further.
        if best is None:
            continue
        try:
            made.append(_quote(name, cluster, best, request, usd_per_hour=usd * nodes))
        except NoProgressError:
            why = "it would fail more often than it saves"
    return made, why


def _fastest(request: _QuoteRequest, cluster: ClusterHardware) -> Candidate | None:
    """The fastest way to train on a cluster that fits there."""
    found = search(request.workload, cluster, best=1, breadth="usual", reliefs=request.reliefs).best
    ways = [candidate for candidate in found if candidate.is_safe]
    for variant in request.variants:
        with suppress(RequestError):  # it may leave no legal layout
            found = search(variant.work, cluster, best=1, breadth="usual").best
            more = variant.settings
            ways += [replace(each, more=(*more, *each.more)) for each in found if each.is_safe]
    return min(ways, key=lambda candidate: candidate.step_s, default=None)


def _quote(
    name: str,
    cluster: ClusterHardware,
    candidate: Candidate,
    request: _QuoteRequest,
    *,
    usd_per_hour: float,
) -> ClusterQuote:
    batch = work_on_devices(request.workload, cluster).global_batch
    # With a batch per device a larger cluster needs fewer steps for the same samples.
    steps = -(-request.steps * request.workload.global_batch // batch)
    reference_s = 0.0
    if request.reference is not None:
        work = work_with(
            request.workload, candidate.layout, micro_batch=candidate.micro_batch,
            recompute=candidate.recompute,
        )  # fmt: skip
        reference_s = request.reference.seconds(work, cluster)
    return ClusterQuote(
        steps=steps,
        instance=name,
        nodes=cluster.nodes,
        device=cluster.accelerator.name,
        devices=cluster.devices,
        candidate=candidate,
        failures=failure_plan(
            nodes=cluster.nodes,
            devices=cluster.devices,
            step_s=candidate.step_s,
            steps=steps,
            saving=SaveCost.of(
                request.checkpoint_bytes, devices=cluster.devices, nodes=cluster.nodes
            ),
            recovery=request.recovery,
            reference_s=reference_s,
        ),
        usd_per_hour=usd_per_hour,
        unmeasured=cluster.accelerator.unmeasured(request.workload.formats.compute),
    )


def _front(quotes: Iterable[ClusterQuote]) -> list[ClusterQuote]:
    """Offers that no other beats in both time and price."""
    front: list[ClusterQuote] = []
    # From the cheapest on, an offer is worth its price only if it is faster than all before.
    for offer in sorted(quotes, key=lambda o: (o.usd, o.wall_s)):
        if not front or offer.wall_s < front[-1].wall_s:
            front.append(offer)
    return front


def _pick(
    quotes: Sequence[ClusterQuote], *, deadline_s: float | None, budget_usd: float | None
) -> ClusterQuote | None:
    within = [
        offer
        for offer in quotes
        if (deadline_s is None or offer.wall_s <= deadline_s)
        and (budget_usd is None or offer.usd <= budget_usd)
    ]
    if not within:
        return None
    if deadline_s is None and budget_usd is not None:
        return min(within, key=lambda o: o.wall_s)
    return min(within, key=lambda o: o.usd)


# The rate does not decide alone: a larger batch needs more samples for the same loss.
#
# Source: McCandlish et al. 2018, arXiv:1812.06162, section 2.3. With a critical batch B_c, steps S
# and samples E to a loss follow (S / S_min - 1) (E / E_min - 1) = 1. So a batch B needs 1 + B / B_c
# times the fewest samples.


def samples_factor(global_batch: float, *, critical_batch: float) -> float:
    """Samples to a given loss at this batch, over the fewest that any batch needs."""
    if not 0 < critical_batch < math.inf:
        raise RequestError(
            f"critical batch={critical_batch} is not a number of samples. It is the batch at which "
            "twice the fewest samples are needed. Give one above 0, or leave it out."
        )
    return 1 + global_batch / critical_batch
