"""Advice as values: what could be changed about a recipe, what it would do, what it has done.

Made by ``control/advice.py``, which plans each change; printed, drawn and written by others.
"""

from dataclasses import asdict, dataclass
from typing import Any

from shardyard.config.fingerprint import may_change
from shardyard.planner.effect import Effect
from shardyard.planner.plan import Plan
from shardyard.planner.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run measured."""

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
    """What is then done, whatever the model."""
    settings: tuple[str, ...]
    """What to add to the recipe for it, as overrides."""
    plan: Plan | None
    refused: str
    """Why there is no plan; empty where there is one."""
    effect: Effect | None
    measured: Measured | None
    """What the newest run with these settings measured; None: none is there."""

    @property
    def note(self) -> str:
        """What beside memory and time it changes: what is learnt, or how numbers are rounded."""
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
            "refused": self.refused or None,
            "effect": None if self.effect is None else asdict(self.effect),
            "plan": None if self.plan is None else _numbers(self.plan),
            "measured": None if self.measured is None else asdict(self.measured),
        }


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What could be changed about a recipe, and what it would do."""

    now: Plan
    """The plan that all are compared with; of a run with phases, of the one that needs most memory.
    """
    measured: Measured | None
    """What the newest run of the very recipe measured."""
    levers: tuple[Change, ...]
    techniques: tuple[Change, ...]
    ranks: Ranks

    def to_json(self) -> dict[str, Any]:
        """Plain values: what `plan --details --json` adds."""
        return {
            "measured": None if self.measured is None else asdict(self.measured),
            "levers": [change.to_json() for change in self.levers],
            "techniques": [change.to_json() for change in self.techniques],
            "ranks": list(self.ranks.to_json()),
        }


def _numbers(plan: Plan) -> dict[str, Any]:
    """Of a plan what is compared."""
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
    }
