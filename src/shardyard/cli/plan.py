"""`shardyard plan`: what a recipe will take, before anything is prepared, rented or started."""

import json
import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import click

from shardyard.cli.options import json_option, recipe_argument
from shardyard.config.limits import least_usd
from shardyard.config.secrets import shown_command
from shardyard.config.site import read_site
from shardyard.control.plan import Prediction, predict
from shardyard.control.plan_check import PlanFinding, check_plan, reject_several_recipes
from shardyard.errors import RequestError
from shardyard.hardware.accelerator import Accelerator
from shardyard.io.path_option import LocalPath
from shardyard.io.terminal import echo, echo_err
from shardyard.planner.dry_run import OnPhase
from shardyard.planner.kernels import missing_rate
from shardyard.report.document import Block, Callout, PageSection, Paragraph
from shardyard.report.plan.advice import advice_blocks
from shardyard.report.plan.offers import day_prices_section, dry_run_section, quotes_section
from shardyard.report.plan.page import (
    failures_section,
    headline_blocks,
    layouts_section,
    memory_section,
    quality_section,
    rejected_section,
    rest_section,
    task_block,
    time_section,
)
from shardyard.report.terminal import show
from shardyard.units import parse_seconds

_WIDE_COLUMNS = 112
"""Columns of a terminal that holds numbers and settings side by side."""


class _Duration(click.ParamType[float]):
    name = "TIME"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            return parse_seconds(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


class _AboveZero(click.ParamType[float]):
    """A finite number above 0, also as this verb prints it: ``$1,500``."""

    name = "NUMBER"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            number = float(value.removeprefix("$").replace(",", ""))
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            self.fail(f"{value!r} is not a number above 0.", param, ctx)
        return number


@click.command()
@recipe_argument
@json_option
@click.option(
    "--details", is_flag=True, help="Show every term with its reason, ranks, levers and techniques."
)
@click.option("--page", type=LocalPath(path_type=Path, dir_okay=False), help="HTML page to write.")
@click.option(
    "--layouts",
    "best",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Alternative parallel layouts to show. 0: none.",
)
@click.option(
    "--calibrate",
    multiple=True,
    type=LocalPath(path_type=Path),
    help="Measurements: a table, step profile, ceilings or a run folder; repeatable.",
)
@click.option(
    "--dry-run-model", is_flag=True, help="Also run a step of the real model without a device."
)
@click.option(
    "--offers", "wants_offers", is_flag=True, help="Compare all instance types by price and speed."
)
@click.option(
    "--deadline",
    type=_Duration(),
    help="Choose the cheapest offer that finishes within it, such as 24h.",
)
@click.option(
    "--budget", type=_AboveZero(), help="Choose the fastest offer within this many dollars."
)
@click.option(
    "--critical-batch",
    type=_AboveZero(),
    help="Critical batch size in samples, to include the cost of larger batches.",
)
@click.option(
    "--prices",
    type=click.Choice(["table", "aws"]),
    default="table",
    show_default=True,
    help="Prices: from the dated table, or today's from AWS with your credentials.",
)
@click.option(
    "--check",
    "is_check",
    is_flag=True,
    help="Exit with 10 if it does not fit, 11 above the budget, 12 above the deadline.",
)
def command(
    recipe: tuple[str, ...],
    *,
    as_json: bool,
    details: bool,
    page: Path | None,
    best: int,
    calibrate: tuple[Path, ...],
    dry_run_model: bool,
    wants_offers: bool,
    deadline: float | None,
    budget: float | None,
    critical_batch: float | None,
    prices: Literal["table", "aws"],
    is_check: bool,
) -> int:
    """Predict memory, speed, price and failures of RECIPE (files and section.key=value overrides).

    Plans for cluster.instance or cluster.file, else for this machine. Needs neither data nor
    accelerators. With --check, a budget (--budget or launch.max_usd) and --deadline are limits of
    the machines in RECIPE.
    """
    if is_check and wants_offers:
        raise click.UsageError("--check is of the machines in RECIPE: leave --offers out.")
    if is_check:
        reject_several_recipes(recipe)
    with _progress(is_enabled=dry_run_model and not as_json) as told:
        found = predict(
            recipe,
            layouts=0 if is_check else best,
            calibrate=calibrate,
            dry_run_model=dry_run_model,
            told=told,
            details=details,
            with_offers=wants_offers,
            deadline_s=None if is_check else deadline,
            budget_usd=None if is_check else budget,
            critical_batch=critical_batch,
            prices=prices,
        )
    if page is not None:
        _write_page(found.page(deadline_s=deadline, budget_usd=budget), page)
    if is_check:
        site = least_usd(read_site().limits)
        against = check_plan(
            found.plan, found.recipe, budget_usd=budget, deadline_s=deadline, site=site
        )
        return _report_check(found, against, as_json=as_json)
    if as_json:
        echo(json.dumps(found.to_json(), indent=1))
        return 0
    blocks = [*_prediction(found, critical_batch=critical_batch, details=details)]
    if found.cluster is None and found.plan.fits == "does not fit":
        length = () if found.plan.steps is not None else ("run.tokens=1B",)
        words = shown_command(["shardyard", "plan", *recipe, *length, "--offers"])
        blocks.append(Callout("This machine is too small. Compare machines to rent:", words))
    if found.day_prices:
        rates = [(p.kind, p.rate.usd_per_hour, p.rate.source) for p in found.day_prices]
        blocks.append(day_prices_section(rates))
    offers = quotes_section(
        found.offers, found.requested, has_chart=False, deadline_s=deadline, budget_usd=budget
    )
    blocks += [] if offers is None else [offers]
    if found.dry_run is not None:
        blocks.append(dry_run_section(found.plan, found.dry_run))
    if details:
        blocks += [memory_section(found.plan), time_section(found.plan)]
        blocks += [failures_section(found.plan), rest_section(found.plan, found.steps_reason)]
    if found.advice is not None:
        blocks += advice_blocks(found.advice, is_narrow=_is_narrow())
    show(blocks)
    return 0


def _report_check(found: Prediction, against: list[PlanFinding], *, as_json: bool) -> int:
    """Print the plan in one line and what speaks against it; return the exit code."""
    if as_json:
        rows = [finding.to_json() for finding in against]
        echo(json.dumps({**found.to_json(), "check": rows}, indent=1))
    else:
        echo(found.plan.line())
        echo(f"memory: {found.plan.fits}: {found.plan.fits_reason}")
        for finding in against:
            echo_err(f"error: {finding.text}")
    return int(against[0].exit_code) if against else 0


def _progress(*, is_enabled: bool) -> AbstractContextManager[OnPhase | None]:
    """Show the progress of a dry run."""
    if not is_enabled:
        return nullcontext()
    from shardyard.cli.progress import phases_progress  # rich takes as long as a plan

    return phases_progress()


def _prediction(
    found: Prediction, *, critical_batch: float | None, details: bool
) -> Iterator[Block]:
    """The prediction for the requested machines."""
    if found.assumed is None:
        yield from headline_blocks(found.plan)
    else:
        yield task_block(found.plan)
    if found.plan.speed.tokens_per_s is None and found.cluster is not None:
        yield from _suggest_format(found.cluster.accelerator)
    if critical_batch is not None:
        yield quality_section(found.plan, critical_batch)
    if found.search is not None and found.assumed is None:
        layouts = layouts_section(found.plan, found.search, found.requested, enough=found.enough())
        yield from [] if layouts is None else [layouts]
        if details:
            yield rejected_section(found.search)


def _suggest_format(accelerator: Accelerator) -> Iterator[Block]:
    """Suggest formats with a known speed, where that of the recipe's format is unknown."""
    known = [name for name in ("fp16", "fp32") if not missing_rate(accelerator, name)]
    if known:
        words = f"{accelerator.name} has a speed with precision.compute={', or '.join(known)}"
        yield PageSection("format", "", [Paragraph(words)])


def _is_narrow() -> bool:
    """Check whether settings next to the numbers of levers would be broken within words."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return is_terminal and shutil.get_terminal_size().columns < _WIDE_COLUMNS


def _write_page(text: str, path: Path) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"--page {path} cannot be written: {error.strerror}. Give a file in a folder that "
            "exists and is yours."
        ) from error
    echo_err(f"wrote {path}")
