"""`shardyard evaluate`: perplexity and task scores of a run or a model folder."""

import json
from pathlib import Path

import click

from shardyard.cli.completion import by, runs
from shardyard.cli.options import json_option, launchers_in, runs_dir_option
from shardyard.control.evaluate import COLUMNS, EvaluationRequest, evaluate, table
from shardyard.io.path_option import LocalPath
from shardyard.io.terminal import echo, echo_err, print_table


@click.command("evaluate")
@click.argument("model", metavar="RUN|FOLDER", type=LocalPath(), shell_complete=by(runs))
@click.option(
    "--task",
    "tasks",
    metavar="FILE|NAME",
    multiple=True,
    help="Task file in the format of lm-evaluation-harness, or a task that comes with Shardyard. "
    "Repeat it for several.",
)
@click.option(
    "--text",
    "texts",
    metavar="FILES",
    multiple=True,
    help="File, folder or glob of text, as data.source takes it: report its perplexity.",
)
@click.option("--text-key", default="text", show_default=True, help="Key of the text in rows.")
@click.option(
    "--step",
    default="latest",
    show_default=True,
    help="Checkpoint of a run: a step, latest or best.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), help="Most examples of each task, or documents of text."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Format of the weights in memory. Default: as saved.",
)
@click.option(
    "--context",
    type=click.IntRange(min=2),
    help="Most tokens that the model reads. Default: as many as it can.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    help="Processes, each with the whole model. Default: one for each accelerator.",
)
@click.option(
    "--batch-tokens",
    type=click.IntRange(min=1),
    help="Most tokens of a batch, padding included. Default: 16384.",
)
@runs_dir_option
@json_option
@click.pass_context
def command(
    context_: click.Context,
    model: str,
    *,
    tasks: tuple[str, ...],
    texts: tuple[str, ...],
    text_key: str,
    step: str,
    limit: int | None,
    dtype: str | None,
    context: int | None,
    processes: int | None,
    batch_tokens: int | None,
    runs_dir: Path,
    as_json: bool,
) -> None:
    """Score a run's checkpoint or a model folder on tasks and text.

    Without --task and --text, it runs small tasks that come with Shardyard. Results of a run are
    kept in its folder evaluations/.
    """
    request = EvaluationRequest(
        tasks=tasks,
        texts=texts,
        text_key=text_key,
        step=step,
        limit=limit,
        dtype=dtype,
        context=context,
        processes=processes,
        batch_tokens=batch_tokens,
    )
    result = evaluate(model, request, runs_dir=runs_dir, launchers=launchers_in(context_))
    if as_json:
        echo(json.dumps(result, indent=1))
        return
    print_table(COLUMNS, table(result))
    if "file" in result:
        echo_err(f"kept in {result['file']}")
