"""The task of a name: ours (``config/tasks.py``), or one that a package adds."""

from typing import Any

from shardyard.config.tasks import TASKS, TaskRow
from shardyard.errors import RequestError
from shardyard.plugins import PlugIn, load_entry_point, load_object, plug_in_named

NOT_BUILT = ("dpo", "ipo", "kto", "orpo", "simpo", "cpo", "ppo", "grpo", "rlhf", "reward")
"""Other trainers' names for tasks that are not built here."""


def task_row(name: str) -> TaskRow:
    """The row of a task, ours or a package's.

    Raises:
        RequestError: There is none, or a package's cannot be used.
    """
    ours = TASKS.get(name)
    if ours is not None:
        return ours
    if name in NOT_BUILT and plug_in_named("tasks", name) is None:
        raise RequestError(
            "tuning by preferences or rewards is not built. Train on the answers that were "
            "preferred (task.name=causal_lm), or give what `shardyard export` writes to a tool for "
            "it, such as TRL."
        )
    row: TaskRow = load_entry_point("tasks", name, builtin=TASKS, validate=_validate_row)
    return row


def task_code(name: str) -> Any:
    """Return the code that a task's row names; imports torch.

    Raises:
        RequestError: As ``task_row``, or a package's code cannot be imported.
    """
    return load_object(_package(name), task_row(name).code)


def task_prepare(name: str) -> Any:
    """Return the function that writes a task's dataset; raises as ``task_code``."""
    return load_object(_package(name), task_row(name).prepare)


def _package(name: str) -> PlugIn | None:
    return None if name in TASKS else plug_in_named("tasks", name)


def _validate_row(content: Any) -> str:
    if not isinstance(content, TaskRow):
        return f"is {type(content).__name__}, not a shardyard.config.tasks.TaskRow"
    return "" if next(iter(content.metrics), "") == "loss" else "has no loss as its first metric"
