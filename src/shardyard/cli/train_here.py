"""An attempt on this machine as the command line shows it: trained, then summed up."""

import json

from shardyard.cli.tables import print_table
from shardyard.control.agent_process import run_agent_process
from shardyard.control.attempt import Attempt, no_plan, write_down
from shardyard.control.last_report import write_last_report
from shardyard.report.summary import Summary
from shardyard.rundir.layout import RunDir
from shardyard.terminal import say, tell
from shardyard.units import format_count, format_seconds


def run_attempt(attempt: Attempt, *, as_json: bool) -> int:
    """Write the attempt's files, train, and print what came of it. Returns the exit code."""
    prediction = attempt.plan()
    write_down(attempt, prediction)
    say(no_plan() if prediction is None else prediction.line())
    answer = run_agent_process(attempt.run_dir, attempt.number)
    summary = write_last_report(attempt.run_dir, attempt.number, attempt.resolved.recipe)
    if as_json:
        numbers = {} if summary is None else summary.to_json()
        tell(json.dumps({**_paths(attempt.run_dir), **numbers, **answer}, indent=1))
    elif summary is not None and summary.steps_done:
        _show(attempt.run_dir, summary)
    if answer["exit_code"] != 0:
        is_error = answer["outcome"] == "failed"
        say(f"{'error: ' if is_error else ''}{answer['message']}")
    return int(answer["exit_code"])


def _paths(run_dir: RunDir) -> dict[str, str | None]:
    latest = run_dir.latest_checkpoint()
    checkpoint = None if latest is None else str(latest)
    report = str(run_dir.report_html) if run_dir.report_html.is_file() else None
    return {"checkpoint": checkpoint, "report_html": report}


def _show(run_dir: RunDir, summary: Summary) -> None:
    rows = [
        ("step", f"{summary.steps_done:,} of {summary.steps_planned:,}", summary.state),
        ("loss", _nats(summary.loss), "of the last step"),
    ]
    if summary.eval_loss is not None:
        scores = (
            f"{name.replace('_', ' ')} {'-' if value is None else f'{value:,.4g}'}"
            for name, value in summary.scores.items()
        )
        rows.append(("evaluation", _nats(summary.eval_loss), ", ".join(scores)))
    rows += [
        ("unigram entropy", _nats(summary.unigram_entropy), "what ignoring all context reaches"),
        ("tokens", format_count(summary.tokens or 0), "read in training"),
        (
            "speed",
            f"{format_count(summary.tokens_per_s or 0)} tokens/s",
            f"median; a step takes {format_seconds(summary.step_time_s or 0)}",
        ),
        (
            "MFU",
            "-" if summary.mfu is None else f"{summary.mfu['full']:.1%}",
            summary.mfu_note,
        ),
        ("wall time", format_seconds(summary.wall_s), "from start to end of all processes"),
    ]
    print_table(("result", "", ""), rows)
    if run_dir.sample.is_file():
        tell("\na sample of generated text:\n")
        for line in run_dir.sample.read_text().splitlines():
            tell(f"    {line}")
    tell()
    for name, path in _paths(run_dir).items():
        if path is not None:  # without one it was said why
            tell(f"{name}: {path}")


def _nats(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f} nats a token"
