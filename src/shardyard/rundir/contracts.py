"""Small JSON files that one half writes and the other reads: side jobs, exports, drills."""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardyard.io.digests import COMPLETE, validate_name
from shardyard.io.files import parse_json, read_json_object, write_json
from shardyard.rundir.layout import RunDir
from shardyard.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ForwardedAnswer:
    """One answer."""

    job_id: str
    """Job id of the submission that gave the answer."""
    result: dict[str, Any]


def read_answer(run_dir: RunDir, label: str) -> ForwardedAnswer | None:
    """The newest answer of a side job that was handed on; None: there is none."""
    try:
        content = read_json_object(run_dir.answer(label))
    except (OSError, ValueError):
        return None
    job_id, result = content.get("job_id"), content.get("result")
    if not isinstance(job_id, str) or not isinstance(result, dict):
        return None
    return ForwardedAnswer(job_id=job_id, result=result)


def write_answer(run_dir: RunDir, label: str, *, job_id: str, result: dict[str, Any]) -> None:
    """Write down that an answer is handed on.

    Raises:
        StorageError: The folder cannot be written.
    """
    content = {"side": label, "job_id": job_id, "t": time.time(), "result": result}
    write_json(run_dir.answer(label), content)


# What a drill and the processes that it breaks agree on: read by both halves.

FAULTS_VARIABLE = "SHARDYARD_FAULTS"
"""Environment variable with the faults that workers make by themselves (elastic/faults.py)."""

FAULT_MARK = "@shardyard-fault "
"""Begins a log line of a rank: which fault strikes it now, at which step, when."""

HOSTS_VARIABLE = "SHARDYARD_HOSTS"
"""Environment variable with the ``Hosts`` of a local job. Only a drill sets it."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts for the nodes of a local job, so that they are more than processes."""

    enter: list[list[str]]
    """By node: the words before its program, such as those that enter a namespace."""
    address: str
    """Address at which the other nodes reach node 0."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))


def hosts_of(environment: Mapping[str, str], nodes: int) -> Hosts:
    """Return the hosts that the environment requests, else this machine."""
    text = environment.get(HOSTS_VARIABLE)
    return Hosts(**parse_json(text)) if text else Hosts(enter=[[]] * nodes, address="127.0.0.1")


# Which files of a run come here from where the nodes wrote them; asked on both sides.
#
# What steers a run (its ledger, what was asked, what is submitted) is written here alone: whoever
# can write on the far side may not decide what is started or ended from here.

_STAYS = frozenset(
    {
        "ledger.jsonl",
        "lease.json",
        "recipe.yaml",
        "launch",
        "requests",
        "submissions",
        "sessions",
        "side",
        "exports",
    }
)
"""First parts of names."""
_CHECKPOINT = re.compile(r"checkpoints/step-\d{8}/[^/]+", re.ASCII)
LINE_FILES = ("events.jsonl", "metrics.jsonl")
"""Merged with what is here already."""


def is_fetched(name: str) -> bool:
    """Whether a file, by its name in the run's folder, is one that `shardyard fetch` brings."""
    try:
        validate_name(name)
    except ValueError:
        return False
    parts = name.split("/")
    if any(part.startswith(".") or part.endswith(".tmp") for part in parts):
        return False  # of a writer that has not finished
    if parts[0] == "checkpoints":
        return _CHECKPOINT.fullmatch(name) is not None
    if parts[0] == "logs" and len(parts) > 1 and parts[1].startswith("job-"):
        return False  # of a local job, steered from here
    return parts[0] not in _STAYS


def checkpoint_of(name: str) -> str | None:
    """Folder of the checkpoint that a file belongs to; None: to none."""
    return name.rpartition("/")[0] if _CHECKPOINT.fullmatch(name) else None


# What an export says of itself, wherever it was made.

_FORMS = {
    "weights": "",
    "adapter": " of adapters in PEFT's format",
    "merged": " with adapters merged",
}


def sentence(summary: dict[str, Any]) -> str:
    """Describe the export and its verification, for a person."""
    complete, verified = summary["complete"], summary["verified"]
    verb = "would export" if complete is None else "exported"
    if complete is not None and complete["was_there"]:
        verb = "had exported already"
    step = RunDir(Path()).checkpoint(summary["step"]).name
    text = (
        f"{verb} {step}: {summary['parameters']:,} parameters{_FORMS[summary['form']]}, "
        f"{format_bytes(summary['bytes'])}, {summary['dtype']}, {len(summary['files'])} file(s) in "
        f"{summary['to']}\nverified: the checkpoint's {verified['files']} files, "
        f"{format_bytes(verified['bytes'])}, against its manifest"
    )
    if complete is None:
        return text
    read = "each held to" if complete["was_there"] else "SHA-256 of each in"
    return (
        f"{text}; {complete['files']} files exported, {read} {COMPLETE} ({complete['sha256'][:12]})"
    )
