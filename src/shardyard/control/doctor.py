"""Check whether this machine, or the target of a launch, is fit for a run. Changes neither."""

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from shardyard.config.schema.plugin_sections import described
from shardyard.config.sources import SCHEMES, scheme_row
from shardyard.config.tasks import TASKS, task_row
from shardyard.config.versions import engines_for
from shardyard.control.alerts import validate_addresses
from shardyard.control.aux_jobs import SideTerms
from shardyard.control.hub_access import access_errors
from shardyard.control.install import proposal_for
from shardyard.control.prepare_remote import probe_on
from shardyard.control.request import Request
from shardyard.control.submission import refusals
from shardyard.control.what_if import plan_of
from shardyard.doctor.finding import Finding
from shardyard.doctor.machine import check_machine
from shardyard.doctor.paths import check_data_sources
from shardyard.errors import ShardyardError
from shardyard.families.registry import FAMILIES, family_of
from shardyard.hardware.machine import local_machine
from shardyard.launchers.base import HasChecks, Launcher, launcher_class
from shardyard.launchers.registry import ALIASES, LAUNCHERS
from shardyard.launchers.secrets import loose_files, resolve_local
from shardyard.plugins import Group, check_plug_in_claims, installed, load_entry_point, unreadable


def _use_source(name: str) -> object:
    """A scheme's row; of a suffix it is known that it can be imported, as readers are no part of
    this half."""
    if name[0] != ".":
        return scheme_row(name)
    return load_entry_point("sources", name, builtin=SCHEMES, validate=lambda _: "")


_REGISTRIES: dict[Group, tuple[Collection[str], Callable[[str], object]]] = {
    "launchers": ((*LAUNCHERS, *ALIASES), launcher_class),
    "tasks": (TASKS, task_row),
    "families": (FAMILIES, family_of),
    "sources": (SCHEMES, _use_source),
}
"""Our own names, and what takes one into use."""


def plug_in_findings() -> list[Finding]:
    """Each name that packages add: whether it can be used. Imports them."""
    found = [_plugin_warning(text) for text in unreadable()]
    wrong_settings = {plug_in: text for plug_in, text in described() if isinstance(text, str)}
    for group, (ours, use) in _REGISTRIES.items():
        found += [_plugin_warning(text) for text in check_plug_in_claims(group, ours)]
        for name, claims in installed(group).items():
            if name in ours or len(claims) > 1:
                continue  # reported above
            try:
                use(name)
            except ShardyardError as error:
                found.append(_plugin_warning(str(error)))
                continue
            text = wrong_settings.get(claims[0])
            good = Finding(name="plug-in", verdict="ok", what=f"{claims[0].what} can be used")
            found.append(good if text is None else _plugin_warning(text))
    return found


def _plugin_warning(text: str) -> Finding:
    return Finding(name="plug-in", verdict="warning", what=text)


def local_findings(request: Request | None = None) -> list[Finding]:
    """Check this machine, for a request or for any."""
    if request is None:
        return check_machine(Path("runs"))
    recipe = request.recipe
    devices = recipe.cluster.devices
    processes = None if devices == "auto" else int(devices)
    return [
        *check_machine(
            Path(recipe.run.dir).expanduser(),
            requested_devices=None if recipe.cluster.device == "cpu" else processes,
            processes=processes,
            checkpoint_bytes=request.checkpoint_bytes,
            retention=recipe.checkpoint,
            host_bytes=_host_bytes(request),
            engines=engines_for(recipe),
        ),
        *_secrets(request),
        *check_data_sources(recipe),
    ]


def _host_bytes(request: Request) -> int | None:
    """Host memory that the processes of a node need by the plan; None: not of CPU processes."""
    if request.recipe.cluster.device not in ("cpu", "auto"):
        return None
    with suppress(ShardyardError):  # what is wrong with the recipe is reported elsewhere
        machine = local_machine(request.recipe.cluster.device)
        if machine.device != "cpu" and request.recipe.cluster.device == "auto":
            return None
        preview = request.preview(machine)
        devices = preview.recipe.cluster.devices
        if isinstance(devices, int) and request.planned_model is not None:
            return plan_of(request, preview, machine, None).device_bytes * devices
    return None


def launcher_findings(request: Request, launcher: Launcher) -> list[Finding]:
    """Check the target that a request would be launched on, by asking its services."""
    try:
        proposal = proposal_for(request, launcher)
    except ShardyardError as error:
        return [Finding(name="request", verdict="problem", what=str(error))]
    against = [*refusals(proposal), *access_errors(request.recipe, launcher)]
    wrong = [Finding(name="request", verdict="problem", what=reason) for reason in against]
    right = Finding(name="request", verdict="ok", what=f"{launcher.name} can be asked for it")
    findings = wrong or [right]
    if _reads_local_secrets(launcher):
        findings += _secrets(request)
    if isinstance(launcher, HasChecks):
        findings += launcher.checks(proposal.request)
    return findings


def findings_of_a_node(
    request: Request, launcher: Launcher, terms: SideTerms
) -> list[Finding] | None:
    """Check the recipe's paths in a short remote job; None: its request was only shown."""
    try:
        return probe_on(request, launcher, terms)
    except ShardyardError as error:
        return [Finding(name="probe", verdict="problem", what=str(error))]


def _reads_local_secrets(launcher: Launcher) -> bool:
    """Whether the nodes see the files that this machine sees, and get its environment."""
    return launcher.capabilities.shares_folder


def _secrets(request: Request) -> list[Finding]:
    section = request.recipe.secrets
    if not section:
        return []
    try:
        found = resolve_local(section, os.environ)
        validate_addresses(request.recipe.observe.alerts, found)
    except ShardyardError as error:
        return [Finding(name="secrets", verdict="problem", what=str(error))]
    loose = [Finding(name="secrets", verdict="warning", what=text) for text in loose_files(section)]
    good = Finding(name="secrets", verdict="ok", what=f"{', '.join(section)} found")
    return loose or [good]
