"""The class of a task, by its name."""

from shardyard.config.task_lookup import task_code
from shardyard.errors import RequestError
from shardyard.tasks.base import Task


def task_class(name: str) -> type[Task]:
    """The task of a name.

    Raises:
        RequestError: There is none of it, or a package's cannot be used.
    """
    task_type: type[Task] = task_code(name)
    if (
        not (isinstance(task_type, type) and issubclass(task_type, Task))
        or task_type.__abstractmethods__
    ):
        lacks = ", ".join(sorted(getattr(task_type, "__abstractmethods__", ()))) or "its base class"
        raise RequestError(
            f"task.name={name}: {task_type!r}, which its row names as its code, is no whole "
            f"shardyard.tasks.base.Task: it lacks {lacks}. Mend the package that adds it."
        )
    return task_type
