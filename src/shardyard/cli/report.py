"""`shardyard report`: a run's page and Markdown summary."""

import json
from pathlib import Path

import click

from shardyard.cli.options import json_option, run_argument, runs_dir_option
from shardyard.control.resend import send_run
from shardyard.control.suggestions import levers_of_run
from shardyard.io.terminal import echo, echo_err
from shardyard.report.next_steps import terminal_lines
from shardyard.report.write import write_report
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
    echo_err(summary.sentence())
    if summary.state in ("drained", "failed", "lost"):
        echo_err(summary.state_reason)
    for line in terminal_lines(summary.levers, summary.findings, summary.step_time_s):
        echo_err(line)
    for each in summary.commands:
        echo_err(f"{each.purpose}: {each.command}")
    echo(found.report_html)
    echo(found.report_markdown)
