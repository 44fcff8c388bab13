"""Propose, check and submit a job: for a recipe, or for a run that continues."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from shardyard.config.load import Source
from shardyard.config.model.hub_errors import HUB_PAGE
from shardyard.config.resolved import RollbackTarget
from shardyard.config.schema.recipe import Recipe
from shardyard.config.site import read_site
from shardyard.control.hub_access import access_errors
from shardyard.control.job import (
    LaunchedJob,
    check_submission_finished,
    fetch_progress,
    launched_of,
    reject_bench,
)
from shardyard.control.prepare_remote import data_line, find_prepared
from shardyard.control.request import Request, check_weights_match_config
from shardyard.control.resume import check_job_over, propose_resume
from shardyard.control.submission import (
    Launchers,
    Proposal,
    check_launcher_allowed,
    check_run_is_new,
    launcher_named,
    propose,
    refusals,
    submit,
    training_problems,
    unfit_reason,
    with_machines,
)
from shardyard.errors import OutOfMemoryError, Problem, RecipeError, RequestError
from shardyard.launchers.base import ChecksAccess, Launcher
from shardyard.launchers.ledger import Ledger
from shardyard.rundir.layout import RunDir, new_run_id
from shardyard.rundir.lease import Lease


def proposal_of(
    words: Sequence[Source], launcher: Launcher, *, is_dry_run: bool = False
) -> Proposal:
    """Return what would be submitted for a recipe, with its plan and price.

    Creates no file or job.

    Raises:
        RequestError: It cannot be launched there as it is.
    """
    check_launcher_allowed(launcher, read_site().limits)  # before what another would not need
    words = with_machines(words, launcher)
    with _with_access(launcher, is_dry_run=is_dry_run) as further:
        request = Request.read(
            words, needs_weights=False, only_looks=True, sees=launcher.node_paths, further=further
        )
    run = request.recipe.run
    run_id = run.id or new_run_id(str(request.preview().recipe.run.name))
    run_dir = RunDir(Path(run.dir).expanduser().resolve() / run_id)
    check_run_is_new(run_dir)
    check_weights_match_config(request)
    proposal = propose(request, launcher, run_dir=run_dir, is_dry_run=is_dry_run)
    return replace(
        proposal, data=_of_data(proposal, [each for each in words if isinstance(each, str)])
    )


@contextmanager
def _with_access(
    launcher: Launcher, *, is_dry_run: bool
) -> Iterator[Callable[[Recipe], list[Problem]]]:
    """Report what access lacks together with a recipe's problems; a dry run looks at neither.

    Yields:
        The launcher's problems of a recipe.
    """
    seen: list[Recipe] = []

    def further(recipe: Recipe) -> list[Problem]:
        seen.append(recipe)
        return training_problems(recipe, launcher)

    try:
        yield further
    except RecipeError as error:
        if is_dry_run or not seen:
            raise
        lacking = _access_errors(seen[0], launcher, has_others=True)
        raise error.with_problems(lacking) from None


def _access_errors(recipe: Recipe, launcher: Launcher, *, has_others: bool) -> list[Problem]:
    """Return why this user cannot reach the scheduler, or may not submit.

    Args:
        has_others: Whether something else is wrong. If not, a missing right is left to the
            submission, whose error has the exit code of access.
    """
    if not isinstance(launcher, ChecksAccess):
        return []
    found = launcher.context_errors(recipe)
    return found if found or not has_others else launcher.permission_errors(recipe)


def reasons_against(proposal: Proposal) -> tuple[list[str], list[str]]:
    """Return what speaks against a submission: plan, price and access, then the hub.

    Asks the hub, and the scheduler if there is another reason.
    """
    recipe, launcher = proposal.request.recipe, proposal.launcher
    against, hub = refusals(proposal), access_errors(recipe, launcher)
    lacking = _access_errors(recipe, launcher, has_others=bool(against or hub))
    return [*against, *map(str, lacking)], hub


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
    against, hub = reasons_against(proposal)
    if against or hub:
        raise rejection(proposal, against, hub)
    return True


def rejection(proposal: Proposal, against: Sequence[str], hub: Sequence[str]) -> RequestError:
    """Return the error of a proposal that is rejected, with the page that explains it.

    Args:
        against: What plan, price and access say.
        hub: What the Hugging Face hub says.
    """
    is_unfit = unfit_reason(proposal.plan) is not None
    page = OutOfMemoryError.page if is_unfit else HUB_PAGE if hub else ""
    return RequestError("\n".join([*against, *hub]), page=page)


def submitted(proposal: Proposal) -> LaunchedJob:
    """Submit; the job.

    Raises:
        ShardyardError: As ``submit``.
    """
    run_dir = proposal.run_dir
    return LaunchedJob(
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
