"""Tasks of data.eval_tasks on their way to the training, which reads no task files.

The questions of each task are written as text next to the prepared data, in a file that is named by
its content.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.data.eval_tasks.prompts import Example, build_examples
from shardyard.data.eval_tasks.rows import read_rows
from shardyard.data.eval_tasks.task import EvalTask
from shardyard.data.eval_tasks.task_file import find_task
from shardyard.errors import RequestError
from shardyard.io.files import make_folder, write_text


def prepare_eval_tasks(recipe: Recipe, metadata: DatasetMetadata) -> tuple[tuple[str, str], ...]:
    """Write the questions of each task; returns the name of each, and of its file.

    Raises:
        RequestError: A task is wrong.
        SourceError: Its data cannot be read.
        StorageError: The file system rejected a write.
    """
    files = []
    for name, task in read_eval_tasks(recipe).items():
        examples = [asdict(each) for each in examples_of(task)]
        text = json.dumps({"task": task.to_json(), "examples": examples})
        file = f"eval-tasks/{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        target = Path(metadata.dir) / file
        if not target.is_file():
            make_folder(target.parent)
            write_text(target, text)
        files.append((name, file))
    return tuple(files)


def read_eval_tasks(recipe: Recipe) -> dict[str, EvalTask]:
    """Read the files of data.eval_tasks; returns the tasks by name.

    Raises:
        RequestError: One cannot be read or scored, or lacks a metric that run.target names.
    """
    found = {}
    for name, word in recipe.data.eval_tasks.items():
        given = f"data.eval_tasks.{name}={word}"
        task = find_task(word, given=given)
        if task.output_type == "generate_until":
            raise RequestError(
                f"{given}: output_type=generate_until generates text, and validation scores only "
                "given texts. Leave it out, and use `shardyard evaluate RUN --task FILE`."
            )
        found[name] = task
    for target in recipe.run.target or ():
        name, _, metric = target.partition("/")
        if name in found and metric not in found[name].metrics:
            known = ", ".join(f"{name}/{each}" for each in found[name].metrics)
            raise RequestError(
                f"run.target: the task of data.eval_tasks.{name} has no {metric}. It has {known}. "
                "Name one of these, or list the metric in the task's metric_list."
            )
    return found


def examples_of(task: EvalTask, limit: int | None = None) -> list[Example]:
    """Read the questions of a task.

    Args:
        limit: Most questions; None: all.

    Raises:
        RequestError: A file or a template of the task is wrong.
        SourceError: A file cannot be read.
    """
    rows = read_rows(task, task.split)
    shot_rows = []
    if task.shots.number and not task.shots.samples:
        is_same = task.shot_split == task.split
        shot_rows = rows if is_same else read_rows(task, task.shot_split)
    return build_examples(task, rows, shot_rows, limit)
