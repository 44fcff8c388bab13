"""`shardyard launch`: shows the plan and its price, asks, submits; the run goes on elsewhere."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from shardyard.cli.asking import confirm, print_request
from shardyard.cli.options import as_override, json_option, launch_options, launchers_in
from shardyard.cli.watch import watch
from shardyard.control.hub_access import access_problems
from shardyard.control.job import Launched
from shardyard.control.prepared import data_line, find_prepared
from shardyard.control.request import Request
from shardyard.control.submission import (
    Proposal,
    describe,
    launcher_named,
    propose,
    refusals,
    refuse_existing,
    submit,
)
from shardyard.errors import RequestError
from shardyard.launch.base import LAUNCHERS, Job
from shardyard.launch.ledger import Ledger
from shardyard.rundir.layout import RunDir, new_run_id
from shardyard.terminal import say, tell


@dataclass(frozen=True, kw_only=True)
class Terms:
    """On what terms something is submitted: the options of ``launch_options``."""

    is_yes: bool
    is_forced: bool
    dry_run: bool
    is_followed: bool
    as_json: bool


@click.command()
@click.argument("recipe", nargs=-1, required=True)
@click.option("--on", required=True, metavar="LAUNCHER", help=f"One of {', '.join(LAUNCHERS)}.")
@launch_options
@click.option("--dry-run", is_flag=True, help="Print exactly what would be sent; create nothing.")
@json_option
@click.pass_context
def command(
    context: click.Context,
    /,
    recipe: tuple[str, ...],
    *,
    on: str,
    max_usd: float | None,
    **terms: Any,
) -> int:
    """Submit RECIPE (files and section.key=value overrides) to a scheduler.

    The plan, the memory's verdict and the price are shown before; what is submitted is what
    --dry-run prints.
    """
    asked = Terms(**terms)
    launcher = launcher_named(on, launchers_in(context))
    words = (*recipe, *as_override(max_usd))
    request = Request.read(words, needs_weights=False, only_looks=True, sees=launcher.sees)
    run = request.recipe.run
    run_id = run.id or new_run_id(str(request.preview().recipe.run.name))
    run_dir = RunDir(Path(run.dir).expanduser().resolve() / run_id)
    refuse_existing(run_dir)
    proposal = propose(request, launcher, run_dir=run_dir, is_dry_run=asked.dry_run)
    return submit_proposal(replace(proposal, data=_of_data(proposal, recipe)), asked)


def _of_data(proposal: Proposal, words: tuple[str, ...]) -> str:
    """What is said of the data; where idle accelerators cost nothing, only that it is ready."""
    asked, launcher = proposal.request, proposal.launcher
    found = find_prepared(proposal.run_dir.path.parent, launcher, asked.recipe)
    rate = None if proposal.plan is None else proposal.plan.price.usd_per_hour
    is_idle_free = launcher.capabilities.is_this_machine or asked.recipe.cluster.device == "cpu"
    if found is None and is_idle_free:
        return ""
    return data_line(found, words, launcher=launcher.name, nodes=asked.nodes, usd_per_hour=rate)


def submit_proposal(proposal: Proposal, terms: Terms) -> int:
    """Show, refuse or ask, submit, and say what to do next; or print the request alone."""
    if not agree(proposal, terms, question="submit it?"):
        return 0
    return say_next(proposal, submit(proposal), terms)


def agree(proposal: Proposal, terms: Terms, *, question: str) -> bool:
    """Show, refuse or ask; with --dry-run print the request alone.

    Returns:
        Whether it is to be submitted.
    """
    if terms.is_followed and terms.as_json:
        raise click.UsageError("--follow prints the output; it and --json exclude each other.")
    for line in describe(proposal):
        say(line)
    against = refusals(proposal)
    if not terms.dry_run:  # which asks no service
        against += access_problems(proposal.request.recipe, proposal.launcher)
    if terms.dry_run:
        for reason in against:
            say(f"warning: it would be refused: {reason}")
        print_request(proposal, as_json=terms.as_json)
        return False
    if against and not terms.is_forced:
        raise RequestError("\n".join(against))
    confirm(question, is_yes=terms.is_yes)
    return True


def say_next(proposal: Proposal, job: Job, terms: Terms) -> int:
    """Say what was submitted and how it is steered; follow it if that was asked."""
    _describe_submitted(proposal, job, as_json=terms.as_json)
    if not terms.is_followed:
        return 0
    run_dir = proposal.run_dir
    return watch(
        Launched(
            run_dir=run_dir, job=job, launcher=proposal.launcher, ledger=Ledger(run_dir.ledger)
        ),
        node=0,
    )


def _describe_submitted(proposal: Proposal, job: Job, *, as_json: bool) -> None:
    handle, plan = proposal.run_dir.handle, proposal.plan
    if as_json:
        content = {
            "run_id": job.run_id,
            "run_dir": str(proposal.run_dir.path),
            "launcher": job.launcher,
            "job_id": job.id,
            "job_name": job.name,
            "usd": proposal.most_usd,
            "usd_per_hour": None if plan is None else plan.price.usd_per_hour,
        }
        tell(json.dumps(content, indent=1))
        return
    tell(f"run: {job.run_id}")
    tell(f"job: {job.id} ({job.name}) on {job.launcher}")
    for verb in ("watch", "status", "logs", "cancel"):
        tell(f"  shardyard {verb} {handle}")
