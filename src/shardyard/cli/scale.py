"""`shardyard scale`: changes the number of nodes of an elastic run while it goes on."""

import json
from pathlib import Path

import click

from shardyard.cli.launched import Launched, describe_job, find_launched, launchers_in
from shardyard.cli.options import json_option, runs_dir_option
from shardyard.errors import RequestError
from shardyard.launch.base import JobStatus


@click.command()
@click.argument("run")
@click.argument("nodes", type=click.IntRange(min=1))
@runs_dir_option
@click.option("--dry-run", is_flag=True, help="Say what would be changed; change nothing.")
@json_option
@click.pass_context
def command(
    context: click.Context, run: str, *, nodes: int, runs_dir: Path, dry_run: bool, as_json: bool
) -> None:
    """Let RUN (a path, an id, or the beginning of one) go on with NODES nodes."""
    launched = find_launched(run, runs_dir, launchers_in(context))
    _refuse_fixed(launched, nodes)
    status = launched.status()
    _refuse_ended(launched, nodes, status)
    job = f"job {launched.job.id} on {launched.job.launcher}"
    if dry_run:
        words = f"{job} would be given {nodes} nodes"
    else:
        launched.launcher.scale(launched.job, nodes)
        words = (
            f"{job} was given {nodes} nodes; the run goes on from its newest durable checkpoint "
            f"once they have met. `shardyard status {launched.run_dir.handle}` shows them"
        )
    if as_json:
        content = {**describe_job(launched.job, status), "asked_nodes": nodes, "message": words}
        click.echo(json.dumps(content, indent=1))
    else:
        click.echo(words)


def _refuse_fixed(launched: Launched, nodes: int) -> None:
    """Raise if this launcher, or this recipe, has a fixed number of nodes."""
    handle, recipe = launched.run_dir.handle, launched.recipe()
    again = f"`shardyard cancel {handle}`, then `shardyard resume {handle} cluster.nodes={nodes}`"
    if not launched.launcher.capabilities.scales:
        raise RequestError(
            f"{launched.job.launcher} cannot change the number of nodes of a running job. Use "
            f"{again}."
        )
    fixed, elastic = recipe.cluster.nodes, recipe.elastic
    least = fixed if elastic.min_nodes == "auto" else elastic.min_nodes
    most = fixed if elastic.max_nodes == "auto" else elastic.max_nodes
    if least <= nodes <= most:
        return
    bounds = f"{least} nodes" if least == most else f"{least} to {most} nodes"
    raise RequestError(
        f"NODES={nodes} but the run was launched for {bounds} (elastic.min_nodes, "
        f"elastic.max_nodes; cluster.nodes where they are not given). Use {again} with "
        f"elastic.max_nodes={max(nodes, most)}."
    )


def _refuse_ended(launched: Launched, nodes: int, status: JobStatus) -> None:
    if status.state.is_over:
        raise RequestError(
            f"job {launched.job.id} is over ({status.state.value}), so there is nothing to scale. "
            f"`shardyard resume {launched.run_dir.handle} cluster.nodes={nodes}` goes on with "
            f"{nodes} nodes."
        )
