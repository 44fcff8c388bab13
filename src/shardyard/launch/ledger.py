"""What was created outside a run's folder: its intent before, its confirmation after.

`ledger.jsonl`: {"t", "action", "kind", "name", "launcher", "id", "details"}, one object a line;
``action`` is intended, created, failed or removed, or submitted: the line of a job, with which
every verb finds it again. Tear-down reads it, so nothing is forgotten: an
object whose creation was interrupted stands as intended and is looked for.
"""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardyard.errors import StorageError

if TYPE_CHECKING:
    from shardyard.launch.base import Job


_KEYS = frozenset({"action", "kind", "name", "launcher"})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One object outside."""

    kind: str
    """``slurm job``, ``jobset``, ``job definition``, ..."""
    name: str
    launcher: str
    id: str | None = None
    details: dict[str, str] = field(default_factory=dict)
    is_confirmed: bool = False


class Ledger:
    """The ledger of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def intend(self, kind: str, name: str, *, launcher: str, **details: str) -> Entry:
        """Write down what is about to be created; on disk before this returns."""
        entry = Entry(kind=kind, name=name, launcher=launcher, details=details)
        self._write("intended", entry)
        return entry

    def confirm(self, entry: Entry, id: str, **details: str) -> Entry:
        """Write down that it exists, and the id it got."""
        confirmed = Entry(
            kind=entry.kind, name=entry.name, launcher=entry.launcher, id=id,
            details={**entry.details, **details}, is_confirmed=True,
        )  # fmt: skip
        self._write("created", confirmed)
        return confirmed

    def fail(self, entry: Entry, reason: str) -> None:
        """Write down that it was not created."""
        self._write("failed", entry, reason=reason)

    def remove(self, entry: Entry) -> None:
        """Write down that it is gone."""
        self._write("removed", entry)

    def record(self, job: "Job") -> None:
        """Write down what a submission returned; no object of its own, so nothing to remove."""
        entry = Entry(
            kind="job", name=job.name, launcher=job.launcher, id=job.id, details=job.details
        )
        self._write("submitted", entry)

    def jobs(self) -> list[Entry]:
        """Every job that was submitted, oldest first."""
        return [_entry(line) for line in self._lines() if line["action"] == "submitted"]

    def live(self) -> list[Entry]:
        """What may exist, oldest first: intended or created, and not failed or removed."""
        found: dict[tuple[str, str, str], Entry] = {}
        for line in self._lines():
            key = (line["launcher"], line["kind"], line["name"])
            if line["action"] in ("failed", "removed"):
                found.pop(key, None)
            elif line["action"] != "submitted":
                found[key] = _entry(line)
        return list(found.values())

    def all(self) -> list[Entry]:
        """Everything that was ever confirmed, oldest first."""
        return [_entry(line) for line in self._lines() if line["action"] == "created"]

    def _lines(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        lines = []
        texts = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        for number, text in enumerate(texts, start=1):
            try:
                line = json.loads(text)
            except ValueError:
                if text.startswith("{") or not text.strip():
                    continue  # the line of a killed writer, who had created nothing by it yet
                line = None
            if not isinstance(line, dict) or not line.keys() >= _KEYS:
                raise StorageError(
                    f"{self.path} line {number} is no line of a ledger: the file was changed by "
                    "something else. What it named may exist and cost money, so nothing is guessed "
                    "from the rest. Mend or remove that line, and look with the scheduler's own "
                    "tools for what it may have named."
                )
            lines.append(line)
        return lines

    def _write(self, action: str, entry: Entry, **more: str) -> None:
        line = {
            "t": time.time(), "action": action, "kind": entry.kind, "name": entry.name,
            "launcher": entry.launcher, "id": entry.id, "details": entry.details, **more,
        }  # fmt: skip
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                file.seek(max(0, file.tell() - 1))
                torn = file.read() not in (b"", b"\n")  # a writer was killed in its line
                file.write((("\n" if torn else "") + json.dumps(line) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be written: {error.strerror}. Nothing is created outside that "
                "is not written down first. Check that the run folder is yours and has room."
            ) from error


def _entry(line: dict[str, Any]) -> Entry:
    return Entry(
        kind=line["kind"], name=line["name"], launcher=line["launcher"], id=line.get("id"),
        details=line.get("details") or {}, is_confirmed=line["action"] == "created",
    )  # fmt: skip
