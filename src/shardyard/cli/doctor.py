"""`shardyard doctor`: is this machine, or the cluster that is meant, fit for a run?"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import click

from shardyard.cli.completion import by, launchers
from shardyard.cli.confirm import confirm, side_terms
from shardyard.cli.options import any_recipe_argument, json_option, launchers_in, trust_option
from shardyard.control.doctor import (
    findings_of_a_node,
    launcher_findings,
    local_findings,
    plug_in_findings,
)
from shardyard.control.install import Target, install, missing_on, target_of, uninstall
from shardyard.control.request import Request
from shardyard.control.submission import launcher_named, with_machines
from shardyard.doctor.finding import Finding, count
from shardyard.io.terminal import echo, echo_raw, print_table
from shardyard.launchers.base import InstallablePart, Launcher, Watchers
from shardyard.launchers.registry import LAUNCHERS

NEEDED = "needed"
_WATCHERS: dict[str, Watchers] = {"monitoring": "monitoring", "cloudwatch": "cloudwatch"}


def _validate_install_target(
    _context: click.Context, _option: click.Parameter, what: str | None
) -> str | None:
    """Check the word after --install; a recipe comes before --install."""
    names = (NEEDED, *_WATCHERS)
    if what is None or what in names:
        return what
    raise click.BadParameter(
        f"{what!r} cannot be installed; choose from {', '.join(names)}. Without a word it is "
        f"{NEEDED}. Recipe and settings come before --install."
    )


@click.command()
@any_recipe_argument
@click.option(
    "--on",
    metavar="LAUNCHER",
    shell_complete=by(launchers),
    help=f"Check a target: {', '.join(LAUNCHERS)}.",
)
@click.option(
    "--install",
    "wanted",
    callback=_validate_install_target,
    is_flag=False,
    flag_value=NEEDED,
    metavar="[WHAT]",
    help="Install on the target: needed (by the recipe; the default), monitoring or cloudwatch.",
)
@click.option("--uninstall", "is_removing", is_flag=True, help="Remove what --install installed.")
@click.option(
    "--probe",
    "is_probing",
    is_flag=True,
    help="Also run a short job on the target that checks the recipe's paths.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print the commands and requests, without changing anything."
)
@click.option("--yes", "is_yes", is_flag=True, help="Do not ask for confirmation.")
@trust_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    recipe: tuple[str, ...],
    *,
    on: str | None,
    wanted: str | None,
    is_removing: bool,
    is_probing: bool,
    dry_run: bool,
    is_yes: bool,
    trusts_folder: bool,
    as_json: bool,
) -> int:
    """Check this machine or, with --on, the target that RECIPE would be launched on.

    Read-only unless you add --install, which installs what the target lacks at pinned versions:
    needed (what the recipe needs to run), monitoring (Prometheus, Grafana and DCGM's exporter with
    dashboards and alert rules), or cloudwatch (EKS's add-on). The exit code is 1 if there is a
    problem.
    """
    launcher = None if on is None else launcher_named(on, launchers_in(context))
    is_here = launcher is None or launcher.capabilities.is_this_machine
    if not is_here and not recipe:
        raise click.UsageError(f"RECIPE is missing. It says what is wanted of {on}.")
    if is_probing and (on is None or not recipe or wanted or is_removing):
        raise click.UsageError("--probe needs --on and a RECIPE, and goes with no --install.")
    if is_here and not is_probing:
        launcher = None  # this machine is looked at itself
    request = _read(recipe, launcher) if recipe else None
    agree = partial(confirm, is_yes=is_yes)
    if wanted or is_removing:
        if wanted and is_removing:
            raise click.UsageError("--install and --uninstall exclude each other.")
        if request is None or launcher is None:
            raise click.UsageError("--install and --uninstall need --on and a RECIPE.")
        target = target_of(request, launcher)
        if wanted:
            missing = missing_on(target, _WATCHERS.get(wanted), is_dry_run=dry_run)
            _install(target, missing, agree, dry_run=dry_run, as_json=as_json)
        else:
            _uninstall(
                target, None if dry_run else agree, trusts_folder=trusts_folder, as_json=as_json
            )
        return 0
    findings = [*local_findings(request), *plug_in_findings()] if is_here else []
    if request is not None and launcher is not None:
        findings += [] if is_here else launcher_findings(request, launcher)
        job = side_terms(is_yes=is_yes, dry_run=dry_run, as_json=as_json)
        probed = findings_of_a_node(request, launcher, job) if is_probing else []
        if probed is None:
            return 0  # its request was printed alone
        findings += probed
    return _answer(findings, as_json=as_json)


def _read(recipe: tuple[str, ...], launcher: Launcher | None) -> Request:
    sees = None if launcher is None else launcher.node_paths
    words = recipe if launcher is None else with_machines(recipe, launcher)
    return Request.read(words, needs_weights=False, only_looks=True, sees=sees)


def _install(
    target: Target,
    missing: Sequence[InstallablePart],
    agree: Callable[[str], None],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    ledger = str(target.ledger.path)
    if dry_run and as_json:
        _print_json(missing=[{"name": part.name, "text": part.text} for part in missing])
    elif dry_run:
        echo_raw("".join(part.text for part in missing))
    elif as_json:
        install(target, missing, agree=agree)
        _print_json(installed=[part.name for part in missing], ledger=ledger)
    else:
        install(
            target, missing, agree=agree, on_installed=lambda part: echo(f"installed: {part.name}")
        )
        if missing:
            echo(f"written down in {ledger}; --uninstall removes it")


def _uninstall(
    target: Target, agree: Callable[[str], None] | None, *, trusts_folder: bool, as_json: bool
) -> None:
    removed = uninstall(target, agree=agree, trusts_folder=trusts_folder)
    if as_json:
        _print_json(removed=removed, left=[entry.name for entry in target.ledger.live()])
        return
    for name in target.installed if agree is None else [f"removed: {name}" for name in removed]:
        echo(name)


def _print_json(**content: object) -> None:
    echo(json.dumps(content, indent=1))


def _answer(findings: list[Finding], *, as_json: bool) -> int:
    problems = count(findings, "problem")
    if as_json:
        _print_json(
            findings=[asdict(finding) for finding in findings],
            problems=problems,
            warnings=count(findings, "warning"),
        )
    else:
        print_table(("check", "verdict", "what"), [_row(finding) for finding in findings])
    return 1 if problems else 0


def _row(finding: Finding) -> tuple[str, str, str]:
    words = f"{finding.what}. {finding.mend}" if finding.mend else finding.what
    return finding.name, finding.verdict, " ".join(words.split())
