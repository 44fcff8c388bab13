"""From a run's folder to report.html and report.md in it."""

from shardyard.io.files import write_text
from shardyard.log import warn
from shardyard.report.matplotlib_check import charts_unavailable_reason
from shardyard.report.page import render
from shardyard.report.run_data import RunRecord, read_run
from shardyard.report.summary import Summary, summarize
from shardyard.report.write import render_markdown
from shardyard.rundir.layout import RunDir


def write_report(run: RunDir) -> Summary:
    """Write both files and return their numbers; without pictures where none can be drawn.

    Raises:
        RequestError: The folder holds no attempt.
        StorageError: The folder cannot be written.
    """
    record = read_run(run)
    summary = summarize(record)
    why_none = charts_unavailable_reason()
    panels = {} if why_none else _panels(record)
    write_text(run.report_html, render(record, summary, panels, no_charts_reason=why_none))
    write_text(run.report_markdown, render_markdown(record, summary))
    if why_none:
        warn(why_none)
    return summary


def _panels(record: RunRecord) -> dict[str, str]:
    # matplotlib: half a second, not for a refused recipe
    from shardyard.report.charts import device_panels, panels

    return {**panels(record), **device_panels(record)}
