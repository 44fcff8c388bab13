"""Effect of a change of a recipe on its plan, in words: the difference of two plans by term.

This module predicts no values. Both plans are the planner's; the words come only from their
terms. ``Advice`` holds the changes that a recipe could have.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.config.fingerprint import may_change
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.plan import Plan
from shardyard.planner.ranks import RankPlacement
from shardyard.units import format_bytes, format_list, format_seconds

NOTABLE = 0.01
"""Share of the plan's memory or step from which a difference is reported."""

IN_USE = "is what this recipe does"
"""The verdict on what is no change."""

_MOST = 3
"""Terms that are named; the largest."""

_AXES = {
    "all-gather": "dp_shard",
    "reduce-scatter": "dp_shard",
    "all-reduce": "dp_replicate",
    "tokens of tp": "tp",
    "sums of tp": "tp",
    "attention of cp": "cp",
    "visits of ep": "ep",
    "hidden states of pp": "pp",
    "tied table of pp": "pp",
}
"""Traffic's term -> the axis that it goes over."""

Difference = tuple[str, float]
"""Name of a term, and by how much it is larger than before."""


@dataclass(frozen=True, kw_only=True)
class PlanDiff:
    """Effect on a plan."""

    verdict: str
    """Whether it helps, in a few words."""
    why: tuple[str, ...]
    """The terms that change: of memory, of what is sent, of the step."""

    def words(self) -> str:
        """All of it, as a line."""
        return "; ".join((self.verdict, *self.why))


def diff_plans(now: Plan, then: Plan, cluster: ClusterHardware | None) -> PlanDiff:
    """Describe what another plan of the same model and batch changes, and why.

    Args:
        cluster: Its links are named; None: not known.
    """
    before = _sums((term.name, term.bytes) for term in now.memory)
    after = _sums((term.name, term.bytes) for term in then.memory)
    why = [_memory(_difference(before, after, of=now.memory_bytes))]
    if why[0] and now.memory_moment != then.memory_moment:
        why.append(f"the peak is then {then.memory_moment}")
    why += [_sent(now, then, cluster), _time(now, then)]
    if then.fits in ("tight", "does not fit"):
        why.append(then.fits_reason)
    return PlanDiff(verdict=classify_change(now, then), why=tuple(part for part in why if part))


_ENDS = {"fits": "makes it fit", "unknown": "makes it fit", "tight": "makes it tight",
         "does not fit": "does not fit"}  # fmt: skip


def classify_change(now: Plan, then: Plan) -> str:
    """Whether a change helps: by what fits, then by memory and time together."""
    # The fit comes first: the speed of a plan that runs out of memory is no gain.
    fitted, fits = now.fits != "does not fit", then.fits != "does not fit"
    if fitted != fits:
        return _ENDS[then.fits]
    lighter, heavier = _compared(then.device_bytes, now.device_bytes)
    if now.step_s is None or then.step_s is None:
        found = "takes less memory" if lighter else "takes more memory" if heavier else "no help"
    else:
        faster, slower = _compared(then.step_s, now.step_s)
        found = _by_both(lighter, heavier, faster, slower)
    return found if fits else f"{found}, and still does not fit"


def _by_both(lighter: bool, heavier: bool, faster: bool, slower: bool) -> str:
    if faster:
        return "buys time with memory" if heavier else f"faster{' and less memory' * lighter}"
    if slower:
        return "buys memory with time" if lighter else "does not help: slower"
    if lighter:
        return "less memory, no slower"
    return "does not help: more memory" if heavier else "makes no difference"


def _compared(then: float, now: float) -> tuple[bool, bool]:
    """Whether it is notably less, and notably more."""
    return then < now * (1 - NOTABLE), then > now * (1 + NOTABLE)


def _sums(terms: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums by name: a plan may have a term twice."""
    totals: dict[str, float] = {}
    for name, size in terms:
        totals[name] = totals.get(name, 0) + size
    return totals


def _difference(now: dict[str, float], then: dict[str, float], *, of: float) -> list[Difference]:
    """Return the notable changes, the largest first."""
    names = list(dict.fromkeys((*now, *then)))
    found = [(name, then.get(name, 0) - now.get(name, 0)) for name in names]
    notable = [(name, more) for name, more in found if abs(more) > NOTABLE * of]
    return sorted(notable, key=lambda change: -abs(change[1]))[:_MOST]


def _memory(changes: Sequence[Difference]) -> str:
    less = [f"{format_bytes(-more)} of {name}" for name, more in changes if more < 0]
    added = [f"{format_bytes(more)} of {name}" for name, more in changes if more > 0]
    parts = [f"takes {format_list(less)} off each device"] if less else []
    if added:
        parts.append(f"adds {format_list(added)}{'' if less else ' to each device'}")
    return ", ".join(parts)


def _time(now: Plan, then: Plan) -> str:
    if now.step_s is None or then.step_s is None:
        return ""
    # The changed plan comes last, so a term that both have is explained as it is there.
    reasons = {term.name: term.reason for term in (*now.time, *then.time)}
    changes = _difference(
        _sums((term.name, term.seconds) for term in now.time),
        _sums((term.name, term.seconds) for term in then.time),
        of=now.step_s,
    )
    each = [
        f"{'+' if more > 0 else '-'}{format_seconds(abs(more))} of {name} ({reasons[name]})"
        for name, more in changes
    ]
    return f"a step: {', '.join(each)}" if each else ""


def _sent(now: Plan, then: Plan, cluster: ClusterHardware | None) -> str:
    """Describe what each rank sends more or less in a step, and over which link."""
    before, after = _traffic(now, cluster), _traffic(then, cluster)
    # Of the larger sum, as a layout of one rank sends nothing to compare with.
    most = max(sum(before.values()), sum(after.values()))
    parts = [
        f"{format_bytes(abs(more))} {'more' if more > 0 else 'less'} {name}"
        for name, more in _difference(before, after, of=most)
    ]
    return f"each rank sends {format_list(parts)} a step" if parts else ""


def _traffic(plan: Plan, cluster: ClusterHardware | None) -> dict[str, float]:
    """Bytes that a rank sends, by what they are and the link they go over."""
    # The link is part of the key: a collective that moves into a node sends no fewer bytes, but
    # over a faster link.
    links = {} if cluster is None else _links(plan, cluster)
    return _sums(
        (f"{term.name}{links.get(_AXES.get(term.name, ''), '')}", term.bytes)
        for term in plan.communication
    )


def _links(plan: Plan, cluster: ClusterHardware) -> dict[str, str]:
    """Axis -> the link that its groups talk over, in words."""
    ranks = RankPlacement(layout=plan.layout, devices_per_node=cluster.reach)
    return {
        axis.name.partition(" ")[0]: f" over {cluster.inside.name}"
        if ranks.nodes_of(axis) == 1
        else f" over {cluster.between.name}"
        for axis in ranks.axes
    }


# Advice holds what could change about a recipe, what that would do, and what was measured.
#
# ``control/suggestions.py`` plans each change. Other modules print, draw and write the result.


@dataclass(frozen=True, kw_only=True)
class RunMeasurement:
    """Measurements of a run."""

    run_id: str
    steps: int
    step_s: float
    """Median, without the first step of each start."""
    tokens_per_s: float | None
    memory_bytes: int | None
    """Most that tensors took on any rank; None: its device does not say."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that was planned, or why it cannot be."""

    name: str
    what: str
    """Action of the change, the same for every model."""
    settings: tuple[str, ...]
    """What to add to the recipe for it, as overrides."""
    plan: Plan | None
    rejection_reason: str
    """Why there is no plan; empty where there is one."""
    effect: PlanDiff | None
    measured: RunMeasurement | None
    """Measurement of the newest run with these settings. None if there is none."""

    @property
    def note(self) -> str:
        """Effect other than on memory and time: on the training result, or on rounding."""
        names = [setting.partition("=")[0] for setting in self.settings]
        if not all(map(may_change, names)):
            return "changes what is learnt"
        if any(name.startswith("precision.") for name in names):
            return "rounds otherwise"
        return ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "what": self.what,
            "settings": list(self.settings),
            "note": self.note,
            "refused": self.rejection_reason or None,
            "effect": None if self.effect is None else asdict(self.effect),
            "plan": None if self.plan is None else _numbers(self.plan),
            "measured": None if self.measured is None else asdict(self.measured),
        }


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Changes that a recipe could have, and their effects."""

    now: Plan
    """The plan that all are compared with; of a run with phases, of the one that needs most memory.
    """
    measured: RunMeasurement | None
    """Measurement of the newest run of this very recipe."""
    levers: tuple[Change, ...]
    techniques: tuple[Change, ...]
    ranks: RankPlacement

    def to_json(self) -> dict[str, Any]:
        """Plain values: what `plan --details --json` adds."""
        return {
            "measured": None if self.measured is None else asdict(self.measured),
            "levers": [change.to_json() for change in self.levers],
            "techniques": [change.to_json() for change in self.techniques],
            "ranks": list(self.ranks.to_json()),
        }


def _numbers(plan: Plan) -> dict[str, Any]:
    """Return the numbers of a plan that are compared."""
    return {
        "layout": asdict(plan.layout),
        "micro_batch": plan.micro_batch,
        "memory": [{"name": term.name, "bytes": term.bytes} for term in plan.memory],
        "memory_bytes": plan.memory_bytes,
        "device_bytes": plan.device_bytes,
        "fits": plan.fits,
        "fits_reason": plan.fits_reason,
        "time": [{"name": term.name, "seconds": term.seconds} for term in plan.time],
        "step_s": plan.step_s,
        "tokens_per_s": plan.speed.tokens_per_s,
        "wall_s": plan.wall_s,
        "usd": plan.usd,
        "usd_per_million_tokens": plan.usd_per_million_tokens,
        "bands": plan.bands(),
    }
