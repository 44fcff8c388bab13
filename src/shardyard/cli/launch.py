"""`shardyard launch`: shows the plan and its price, asks, and submits a remote run."""

import json
from dataclasses import dataclass
from typing import Any

import click

from shardyard.cli.completion import by, launchers
from shardyard.cli.confirm import confirm, print_request
from shardyard.cli.options import (
    any_recipe_argument,
    as_override,
    json_option,
    launch_options,
    launchers_in,
)
from shardyard.cli.watch import watch
from shardyard.config.secrets import shown_command
from shardyard.control.job import LaunchedJob
from shardyard.control.launch import proposal_of, reasons_against, rejection, submitted
from shardyard.control.launch_script import script_proposal
from shardyard.control.submission import (
    Proposal,
    describe,
    launcher_named,
    refusals,
)
from shardyard.io.terminal import echo, echo_err
from shardyard.launchers.registry import LAUNCHERS


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """On what terms something is submitted: the options of ``launch_options``."""

    is_yes: bool
    is_forced: bool
    dry_run: bool
    is_followed: bool
    as_json: bool


_SCRIPT = "shardyard.script"


class _WithScript(click.Command):
    """Keeps what follows ``--`` apart: a script with its arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.meta[_SCRIPT], args = tuple(args[place + 1 :]), args[:place]
        return super().parse_args(ctx, args)


@click.command(cls=_WithScript)
@any_recipe_argument
@click.option(
    "--on",
    metavar="LAUNCHER",
    shell_complete=by(launchers),
    help=f"Launcher: {', '.join(LAUNCHERS)}.  [required]",
)
@launch_options
@click.option(
    "--dry-run", is_flag=True, help="Print the job that would be submitted, without submitting it."
)
@json_option
@click.pass_context
def command(
    context: click.Context,
    /,
    recipe: tuple[str, ...],
    *,
    on: str | None,
    max_usd: float | None,
    **terms: Any,
) -> int:
    """Submit RECIPE (files and section.key=value overrides) to a scheduler.

    With -- python SCRIPT ARGUMENTS at the end, the nodes run that script in place of the recipe.

    Shows the plan, memory use and price first, and asks. It submits exactly what --dry-run prints.
    """
    asked = SubmitOptions(**terms)
    script = context.meta.get(_SCRIPT)
    if not recipe and script is None:
        raise click.UsageError("Missing argument 'RECIPE...'.")
    if on is None:
        raise click.UsageError(
            f"--on is missing: where to run, one of {', '.join(LAUNCHERS)}. For example: "
            f"{shown_command(['shardyard', 'launch', *recipe, '--on', 'slurm'])}."
        )
    launcher = launcher_named(on, launchers_in(context))
    words = (*recipe, *as_override(max_usd))
    if script is not None:
        proposal = script_proposal(words, script, launcher, is_dry_run=asked.dry_run)
        return submit_proposal(proposal, asked)
    return submit_proposal(proposal_of(words, launcher, is_dry_run=asked.dry_run), asked)


def submit_proposal(proposal: Proposal, terms: SubmitOptions) -> int:
    """Show, reject or ask, submit, and say what to do next; or only print the request."""
    if not agree(proposal, terms, question="submit it?"):
        return 0
    return report_submission(proposal, submitted(proposal), terms)


def agree(proposal: Proposal, terms: SubmitOptions, *, question: str) -> bool:
    """Show, reject or ask; with --dry-run print the request and reject, without a question.

    Returns:
        Whether it is to be submitted.
    """
    if terms.is_followed and terms.as_json:
        raise click.UsageError("--follow prints the output; it and --json exclude each other.")
    for line in describe(proposal, in_full=terms.dry_run):
        echo_err(line)
    # a dry run asks no service
    against, hub = (refusals(proposal), []) if terms.dry_run else reasons_against(proposal)
    if terms.dry_run:
        print_request(proposal, as_json=terms.as_json)
    if (against or hub) and not terms.is_forced:
        raise rejection(proposal, against, hub)
    if terms.dry_run:
        return False
    confirm(question, is_yes=terms.is_yes)
    return True


def report_submission(proposal: Proposal, job: LaunchedJob, terms: SubmitOptions) -> int:
    """Say what was submitted and how it is steered; follow it if that was asked."""
    _describe_submitted(proposal, job, as_json=terms.as_json)
    if not terms.is_followed:
        return 0
    return watch(job, node=0)


def _describe_submitted(proposal: Proposal, job: LaunchedJob, *, as_json: bool) -> None:
    handle, plan = proposal.run_dir.handle, proposal.plan
    if as_json:
        content = {
            "run_id": job.run_id,
            "run_dir": str(proposal.run_dir.path),
            "launcher": job.on,
            "job_id": job.id,
            "job_name": job.name,
            "usd": proposal.most_usd,
            "usd_per_hour": None if plan is None else plan.price.usd_per_hour,
        }
        echo(json.dumps(content, indent=1))
        return
    echo(f"run: {job.run_id}")
    echo(f"job: {job.id} ({job.name}) on {job.on}")
    for verb in ("watch", "status", "logs", "cancel"):
        echo(f"  shardyard {verb} {handle}")
