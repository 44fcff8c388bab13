"""`shardyard scale`: lets a launched run go on with another number of nodes.

A job that can be resized goes on with them at once. Any other is asked to save and end, as
`shardyard cancel` asks it, and when it is over the run is submitted again, as `shardyard resume`
does; all that could be refused is looked at before.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from shardyard.cli.launch import Terms, agree, say_next
from shardyard.cli.options import (
    as_override,
    json_option,
    launch_options,
    launchers_in,
    run_argument,
    runs_dir_option,
    trust_option,
)
from shardyard.cli.watch import watch
from shardyard.control.job import Launched, describe_job, fetch_progress, find_steered
from shardyard.control.resume import propose_again
from shardyard.control.scale import drain, job_words, refuse_ended, refuse_out_of_range
from shardyard.control.submission import submit
from shardyard.errors import RequestError, ShardyardError
from shardyard.launch.base import JobState, JobStatus, Resizer
from shardyard.rundir.lease import Lease
from shardyard.terminal import say, tell


@click.command()
@run_argument
@click.argument("nodes", type=click.IntRange(min=1))
@runs_dir_option
@launch_options
@click.option("--dry-run", is_flag=True, help="Say or print what would be done; change nothing.")
@trust_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    /,
    run: str,
    *,
    nodes: int,
    runs_dir: Path,
    trusts_folder: bool,
    max_usd: float | None,
    **terms: Any,
) -> int:
    """Let RUN (a path, an id, or the beginning of one) go on with NODES nodes.

    Where the job keeps its number of nodes it is drained, and a new one is submitted.
    """
    launched = find_steered(run, runs_dir, launchers_in(context), trusts_folder=trusts_folder)
    status = launched.status()
    refuse_ended(launched, nodes, status)
    launcher = launched.launcher
    if isinstance(launcher, Resizer) and launcher.resizes(launched.job):
        return _resize(launched, launcher, nodes, status, Terms(**terms))
    overrides = (f"cluster.nodes={nodes}", *as_override(max_usd))
    return _submit_again(launched, nodes, overrides, Terms(**terms))


def _resize(
    launched: Launched, launcher: Resizer, nodes: int, status: JobStatus, terms: Terms
) -> int:
    """Change the number of nodes of a job that goes on."""
    refuse_out_of_range(launched, nodes)
    job = job_words(launched)
    if terms.dry_run:
        words = f"{job} would be given {nodes} nodes"
    else:
        launcher.resize(launched.job, nodes)
        words = (
            f"{job} was given {nodes} nodes; the run goes on from its newest durable checkpoint "
            f"once they have met. `shardyard status {launched.run_dir.handle}` shows them"
        )
    _answer(launched, nodes, status, words, as_json=terms.as_json)
    return watch(launched, node=0) if terms.is_followed and not terms.dry_run else 0


def _submit_again(launched: Launched, nodes: int, overrides: Sequence[str], terms: Terms) -> int:
    """Drain the job, and submit the run again."""
    run_dir, job = launched.run_dir, job_words(launched)
    has = launched.recipe().cluster.nodes
    if nodes == has:
        raise RequestError(
            f"NODES={nodes}, and {job} was submitted with that many. A new job would only cost the "
            "time between the two. Give another number."
        )
    fetch_progress(launched)
    proposal = propose_again(run_dir, overrides, launched.launcher, is_dry_run=terms.dry_run)
    would = "would be" if terms.dry_run else "will be"
    say(f"{job} keeps its {has} nodes: it {would} drained, and the run submitted again")
    if not agree(proposal, terms, question="drain it and submit the run again?"):
        return 0
    try:
        ended = drain(launched)
        if ended.state is JobState.SUCCEEDED:
            words = f"{job} came to the end of the run before it drained: nothing was submitted"
            _answer(launched, nodes, ended, words, as_json=terms.as_json)
            return 0
        Lease(run_dir.lease).close()  # no process of this machine trains it either
        say(f"{job} is over ({ended.state.value}): submitting the run with {nodes} nodes")
        submitted = submit(proposal)
    except (ShardyardError, KeyboardInterrupt):
        say(
            f"note: {job} was asked to end, and no other was submitted. Once `shardyard status "
            f"{run_dir.handle}` says that it is over, `shardyard resume {run_dir.handle} "
            f"cluster.nodes={nodes}` goes on with {nodes} nodes."
        )
        raise
    return say_next(proposal, submitted, terms)


def _answer(
    launched: Launched, nodes: int, status: JobStatus, words: str, *, as_json: bool
) -> None:
    if as_json:
        content = {**describe_job(launched.job, status), "asked_nodes": nodes, "message": words}
        tell(json.dumps(content, indent=1))
    else:
        tell(words)
