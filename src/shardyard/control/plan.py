"""Plan of a recipe: memory, speed, price, failures; the best layouts; other machines."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from shardyard.cluster.live_prices import LivePrice, ask_prices, price_query, rate_for
from shardyard.config.layout import Layout
from shardyard.config.load import Source, is_override, read_settings
from shardyard.config.phases import of_phases
from shardyard.config.resolve import PartialResolution
from shardyard.config.schema.recipe import Parallel, Recipe
from shardyard.control.reliefs import reliefs_of, variants_of
from shardyard.control.request import Request, sources_of
from shardyard.control.what_if import Replanner, check_plannable, plan_of
from shardyard.errors import RequestError
from shardyard.families.shape import ModelShape
from shardyard.hardware.catalogue import Rate
from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.machine import Machine, local_machine
from shardyard.log import info, warn
from shardyard.planner.calibration import Calibration, combined, read_calibration
from shardyard.planner.dispatch import Model, Work, memory_of, work_of, work_with
from shardyard.planner.dry_run import DryRun, OnPhase, dry_run
from shardyard.planner.effective_time import RecoverySettings
from shardyard.planner.format import candidate_name, fitting_words, headline, settings_of
from shardyard.planner.instance_search import ClusterQuote, ClusterQuotes, quote_clusters
from shardyard.planner.kernels import missing_rate
from shardyard.planner.layouts import (
    Candidate,
    Reliefs,
    Search,
    nodes_that_fit,
    search,
    speed_reason,
)
from shardyard.planner.plan import (
    Plan,
    layout_name,
    planned_cluster,
    with_links,
)
from shardyard.planner.plan_diff import Advice
from shardyard.planner.ranks import RankPlacement
from shardyard.planner.reference_pass import reference_of
from shardyard.planner.throughput import Price
from shardyard.planner.workload import Workload
from shardyard.report.notebook import details_html, table_html
from shardyard.units import format_bytes, format_count

ANY_INSTANCE = "p5.48xlarge"
"""Settles what `auto` depends on until --offers has looked at all instance types."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """All that `shardyard plan` finds out."""

    plan: Plan
    """Memory, speed, price and failures, each number with its reason."""
    recipe: Recipe
    """The recipe that is planned, each `auto` settled as far as a plan needs it."""
    requested: Parallel
    """Axes as the recipe gives them; many may be open."""
    steps_reason: str
    workload: Work
    search: Search | None
    """The best layouts. None: no accelerator, none whose rates are known, or none was wanted."""
    offers: ClusterQuotes | None
    """Other machines, where they were asked for."""
    dry_run: DryRun | None
    """Allocations of the real model on no device, where they were asked for."""
    cluster: ClusterHardware | None
    assumed: str | None
    """The instance of the plan where the recipe names no machines: of the offer that was picked,
    else of the one that comes nearest to what was asked."""
    samples_factor: float | None
    """Factor of samples that the batch needs compared with a small one, by a critical batch."""
    day_prices: tuple[LivePrice, ...] = ()
    """Price of a node today for each way to rent it; empty: AWS was not asked."""
    reliefs: Reliefs = tuple
    """Gives settings that a search may change in addition to layouts, if no layout fits
    otherwise.
    """
    advice: Advice | None = None
    """Effect of each lever and technique, and the rank placement, where details are wanted."""

    def enough(self) -> tuple[int, Candidate] | None:
        """Return a number of nodes on which a layout fits, and that layout, if none fits here."""
        if self.cluster is None or self.search is None or self.search.fits:
            return None
        return nodes_that_fit(self.workload, self.cluster, reliefs=self.reliefs)

    def __repr__(self) -> str:
        return f"<Prediction: {self.plan.line().removeprefix('plan: ')}>"

    def _repr_html_(self) -> str:
        plan = self.plan
        lead = plan.line().removeprefix("plan: ")
        html = details_html(f"Plan of {plan.model}", headline(plan), lead=lead)
        if self.search is None or not self.search.best:
            return html
        heads = ("layout", f"{plan.units}/s", "memory", "reason")
        rows = [
            (candidate_name(each), format_count(each.tokens_per_s),
             format_bytes(each.device_bytes), speed_reason(each))
            for each in self.search.best
        ]  # fmt: skip
        return html + table_html(heads, rows, note=fitting_words(self.search))

    def to_json(self) -> dict[str, Any]:
        """Return the content that `shardyard plan --json` prints."""
        content: dict[str, Any] = {**self.plan.to_json(), "steps_reason": self.steps_reason}
        if self.samples_factor is not None:
            content["samples_factor"] = self.samples_factor
        if self.search is not None:
            enough = self.enough()
            content["search"] = {
                "enough_nodes": enough[0] if enough else None,
                "enough": self._candidate(enough[1]) if enough else None,
                "legal": self.search.legal,
                "fitting": self.search.fitting,
                "more_legal": self.search.more_legal,
                "more_fitting": self.search.more_fitting,
                "best": [self._candidate(candidate) for candidate in self.search.best],
                "rejected": [asdict(row) for row in self.search.rejected],
                "nearest": self.search.nearest.to_json() if self.search.nearest else None,
            }
        if self.offers is not None:
            content["offers"] = self.offers.to_json()
            content["assumed_instance"] = self.assumed
        if self.dry_run is not None:
            content["dry_run"] = asdict(self.dry_run)
        if self.day_prices:
            content["day_prices"] = [each.to_json() for each in self.day_prices]
        if self.advice is not None:
            content["advice"] = self.advice.to_json()
        return content

    def _candidate(self, candidate: Candidate) -> dict[str, Any]:
        """With the overrides that make the recipe use it."""
        return {**candidate.to_json(), "settings": settings_of(candidate, self.requested)}

    def _work(self, candidate: Candidate) -> Work:
        """The step of a candidate, with the further settings that it needs."""
        work = self.workload
        if candidate.more:
            works = {relief.settings: relief.work for relief in self.reliefs()}
            work = works.get(candidate.more, work)
        return work_with(
            work, candidate.layout, micro_batch=candidate.micro_batch,
            recompute=candidate.recompute,
        )  # fmt: skip

    def page(self, *, deadline_s: float | None = None, budget_usd: float | None = None) -> str:
        """One HTML page, with pictures; the offer that was asked for has its limit with it."""
        # plots take 0.2 s to import
        from shardyard.report.html import charts_unavailable_reason
        from shardyard.report.plan.page import plan_page

        if why_none := charts_unavailable_reason():
            warn(why_none)
        best = () if self.search is None else self.search.best
        bars = [(layout_name(each.layout), memory_of(self._work(each))) for each in best]
        return plan_page(
            self.plan, search=self.search, quotes=self.offers, bars=bars,
            title=f"Plan of {self.plan.model}", no_charts_reason=why_none,
            advice=self.advice, requested=self.requested, steps_reason=self.steps_reason,
            deadline_s=deadline_s, budget_usd=budget_usd,
        )  # fmt: skip


def log_phase(phase: str, done: int, of: int) -> None:
    """Say how far a dry run is."""
    info(f"dry run{f' {done + 1}/{of}' if of else ''}: {phase}")


def predict(
    recipe: Source | Sequence[Source],
    *overrides: Source,
    layouts: int = 3,
    calibrate: Sequence[Path] = (),
    dry_run_model: bool = False,
    told: OnPhase | None = log_phase,
    details: bool = False,
    with_offers: bool = False,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
    critical_batch: float | None = None,
    prices: Literal["table", "aws"] = "table",
) -> Prediction:
    """Predict memory, speed, price and failures of a recipe, before anything is rented.

    The machines are those of ``cluster.instance`` or ``cluster.file``, else this one. No data
    is needed.

    Args:
        recipe: The path of a YAML file, a dict of sections, or a ``Recipe``; or several of them.
        overrides: ``section.key=value``, or more of the recipe; later ones win.
        layouts: How many of the best layouts are looked for; 0: none.
        calibrate: Measured tables of collectives, step profiles, folders of runs.
        dry_run_model: Also build and step the real model on no device, in a process of its own.
        told: Called with each phase of that; None: not called.
        details: Also plan each lever and technique (``Prediction.advice``); takes about a second.
        with_offers: Also compare all instance types; as a deadline or a budget does.
        deadline_s: The cheapest offer within it is looked for.
        budget_usd: The fastest offer within it is looked for.
        critical_batch: Samples a step at which a loss takes twice the fewest samples.
        prices: The dated table, or AWS's prices of today, asked with the credentials of here.

    Raises:
        RequestError: The recipe is wrong or cannot be planned; every problem is named.
        AccessError: These credentials may not read AWS's prices.
    """
    is_open = with_offers or deadline_s is not None or budget_usd is not None
    sources = sources_of(recipe, overrides)
    base = _plan_of_sources(sources, is_open=is_open, calibrate=calibrate, prices=prices)
    found = None if not is_open else _search_instances(base, deadline_s, budget_usd)
    if found is not None and base.assumed is not None:
        return replace(
            predict(
                sources, *_settings_of_quote(found.recommended, base.request.recipe.parallel),
                layouts=layouts, calibrate=calibrate, dry_run_model=dry_run_model, told=told,
                details=details, critical_batch=critical_batch,
            ),
            offers=found,
            assumed=found.recommended.instance,
        )  # fmt: skip
    plan = base.plan
    return Prediction(
        plan=plan,
        recipe=base.preview.recipe,
        requested=base.request.recipe.parallel,
        steps_reason=base.preview.steps_reason,
        workload=base.workload,
        search=_search(base, best=layouts),
        offers=found,
        dry_run=_dry_run(base.recipe, base.model, plan.layout, told) if dry_run_model else None,
        cluster=base.cluster,
        assumed=base.assumed,
        samples_factor=None if critical_batch is None else plan.samples_factor(critical_batch),
        day_prices=base.day_prices,
        reliefs=base.reliefs,
        advice=_advice(base) if details and base.assumed is None else None,
    )


@dataclass(frozen=True, kw_only=True)
class _BasePlan:
    """The plan of a recipe on its machines, and what searches and advice may change of it."""

    request: Request
    preview: PartialResolution
    machine: Machine | None
    """This machine, if it is planned."""
    assumed: str | None
    """Instance that was assumed, as all are compared and the recipe names none."""
    plan: Plan
    phase: int
    """Number of the phase that needs most memory: searches are for that one."""
    recipe: Recipe
    """Settled recipe of that phase."""
    workload: Work
    reliefs: Reliefs
    variants: Reliefs
    """Like ``reliefs`` found only where a search asks: each checks the recipe again."""
    cluster: ClusterHardware | None
    calibration: Calibration | None
    day_prices: tuple[LivePrice, ...]
    rate: Rate | None
    """Price of a node today; None: the table's."""

    @property
    def model(self) -> Model:
        return self.request.planned_model


def _plan_of_sources(
    sources: tuple[Source, ...],
    *,
    is_open: bool,
    calibrate: Sequence[Path],
    prices: Literal["table", "aws"],
) -> _BasePlan:
    """Plan a recipe as it is given.

    Args:
        is_open: Whether all instance types are compared.
    """
    request, preview, machine, assumed = _resolved(sources, is_open=is_open)
    settled, model = preview.recipe, request.planned_model
    day_prices = _day_prices(settled, is_open=is_open) if prices == "aws" else ()
    check_plannable(request, preview)
    devices = settled.cluster.devices
    assert isinstance(devices, int)  # an instance and a machine both say how many
    cluster = planned_cluster(settled, machine, devices_per_node=devices)
    calibration = _calibration(calibrate, cluster)
    rate = rate_for(day_prices, _kind(settled)) if day_prices else None
    plan = _priced(plan_of(request, preview, machine, calibration), rate)
    needs_most = plan.phases.index(max(plan.phases, key=_memory)) if plan.phases else 0
    part = preview.of_phases[needs_most]
    by_rule = "memory.loss_chunk" in part.reasons
    asked = of_phases(request.recipe)[needs_most]
    reliefs, variants = (
        cache(
            partial(find, asked, part.recipe, model, plan.layout, cluster, chunks_by_rule=by_rule)
        )
        for find in (reliefs_of, variants_of)
    )
    return _BasePlan(
        request=request,
        preview=preview,
        machine=machine,
        assumed=assumed,
        plan=plan,
        phase=needs_most,
        recipe=part.recipe,
        workload=_work(part.recipe, model, plan.layout, cluster, chunks_by_rule=by_rule),
        reliefs=reliefs,
        variants=variants,
        cluster=cluster,
        calibration=calibration,
        day_prices=day_prices,
        rate=rate,
    )


def _work(
    recipe: Recipe,
    model: Model,
    layout: Layout,
    cluster: ClusterHardware | None,
    *,
    chunks_by_rule: bool,
) -> Work:
    work = work_of(recipe, model, layout, cluster)
    return replace(work, chunks_by_rule=chunks_by_rule) if isinstance(work, Workload) else work


def _advice(base: _BasePlan) -> Advice:
    # only where it is wanted: with what reads runs of before, a plan would start later
    from shardyard.control.past_runs import PastRuns
    from shardyard.control.suggestions import advise

    settled, plan = base.recipe, base.plan
    devices = settled.cluster.devices
    assert isinstance(devices, int)  # it has been planned
    return advise(
        Replanner(
            base.request, settled, phase=base.phase, machine=base.machine,
            calibration=base.calibration, priced=lambda replanned: _priced(replanned, base.rate),
        ),
        plan.phases[base.phase] if plan.phases else plan,
        cluster=base.cluster,
        past=PastRuns(Path(settled.run.dir)),
        ranks=RankPlacement(layout=plan.layout, devices_per_node=devices),
    )  # fmt: skip


def _kind(recipe: Recipe) -> str:
    """Return the purchase option of a recipe's nodes."""
    return (recipe.cluster.capacity or "on-demand").partition(":")[0]


def _day_prices(recipe: Recipe, *, is_open: bool) -> tuple[LivePrice, ...]:
    """Return AWS's prices of today for the recipe's machines.

    Raises:
        RequestError: They are none of AWS's, or not those that are planned.
        AccessError: These credentials may not read the prices.
    """
    cluster = recipe.cluster
    if is_open or cluster.instance is None or cluster.usd_per_node_hour is not None:
        why = (
            "--offers, --deadline and --budget compare all types by the dated table"
            if is_open
            else "cluster.instance names none"
            if cluster.instance is None
            else f"cluster.usd_per_node_hour={cluster.usd_per_node_hour:g} says what it costs"
        )
        raise RequestError(
            f"--prices aws asks what the EC2 type of the recipe costs today, and {why}. Leave one "
            "of the two out; an instance is named with cluster.instance."
        )
    region = recipe.launch.aws_batch.region
    return tuple(ask_prices(price_query(cluster.instance, region=region, nodes=cluster.nodes)))


def _priced(plan: Plan, rate: Rate | None) -> Plan:
    """The same plan, its nodes at another price; None: at the table's."""
    if rate is None:
        return plan
    usd = rate.usd_per_hour
    price = Price(usd_per_hour=None if usd is None else usd * plan.nodes, source=rate.source)
    phases = tuple(replace(phase, price=price) for phase in plan.phases)
    return replace(plan, price=price, phases=phases)


def _dry_run(recipe: Recipe, model: Model, layout: Layout, on_phase: OnPhase | None) -> DryRun:
    if not isinstance(model, ModelShape):
        raise RequestError(
            "--dry-run-model steps a transformer on no device, and this is a network for images, "
            "which it does not build yet. Leave it out; the plan's memory is counted operator by "
            "operator."
        )
    return dry_run(recipe, model, layout, on_phase=on_phase)


def _memory(plan: Plan) -> int:
    return plan.device_bytes


def _resolved(
    arguments: tuple[Source, ...], *, is_open: bool
) -> tuple[Request, PartialResolution, Machine | None, str | None]:
    """The request, what of it can be settled without data, this machine if it is planned.

    Returns:
        Also the instance that was assumed, where all are compared and the recipe names none.
    """
    assumed = ANY_INSTANCE if is_open and not _names_machines(arguments) else None
    if assumed:
        arguments = (*arguments, f"cluster.instance={assumed}")
    request = Request.read(arguments, to_train=False, needs_weights=False, only_looks=True)
    cluster = request.recipe.cluster
    if is_open:
        _reject_reserved_capacity(cluster.capacity)
    named = (
        None if assumed else "instance" if cluster.instance else "file" if cluster.file else None
    )
    if cluster.device == "cpu" and (named or assumed):
        wanted = (
            f"cluster.{named} names accelerators" if named else "--offers compares accelerators"
        )
        raise RequestError(
            f"cluster.device=cpu, but {wanted}, and those are what would be planned. Use "
            "cluster.device=auto for them"
            + (f", or cluster.{named}=null for the processes of this machine." if named else ".")
        )
    machine = None if named or assumed else local_machine(cluster.device)
    return request, request.preview(machine), machine, assumed


def _names_machines(arguments: tuple[Source, ...]) -> bool:
    """Whether a recipe says on what it is trained, right or wrong."""
    words = [isinstance(each, str) and is_override(each) for each in arguments]
    sources = [each for each, is_one in zip(arguments, words, strict=True) if not is_one]
    overrides = [str(each) for each, is_one in zip(arguments, words, strict=True) if is_one]
    cluster = read_settings(sources, overrides, with_site=True)[0].cluster
    return cluster.instance is not None or cluster.file is not None


def _reject_reserved_capacity(capacity: str | None) -> None:
    """Reject reserved capacity: it is of one instance type, and offers compare all of them.

    Raises:
        RequestError: The recipe names a reservation or a block.
    """
    kind, _, name = (capacity or "").partition(":")
    if name:
        raise RequestError(
            f"cluster.capacity={capacity} is a {kind} of one instance type, and --offers, "
            "--deadline and --budget compare all types. Leave it out: cluster.capacity=null, or "
            "spot for spot instances."
        )


def _calibration(paths: Sequence[Path], cluster: ClusterHardware | None) -> Calibration | None:
    if not paths:
        return None
    if cluster is None:
        raise RequestError(
            f"--calibrate {paths[0]}: what was measured replaces what the catalogue says of an "
            "accelerator, and none is planned here. Name one with cluster.instance or cluster.file."
        )
    return combined([read_calibration(path, cluster=cluster) for path in paths])


def _search(base: _BasePlan, *, best: int) -> Search | None:
    """Look for the best layouts; None where no speed is known, as the plan's own speed says."""
    cluster = base.cluster
    if cluster is None or not best:
        return None
    if missing_rate(cluster.accelerator, base.workload.formats.compute):
        return None
    return search(
        base.workload, with_links(cluster, base.calibration), best=best,
        calibration=base.calibration, reliefs=base.reliefs,
    )  # fmt: skip


def _settings_of_quote(quote: ClusterQuote, axes: Parallel) -> tuple[str, ...]:
    """The overrides that make a recipe be trained so."""
    return (
        f"cluster.instance={quote.instance}",
        f"cluster.nodes={quote.nodes}",
        *settings_of(quote.candidate, axes),
        f"checkpoint.every={quote.failures.interval_steps}",
    )


def _search_instances(
    base: _BasePlan, deadline_s: float | None, budget_usd: float | None
) -> ClusterQuotes:
    plan, recipe = base.plan, base.recipe
    if plan.phases:
        raise RequestError(
            "--offers looks for machines for one kind of step, and this run has "
            f"{len(plan.phases)} phases. Plan each by itself: give `phases=[]` and its settings as "
            "overrides."
        )
    if plan.steps is None:
        raise RequestError(
            f"--offers needs the length of the run, which is {base.preview.steps_reason}. Give "
            "run.steps, run.samples or run.tokens."
        )
    return quote_clusters(
        base.workload,
        steps=plan.steps,
        checkpoint_bytes=plan.checkpoint_bytes,
        # on each machine saves are as far apart as is best there
        recovery=replace(RecoverySettings.of(recipe), checkpoint_every=None),
        deadline_s=deadline_s,
        budget_usd=budget_usd,
        capacity=recipe.cluster.capacity or "on-demand",
        variants=base.variants(),
        reliefs=base.reliefs,
        reference=reference_of(recipe, base.workload, steps=plan.steps, data=None),
    )
