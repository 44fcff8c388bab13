"""A recipe becomes a job: looked at, planned and priced, submitted; one, many, or a run again."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from shardyard.config.load import Source
from shardyard.config.resolved import RollbackTarget
from shardyard.control.hub_access import access_errors
from shardyard.control.job import (
    Job,
    check_submission_finished,
    fetch_progress,
    launched_of,
    reject_bench,
)
from shardyard.control.model_check import check_weights_match_config
from shardyard.control.prepare_remote import data_line, find_prepared
from shardyard.control.request import Request
from shardyard.control.resume import check_job_over, propose_resume
from shardyard.control.submission import (
    Launchers,
    Proposal,
    check_run_is_new,
    describe,
    launcher_named,
    propose,
    refusals,
    submit,
)
from shardyard.errors import RequestError, ShardyardError
from shardyard.launchers.base import Launcher
from shardyard.launchers.ledger import Ledger
from shardyard.log import info, warn
from shardyard.rundir.layout import RunDir, new_run_id
from shardyard.rundir.lease import Lease


@overload
def launch(
    recipe: Source,
    *overrides: Source,
    on: str = "local",
    max_usd: float | None = None,
    force: bool = False,
    launchers: Launchers | None = None,
) -> Job: ...


@overload
def launch(
    recipe: list[Any],
    *overrides: Source,
    on: str = "local",
    max_usd: float | None = None,
    force: bool = False,
    launchers: Launchers | None = None,
) -> list[Job]: ...


def launch(
    recipe: Source | list[Any],
    *overrides: Source,
    on: str = "local",
    max_usd: float | None = None,
    force: bool = False,
    launchers: Launchers | None = None,
) -> Job | list[Job]:
    """Submit a recipe to a launcher, as `shardyard launch` does, without confirmation.

    Plan and price are logged (`shardyard`, level INFO).

    Args:
        recipe: The path of a YAML file, a dict of sections, or a ``Recipe``. Or a list of these,
            or of tuples of one with its overrides: a job for each. All of them are checked before
            the first is submitted.
        overrides: ``section.key=value``, or more of the recipe; later ones win.
        on: Name of the launcher.
        max_usd: The most each may cost, as ``launch.max_usd``.
        force: Submit even if the plan or the price speaks against it.
        launchers: Name -> launcher, in place of all that there are.

    Raises:
        RequestError: A recipe is wrong, or the plan or the price speaks against it.
        ShardyardError: The launcher's own.
    """
    limit = () if max_usd is None else (f"launch.max_usd={max_usd!r}",)
    launcher = launcher_named(on, launchers)
    many = recipe if isinstance(recipe, list) else [recipe]
    proposals = []
    for each in many:
        words = each if isinstance(each, tuple) else (each,)
        proposals.append(proposal_of((*words, *overrides, *limit), launcher))
        info("\n".join(describe(proposals[-1])))
        if not force:
            check_proposal(proposals[-1])
    jobs = _submit_all(proposals)
    return jobs if isinstance(recipe, list) else jobs[0]


def _submit_all(proposals: Sequence[Proposal]) -> list[Job]:
    jobs: list[Job] = []
    for proposal in proposals:
        try:
            jobs.append(submitted(proposal))
        except ShardyardError:
            if jobs:
                warn(f"submitted before this: {', '.join(job.run_id for job in jobs)}")
            raise
    return jobs


def proposal_of(
    words: Sequence[Source], launcher: Launcher, *, is_dry_run: bool = False
) -> Proposal:
    """Return what would be submitted for a recipe, with its plan and price.

    Creates no file or job.

    Raises:
        RequestError: It cannot be launched there as it is.
    """
    request = Request.read(words, needs_weights=False, only_looks=True, sees=launcher.node_paths)
    run = request.recipe.run
    run_id = run.id or new_run_id(str(request.preview().recipe.run.name))
    run_dir = RunDir(Path(run.dir).expanduser().resolve() / run_id)
    check_run_is_new(run_dir)
    check_weights_match_config(request)
    proposal = propose(request, launcher, run_dir=run_dir, is_dry_run=is_dry_run)
    return replace(
        proposal, data=_of_data(proposal, [each for each in words if isinstance(each, str)])
    )


def _of_data(proposal: Proposal, words: Sequence[str]) -> str:
    """Describe the data; where idle accelerators cost no money, only that it is ready."""
    asked, launcher = proposal.request, proposal.launcher
    found = find_prepared(proposal.run_dir.path.parent, launcher, asked.recipe)
    rate = None if proposal.plan is None else proposal.plan.price.usd_per_hour
    is_idle_free = launcher.capabilities.is_this_machine or asked.recipe.cluster.device == "cpu"
    if found is None and is_idle_free:
        return ""
    return data_line(found, words, launcher=launcher.name, nodes=asked.nodes, usd_per_hour=rate)


def check_proposal(proposal: Proposal) -> bool:
    """Raise if plan, price or the hub speak against a submission; else True.

    Raises:
        RequestError: All that does.
    """
    against = refusals(proposal) + access_errors(proposal.request.recipe, proposal.launcher)
    if against:
        raise RequestError("\n".join(against))
    return True


def submitted(proposal: Proposal) -> Job:
    """Submit; the job.

    Raises:
        ShardyardError: As ``submit``.
    """
    run_dir = proposal.run_dir
    return Job(
        run_dir=run_dir,
        submission=submit(proposal),
        launcher=proposal.launcher,
        ledger=Ledger(run_dir.ledger),
    )


def resume_proposal(
    run_dir: RunDir,
    overrides: Sequence[str],
    *,
    on: str | None,
    launchers: Launchers | None = None,
    is_dry_run: bool = False,
    back_to: RollbackTarget | None = None,
) -> Proposal:
    """Return the next job of a run, where its last one was or elsewhere, without creating it.

    Raises:
        RequestError: Its last job is not over, or this cannot be changed.
    """
    reject_bench(run_dir)
    check_submission_finished(run_dir)
    jobs = Ledger(run_dir.ledger).jobs()
    if jobs:
        check_job_over(run_dir, jobs[-1], launchers)
        fetch_progress(launched_of(run_dir, launchers))
    launcher = launcher_named(on or jobs[-1].launcher, launchers)
    Lease(run_dir.lease).close()  # no process of this machine trains it either
    return propose_resume(run_dir, overrides, launcher, is_dry_run=is_dry_run, back_to=back_to)
