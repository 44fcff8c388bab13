"""Alerts when a run fails, makes no progress, costs too much or is done: ``observe.alerts``."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shardyard.config.schema.base import Section
from shardyard.errors import Problem

if TYPE_CHECKING:
    from shardyard.config.schema.recipe import Recipe

When = Literal["failed", "stalled", "target", "cost", "device_problem"]


class Alert(Section):
    """One address, and the events that it receives."""

    when: Annotated[tuple[When, ...], Field(min_length=1, strict=False)]
    """failed: an attempt ended with an error; stalled: no step for long (launched runs); target:
    run.target is reached; cost: above_usd is; device_problem: a device or its bits are wrong."""
    webhook: str
    """Name in `secrets` of the address that takes a POST of JSON; an address is a secret."""
    above_usd: Annotated[float, Field(gt=0)] | None = None
    """For cost: dollars of the whole run."""


def check_alerts(recipe: "Recipe") -> Iterable[Problem]:
    """Find alerts that can never be sent, and addresses written into the recipe."""
    for number, alert in enumerate(recipe.observe.alerts):
        place = f"observe.alerts[{number}]"
        if "://" in alert.webhook or "/" in alert.webhook:
            text = (
                " is an address, and whoever knows it may post there. Keep it as a secret and give "
                "its name: webhook: ALERTS with `secrets: {ALERTS: env}`."
            )
            yield Problem(f"{place}.webhook", text)
        elif alert.webhook not in recipe.secrets:
            text = (
                f"={alert.webhook} is no name in secrets. Say where the address is kept: "
                f"`secrets: {{{alert.webhook}: env}}`."
            )
            yield Problem(f"{place}.webhook", text)
        if "cost" in alert.when and alert.above_usd is None:
            yield Problem(f"{place}.when", "=cost needs a sum. Give above_usd beside it.")
        if "cost" not in alert.when and alert.above_usd is not None:
            text = f"={alert.above_usd:g} is for when: cost alone. Add cost, or leave it out."
            yield Problem(f"{place}.above_usd", text)
        if "target" in alert.when and recipe.run.target is None:
            text = "=target but the recipe has no run.target. Give one, or leave target out."
            yield Problem(f"{place}.when", text)
