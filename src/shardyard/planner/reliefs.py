"""What a search tries before it says that nothing fits: other settings of the same step."""

from dataclasses import dataclass

from shardyard.planner.dispatch import Work


@dataclass(frozen=True, kw_only=True)
class Relief:
    """Settings that make a step need less memory on a device, and the step with them."""

    settings: tuple[str, ...]
    """Overrides of the recipe, such as ``memory.offload=optimizer``."""
    work: Work
