"""Another number of nodes for a launched run: it is drained and submitted again, or resized."""

import time
from collections.abc import Callable

from shardyard.control.job import Launched, wait_until
from shardyard.errors import RequestError, ShardyardError
from shardyard.launch.base import JobState, JobStatus
from shardyard.talk import say
from shardyard.units import format_seconds

_END_SLACK_S = 180.0
"""Beyond elastic.drain_timeout_s: for the scheduler to pass the wish on and to clean up."""


def drain(launched: Launched, *, sleep: Callable[[float], None] = time.sleep) -> JobStatus:
    """Ask the job to save and end, and wait until it is over.

    Raises:
        ShardyardError: It did not end in time, or it failed.
    """
    job, handle = job_words(launched), launched.run_dir.handle
    limit_s = launched.recipe().elastic.drain_timeout_s + _END_SLACK_S
    launched.launcher.cancel(launched.job)
    say(f"{job} was asked to save and end; waiting up to {format_seconds(limit_s)} for it")
    status = wait_until(
        launched,
        lambda status: status.state.is_over,
        give_up_after_s=limit_s,
        shown=(JobState.RUNNING,),
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


def job_words(launched: Launched) -> str:
    return f"job {launched.job.id} on {launched.job.launcher}"


def refuse_out_of_range(launched: Launched, nodes: int) -> None:
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


def refuse_ended(launched: Launched, nodes: int, status: JobStatus) -> None:
    if status.state.is_over:
        raise RequestError(
            f"job {launched.job.id} is over ({status.state.value}), so there is nothing to scale. "
            f"`shardyard resume {launched.run_dir.handle} cluster.nodes={nodes}` goes on with "
            f"{nodes} nodes."
        )
