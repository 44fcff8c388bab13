"""Running exports of FSx for Lustre into its bucket; they end with the file system."""

from typing import Any

from shardyard.cluster.clients import World
from shardyard.cluster.orphans import listed_of
from shardyard.log import warn

_RUNNING = frozenset({"PENDING", "EXECUTING", "CANCELING"})
"""States of a data repository task that is not over. Source: FSx, DataRepositoryTask."""


def running_exports(world: World) -> str:
    """Describe export tasks that are not over; empty: none.

    A failed one is reported and not waited for: what it was to write stays where it is.

    Raises:
        ShardyardError: FSx does not list them.
    """
    systems = {str(one["FileSystemId"]) for one in listed_of(world, "FSx file system")}
    if not systems:
        return ""
    asked = ("fsx", "describe_data_repository_tasks", "DataRepositoryTasks")
    tasks = [
        task
        for task in world.listed(*asked)
        if task["FileSystemId"] in systems and task["Type"] == "EXPORT_TO_REPOSITORY"
    ]
    running = [f"{task['TaskId']} is {task['Lifecycle']}" for task in tasks if _is_running(task)]
    if not running:
        _warn_failed(tasks)
    return f"exports into its bucket: {', '.join(running)}" if running else ""


def _is_running(task: dict[str, Any]) -> bool:
    return task["Lifecycle"] in _RUNNING


def _warn_failed(tasks: list[dict[str, Any]]) -> None:
    """Warn if the newest task of a file system failed."""
    latest: dict[str, dict[str, Any]] = {}
    for task in tasks:
        known = latest.get(task["FileSystemId"])
        if known is None or task["CreationTime"] > known["CreationTime"]:
            latest[task["FileSystemId"]] = task
    for task in latest.values():
        if task["Lifecycle"] == "FAILED":
            why = task.get("FailureDetails", {}).get("Message", "FSx gives no reason")
            warn(
                f"the last export of {task['FileSystemId']}, {task['TaskId']}, failed: {why}. What "
                "it was to write into the bucket goes with the file system"
            )
