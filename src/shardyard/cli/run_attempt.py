"""An attempt on this machine as the command line shows it: trained, then summed up."""

import json

from shardyard.cli.progress import attempt_view
from shardyard.control.attempt import Attempt
from shardyard.control.train import TrainResult, train
from shardyard.io.terminal import echo, echo_err, print_table
from shardyard.report.next_steps import terminal_lines
from shardyard.report.run_data import read_run
from shardyard.report.summary import Summary
from shardyard.rundir.layout import RunDir
from shardyard.units import format_count, format_seconds


def run_attempt(attempt: Attempt, *, as_json: bool) -> int:
    """Train, and print what came of it. Returns the exit code."""
    trained = train(attempt, view_factory=attempt_view)
    if as_json:
        echo(json.dumps(trained.to_json(), indent=1))
    elif trained.summary is not None and trained.summary.steps_done:
        _show(trained, trained.summary)
    if trained.exit_code != 0:
        is_error = trained.answer["outcome"] == "failed"
        echo_err(f"{'error: ' if is_error else ''}{trained.answer['message']}")
        if trained.page:
            echo_err(f"docs: {trained.page}")
    return trained.exit_code


def _show(trained: TrainResult, summary: Summary) -> None:
    rows = [
        ("step", f"{summary.steps_done:,} of {summary.steps_planned:,}", summary.state),
        ("loss", _nats(summary.loss, summary.unit), "of the last step"),
    ]
    if summary.eval_loss is not None:
        scores = (
            f"{name.replace('_', ' ')} {'-' if value is None else f'{value:,.4g}'}"
            for name, value in summary.scores.items()
        )
        rows.append(("evaluation", _nats(summary.eval_loss, summary.unit), ", ".join(scores)))
    if summary.unigram_entropy:
        entropy = _nats(summary.unigram_entropy, summary.unit)
        rows.append(("unigram entropy", entropy, "what ignoring all context reaches"))
    rows += [
        (f"{summary.unit}s", format_count(summary.tokens or 0), "read in training"),
        (
            "speed",
            f"{format_count(summary.tokens_per_s or 0)} {summary.unit}s/s",
            f"median; a step takes {format_seconds(summary.step_time_s or 0)} "
            f"({summary.steps_words()})",
        ),
        (
            "MFU",
            "-" if summary.mfu is None else f"{summary.mfu['full']:.1%}",
            summary.mfu_note,
        ),
        ("time trained", format_seconds(summary.trained_s), _running(summary)),
        ("wall time", format_seconds(summary.wall_s), _wall(summary)),
    ]
    print_table(("result", "", ""), rows)
    if trained.run_dir.sample.is_file():
        _show_sample(trained.run_dir)
    echo()
    for name, path in trained.paths.items():
        if path is not None:  # without one it was said why
            echo(f"{name}: {path}")
    for line in terminal_lines(summary.levers, summary.findings, summary.step_time_s):
        echo(line)


def _running(summary: Summary) -> str:
    running = f"of {format_seconds(summary.running_s)} running time"
    share = summary.effective_share
    return running if share is None else f"{share:.1%} {running} (effective share)"


def _wall(summary: Summary) -> str:
    if not summary.between_s:
        return "from start to end of all processes"
    between = format_seconds(summary.between_s)
    return f"over {len(summary.attempts)} attempts, {between} of it between them"


def _show_sample(run_dir: RunDir) -> None:
    """Print the prompt, then what the model wrote after it."""
    record = read_run(run_dir)
    text = run_dir.sample.read_text()
    method = f", {record.sampling_method}" if record.sampling_method else ""
    prompt = record.resolved.recipe.task.prompt if record.resolved else ""
    if prompt and text.startswith(prompt):
        parts = [("prompt", prompt), (f"the model continues{method}", text[len(prompt) :])]
    else:  # the tokenizer does not give the prompt back as it is
        parts = [(f"a sample of generated text{method}", text)]
    for title, part in parts:
        echo(f"\n{title}:\n")
        for line in part.strip("\n").splitlines():
            echo(f"    {line}")


def _nats(value: float | None, unit: str) -> str:
    article = "an" if unit == "image" else "a"
    return "not finite" if value is None else f"{value:.3f} nats {article} {unit}"
