"""Which instance, how many of them: time and price of one run on everything that can be rented.

For each EC2 type with a price and known rates, and for each number of nodes, the fastest layout
that fits is timed with its failures. What is cheaper and faster than another offer dominates it;
the rest is the Pareto front. A deadline or a budget picks one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.errors import RequestError
from shardyard.hardware.catalogue import instance, instance_names
from shardyard.hardware.cluster import Cluster, cluster_of
from shardyard.planner.effective_time import NoProgressError
from shardyard.planner.failures import FailureOutlook, failure_plan
from shardyard.planner.kernels import missing
from shardyard.planner.kinds import Work, work_on_devices
from shardyard.planner.layouts import Candidate, search
from shardyard.planner.restart import Recovery
from shardyard.planner.saving import SaveCost

NODES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One cluster, the best way to train on it, and what the whole run comes to."""

    instance: str
    nodes: int
    device: str
    devices: int
    candidate: Candidate
    failures: FailureOutlook
    usd_per_hour: float

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
        """Its price on demand."""
        return self.wall_s / 3600 * self.usd_per_hour

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "instance": self.instance,
            "nodes": self.nodes,
            "device": self.device,
            "devices": self.devices,
            "wall_s": self.wall_s,
            "usd": self.usd,
            "usd_per_hour": self.usd_per_hour,
            "candidate": self.candidate.to_json(),
            "failures": asdict(self.failures),
        }


@dataclass(frozen=True, kw_only=True)
class Offers:
    """All that can be rented for one run."""

    offers: tuple[Offer, ...]
    """The Pareto front: cheapest first, each next one faster."""
    considered: int
    passed_over: tuple[tuple[str, str], ...]
    """Instance -> why it is in no offer."""
    picked: Offer | None
    """The cheapest in time, or the fastest in budget; None: no offer meets what was asked."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "offers": [offer.to_json() for offer in self.offers],
            "considered": self.considered,
            "passed_over": dict(self.passed_over),
            "picked": self.picked.to_json() if self.picked else None,
        }


def offers(
    workload: Work,
    *,
    steps: int,
    checkpoint_bytes: int,
    recovery: Recovery,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
    names: Sequence[str] = (),
) -> Offers:
    """Time and price a run on every instance type and number of nodes.

    Args:
        workload: Model, batch, formats and techniques.
        steps: Optimizer steps of the run, each of the workload's batch.
        recovery: What the run does about failures.
        deadline_s: Longest wall time; the cheapest offer within it is picked.
        budget_usd: Highest price; the fastest offer within it is picked.
        names: Instance types to look at; none: all of the catalogue.

    Raises:
        RequestError: Nothing can be rented that trains it.
    """
    found: list[Offer] = []
    passed: list[tuple[str, str]] = []
    for name in names or instance_names():
        made, why = _of_instance(
            name, workload, steps=steps, checkpoint_bytes=checkpoint_bytes,
            recovery=recovery,
        )  # fmt: skip
        found += made
        if not made:
            passed.append((name, why))
    if not found:
        reasons = "; ".join(f"{name}: {why}" for name, why in passed[:3])
        raise RequestError(
            f"no instance type trains this within {NODES[-1]} nodes ({reasons}, ...). Use a "
            "smaller model, shorter samples or memory.recompute=full, or describe a cluster of "
            "your own with cluster.file."
        )
    front = _front(found)
    return Offers(
        offers=tuple(front),
        considered=len(found),
        passed_over=tuple(passed),
        picked=_pick(found, deadline_s=deadline_s, budget_usd=budget_usd),
    )


def _of_instance(
    name: str,
    workload: Work,
    *,
    steps: int,
    checkpoint_bytes: int,
    recovery: Recovery,
) -> tuple[list[Offer], str]:
    """Offers of one type by number of nodes; or why there is none."""
    kind = instance(name)
    if kind.usd_per_hour is None:
        return [], "no on-demand price is known"
    why_not = missing(kind.accelerator, workload.formats.compute)
    if why_not:
        return [], why_not
    made, why = [], "the model does not fit"
    for nodes in NODES:
        cluster = cluster_of(kind, nodes)
        try:
            best = search(workload, cluster, best=1, breadth="usual").best
        except RequestError:
            why = "more data-parallel ranks than samples in a step"
            break
        if not best or not best[0].is_safe:
            continue
        try:
            batch = work_on_devices(workload, cluster).global_batch
            offer = _offer(
                name, cluster, best[0], steps=-(-steps * workload.global_batch // batch),
                checkpoint_bytes=checkpoint_bytes, recovery=recovery,
            )  # fmt: skip
        except NoProgressError:
            why = "it would fail more often than it saves"
            continue
        made.append(offer)
    return made, why


def _offer(
    name: str,
    cluster: Cluster,
    candidate: Candidate,
    *,
    steps: int,
    checkpoint_bytes: int,
    recovery: Recovery,
) -> Offer:
    assert cluster.usd_per_hour is not None
    return Offer(
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
            saving=SaveCost.of(checkpoint_bytes, devices=cluster.devices, nodes=cluster.nodes),
            recovery=recovery,
        ),
        usd_per_hour=cluster.usd_per_hour,
    )


def _front(found: Iterable[Offer]) -> list[Offer]:
    """Offers that no other beats in both time and price."""
    front: list[Offer] = []
    for offer in sorted(found, key=lambda o: (o.usd, o.wall_s)):
        if not front or offer.wall_s < front[-1].wall_s:
            front.append(offer)
    return front


def _pick(
    found: Sequence[Offer], *, deadline_s: float | None, budget_usd: float | None
) -> Offer | None:
    within = [
        offer
        for offer in found
        if (deadline_s is None or offer.wall_s <= deadline_s)
        and (budget_usd is None or offer.usd <= budget_usd)
    ]
    if not within:
        return None
    if deadline_s is None and budget_usd is not None:
        return min(within, key=lambda o: o.wall_s)
    return min(within, key=lambda o: o.usd)
