"""Verdict on a plan for a gate in continuous integration: each finding has an exit code."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from shardyard.config.limits import Limit
from shardyard.config.load import Source, is_override, read_settings
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RequestError
from shardyard.planner.plan import Plan
from shardyard.units import format_seconds, format_usd


class CheckExit(IntEnum):
    """Exit codes of ``shardyard plan --check``; a recipe that is illegal ends with 2 before."""

    FITS = 0
    UNKNOWN = 2
    """A limit was set, and the plan has no price or time to compare with it."""
    DOES_NOT_FIT = 10
    ABOVE_BUDGET = 11
    ABOVE_DEADLINE = 12


@dataclass(frozen=True, kw_only=True)
class PlanFinding:
    """One reason against a recipe.

    Args:
        exit_code: Kind of the reason.
        text: The value, the limit and the likeliest fix.
    """

    exit_code: CheckExit
    text: str

    def to_json(self) -> dict[str, Any]:
        """Return a row of ``check`` in ``shardyard plan --check --json``."""
        return {
            "finding": self.exit_code.name.lower(),
            "exit_code": int(self.exit_code),
            "text": self.text,
        }


def reject_several_recipes(sources: Sequence[Source]) -> None:
    """Raise where several files each name a model: they would be checked as one, merged recipe.

    Raises:
        RequestError: Names these files, and a loop over them.
    """
    files = [str(each) for each in sources if isinstance(each, str | Path)]
    files = [file for file in files if not is_override(file)]
    if len(files) < 2:
        return
    whole = [file for file in files if _names_model(file)]
    if len(whole) > 1:
        raise RequestError(
            f"--check checks one recipe, and {', '.join(whole)} each name a model: files are "
            "merged, and a later one wins. Check each: for recipe in *.yaml; do shardyard plan "
            '"$recipe" --check || exit; done'
        )


def _names_model(file: str) -> bool:
    recipe, _ = read_settings([file], [])
    return bool(recipe.model.model_fields_set & {"preset", "path", "hub", "module"})


def check_plan(
    plan: Plan,
    recipe: Recipe,
    *,
    budget_usd: float | None,
    deadline_s: float | None,
    site: Limit | None = None,
) -> list[PlanFinding]:
    """Return what speaks against a recipe: memory first, then price, then time; empty: nothing.

    Args:
        recipe: As the plan has it. Its ``launch.max_usd`` is the budget if none is given.
        budget_usd: Most that the run may cost, failures included.
        deadline_s: Most that the run may take, failures included.
        site: Most dollars of a run by a site file, which hold in addition to the budget.
    """
    limit, name = budget_usd, "--budget"
    if limit is None:
        limit, name = recipe.launch.max_usd, "launch.max_usd"
    found = list(_memory(plan, recipe))
    if limit is not None:
        found += _price(plan, limit, f"{name}={limit:g}")
    if site is not None:
        found += _price(plan, site.value, str(site))
    if deadline_s is not None:
        found += _time(plan, deadline_s)
    return found


def _memory(plan: Plan, recipe: Recipe) -> Iterator[PlanFinding]:
    if plan.fits != "does not fit":
        return
    is_here = recipe.cluster.instance is None and recipe.cluster.file is None
    fix = (
        "This is the memory of this machine: name the machines of the run with "
        "cluster.instance=p5.48xlarge or cluster.file."
        if is_here
        else "`shardyard plan` without --check shows layouts that fit."
    )
    yield PlanFinding(
        exit_code=CheckExit.DOES_NOT_FIT, text=f"the plan does not fit: {plan.fits_reason}. {fix}"
    )


def _price(plan: Plan, limit: float, words: str) -> Iterator[PlanFinding]:
    if plan.usd is None:
        yield PlanFinding(
            exit_code=CheckExit.UNKNOWN,
            text=f"{words}, but the price is not known: {_missing(plan)}",
        )
    elif plan.usd > limit:
        yield PlanFinding(
            exit_code=CheckExit.ABOVE_BUDGET,
            text=f"the price is predicted to be {format_usd(plan.usd)}, above {words}. "
            "Make the run shorter, compare machines with `shardyard plan --offers`, or raise the "
            "limit.",
        )


def _time(plan: Plan, deadline_s: float) -> Iterator[PlanFinding]:
    limit = format_seconds(deadline_s)
    if plan.wall_s is None:
        yield PlanFinding(
            exit_code=CheckExit.UNKNOWN,
            text=f"--deadline {limit}, but the time is not known: {_missing(plan)}",
        )
    elif plan.wall_s > deadline_s:
        yield PlanFinding(
            exit_code=CheckExit.ABOVE_DEADLINE,
            text=f"the run is predicted to take {format_seconds(plan.wall_s)}, above --deadline "
            f"{limit}. Use more or faster machines (`shardyard plan --deadline` without --check "
            "finds the cheapest), or make the run shorter.",
        )


def _missing(plan: Plan) -> str:
    """Say why a plan has no price or no time, and what to set."""
    if not plan.advances:
        return f"{plan.failures_reason}."
    if plan.steps is None:
        return "the run has no length. Set run.steps or run.tokens."
    if plan.speed.tokens_per_s is None:
        return f"{plan.speed.reason}. Name machines with cluster.instance."
    return (
        f"{plan.price.source}. Name the machines with cluster.instance, or what they cost with "
        "cluster.usd_per_node_hour."
    )
