"""`shardyard cancel`: asks a launched run to make its last step durable and end."""

import json
from pathlib import Path

import click

from shardyard.cli.launched import describe_job, find_steered, launchers_in
from shardyard.cli.options import json_option, run_argument, runs_dir_option, trust_option
from shardyard.cli.terminal import tell


@click.command()
@run_argument
@runs_dir_option
@click.option("--dry-run", is_flag=True, help="Say what would be cancelled; cancel nothing.")
@trust_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    run: str,
    *,
    runs_dir: Path,
    dry_run: bool,
    trusts_folder: bool,
    as_json: bool,
) -> None:
    """Cancel the job of RUN (a path, an id, or the beginning of one). Safe to repeat."""
    launched = find_steered(run, runs_dir, launchers_in(context), trusts_folder=trusts_folder)
    status, handle = launched.status(), launched.run_dir.handle
    job = f"job {launched.job.id} on {launched.job.launcher}"
    if status.state.is_over:
        words = f"{job} is over already: {status.state.value}"
    elif dry_run:
        words = f"{job} is {status.state.value} and would be asked to save and end"
    else:
        launched.launcher.cancel(launched.job)
        words = (
            f"{job} was asked to save and end. `shardyard watch {handle}` follows it there, "
            f"`shardyard resume {handle}` goes on later"
        )
    if as_json:
        content = {**describe_job(launched.job, status), "message": words}
        tell(json.dumps(content, indent=1))
    else:
        tell(words)
