"""Make a submission of a recipe: the request, plan and price, rejections, the run folder.

`launch` and `resume --on` do the same here; what a scheduler needs is the launcher's own
affair.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from shardyard.config.cluster_choice import devices_of_node
from shardyard.config.limits import Limit, beyond_launchers, beyond_limits, least_usd
from shardyard.config.load import Source, dump_recipe, is_override, load_recipe
from shardyard.config.machines import block_remaining_s
from shardyard.config.model.source import config_content
from shardyard.config.resolve import PartialResolution, check_resume
from shardyard.config.resolved import Resolved, RollbackTarget
from shardyard.config.rules.custom_module import NO_SHAPE
from shardyard.config.rules.tags import tag_words
from shardyard.config.schema.launch import Kubernetes
from shardyard.config.schema.recipe import Recipe
from shardyard.config.secrets import shown_command
from shardyard.config.site import read_site
from shardyard.config.versions import check_packages, engines_for
from shardyard.control.code_bundle import describe_code, packed_code, send_code
from shardyard.control.described_cluster import against_description, against_side_jobs
from shardyard.control.request import Request, check_compatibility
from shardyard.errors import Problem, RecipeError, RequestError, ShardyardError, StorageError
from shardyard.hardware.machine import Machine, local_machine
from shardyard.image.dockerfile import without_code
from shardyard.io.files import create_text, drop_lock, take_lock, write_text
from shardyard.launchers.base import (
    KnowsMachines,
    Launcher,
    LaunchRequest,
    Rendered,
    SharesPython,
    launcher_class,
)
from shardyard.launchers.code_files import unsent_code
from shardyard.launchers.ledger import (
    BENCH_DETAIL,
    OWNER_DETAIL,
    SCRIPT_DETAIL,
    TAGS_DETAIL,
    Ledger,
    Submission,
)
from shardyard.launchers.ledger_owner import current_user
from shardyard.launchers.log_markers import NONCE_DETAIL, new_nonce
from shardyard.launchers.registry import ALIASES, LAUNCHERS
from shardyard.launchers.secrets import unsupported
from shardyard.log import info
from shardyard.planner.format import spare_words
from shardyard.planner.phases import plan_phases
from shardyard.planner.plan import Plan, planned_cluster
from shardyard.plugins import plug_in_named
from shardyard.rundir.layout import RunDir
from shardyard.rundir.network import NetworkBench
from shardyard.rundir.script import ScriptCommand
from shardyard.units import format_seconds, format_usd

Launchers = Mapping[str, Launcher]
"""Name -> launcher, in place of all that there are."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Submission as it would be made, and its prediction."""

    launcher: Launcher
    run_dir: RunDir
    """Folder of the run as this machine sees it."""
    request: LaunchRequest
    rendered: Rendered
    plan: Plan | None
    no_plan_reason: str
    data: str = ""
    """Description of the data; may be empty."""

    @property
    def most_usd(self) -> float | None:
        """Predicted price of the run; without a length, that of its time limit; None: not known."""
        rate = None if self.plan is None else self.plan.price.usd_per_hour
        if self.launcher.capabilities.is_this_machine and rate is None:
            return 0.0
        is_script = self.request.script is not None  # whose length no plan knows
        if self.plan is None or (self.plan.usd is not None and not is_script):
            return None if self.plan is None else self.plan.usd
        limit_s = self.request.time_limit_s
        if limit_s is None or rate is None:
            return None
        return limit_s / 3600 * rate

    @property
    def loses_price(self) -> bool:
        """Whether the price that is known here is not known where the run could be held to it."""
        cluster = self.request.recipe.cluster
        return bool(self.most_usd) and cluster.instance is None and cluster.file is None


def launcher_named(name: str, launchers: Launchers | None = None) -> Launcher:
    """Import and return the launcher of a name or of one of its ``ALIASES``.

    Raises:
        RequestError: There is none, or a package's cannot be used.
    """
    name = ALIASES.get(name, name)
    if launchers is None:
        return launcher_class(name)()
    if name not in launchers:
        raise RequestError(f"unknown launcher {name!r}. Available: {', '.join(launchers)}.")
    return launchers[name]


def with_machines(words: Sequence[Source], launcher: Launcher) -> Sequence[Source]:
    """Return the words of a recipe, and what a launcher knows of its machines at their end."""
    if not isinstance(launcher, KnowsMachines):
        return words
    overrides = [each for each in words if isinstance(each, str) and is_override(each)]
    sources = [each for each in words if not (isinstance(each, str) and is_override(each))]
    try:
        recipe = load_recipe(sources, overrides, with_site=True)
    except ShardyardError:
        return words  # who reads the request reports it, with all other problems
    return [*words, *launcher.machine_settings(recipe)]


def propose(
    request: Request,
    launcher: Launcher,
    *,
    run_dir: RunDir,
    previous: Resolved | None = None,
    is_resume: bool = False,
    is_dry_run: bool = False,
    bench: Callable[[Recipe, int], NetworkBench] | None = None,
    back_to: RollbackTarget | None = None,
    script: Sequence[str] | None = None,
) -> Proposal:
    """Check a recipe against a launcher, plan it and render it, without creating anything.

    Args:
        previous: The last attempt, on a resume, where its folder is in reach.
        bench: What the nodes measure in place of a training, by the recipe that they read and the
            processes of each.
        back_to: Step of an earlier checkpoint from which node 0 continues.
        script: Script and its arguments that the nodes run in place of a training.

    Raises:
        RequestError: It cannot be launched there as it is.
    """
    if request.shape is None and previous is not None:
        request = replace(request, shape=previous.shape)
    recipe = request.recipe
    limits = read_site().limits
    _check_limits(recipe, launcher, limits)
    check_launchable(recipe, launcher)
    if isinstance(launcher, SharesPython) and launcher.shares_python(recipe):
        check_packages(engines_for(recipe))  # what is missing here is missing there
    machine = _machine(recipe, launcher, is_dry_run=is_dry_run)
    preview = _of_launcher(request.preview(machine, previous), launcher)
    if previous is not None:
        check_resume(previous, replace(previous, recipe=preview.recipe), run=run_dir.run_id)
    devices = _devices(preview, launcher)
    prediction, why_no_plan = predict(request, preview, machine, devices=devices)
    asked = for_nodes(recipe_on_nodes(request, launcher), preview, run_dir, devices=devices)
    recipe_text = dump_recipe(asked)
    content = LaunchRequest(
        run_id=run_dir.run_id,
        recipe=asked,
        recipe_text=recipe_text,
        code=packed_code(asked, recipe_text, run_dir, is_resume=is_resume),
        nodes=recipe.cluster.nodes,
        devices_per_node=devices,
        cluster=planned_cluster(preview.recipe, machine, devices_per_node=devices),
        run_dir=f"{asked.run.dir.rstrip('/')}/{run_dir.run_id}",
        is_resume=is_resume,
        nonce=new_nonce(),
        submission=len(Ledger(run_dir.ledger).jobs()) + 1,
        block_left_s=block_remaining_s(
            recipe.cluster, least_s=recipe.elastic.drain_timeout_s + 60, now=time.time()
        ),
        launched_by=None
        if launcher.name in LAUNCHERS
        else plug_in_named("launchers", launcher.name),
        bench=None if bench is None else bench(preview.recipe, devices),
        back_to=back_to,
        script=None if script is None else ScriptCommand(words=tuple(script), processes=devices),
    )
    proposal = Proposal(
        launcher=launcher,
        run_dir=run_dir,
        request=content,
        rendered=launcher.render(content),
        plan=prediction,
        no_plan_reason=why_no_plan,
    )
    _check_price_limit(proposal, limits)
    return proposal


def _check_limits(recipe: Recipe, launcher: Launcher, limits: Sequence[Limit]) -> None:
    """Reject what the site does not allow; of a resumed run too, which reads no site file else.

    Raises:
        RequestError: It names the limit and its file.
    """
    check_launcher_allowed(launcher, limits)
    if problems := [*beyond_limits(recipe, limits)]:
        raise RecipeError(problems)


def check_launcher_allowed(launcher: Launcher, limits: Sequence[Limit]) -> None:
    """Reject a launcher that the site does not allow.

    Raises:
        RequestError: It names the limit and its file.
    """
    if (wrong := beyond_launchers(launcher.name, limits)) is not None:
        raise RequestError(wrong)


def _check_price_limit(proposal: Proposal, limits: Sequence[Limit]) -> None:
    """Reject a job that the plan predicts to cost more than the site allows.

    Raises:
        RequestError: It costs more, or its price is not known.
    """
    limit, usd = least_usd(limits), proposal.most_usd
    if limit is None:
        return
    if usd is None:
        raise RequestError(
            f"{limit}, but the price is not known: {_no_price_reason(proposal)}. Set "
            "cluster.instance or cluster.usd_per_node_hour, and run.steps or launch.time_limit."
        )
    if usd > limit.value:
        raise RequestError(
            f"the price is predicted to be {format_usd(usd)}, above {limit}. Make the run shorter, "
            "or compare machines with `shardyard plan --offers`."
        )


def refusals(proposal: Proposal) -> list[str]:
    """Why it should not be submitted as it is, each with what to do."""
    found = against_description(proposal.request) if _is_kubernetes(proposal) else []
    plan, limit = proposal.plan, proposal.request.recipe.launch.max_usd
    if (misfit := unfit_reason(plan)) is not None:
        found.append(misfit)
    if limit is None:
        return found
    usd = proposal.most_usd
    if usd is None:
        found.append(
            f"launch.max_usd={limit:g}, but the price is not known: {_no_price_reason(proposal)}, "
            "so the limit cannot be checked. Name what is missing; on machines that cost nothing, "
            "set launch.max_usd=null."
        )
    elif usd > limit:
        found.append(
            f"the price is predicted to be {format_usd(usd)}, above launch.max_usd={limit:g}. No "
            "job was submitted. Make the run shorter, compare machines with `shardyard plan "
            "--offers`, or raise the limit."
        )
    elif proposal.loses_price:
        found.append(
            f"launch.max_usd={limit:g}, but the price is in cluster.file, which the nodes of "
            f"{proposal.launcher.name} do not see: the run would not stop there. Name an instance "
            "with cluster.instance, or leave the limit out."
        )
    return found


def unfit_reason(plan: Plan | None) -> str | None:
    """Say that a plan does not fit into memory, and what to do; None: it fits, or may."""
    if plan is None or plan.fits != "does not fit":
        return None
    return (
        f"the plan does not fit: {plan.fits_reason}. It would end out of memory. "
        "`shardyard plan` shows layouts that fit; --force starts it anyway."
    )


def describe(proposal: Proposal, *, in_full: bool = False) -> list[str]:
    """Describe the code, the plan, the memory's verdict and the price, before the user confirms.

    Args:
        in_full: Name every file that is sent.
    """
    request, plan = proposal.request, proposal.plan
    name = proposal.rendered.name
    job = "" if name == request.run_id else f" as {name}"
    nodes = f"{request.nodes} node{'s' * (request.nodes > 1)}"
    each = f"{request.devices_per_node} process{'es' * (request.devices_per_node > 1)} each"
    verb = "launch" if request.bench is None else "bench network"
    lines = [f"{verb}: run {request.run_id}{job} on {proposal.launcher.name}: {nodes}, {each}"]
    lines += [f"warning: {warning}" for warning in _warnings(proposal)]
    lines += describe_code(request.code, in_full=in_full)
    if request.script is not None:
        lines.append(f"script: {shown_command(request.script.words)}")
    if request.bench is not None or request.script is not None:
        rate = None if plan is None else plan.price.usd_per_hour
        return lines if rate is None else [*lines, f"price: {format_usd(rate)} an hour"]
    lines += [proposal.data] if proposal.data else []
    if plan is None:
        return [*lines, f"plan: no prediction: {proposal.no_plan_reason}"]
    lines += [plan.line(), f"memory: {plan.fits}: {plan.fits_reason}"]
    usd, rate = proposal.most_usd, plan.price.usd_per_hour
    if proposal.launcher.capabilities.is_this_machine and rate is None:
        return lines
    hour = "" if rate is None else f"{format_usd(rate)} an hour, "
    if usd is None:
        return [*lines, f"price: {hour}of the run not known: {_no_price_reason(proposal)}"]
    about = "about" if plan.usd is not None else "by its time limit at most"
    length = "" if plan.wall_s is None else f" in {format_seconds(plan.wall_s)}"
    if plan.usd is not None and plan.spare_nodes:
        length += f", {spare_words(plan.spare_nodes)}"
    return [*lines, f"price: {hour}{about} {format_usd(usd)} for the run{length}"]


def _warnings(proposal: Proposal) -> list[str]:
    """The launcher's, and what holds for all of them."""
    cluster, device = proposal.request.cluster, proposal.request.recipe.cluster.device
    old = None if cluster is None or device == "cpu" else without_code(cluster.accelerator)
    plan = None if proposal.request.script is not None else proposal.plan
    stuck = [] if plan is None or plan.advances else [plan.failures_reason]
    if plan is not None and plan.fits == "tight":
        stuck.append(
            f"memory is tight: {plan.fits_reason}. It may end out of memory; `shardyard plan` "
            "shows layouts that fit."
        )
    if _is_kubernetes(proposal):
        stuck += [f"{why}." for why in against_side_jobs(proposal.request)]
    return [*proposal.rendered.warnings, *([] if old is None else [f"{old}."]), *stuck]


def _is_kubernetes(proposal: Proposal) -> bool:
    return proposal.launcher.name == "kubernetes"


def submit(proposal: Proposal) -> Submission:
    """Make the run folder, submit, and write the job down.

    Raises:
        RequestError: The run exists.
        ShardyardError: The launcher's; what it left is in the ledger.
    """
    ledger = Ledger(proposal.run_dir.ledger)
    with _claimed(proposal, ledger):
        send_code(proposal.request, proposal.run_dir)
        side = proposal.request.side
        number = proposal.request.submission if side is None else side.label
        write_text(proposal.run_dir.submission(number), proposal.request.recipe_text)
        job = proposal.launcher.submit(proposal.rendered, ledger)
        added = {NONCE_DETAIL: proposal.request.nonce, **proposal.request.side_details}
        added |= {} if proposal.request.bench is None else {BENCH_DETAIL: "network"}
        if proposal.request.script is not None:
            added[SCRIPT_DETAIL] = json.dumps(proposal.request.script.words)
        added |= _accounting(proposal.request.recipe)
        job = replace(job, details={**job.details, **added})
        ledger.record(job)
    return job


def _accounting(recipe: Recipe) -> dict[str, str]:
    """Return who submits, and the tags: what costs are added up by."""
    tags = tag_words(recipe.run.tags)
    return {OWNER_DETAIL: current_user(), **({TAGS_DETAIL: tags} if tags else {})}


def check_run_is_new(run_dir: RunDir) -> None:
    """Raise if there is a run in this folder already."""
    if not run_dir.exists:
        return
    jobs = Ledger(run_dir.ledger).jobs()
    job = f" as {jobs[-1].launcher} job {jobs[-1].id}" if jobs else ""
    bench = jobs[-1].details.get(BENCH_DETAIL) if jobs else None
    next_step = f"continue it with `shardyard resume {run_dir.handle}`, or choose another id."
    if bench is not None:
        next_step = (
            f"or its tables with `shardyard logs {run_dir.handle}`. It is a benchmark (bench "
            f"{bench}), which is not continued: choose another id."
        )
    raise RequestError(
        f"run.id={run_dir.run_id!r} exists already in {run_dir.path.parent}{job}. A second run in "
        f"its folder would mix their files. See it with `shardyard status {run_dir.handle}`, "
        f"{next_step}"
    )


@contextmanager
def _claimed(proposal: Proposal, ledger: Ledger) -> Iterator[None]:
    """Hold the run's folder while submitting; remove a new one that led to no job."""
    run_dir, is_resume = proposal.run_dir, proposal.request.is_resume
    is_new, before = not run_dir.path.exists(), ledger.live()
    if not is_resume:
        _make(run_dir, proposal.request.recipe_text)
    try:
        with _ledger_lock(proposal, ledger):
            yield
    except BaseException:
        is_blank = ledger.is_blank()  # made to take its lock, and nothing was written into it
        has_jobs = not is_blank and _has_jobs(ledger)
        if not is_blank and any(entry not in before for entry in ledger.live()):
            info(
                f"note: what was created before this is listed in {ledger.path}; `shardyard "
                f"teardown {run_dir.handle}` removes it"
            )
        elif is_new and not has_jobs:
            with suppress(OSError):
                shutil.rmtree(run_dir.path)
        elif not is_resume and not has_jobs:
            for made in (run_dir.recipe, run_dir.ledger, *run_dir.submissions()):
                made.unlink(missing_ok=True)
        ledger.remove_empty()
        raise


@contextmanager
def _ledger_lock(proposal: Proposal, ledger: Ledger) -> Iterator[None]:
    """Hold the ledger: of two who submit one run at the same time, the second is rejected.

    Raises:
        RequestError: Another process submits it now, or has since it was looked at.
    """
    with ledger.open() as file:
        if not take_lock(file.fileno()):
            raise RequestError(_submitted_by_another(proposal))
        side = proposal.request.side
        before = ledger.jobs() if side is None else ledger.side_jobs(side.label)
        if len(before) + 1 != proposal.request.submission:
            raise RequestError(_submitted_by_another(proposal))
        try:
            yield
        finally:
            drop_lock(file.fileno())


def _has_jobs(ledger: Ledger) -> bool:
    return bool(ledger.jobs() or ledger.side_jobs())


def _submitted_by_another(proposal: Proposal) -> str:
    handle = proposal.run_dir.handle
    return (
        f"run {proposal.request.run_id} was submitted by another command meanwhile. Two jobs at "
        f"once would overwrite each other's checkpoints. See it with `shardyard status {handle}`."
    )


def _make(run_dir: RunDir, recipe_text: str) -> None:
    """Make the folder with its recipe; of two who launch the same id, one is rejected."""
    try:
        create_text(run_dir.recipe, recipe_text)
    except FileExistsError:
        check_run_is_new(run_dir)
        raise
    except OSError as error:
        raise StorageError(
            f"{run_dir.path} cannot be written: {error.strerror}. Every run gets a folder, where "
            "what is created elsewhere is written down first. Choose another place with run.dir."
        ) from error


def launch_problems(recipe: Recipe, launcher: Launcher) -> list[Problem]:
    """List what a launcher cannot do for any request, of a training or not."""
    name, can = launcher.name, launcher.capabilities
    found = unsupported(recipe.secrets, can.secrets, recipe.launch, launcher=name)
    if can.needs_image and recipe.launch.image is None:
        text = (
            f"is not set, and {name} runs containers. Build one with `shardyard image build`, push "
            "it with `shardyard image push`, and set launch.image=NAME@sha256:DIGEST."
        )
        found.append(Problem("launch.image", text))
    if not can.shares_folder and recipe.launch.run_dir is None:
        text = (
            f"is not set, and the nodes of {name} do not see run.dir={recipe.run.dir}. Checkpoints "
            "must outlive a container. Use a folder of a volume (launch.volumes), such as "
            "launch.run_dir=/shared/runs."
        )
        found.append(Problem("launch.run_dir", text))
    return found


def training_problems(recipe: Recipe, launcher: Launcher) -> list[Problem]:
    """List the same for a training, whose number of ranks must be known."""
    found = launch_problems(recipe, launcher)
    if launcher.capabilities.needs_image:
        found += unsent_code(recipe, launcher.name)
    is_known = launcher.capabilities.is_this_machine or devices_of_node(recipe.cluster) is not None
    named = recipe.cluster.instance or recipe.cluster.file  # another check covers these
    if not is_known and not named:
        found.append(Problem("cluster.devices", _unknown_devices(launcher)))
    return found


def check_launchable(recipe: Recipe, launcher: Launcher) -> None:
    """Reject what a launcher cannot do for any request, of a training or not."""
    found = launch_problems(recipe, launcher)
    if found:
        raise RecipeError(found)


def _of_launcher(preview: PartialResolution, launcher: Launcher) -> PartialResolution:
    """Without what only pods are asked: elsewhere it changes no network."""
    recipe = preview.recipe
    if launcher.name == "kubernetes" or recipe.launch.kubernetes == Kubernetes():
        return preview
    launch = recipe.launch.model_copy(update={"kubernetes": Kubernetes()})
    return replace(preview, recipe=recipe.model_copy(update={"launch": launch}))


def _machine(recipe: Recipe, launcher: Launcher, *, is_dry_run: bool) -> Machine | None:
    """This machine, where it is the one to be used and something depends on it."""
    if not launcher.capabilities.is_this_machine:
        return None
    settles_all = recipe.cluster.device == "cpu" and recipe.cluster.devices != "auto"
    return None if is_dry_run and settles_all else local_machine(recipe.cluster.device)


def _devices(preview: PartialResolution, launcher: Launcher) -> int:
    devices = preview.recipe.cluster.devices
    if not isinstance(devices, int):
        raise RecipeError([Problem("cluster.devices", _unknown_devices(launcher))])
    return devices


def _unknown_devices(launcher: Launcher) -> str:
    return (
        f"=auto, and how many devices a node of {launcher.name} has is not known here. Name the "
        "machines with cluster.instance=p5.48xlarge or cluster.file, or set cluster.devices=8."
    )


def predict(
    request: Request, preview: PartialResolution, machine: Machine | None, *, devices: int
) -> tuple[Plan | None, str]:
    """The prediction, or why there is none."""
    recipe = preview.recipe
    model = request.network or request.shape
    if recipe.model.module is not None:
        return None, NO_SHAPE
    if model is None:
        return None, (
            f"{request.no_shape_reason}, so memory, time and price are not known here; node 0 "
            "settles what is open. Give model.preset or model.config to see them before"
        )
    for phase in preview.of_phases:
        check_compatibility(phase.recipe, request.shape)
    open_settings = {
        "cluster.device": recipe.cluster.device,
        "precision.compute": recipe.precision.compute,
    }
    still_open = [name for name, value in open_settings.items() if value == "auto"]
    if still_open:
        return None, f"{still_open[0]}=auto and no machines are named (cluster.instance or file)"
    prediction = plan_phases(
        preview.of_phases,
        shape=model,
        world_size=recipe.cluster.nodes * devices,
        devices_per_node=devices,
        machine=machine,
    )
    return prediction, ""


def recipe_on_nodes(request: Request, launcher: Launcher) -> Recipe:
    """The recipe as the nodes of a launcher can read it: its paths are theirs."""
    shares_folder = launcher.capabilities.shares_folder
    recipe = request.recipe if shares_folder else request.as_written
    if launcher.node_paths(request.recipe).shares_filesystem:
        return recipe
    return _without_our_files(recipe)


def _without_our_files(recipe: Recipe) -> Recipe:
    """The nodes do not have files of this machine: what they hold is known by now, or sent."""
    if recipe.cluster.file is not None:
        cluster = recipe.cluster.model_copy(update={"file": None, "usd_per_node_hour": None})
        recipe = recipe.model_copy(update={"cluster": cluster})
    if recipe.model.config is not None:
        content = {"config": config_content(recipe.model.config)}
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=content)})
    return recipe


def for_nodes(
    recipe: Recipe, preview: PartialResolution, run_dir: RunDir, *, devices: int | None
) -> Recipe:
    """Return the recipe that the nodes read: the request, and what was settled here.

    Args:
        devices: None: no node uses any.
    """
    parent = recipe.launch.run_dir or str(run_dir.path.parent)
    resolved: dict[str, dict[str, Any]] = {
        "run": {"id": run_dir.run_id, "name": preview.recipe.run.name, "dir": parent},
        "cluster": {} if devices is None else {"devices": devices},
    }
    for section, values in resolved.items():
        content = getattr(recipe, section).model_copy(update=values)
        recipe = recipe.model_copy(update={section: content})
    return recipe


def _no_price_reason(proposal: Proposal) -> str:
    plan = proposal.plan
    if plan is None:
        return proposal.no_plan_reason
    if plan.price.usd_per_hour is None:
        return plan.price.source
    if not plan.advances:
        return plan.failures_reason
    if plan.steps is None:
        return "its length is not known before the data is prepared (run.steps or run.tokens)"
    return plan.speed.reason
