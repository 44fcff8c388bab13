"""Further settings of the same step that a search tries before it reports that no layout fits."""

from dataclasses import dataclass

from shardyard.planner.dispatch import Work


@dataclass(frozen=True, kw_only=True)
class Relief:
    """Settings that make a step need less memory on a device, and the step with them."""

    settings: tuple[str, ...]
    """Overrides of the recipe, such as ``memory.offload=optimizer``."""
    work: Work
