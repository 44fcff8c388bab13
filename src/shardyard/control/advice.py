"""Advice: what each lever and each technique would do to the memory, time and price of a recipe.

The planner is the only one who predicts: a change is the recipe with other settings, planned as
`shardyard plan` would (``control/replan.py``). Which changes: ``control/levers.py``; the difference
in words: ``planner/effect.py``; what runs of before measured: ``control/past_runs.py``.
"""

from collections.abc import Iterable
from typing import Any

from shardyard.config.schema.recipe import Recipe
from shardyard.control.levers import Ask, levers, techniques
from shardyard.control.past_runs import PastRuns
from shardyard.control.replan import Replanned, Replanner
from shardyard.errors import RecipeError, RequestError
from shardyard.hardware.cluster import Cluster
from shardyard.planner.advice import Advice, Change
from shardyard.planner.effect import IN_USE, Effect, effect
from shardyard.planner.plan import Plan
from shardyard.planner.ranks import Ranks


def advise(
    replanner: Replanner, now: Plan, *, cluster: Cluster | None, past: PastRuns, ranks: Ranks
) -> Advice:
    """Plan every lever and technique of a recipe.

    Args:
        now: Its plan.
        cluster: Its machines; None: no accelerator, or none that is known.
        past: Runs that may have measured some of them.
    """
    asked, settled = replanner.asked, replanner.settled

    def changed(asks: Iterable[Ask]) -> tuple[Change, ...]:
        return tuple(_change(ask, replanner, now, cluster=cluster, past=past) for ask in asks)

    return Advice(
        now=now,
        measured=past.of(settled),
        levers=changed(levers(asked, settled)),
        techniques=changed(techniques(asked, settled)),
        ranks=ranks,
    )


def _change(
    ask: Ask, replanner: Replanner, now: Plan, *, cluster: Cluster | None, past: PastRuns
) -> Change:
    planned, refusals = _planned(ask, replanner)
    refused = ask.needless or (refusals[0] if refusals else "")
    best = min(planned, key=_rank) if planned else None
    if best is not None and now.step_s is not None and best.plan.step_s is None:
        refused = best.plan.speed.reason
        best = None
    if best is None:
        first = ask.choices[0] if ask.choices else ()
        return Change(
            name=ask.name, what=ask.what, settings=first, plan=None, refused=refused,
            effect=None, measured=None,
        )  # fmt: skip
    return Change(
        name=ask.name,
        what=ask.what,
        settings=best.settings,
        plan=best.plan,
        refused="",
        effect=Effect(verdict=IN_USE, why=())
        if _said(best.recipe) == _said(replanner.settled)
        else effect(now, best.plan, cluster),
        measured=past.of(best.recipe),
    )


def _said(recipe: Recipe) -> dict[str, Any]:
    """What a settled recipe says, whether its layout has a name there or not."""
    said = recipe.model_dump()
    del said["parallel"]["strategy"]
    return said


def _planned(ask: Ask, replanner: Replanner) -> tuple[list[Replanned], list[str]]:
    """Each choice that can be planned, and why the others cannot."""
    found, refusals = [], []
    for settings in ask.choices:
        try:
            found.append(replanner.plan(settings))
        except RequestError as error:
            refusals.append(_reason(error))
    return found, refusals


def _reason(error: RequestError) -> str:
    """A refusal on one line."""
    if isinstance(error, RecipeError):
        return " ".join(map(str, error.problems))
    return " ".join(str(error).split())


_FITS = ("fits", "unknown", "tight", "does not fit")


def _rank(found: Replanned) -> tuple[int, float, float]:
    """What fits first, then what is fastest; of what does not fit, what needs least."""
    plan = found.plan
    if plan.fits == "does not fit":
        return _FITS.index(plan.fits), plan.device_bytes, 0.0
    return _FITS.index(plan.fits), plan.step_s or 0.0, plan.device_bytes
