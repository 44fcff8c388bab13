"""side/<kind>-<digest>.json: what a side job answered, once a command has handed it on."""

import json
import time
from dataclasses import dataclass
from typing import Any

from shardyard.files import write_json
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
        content = json.loads(run_dir.answer(label).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
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
