"""Both files of a report, and the text of report.md: the same numbers as the page."""

import re

from shardyard.config.rules.tags import tag_words
from shardyard.io.files import write_text
from shardyard.io.sanitize import sanitize
from shardyard.log import warn
from shardyard.report.attempts import attempts_table
from shardyard.report.html import (
    charts_unavailable_reason,
    escape_markdown,
    render_markdown_table,
)
from shardyard.report.page import HEADS, profile_rows, profile_words, render, tiles
from shardyard.report.run_data import RunRecord, read_run
from shardyard.report.summary import Suggest, Summary, no_levers, summarize
from shardyard.report.walltime import PHASES, WAITING
from shardyard.rundir.layout import RunDir
from shardyard.units import format_error, format_percent, format_seconds, format_value


def render_markdown(record: RunRecord, summary: Summary) -> str:
    """The report as Markdown; curves, settings and events are on the page."""
    title = f"# {escape_markdown(summary.run_id)}: {summary.state}"
    blocks = [title, escape_markdown(summary.sentence())]
    if summary.state != "finished" and summary.state_reason:
        blocks.append(escape_markdown(summary.state_reason))
    if record.plan is not None:
        blocks.append(escape_markdown(record.plan.line()))
    blocks.append(render_markdown_table(("", "", ""), tiles(summary)))
    blocks.append(escape_markdown(f"MFU: {summary.mfu_note}."))
    if summary.tags:
        blocks.append(f"Tags: {escape_markdown(tag_words(summary.tags, ', '))}")
    blocks += [] if summary.cost is None else [escape_markdown(summary.cost.words())]
    blocks.append(escape_markdown(summary.health.words))
    blocks += [f"- {escape_markdown(text)}" for text in summary.health.problems]
    blocks += _what_to_change(summary)
    blocks += _attempts(summary)
    blocks += ["## Where the time went", summary.effective_words(), _phases(summary)]
    if summary.comparisons:
        rows = [
            (
                row.name,
                format_value(row.predicted, row.unit, "not predicted"),
                format_value(row.measured, row.unit, "not measured"),
                format_error(row.error),
            )
            for row in summary.comparisons
        ]
        heads = ("term", "predicted", "measured", "error")
        blocks += ["## Predicted against measured", render_markdown_table(heads, rows)]
    for profile in record.profiles:
        table = render_markdown_table(HEADS, profile_rows(profile))
        blocks += ["## Where a step's time went", escape_markdown(profile_words(profile)), table]
    if record.sample:
        drawn = record.sampling_method
        blocks += [f"## Sample{f', {drawn}' if drawn else ''}", _fenced(record.sample)]
    copied = [f"# {each.purpose}\n{each.command}" for each in summary.commands]
    blocks += ["## Commands", "```sh\n" + "\n".join(copied) + "\n```"]
    blocks.append("Curves, settings with reasons, manifest and events: [report.html](report.html)")
    return sanitize("\n\n".join(blocks) + "\n")


def _what_to_change(summary: Summary) -> list[str]:
    if not (summary.levers or summary.findings):
        return []
    told = [f"- {escape_markdown(text)}" for text in summary.findings]
    for lever in summary.levers:
        words = escape_markdown(f"{lever.name}: {lever.words(summary.step_time_s or 0.0)}.")
        told.append(f"- {words} `{' '.join(lever.settings)}`")
    return ["## What to change", *told]


def _phases(summary: Summary) -> str:
    rows = [
        (
            name,
            _time(seconds),
            format_percent(seconds / summary.running_s) if summary.running_s else "",
            PHASES[name],
        )
        for name, seconds in summary.phases.items()
        if name != WAITING
    ]
    rows.append(("running time", _time(summary.running_s), "100 %", "shares are of this"))
    if summary.between_s:
        rows.append(("between attempts", _time(summary.between_s), "", PHASES[WAITING]))
        rows.append(("wall time", _time(summary.wall_s), "", ""))
    return render_markdown_table(("phase", "time", "share", "what"), rows)


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds >= 0 else f"{seconds:.3f} s"


def _attempts(summary: Summary) -> list[str]:
    if len(summary.results) < 2 and len(summary.paces) < 2:
        return []
    heads, rows = attempts_table(summary.results)
    return ["## Attempts", render_markdown_table([h.removeprefix("#") for h in heads], rows)]


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks in it."""
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def write_report(run: RunDir, *, suggest: Suggest = no_levers) -> Summary:
    """Write both files and return their numbers; without pictures where none can be drawn.

    Args:
        suggest: Plans the levers; without it, the report has none.

    Raises:
        RequestError: The folder holds no attempt.
        StorageError: The folder cannot be written.
    """
    record = read_run(run)
    summary = summarize(record, suggest=suggest)
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
