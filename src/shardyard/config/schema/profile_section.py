"""A profile that the recipe asks for: ``observe.profile``; its meaning: ``profile_problems.py``."""

from typing import Annotated

from pydantic import Field

from shardyard.config.schema.base import Section

MOST_STEPS = 20
"""Of one profile: viewers give up at traces of some hundred megabytes, and memory holds them."""


class Profile(Section):
    """A profile that is taken without being asked for."""

    at_step: Annotated[int, Field(ge=1)] | None = None
    """Profile from this step on, as `shardyard profile` does; null: not unless somebody asks."""
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 3
    """With observe.profile.at_step: how many steps."""
    ranks: str = "auto"
    """With observe.profile.at_step: whose traces, as 0-3,8 or all, 64 at most; auto: all of up to
    8, else 8 spread evenly."""
