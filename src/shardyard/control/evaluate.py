"""Evaluate a model: perplexity of text, and tasks in the format of lm-evaluation-harness."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.control.run_location import locate_run
from shardyard.control.submission import Launchers
from shardyard.control.subprocesses import run_program
from shardyard.errors import RequestError
from shardyard.rundir.layout import RUNS_DIR, find_run, is_run

BUILTIN_TASKS = ("shardyard_addition", "shardyard_facts", "shardyard_word_order")
"""Tasks that come with Shardyard: evaluated unless tasks or texts are given."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """Tasks and texts to evaluate, and options."""

    tasks: Sequence[str] = ()
    """Task files, or names of tasks that come with Shardyard."""
    texts: Sequence[str] = ()
    """Files, folders or globs of text."""
    text_key: str = "text"
    """Key of the text in rows."""
    step: str = "latest"
    """Checkpoint of a run: a step, latest or best."""
    limit: int | None = None
    """Most examples of each task, and documents of each text."""
    dtype: str | None = None
    context: int | None = None
    """Most tokens that the model reads; None: as many as it can."""
    processes: int | None = None
    """Processes, each with the whole model; None: one for each accelerator."""
    batch_tokens: int | None = None

    def options(self) -> list[str]:
        """Return the options of the program that evaluates."""
        tasks = self.tasks if self.tasks or self.texts else BUILTIN_TASKS
        words = [word for task in tasks for word in ("--task", str(task))]
        words += [word for text in self.texts for word in ("--text", str(text))]
        values = {
            "--text-key": self.text_key,
            "--limit": self.limit,
            "--dtype": self.dtype,
            "--context": self.context,
            "--processes": self.processes,
            "--batch-tokens": self.batch_tokens,
        }
        # joined, so that a value that begins with a dash is no option
        return [*words, *(f"{name}={value}" for name, value in values.items() if value is not None)]


def evaluate(
    model: str | Path,
    request: EvaluationRequest,
    *,
    runs_dir: Path = Path(RUNS_DIR),
    launchers: Launchers | None = None,
) -> dict[str, Any]:
    """Evaluate a run or a model folder and return the results.

    Raises:
        RequestError: It is neither, or only the nodes see its files.
        ShardyardError: The evaluation failed.
    """
    place = model_place(model, request.step, runs_dir=runs_dir, launchers=launchers)
    return run_program("shardyard.evaluation.run", [*place.options, *request.options()])


@dataclass(frozen=True, kw_only=True)
class ModelPlace:
    """Place of a model's weights, for the programs that run it."""

    folder: Path
    """Folder of a run, or of a model."""
    step: str | None
    """Checkpoint of the run: a step, latest or best; None: it is a model's folder."""

    @property
    def options(self) -> list[str]:
        """Options of such a program."""
        if self.step is None:
            return [f"--folder={self.folder}"]
        return [f"--run={self.folder}", f"--step={self.step}"]


def model_place(
    model: str | Path, step: str, *, runs_dir: Path, launchers: Launchers | None
) -> ModelPlace:
    """Find a run or a model folder on this machine.

    Args:
        model: Folder or id of a run, also as RUN@STEP or RUN@best, or the folder of a model.
        step: Checkpoint of a run: a step, latest or best.

    Raises:
        RequestError: It is neither, or only the nodes see its files.
    """
    folder = Path(model)
    if folder.is_dir() and not is_run(folder):
        if step != "latest":
            raise RequestError(
                f"--step {step}: {model} is the folder of a model, which has no steps. Leave "
                "--step out, or give a run."
            )
        return ModelPlace(folder=folder, step=None)
    name, at, named_step = str(model).rpartition("@")
    if at and not folder.is_dir():
        if step not in ("latest", named_step):
            raise RequestError(f"{model} and --step {step} name two checkpoints. Give one of them.")
        model, step = name, named_step
    location = locate_run(find_run(str(model), runs_dir), launchers)
    found = location.folder
    if found is None and location.run_dir.checkpoint_steps() and location.run_dir.attempts():
        found = location.run_dir
    if found is None:
        handle = location.run_dir.handle
        raise RequestError(
            f"run {location.run_dir.run_id}: only its nodes see its checkpoints. Bring them here "
            f"first: `shardyard fetch {handle} --step {step}`."
        )
    return ModelPlace(folder=found.path, step=step)


def evaluate_model(
    model: str | Path,
    *,
    tasks: Sequence[str | Path] = (),
    texts: Sequence[str | Path] = (),
    text_key: str = "text",
    step: str | int = "latest",
    limit: int | None = None,
    dtype: str | None = None,
    context: int | None = None,
    processes: int | None = None,
    batch_tokens: int | None = None,
) -> dict[str, Any]:
    """Evaluate a run or a model folder, as `shardyard evaluate` does.

    Args:
        model: Folder or id of a run, or the folder of a model.
        tasks: Task files of lm-evaluation-harness, or names of tasks that come with Shardyard.
        texts: Files, folders or globs of text. With neither, all tasks that come with Shardyard.
        text_key: Key of the text in rows.
        step: Checkpoint of a run: a step, ``latest`` or ``best``.
        limit: Most examples of each task, and documents of each text; None: all.
        dtype: float32, bfloat16 or float16; None: as saved.
        context: Most tokens that the model reads; None: as many as it can.
        processes: Processes, each with the whole model; None: one for each accelerator.
        batch_tokens: Most tokens of a batch, padding included.

    Returns:
        ``results``: for each task or text its ``metrics``, each with ``value`` and ``stderr``.

    Raises:
        ShardyardError: The evaluation's own.
    """
    request = EvaluationRequest(
        tasks=[str(each) for each in tasks],
        texts=[str(each) for each in texts],
        text_key=text_key,
        step=str(step),
        limit=limit,
        dtype=dtype,
        context=context,
        processes=processes,
        batch_tokens=batch_tokens,
    )
    return evaluate(model, request)


def table(result: dict[str, Any]) -> list[list[str]]:
    """Rows of a table of the results: task, shots, examples, metric, value, standard error."""
    rows = []
    for each in result["results"]:
        head = [each["name"], str(each["shots"]), f"{each['examples']:,}"]
        for metric in each["metrics"]:
            name = metric["metric"]
            name += "" if metric["filter"] == "none" else f" ({metric['filter']})"
            stderr = metric["stderr"]
            error = "" if stderr is None else f"± {stderr:.4f}"
            value = "inf" if metric["value"] is None else f"{metric['value']:.4f}"
            rows.append([*head, name, value, error])
            head = ["", "", ""]
        if "tokens" in each:
            counts = [(f"{key}", f"{each[key]:,}", "") for key in ("tokens", "words", "bytes")]
            rows += [["", "", "", *count] for count in counts]
    return rows


COLUMNS = ("task", "shots", "examples", "metric", "value", "standard error")
