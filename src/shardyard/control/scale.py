"""Change the number of nodes of a launched run.

A job that can be resized continues with them at once. Any other has to save and end. When
it is over, the run is submitted again, as by `shardyard resume`; all reasons to reject that
are checked before.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardyard.control.job import LaunchedJob, fetch_progress, reject_bench, wait_until
from shardyard.control.launch import check_proposal, submitted
from shardyard.control.resume import propose_resume
from shardyard.control.submission import Proposal
from shardyard.errors import RequestError, ShardyardError
from shardyard.launchers.base import JobState, JobStatus, Resizer
from shardyard.log import info
from shardyard.rundir.lease import Lease
from shardyard.units import format_seconds

_END_SLACK_S = 180.0
"""Beyond elastic.drain_timeout_s: for the scheduler to pass the request on and to clean up."""


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Result of scaling."""

    job: LaunchedJob
    """Job that the run continues with."""
    status: JobStatus
    """Status of the previous job."""
    words: str
    """Description of what was done; empty where the run was submitted again."""
    proposal: Proposal | None = None
    """Proposal of the run that was submitted again."""


def scale(
    job: LaunchedJob,
    nodes: int,
    overrides: Sequence[str] = (),
    *,
    dry_run: bool = False,
    agree: Callable[[Proposal], bool] = check_proposal,
) -> Scaled | None:
    """Let a run continue with ``nodes`` nodes.

    Args:
        overrides: ``section.key=value`` of the run that is submitted again.
        agree: Called before a job is drained for it; also raises what speaks against it.

    Returns:
        None: it was not agreed to.

    Raises:
        RequestError: The job is over, or cannot have so many.
    """
    reject_bench(job.run_dir)
    status = job.status()
    check_not_ended(job, nodes, status)
    launcher = job.launcher
    if isinstance(launcher, Resizer) and launcher.resizes(job.submission):
        return _resize(job, launcher, nodes, status, dry_run=dry_run)
    return _resubmit(job, nodes, overrides, dry_run=dry_run, agree=agree)


def _resize(
    job: LaunchedJob, launcher: Resizer, nodes: int, status: JobStatus, *, dry_run: bool
) -> Scaled:
    """Change the number of nodes of a job that continues."""
    check_node_range(job, nodes)
    if dry_run:
        words = f"{job_words(job)} would be given {nodes} nodes"
        return Scaled(job=job, status=status, words=words)
    launcher.resize(job.submission, nodes)
    words = (
        f"{job_words(job)} was given {nodes} nodes; the run continues from its newest durable "
        f"checkpoint once they have joined. `shardyard status {job.run_dir.handle}` shows them"
    )
    return Scaled(job=job, status=status, words=words)


def _resubmit(
    job: LaunchedJob,
    nodes: int,
    overrides: Sequence[str],
    *,
    dry_run: bool,
    agree: Callable[[Proposal], bool],
) -> Scaled | None:
    """Drain the job, and submit the run again."""
    run_dir, words = job.run_dir, job_words(job)
    has = job.recipe().cluster.nodes
    if nodes == has:
        raise RequestError(
            f"NODES={nodes}, and {words} was submitted with that many. A new job would only cost "
            "the time between the two. Give another number."
        )
    fetch_progress(job)
    overrides = (f"cluster.nodes={nodes}", *overrides)
    proposal = propose_resume(run_dir, overrides, job.launcher, is_dry_run=dry_run)
    would = "would be" if dry_run else "will be"
    info(f"{words} keeps its {has} nodes: it {would} drained, and the run submitted again")
    if not agree(proposal):
        return None
    try:
        ended = drain(job)
        if ended.state is JobState.SUCCEEDED:
            outcome = f"{words} came to the end of the run before it drained: no job was submitted"
            return Scaled(job=job, status=ended, words=outcome)
        Lease(run_dir.lease).close()  # no process of this machine trains it either
        info(f"{words} is over ({ended.state.value}): submitting the run with {nodes} nodes")
        return Scaled(job=submitted(proposal), status=ended, words="", proposal=proposal)
    except (ShardyardError, KeyboardInterrupt):
        info(
            f"note: {words} was asked to end, and no other was submitted. Once `shardyard status "
            f"{run_dir.handle}` says that it is over, `shardyard resume {run_dir.handle} "
            f"cluster.nodes={nodes}` continues with {nodes} nodes."
        )
        raise


def drain(launched: LaunchedJob, *, sleep: Callable[[float], None] = time.sleep) -> JobStatus:
    """Ask the job to save and end, and wait until it is over.

    Raises:
        ShardyardError: It did not end in time, or it failed.
    """
    job, handle = job_words(launched), launched.run_dir.handle
    limit_s = launched.recipe().elastic.drain_timeout_s + _END_SLACK_S
    launched.launcher.cancel(launched.submission)
    info(f"{job} was asked to save and end; waiting up to {format_seconds(limit_s)} for it")
    status = wait_until(
        launched,
        lambda status: status.state.is_over,
        give_up_after_s=limit_s,
        reported_states=(JobState.RUNNING,),
        sleep=sleep,
    )
    if not status.state.is_over:
        raise ShardyardError(
            f"{job} was asked to save and end {format_seconds(limit_s)} ago "
            f"(elastic.drain_timeout_s, and {format_seconds(_END_SLACK_S)} for the scheduler), and "
            f"is still {status.state.value}: {status.reason}. Two jobs at once would train one "
            f"run. `shardyard logs {handle}` says what it does, `shardyard watch {handle}` waits "
            f"for its end; `shardyard teardown {handle}` ends it without saving."
        )
    if status.state is JobState.FAILED:
        raise ShardyardError(
            f"{job} failed while it drained: {status.reason}. A new job might fail the same way. "
            f"`shardyard logs {handle}` says why; the run's newest durable checkpoint stays."
        )
    return status


def job_words(launched: LaunchedJob) -> str:
    return f"job {launched.id} on {launched.on}"


def check_node_range(launched: LaunchedJob, nodes: int) -> None:
    """Raise if this job was not launched for so many or so few."""
    handle, recipe = launched.run_dir.handle, launched.recipe()
    fixed, elastic = recipe.cluster.nodes, recipe.elastic
    least = fixed if elastic.min_nodes == "auto" else elastic.min_nodes
    most = fixed if elastic.max_nodes == "auto" else elastic.max_nodes
    if least <= nodes <= most:
        return
    bounds = f"{least} nodes" if least == most else f"{least} to {most} nodes"
    raise RequestError(
        f"NODES={nodes} but the run was launched for {bounds} (elastic.min_nodes, "
        "elastic.max_nodes; cluster.nodes where they are not given). Use `shardyard cancel "
        f"{handle}`, then `shardyard resume {handle} cluster.nodes={nodes}` with "
        f"elastic.max_nodes={max(nodes, most)}."
    )


def check_not_ended(launched: LaunchedJob, nodes: int, status: JobStatus) -> None:
    if status.state.is_over:
        raise RequestError(
            f"job {launched.id} is over ({status.state.value}), so it cannot be scaled. `shardyard "
            f"resume {launched.run_dir.handle} cluster.nodes={nodes}` continues with {nodes} nodes."
        )
