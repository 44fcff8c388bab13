"""`shardyard doctor`: is this machine, or the cluster that is meant, fit for a run?"""

import json
import os
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path

import click

from shardyard.cli.asking import side_terms
from shardyard.cli.installing import (
    InstallTerms,
    install_missing,
    proposal_for,
    remove_installed,
)
from shardyard.cli.options import json_option, launchers_in, trust_option
from shardyard.cli.tables import print_table
from shardyard.config.plug_in_settings import described
from shardyard.config.sources import SCHEMES, scheme_row
from shardyard.config.task_names import task_row
from shardyard.config.tasks import TASKS
from shardyard.control.hub_access import access_problems
from shardyard.control.probe import probe_on
from shardyard.control.request import Request
from shardyard.control.side_jobs import SideTerms
from shardyard.control.submission import launcher_named, refusals
from shardyard.doctor.finding import Finding, count
from shardyard.doctor.machine import check_machine
from shardyard.errors import ShardyardError
from shardyard.families.registry import FAMILIES, family_of
from shardyard.launch.base import LAUNCHERS, HasChecks, Launcher, launcher_class
from shardyard.launch.secrets import loose_files, resolve_local
from shardyard.plan.workload import optimizer_bytes
from shardyard.plug_ins import Group, claim_problems, installed, loaded, unreadable
from shardyard.terminal import tell

_HERE = "local"


def _use_source(name: str) -> object:
    """A scheme's row; of a suffix it is known that it can be imported, as readers are no part of
    this half."""
    if name[0] != ".":
        return scheme_row(name)
    return loaded("sources", name, ours=SCHEMES, wrong=lambda _: "")


_REGISTRIES: dict[Group, tuple[Collection[str], Callable[[str], object]]] = {
    "launchers": (LAUNCHERS, launcher_class),
    "tasks": (TASKS, task_row),
    "families": (FAMILIES, family_of),
    "sources": (SCHEMES, _use_source),
}
"""Our own names, and what takes one into use."""


@click.command()
@click.argument("recipe", nargs=-1)
@click.option("--on", metavar="LAUNCHER", help=f"Look at a target: one of {', '.join(LAUNCHERS)}.")
@click.option("--install", "is_installing", is_flag=True, help="Install what the target lacks.")
@click.option("--uninstall", "is_removing", is_flag=True, help="Remove what --install installed.")
@click.option(
    "--probe",
    "is_probing",
    is_flag=True,
    help="Also start a short job there, which looks at the recipe's paths.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be run or sent; change nothing.")
@click.option("--yes", "is_yes", is_flag=True, help="Do not ask.")
@trust_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    recipe: tuple[str, ...],
    *,
    on: str | None,
    is_installing: bool,
    is_removing: bool,
    is_probing: bool,
    dry_run: bool,
    is_yes: bool,
    trusts_folder: bool,
    as_json: bool,
) -> int:
    """Look at this machine, or with --on at what RECIPE would be launched on. Changes nothing.

    The exit code is 0 without a problem, else 1. With --install what the target lacks is installed
    at pinned versions.
    """
    if on not in (None, _HERE) and not recipe:
        raise click.UsageError(f"RECIPE is missing. It says what is wanted of {on}.")
    launcher = None if on in (None, _HERE) else launcher_named(str(on), launchers_in(context))
    if is_probing:
        if on is None or not recipe or is_installing or is_removing:
            raise click.UsageError("--probe needs --on and a RECIPE, and goes with no --install.")
        launcher = launcher_named(on, launchers_in(context))
    request = _read(recipe, launcher) if recipe else None
    if is_installing or is_removing:
        if is_installing and is_removing:
            raise click.UsageError("--install and --uninstall exclude each other.")
        if request is None or launcher is None:
            raise click.UsageError("--install and --uninstall need --on and a RECIPE.")
        terms = InstallTerms(
            is_yes=is_yes, dry_run=dry_run, trusts_folder=trusts_folder, as_json=as_json
        )
        change = install_missing if is_installing else remove_installed
        return change(request, launcher, terms)
    findings = [*_findings_here(request), *plug_in_findings()] if on in (None, _HERE) else []
    if request is not None and launcher is not None:
        findings += [] if on == _HERE else _findings_there(request, launcher)
        job = side_terms(is_yes=is_yes, dry_run=dry_run, as_json=as_json)
        probed = _findings_of_a_node(request, launcher, job) if is_probing else []
        if probed is None:
            return 0  # its request was printed alone
        findings += probed
    return _answer(findings, as_json=as_json)


def plug_in_findings() -> list[Finding]:
    """Each name that packages add: whether it can be used. Imports them."""
    found = [_wrong_plug_in(text) for text in unreadable()]
    wrong_settings = {plug_in: text for plug_in, text in described() if isinstance(text, str)}
    for group, (ours, use) in _REGISTRIES.items():
        found += [_wrong_plug_in(text) for text in claim_problems(group, ours)]
        for name, claims in installed(group).items():
            if name in ours or len(claims) > 1:
                continue  # told above
            try:
                use(name)
            except ShardyardError as error:
                found.append(_wrong_plug_in(str(error)))
                continue
            text = wrong_settings.get(claims[0])
            good = Finding(name="plug-in", verdict="ok", what=f"{claims[0].what} can be used")
            found.append(good if text is None else _wrong_plug_in(text))
    return found


def _wrong_plug_in(text: str) -> Finding:
    return Finding(name="plug-in", verdict="warning", what=text)


def _answer(findings: list[Finding], *, as_json: bool) -> int:
    problems = count(findings, "problem")
    if as_json:
        answer = {
            "findings": [asdict(finding) for finding in findings],
            "problems": problems,
            "warnings": count(findings, "warning"),
        }
        tell(json.dumps(answer, indent=1))
    else:
        print_table(("check", "verdict", "what"), [_row(finding) for finding in findings])
    return 1 if problems else 0


def _findings_here(request: Request | None) -> list[Finding]:
    if request is None:
        return check_machine(Path("runs"))
    recipe = request.recipe
    devices = recipe.cluster.devices
    is_cpu = recipe.cluster.device == "cpu"
    return [
        *check_machine(
            Path(recipe.run.dir).expanduser(),
            devices_wanted=None if is_cpu or devices == "auto" else int(devices),
            # weights in fp32 and the optimizer's state of each
            checkpoint_bytes=0  # of a module of the user's own nobody knows
            if request.shape is None
            else request.shape.parameters * (4 + optimizer_bytes(recipe)),
            checkpoints=recipe.checkpoint.keep_last + recipe.checkpoint.keep_best,
        ),
        *_secrets(request),
    ]


def _read(recipe: tuple[str, ...], launcher: Launcher | None) -> Request:
    sees = None if launcher is None else launcher.sees
    return Request.read(recipe, needs_weights=False, only_looks=True, sees=sees)


def _findings_there(request: Request, launcher: Launcher) -> list[Finding]:
    try:
        proposal = proposal_for(request, launcher)
    except ShardyardError as error:
        return [Finding(name="request", verdict="problem", what=str(error))]
    against = [*refusals(proposal), *access_problems(request.recipe, launcher)]
    wrong = [Finding(name="request", verdict="problem", what=reason) for reason in against]
    right = Finding(name="request", verdict="ok", what=f"{launcher.name} can be asked for it")
    findings = wrong or [right]
    if _reads_secrets_here(launcher):
        findings += _secrets(request)
    if isinstance(launcher, HasChecks):
        findings += launcher.checks(proposal.request)
    return findings


def _findings_of_a_node(
    request: Request, launcher: Launcher, terms: SideTerms
) -> list[Finding] | None:
    try:
        return probe_on(request, launcher, terms)
    except ShardyardError as error:
        return [Finding(name="probe", verdict="problem", what=str(error))]


def _reads_secrets_here(launcher: Launcher) -> bool:
    """Whether the nodes see the files that this machine sees, and get its environment."""
    return launcher.capabilities.shares_folder


def _secrets(request: Request) -> list[Finding]:
    section = request.recipe.secrets
    if not section:
        return []
    try:
        resolve_local(section, os.environ)
    except ShardyardError as error:
        return [Finding(name="secrets", verdict="problem", what=str(error))]
    loose = [Finding(name="secrets", verdict="warning", what=text) for text in loose_files(section)]
    good = Finding(name="secrets", verdict="ok", what=f"{', '.join(section)} found")
    return loose or [good]


def _row(finding: Finding) -> tuple[str, str, str]:
    words = f"{finding.what}. {finding.mend}" if finding.mend else finding.what
    return finding.name, finding.verdict, " ".join(words.split())
