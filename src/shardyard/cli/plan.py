"""`shardyard plan`: what a recipe will take, before anything is prepared, rented or started."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from shardyard.cli.options import json_option
from shardyard.cli.plan_tables import (
    show_details,
    show_dry_run,
    show_headline,
    show_layouts,
    show_offers,
    show_quality,
    show_rejected,
    show_task,
)
from shardyard.config.resolve import Preview
from shardyard.config.schema import Parallel
from shardyard.control.request import Request, refuse_misfits
from shardyard.errors import RequestError
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.cluster import Cluster
from shardyard.hardware.machine import Machine
from shardyard.hardware.probe import probe
from shardyard.local_path import LocalPath
from shardyard.plan.calibration import Calibration, combined, read_calibration
from shardyard.plan.dry_run import DryRun, dry_run
from shardyard.plan.kernels import missing
from shardyard.plan.layouts import Candidate, Search, nodes_that_fit, search
from shardyard.plan.memory import Memory, memory
from shardyard.plan.offers import Offers, offers
from shardyard.plan.plan import (
    Plan,
    layout_name,
    plan_recipe,
    planned_cluster,
    with_links,
)
from shardyard.plan.workload import Workload, with_layout, workload_of
from shardyard.talk import warn
from shardyard.terminal import say, tell
from shardyard.units import parse_seconds

ANY_INSTANCE = "p5.48xlarge"
"""Settles what `auto` depends on where --offers looks at all instance types anyway."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All that one call of the verb finds out."""

    plan: Plan
    asked: Parallel
    """What the recipe says of the axes; much of it may be open."""
    why_steps: str
    workload: Workload
    found: Search | None
    """None: no accelerator, or none whose rates are known."""
    offers: Offers | None
    dry: DryRun | None
    cluster: Cluster | None
    assumed: str | None
    """The instance that stands for all in --offers, where the recipe names no machines."""


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
            self.fail(f"{value!r} is no number above 0.", param, ctx)
        return number


@click.command()
@click.argument("recipe", nargs=-1, required=True)
@json_option
@click.option("--details", is_flag=True, help="Show every term with its reason.")
@click.option("--page", type=LocalPath(path_type=Path, dir_okay=False), help="Write a page here.")
@click.option(
    "--layouts",
    "best",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Layouts to show; 0: none.",
)
@click.option(
    "--calibrate",
    multiple=True,
    type=LocalPath(path_type=Path),
    help="A measured table of collectives, a step profile or a run's folder; several may be given.",
)
@click.option("--dry-run-model", is_flag=True, help="Build and step the real model on no device.")
@click.option("--offers", "wants_offers", is_flag=True, help="Compare all instance types.")
@click.option("--deadline", type=_Duration(), help="The cheapest offer within it, such as 24h.")
@click.option("--budget", type=_AboveZero(), help="The fastest offer within it, in dollars.")
@click.option(
    "--critical-batch",
    type=_AboveZero(),
    help="Samples a step at which a loss takes twice the fewest samples: what larger steps cost.",
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
) -> None:
    """Predict memory, speed, price and failures of RECIPE (files and section.key=value overrides).

    For the machines of cluster.instance or cluster.file, else for this machine. Needs no data.
    """
    wants_offers = wants_offers or deadline is not None or budget is not None
    request, preview, machine, assumed = _resolved(recipe, is_open=wants_offers)
    answer = _answer(
        request, preview, machine, best=best, calibrate=calibrate, dry_run_model=dry_run_model
    )
    if wants_offers:
        found = _offers(answer, deadline=deadline, budget=budget)
        answer = replace(answer, offers=found, assumed=assumed)
    if page is not None:
        _write_page(answer, page)
    if as_json:
        tell(json.dumps(_as_json(answer, critical_batch), indent=1))
        return
    _show(answer, critical_batch=critical_batch, details=details)
    if answer.offers is not None:
        show_offers(answer.offers, answer.asked, deadline_s=deadline, budget_usd=budget)
    if answer.dry is not None:
        show_dry_run(answer.plan, answer.dry)
    if details:
        show_details(answer.plan, answer.why_steps)


def _show(answer: Answer, *, critical_batch: float | None, details: bool) -> None:
    """What is said of the machines that were asked for."""
    if answer.assumed is None:
        show_headline(answer.plan)
    else:
        show_task(answer.plan)
    if answer.plan.speed.tokens_per_s is None and answer.cluster is not None:
        _suggest_format(answer.cluster.accelerator)
    if critical_batch is not None:
        show_quality(answer.plan, critical_batch)
    if answer.found is not None and answer.assumed is None:
        show_layouts(answer.plan, answer.found, answer.asked, enough=_enough(answer))
        if details:
            show_rejected(answer.found)


def _suggest_format(accelerator: Accelerator) -> None:
    """Where no speed can be said: the formats in which it could be."""
    known = [name for name in ("fp16", "fp32") if not missing(accelerator, name)]
    if known:
        tell(
            f"\n{accelerator.name} has a speed with precision.compute={known[0]}"
            + "".join(f", or {name}" for name in known[1:])
        )


def _resolved(
    arguments: tuple[str, ...], *, is_open: bool
) -> tuple[Request, Preview, Machine | None, str | None]:
    """The request, what of it can be settled without data, this machine if it is planned.

    Returns:
        Also the instance that was assumed, where all are compared and the recipe names none.
    """
    request = Request.read(arguments, to_train=False, needs_weights=False, only_looks=True)
    cluster = request.recipe.cluster
    named = "instance" if cluster.instance else "file" if cluster.file else None
    assumed = ANY_INSTANCE if is_open and not named else None
    if assumed:
        arguments = (*arguments, f"cluster.instance={assumed}")
        request = Request.read(arguments, to_train=False, needs_weights=False, only_looks=True)
    if cluster.device == "cpu" and (named or assumed):
        wanted = (
            f"cluster.{named} names accelerators" if named else "--offers compares accelerators"
        )
        raise RequestError(
            f"cluster.device=cpu, but {wanted}, and those are what would be planned. Use "
            "cluster.device=auto for them"
            + (f", or cluster.{named}=null for the processes of this machine." if named else ".")
        )
    machine = None if named or assumed else probe()
    return request, request.preview(machine), machine, assumed


def _answer(
    request: Request,
    preview: Preview,
    machine: Machine | None,
    *,
    best: int,
    calibrate: Sequence[Path],
    dry_run_model: bool,
) -> Answer:
    recipe, shape = preview.recipe, request.known_shape
    devices = recipe.cluster.devices
    assert isinstance(devices, int)  # an instance and a machine both say how many
    refuse_misfits(recipe, shape)
    cluster = planned_cluster(recipe, machine, devices_per_node=devices)
    calibration = _calibration(calibrate, cluster)
    plan = plan_recipe(
        recipe,
        shape=shape,
        steps=preview.steps,
        world_size=recipe.cluster.nodes * devices,
        devices_per_node=devices,
        machine=machine,
        calibration=calibration,
    )
    workload = workload_of(recipe, shape, plan.layout)
    return Answer(
        plan=plan,
        asked=request.recipe.parallel,
        why_steps=preview.why_steps,
        workload=workload,
        found=_search(workload, cluster, calibration, best=best),
        offers=None,
        dry=dry_run(recipe, shape, plan.layout) if dry_run_model else None,
        cluster=cluster,
        assumed=None,
    )


def _calibration(paths: Sequence[Path], cluster: Cluster | None) -> Calibration | None:
    if not paths:
        return None
    if cluster is None:
        raise RequestError(
            f"--calibrate {paths[0]}: what was measured replaces what the catalogue says of an "
            "accelerator, and none is planned here. Name one with cluster.instance or cluster.file."
        )
    return combined([read_calibration(path, cluster=cluster) for path in paths])


def _search(
    workload: Workload, cluster: Cluster | None, calibration: Calibration | None, *, best: int
) -> Search | None:
    if cluster is None or not best:
        return None
    if missing(cluster.accelerator, workload.formats.compute):
        return None  # the plan's own speed says so
    return search(workload, with_links(cluster, calibration), best=best, calibration=calibration)


def _offers(answer: Answer, *, deadline: float | None, budget: float | None) -> Offers:
    if answer.plan.steps is None:
        raise RequestError(
            f"--offers needs the length of the run, which is {answer.why_steps}. Give run.steps, "
            "run.samples or run.tokens."
        )
    return offers(
        answer.workload,
        steps=answer.plan.steps,
        checkpoint_bytes=answer.plan.checkpoint_bytes,
        deadline_s=deadline,
        budget_usd=budget,
    )


def _enough(answer: Answer) -> tuple[int, Candidate] | None:
    """Where nothing fits: nodes on which something does, and what."""
    if answer.cluster is None or answer.found is None or answer.found.best:
        return None
    return nodes_that_fit(answer.workload, answer.cluster)


def _write_page(answer: Answer, path: Path) -> None:
    from shardyard.report.pictures import no_pictures
    from shardyard.report.plan_page import plan_page

    bars: list[tuple[str, Memory]] = []
    if answer.found is not None:
        bars = [
            (layout_name(best.layout), memory(with_layout(answer.workload, best.layout,
             micro_batch=best.micro_batch, recompute=best.recompute)))
            for best in answer.found.best
        ]  # fmt: skip
    why_none = no_pictures()
    text = plan_page(
        answer.plan, search=answer.found, offers=answer.offers, bars=bars,
        title=f"Plan of {answer.plan.model}", no_pictures=why_none,
    )  # fmt: skip
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"--page {path} cannot be written: {error.strerror}. Give a file in a folder that "
            "exists and is yours."
        ) from error
    if why_none:
        warn(why_none)
    say(f"wrote {path}")


def _as_json(answer: Answer, critical_batch: float | None) -> dict[str, Any]:
    content: dict[str, Any] = {**answer.plan.to_json(), "steps_reason": answer.why_steps}
    if critical_batch is not None:
        content["samples_factor"] = answer.plan.samples_factor(critical_batch)
    if answer.found is not None:
        enough = _enough(answer)
        content["search"] = {
            "enough_nodes": enough[0] if enough else None,
            "enough": enough[1].to_json() if enough else None,
            "legal": answer.found.legal,
            "fitting": answer.found.fitting,
            "best": [candidate.to_json() for candidate in answer.found.best],
            "rejected": [asdict(row) for row in answer.found.rejected],
            "nearest": answer.found.nearest.to_json() if answer.found.nearest else None,
        }
    if answer.offers is not None:
        content["offers"] = answer.offers.to_json()
        content["assumed_instance"] = answer.assumed
    if answer.dry is not None:
        content["dry_run"] = asdict(answer.dry)
    return content
