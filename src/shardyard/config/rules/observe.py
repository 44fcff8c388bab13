"""Rules of ``observe``: services, alerts and profiles."""

import re
from collections.abc import Iterable

from shardyard.config.schema.recipe import Recipe
from shardyard.errors import Problem, RequestError


def services_of(recipe: Recipe) -> tuple[str, ...]:
    """Names of the services that a run is sent to."""
    observe = recipe.observe
    wanted = {"wandb": observe.wandb.project, "mlflow": observe.mlflow.url}
    return tuple(name for name, setting in wanted.items() if setting is not None)


def check_exporters(recipe: Recipe) -> Iterable[Problem]:
    """Yield problems of a service's settings without the setting that turns it on."""
    wandb, mlflow = recipe.observe.wandb, recipe.observe.mlflow
    if wandb.project is None:
        for name, value in (("entity", wandb.entity), ("url", wandb.url)):
            if value is not None:
                text = (
                    f"={value} and no observe.wandb.project: results would not be sent. Give the "
                    "project."
                )
                yield Problem(f"observe.wandb.{name}", text)
    elif any(char in wandb.project for char in "/\\#?%:"):
        text = f"={wandb.project} holds one of / \\ # ? % : which W&B refuses. Leave it out."
        yield Problem("observe.wandb.project", text)
    if mlflow.url is None and mlflow.experiment is not None:
        text = (
            f"={mlflow.experiment} and no observe.mlflow.url: results would not be sent. Give the "
            "address."
        )
        yield Problem("observe.mlflow.experiment", text)


def check_alerts(recipe: Recipe) -> Iterable[Problem]:
    """Find alerts that can never be sent, and addresses written into the recipe."""
    for number, alert in enumerate(recipe.observe.alerts):
        place = f"observe.alerts[{number}]"
        if "://" in alert.webhook or "/" in alert.webhook:
            text = (
                " is an address, and everybody who knows it can post there. Keep it as a secret "
                "and give its name: webhook: ALERTS with `secrets: {ALERTS: env}`."
            )
            yield Problem(f"{place}.webhook", text)
        elif alert.webhook not in recipe.secrets:
            text = (
                f"={alert.webhook} is not a name in secrets. Say where the address is kept: "
                f"`secrets: {{{alert.webhook}: env}}`."
            )
            yield Problem(f"{place}.webhook", text)
        if "cost" in alert.when and alert.above_usd is None:
            yield Problem(f"{place}.when", "=cost needs a sum. Give above_usd as well.")
        if "cost" not in alert.when and alert.above_usd is not None:
            text = f"={alert.above_usd:g} is only for when: cost. Add cost, or leave it out."
            yield Problem(f"{place}.above_usd", text)
        if "target" in alert.when and recipe.run.target is None:
            text = "=target but the recipe has no run.target. Give one, or leave target out."
            yield Problem(f"{place}.when", text)


# Which ranks a profile is taken of, and what of ``observe.profile`` cannot be followed.

MOST_RANKS = 64
"""Most ranks in one profile: their traces are written and read while the run pauses."""
USUAL_RANKS = 8
"""Ranks that are profiled in a larger run, unless the user names others."""

_RANKS = re.compile(r"\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*", re.ASCII)


def check_profile(recipe: Recipe) -> Iterable[Problem]:
    """Yield problems of a profile that could not be taken."""
    profile = recipe.observe.profile
    if not is_ranks(profile.ranks):
        yield Problem("observe.profile.ranks", f"={profile.ranks} {_WRONG_RANKS}")
    last = recipe.run.steps
    if profile.at_step is not None and last is not None and profile.at_step > last:
        text = (
            f"={profile.at_step} but the run ends after run.steps={last}. No step would be "
            f"profiled. Use a step from 1 to {last}."
        )
        yield Problem("observe.profile.at_step", text)


_WRONG_RANKS = "does not say which ranks. Use auto, all, or numbers and spans such as 0-3,8."


def is_ranks(words: str) -> bool:
    """Whether a text says which ranks are meant."""
    return words in ("auto", "all") or _RANKS.fullmatch(words) is not None


def ranks_of(words: str, world_size: int) -> tuple[int, ...]:
    """The ranks that are meant, in order.

    ``auto`` takes all of a small run. Of a larger one it takes some that are evenly spread: ranks
    count stages first and nodes next (``parallel/mesh.py``), so these are of all stages and nodes
    as far as their number reaches.

    Raises:
        RequestError: There are no such ranks, or too many.
    """
    if words == "auto":
        if world_size <= USUAL_RANKS:
            return tuple(range(world_size))
        return tuple(place * world_size // USUAL_RANKS for place in range(USUAL_RANKS))
    if words == "all":
        found = set(range(world_size))
    elif is_ranks(words):
        found = set()
        for span in words.split(","):
            first, _, last = span.partition("-")
            # a span is cut where ranks end, so that a wrong one takes no memory
            found |= {int(first), *range(int(first), min(int(last or first), world_size) + 1)}
    else:
        raise RequestError(f"--ranks {words} {_WRONG_RANKS}")
    if not found or max(found) >= world_size:
        raise RequestError(
            f"--ranks {words}: the run has {world_size} ranks, counted from 0. Use numbers up to "
            f"{world_size - 1}."
        )
    if len(found) > MOST_RANKS:
        raise RequestError(
            f"--ranks {words} are {len(found)} ranks, and a profile is taken of {MOST_RANKS} at "
            "most: all ranks wait until their traces are written. Name fewer, or leave --ranks out."
        )
    return tuple(sorted(found))
