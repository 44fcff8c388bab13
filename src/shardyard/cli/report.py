"""`shardyard report`: a run's page and Markdown summary."""

import json
from pathlib import Path

import click

from shardyard.cli.options import json_option, run_argument, runs_dir_option
from shardyard.control.resend import send_run
from shardyard.control.suggestions import levers_of_run
from shardyard.io.terminal import echo, echo_err
from shardyard.report.page import terminal_blocks, write_report
from shardyard.report.terminal import show
from shardyard.rundir.layout import find_run


@click.command()
@run_argument
@runs_dir_option
@json_option
@click.option("--send", is_flag=True, help="Send W&B and MLflow the data that they lack.")
def command(run: str, *, runs_dir: Path, as_json: bool, send: bool) -> None:
    """Write report.html and report.md to the folder of RUN (path, id or its beginning).

    Works on running and failed runs too; reads only the run folder.
    """
    found = find_run(run, runs_dir)
    if send:
        send_run(found)
    summary = write_report(found, suggest=levers_of_run)
    if as_json:
        content = summary.to_json()
        paths = {
            "report_html": str(found.report_html),
            "report_markdown": str(found.report_markdown),
        }
        echo(json.dumps({**content, **paths}, indent=1))
        return
    show(terminal_blocks(summary), write=echo_err)
    echo(found.report_html)
    echo(found.report_markdown)
