"""side/<kind>-<digest>.json: what a side job answered, once a command has handed it on."""

import time
from dataclasses import dataclass
from typing import Any

from shardyard.io.files import read_json_object, write_json
from shardyard.rundir.layout import RunDir


@dataclass(frozen=True, kw_only=True)
class HandedOn:
    """One answer."""

    job_id: str
    """Of the submission that gave it."""
    result: dict[str, Any]


def read_answer(run_dir: RunDir, label: str) -> HandedOn | None:
    """The newest answer of a side job that was handed on; None: there is none."""
    try:
        content = read_json_object(run_dir.answer(label))
    except (OSError, ValueError):
        return None
    job_id, result = content.get("job_id"), content.get("result")
    if not isinstance(job_id, str) or not isinstance(result, dict):
        return None
    return HandedOn(job_id=job_id, result=result)


def write_answer(run_dir: RunDir, label: str, *, job_id: str, result: dict[str, Any]) -> None:
    """Write down that an answer is handed on.

    Raises:
        StorageError: The folder cannot be written.
    """
    content = {"side": label, "job_id": job_id, "t": time.time(), "result": result}
    write_json(run_dir.answer(label), content)
