"""From a run's folder to report.html and report.md in it."""

from shardyard.files import write_text
from shardyard.report.markdown import render_markdown
from shardyard.report.render import render
from shardyard.report.run import read_run
from shardyard.report.summary import Summary, summarize
from shardyard.rundir.layout import RunDir


def write_report(run: RunDir) -> Summary:
    """Write both files and return their numbers.

    Raises:
        RequestError: The folder holds no attempt.
        StorageError: The folder cannot be written.
    """
    from shardyard.report.plots import panels  # matplotlib: half a second, not for a refused recipe

    record = read_run(run)
    summary = summarize(record)
    write_text(run.report_html, render(record, summary, panels(record)))
    write_text(run.report_markdown, render_markdown(record, summary))
    return summary
