"""An attempt on this machine as the command line shows it: trained, then summed up."""

import json

from shardyard.cli.progress import attempt_view
from shardyard.control.attempt import Attempt
from shardyard.control.train import TrainResult, train
from shardyard.io.terminal import echo, echo_err
from shardyard.report.document import Paragraph, Tiles
from shardyard.report.page import change_blocks, tiles
from shardyard.report.run_data import read_run
from shardyard.report.summary import Summary
from shardyard.report.terminal import show
from shardyard.rundir.layout import RunDir


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
    show([Paragraph(summary.sentence()), Tiles(tiles(summary))])
    if trained.run_dir.sample.is_file():
        _show_sample(trained.run_dir)
    echo()
    for name, path in trained.paths.items():
        if path is not None:  # without one it was said why
            echo(f"{name}: {path}")
    show(change_blocks(summary))


def _show_sample(run_dir: RunDir) -> None:
    """Print the prompt, then what the model wrote after it."""
    record = read_run(run_dir)
    text = run_dir.sample.read_text()
    method = f", {record.sampling_method}" if record.sampling_method else ""
    task = record.resolved.recipe.task if record.resolved else None
    prompt = "" if task is None else (task.prompts or (task.prompt,))[0]
    if prompt and text.startswith(prompt):
        parts = [("prompt", prompt), (f"the model continues{method}", text[len(prompt) :])]
    else:  # the tokenizer does not give the prompt back as it is
        parts = [(f"a sample of generated text{method}", text)]
    for title, part in parts:
        echo(f"\n{title}:\n")
        for line in part.strip("\n").splitlines():
            echo(f"    {line}")
