"""Ledger of the objects created outside a run's folder: intent before, confirmation after.

`ledger.jsonl`: {"t", "action", "kind", "name", "launcher", "id", "details"}, one object a
line. ``action`` is one of:

- intended, created, failed or removed;
- noted: something about them that is no object;
- submitted: the line of a job, with which every verb finds it again.

Tear-down reads it, so no object is forgotten: one whose creation was interrupted is
intended and is looked for.

Each line is on disk before its object is created. So a writer that was killed in a line had
created no object by it, and the beginning of a line is passed over. Anything else that
cannot be read may have named a job that runs and costs: a complete line with a wrong
character, NUL bytes, an empty file, a ledger that is gone. Every verb then names the file
and the line, and makes no guess.

Verbs ask about, end and remove what it names. So each line is checked first, whatever the
verb: by the rules of ``_line_error``, and by the form that its launcher declares
(``EntryForm``).
"""

import json
import os
import re
import shlex
import stat
import time
import unicodedata
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from shardyard.errors import RequestError, StorageError
from shardyard.io.files import (
    FILE_MODE,
    break_links,
    drop_lock,
    flush_folder,
    make_folder,
    parse_json,
    take_lock,
)
from shardyard.launchers.registry import load_launcher

_TRACE = "submissions"
"""Folder that a submission makes in a run's folder before the ledger names anything."""
_NEW_LEDGER = """echo '{"action": "noted", "kind": "lost", "name": "all", "launcher": "local"}'"""
"""Command that writes a ledger of no job."""
_BROKEN_OFF = re.compile(r"(n(ul?)?|t(ru?)?|f(a(ls?)?)?|-|\.|[eE][-+]?|\\?u?[0-9a-fA-F]{0,4})?")
"""Rest of a value where a line of JSON breaks off, from where it cannot be parsed."""
_ENDS = re.compile(r'"action": "(submitted|failed|removed)"')
"""Actions of a line that names no object that an earlier one does not name."""
_WITH_ID = ("created", "submitted")
_NO_OBJECT = ("submitted", "noted")
_ACTIONS = frozenset({"intended", "failed", "removed", "noted", *_WITH_ID})
SUBMITTED = "job"
"""Kind of the line of a submission; an object that was created has a kind of its launcher."""
SIDE_DETAIL = "side"
"""Detail of a side job's lines: its label (``SideJob``). A training's have none."""
BENCH_DETAIL = "bench"
"""Detail of a benchmark job's line: its measurement. A training's has none."""
SCRIPT_DETAIL = "script"
"""Detail of a script job's line: script and arguments, as JSON. A training's has none."""
TAGS_DETAIL, OWNER_DETAIL = "tags", "owner"
"""Details of a job's line: ``run.tags`` as ``team=nlp,project=x``, and the user who submitted."""
SIDE_LABEL = re.compile(r"[a-z]{1,20}-[0-9a-f]{12}", re.ASCII)
RUN_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


@dataclass(frozen=True, kw_only=True)
class EntryForm:
    """Form of one kind of object in a launcher's lines; each part must match completely."""

    name: re.Pattern[str]
    id: re.Pattern[str]
    details: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    """Details that the launcher reads and that are always present."""
    optional: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    """Details that the launcher reads if they are present."""
    folder: re.Pattern[str] | None = None
    """Path of ``details["folder"]`` in the run's folder; ``.`` is that folder itself."""


def form(pattern: str) -> re.Pattern[str]:
    """The form of one value; ASCII, so that a digit is one that every program reads as such."""
    return re.compile(pattern, re.ASCII)


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One object outside."""

    kind: str
    """``slurm job``, ``jobset``, ``job definition``, ..."""
    name: str
    launcher: str
    id: str | None = None
    details: dict[str, str] = field(default_factory=dict)
    is_confirmed: bool = False


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One submission to a scheduler; plain values, kept in the ledger."""

    launcher: str
    run_id: str
    id: str
    """The scheduler's."""
    name: str
    details: dict[str, str] = field(default_factory=dict)
    """Details to find it again: cluster, namespace, region, folder."""


class Ledger:
    """The ledger of one run."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Args:
        clock: Unix seconds, for the lines that are written.
        """
        self.path = path
        self._clock = clock

    def intend(self, kind: str, name: str, *, launcher: str, **details: str) -> LedgerEntry:
        """Write down what is about to be created; on disk before this returns."""
        entry = LedgerEntry(kind=kind, name=name, launcher=launcher, details=details)
        self._write("intended", entry)
        return entry

    def confirm(self, entry: LedgerEntry, id: str, **details: str) -> LedgerEntry:
        """Write down that it exists, and the id it got."""
        confirmed = LedgerEntry(
            kind=entry.kind, name=entry.name, launcher=entry.launcher, id=id,
            details={**entry.details, **details}, is_confirmed=True,
        )  # fmt: skip
        self._write("created", confirmed)
        return confirmed

    def fail(self, entry: LedgerEntry, reason: str) -> None:
        """Write down that it was not created."""
        self._write("failed", entry, reason=reason)

    def remove(self, entry: LedgerEntry) -> None:
        """Write down that it is gone."""
        self._write("removed", entry)

    def note(self, kind: str, name: str, *, launcher: str) -> None:
        """Write down what is no object and worth knowing later."""
        self._write("noted", LedgerEntry(kind=kind, name=name, launcher=launcher))

    def record(self, job: Submission) -> None:
        """Record a submission's result; it is no object of its own, so it needs no removal."""
        entry = LedgerEntry(
            kind="job", name=job.name, launcher=job.launcher, id=job.id, details=job.details
        )
        self._write("submitted", entry)

    def jobs(self) -> list[LedgerEntry]:
        """Every training or benchmark that was submitted, oldest first."""
        return [entry for entry in self._submitted() if SIDE_DETAIL not in entry.details]

    def side_jobs(self, label: str | None = None) -> list[LedgerEntry]:
        """Every side job that was submitted, or those of one label, oldest first."""
        found = [entry for entry in self._submitted() if SIDE_DETAIL in entry.details]
        return [entry for entry in found if label in (None, entry.details[SIDE_DETAIL])]

    def _submitted(self) -> list[LedgerEntry]:
        return [_entry(line) for line in self._lines() if line["action"] == "submitted"]

    def live(self) -> list[LedgerEntry]:
        """Return the objects that may exist, oldest first.

        They are intended or created, and not failed or removed.
        """
        entries: dict[tuple[str, str, str], LedgerEntry] = {}
        for line in self._lines():
            key = _key(line)
            if line["action"] in ("failed", "removed"):
                entries.pop(key, None)
            elif line["action"] not in _NO_OBJECT:
                # A later line of the same object replaces the earlier one: `created` adds the id.
                entries[key] = _entry(line)
        return list(entries.values())

    def unfinished(self) -> list[LedgerEntry]:
        """Return what may exist of a training's submission that was cut off before it was a job."""
        since: list[tuple[str, str, str]] = []
        for line in self._lines():
            if line["action"] == "submitted":
                # The lines before it belong to the job that it records, so they were not cut off.
                since.clear()
            elif line["action"] in ("intended", "created"):
                since.append(_key(line))
        return [
            entry
            for entry in self.live()
            if (entry.launcher, entry.kind, entry.name) in since
            and SIDE_DETAIL not in entry.details
        ]

    def history(self) -> list[tuple[float, str, LedgerEntry]]:
        """When (unix seconds), which action and on what, oldest first; jobs are left out.

        Raises:
            StorageError: A line does not say when.
        """
        lines = [line for line in self._lines() if line["action"] != "submitted"]
        for line in lines:
            if not isinstance(line.get("t"), float | int):
                raise StorageError(
                    f"{self.path} has a line of {line['kind']} {line['name']} that does not say "
                    "when (t), so its cost is unknown. Shardyard never writes such a line: "
                    "restore the file from a copy."
                )
        return [(float(line["t"]), line["action"], _entry(line)) for line in lines]

    def ever_intended(self) -> list[LedgerEntry]:
        """Everything that was ever intended or confirmed, there or not, oldest first."""
        lines = [line for line in self._lines() if line["action"] in ("intended", "created")]
        return [_entry(line) for line in lines]

    def all(self) -> list[LedgerEntry]:
        """Everything that was ever confirmed, oldest first."""
        return [_entry(line) for line in self._lines() if line["action"] == "created"]

    def is_blank(self) -> bool:
        """Return whether the file exists and is empty."""
        with suppress(OSError):
            return self.path.stat().st_size == 0
        return False

    def remove_empty(self) -> None:
        """Remove the file if it is empty: an empty one reads as damaged."""
        if self.is_blank():
            self.path.unlink(missing_ok=True)

    def open(self) -> BinaryIO:
        """The file, to append to or to lock; made if it is not there."""
        # A run copied by `cp -al` shares this file: the original must not get these lines.
        break_links(self.path)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        return os.fdopen(os.open(self.path, flags, FILE_MODE), "a+b")

    def torn_lines(self) -> list[int]:
        """Return numbers of lines that break off and may have begun to name another object.

        A writer that was killed had created no object by it; after a power cut, lines behind it may
        be lost.
        """
        parts = enumerate((self._read() or "").split("\n"), start=1)
        torn = [(number, part) for number, part in parts if part.strip() and _is_truncated(part)]
        return [number for number, part in torn if not _ENDS.search(part)]

    def _lines(self) -> list[dict[str, Any]]:
        text = self._read()
        # A submission locks the file before its first line; an empty one without lock is damaged.
        if text is None or (not text and self._is_locked()):
            return []
        lines, is_torn = [], False
        for number, part in enumerate(text.split("\n"), start=1):
            if not part.strip():
                continue
            line, why_not = _parse(part)
            if line is None and not why_not:
                is_torn = True  # the line of a killed writer, who had created nothing by it yet
                continue
            why_not = why_not or _line_error(line, self.path.parent)
            if why_not:
                raise StorageError(
                    f"{self.path} line {number} is not a line of a ledger: {why_not}. Another "
                    "program changed the file. It names objects that cost money and that "
                    "Shardyard ends, so Shardyard does not guess. Fix or remove that line, and "
                    "look with the scheduler's own tools for the object that it named."
                )
            lines.append(line)
        # With notes alone, the torn line may have been the first one that named an object.
        if not lines or (is_torn and all(line["action"] == "noted" for line in lines)):
            raise StorageError(_damaged_message(self.path, "torn" if is_torn else "empty"))
        return lines

    def _is_locked(self) -> bool:
        """Whether a command submits the run at this moment."""
        with self.path.open("rb") as file:
            # A shared lock, so that two commands that read do not take each other for a submission.
            is_free = take_lock(file.fileno(), is_shared=True)
            drop_lock(file.fileno())
        return not is_free

    def _read(self) -> str | None:
        """Return the whole text; None: there is no ledger, and there was no submission.

        Raises:
            StorageError: The ledger is gone or cannot be read, so it is not known what it named.
        """
        # Not exists(): a broken link here means a ledger out of reach, not a run without one.
        if not os.path.lexists(self.path):
            if (self.path.parent / _TRACE).exists():
                raise StorageError(_damaged_message(self.path, "missing"))
            return None
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise OSError(0, "it is not a file")
            return self.path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be read: {error.strerror}. It lists what was created "
                "elsewhere, which may still exist and cost money. Restore the file from a copy, "
                "or its permissions. Without a copy, look with the scheduler's own tools for the "
                "run's objects, and then remove what is at this path."
            ) from error

    def _write(self, action: str, entry: LedgerEntry, **more: str) -> None:
        line = {
            "t": self._clock(), "action": action, "kind": entry.kind, "name": entry.name,
            "launcher": entry.launcher, "id": entry.id, "details": entry.details, **more,
        }  # fmt: skip
        try:
            make_folder(self.path.parent)
            is_new = not self.path.exists()
            with self.open() as file:
                file.seek(max(0, file.tell() - 1))
                torn = file.read() not in (b"", b"\n")  # a writer was killed in its line
                file.write((("\n" if torn else "") + json.dumps(line) + "\n").encode())
                # A power cut after the object's creation must not take the only line that names it.
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                # fsync of a file does not save its name, which is an entry of the folder.
                flush_folder(self.path.parent)
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be written: {error.strerror}. Each object must be listed here "
                "before it is created. Check that the run folder is yours and has room."
            ) from error


def _damaged_message(path: Path, condition: str) -> str:
    """Return the message on a ledger without names, though something was submitted."""
    return (
        f"{path} is {condition}, as a power cut leaves a file. It named what was created for this "
        "run, which may still run and cost money. Bring the file back from a copy. Without a "
        "copy, look for the run's jobs with the scheduler's own tools (or `shardyard runs "
        f"--strays --on LAUNCHER`), end them, then write a new one: {_NEW_LEDGER} > "
        f"{shlex.quote(str(path))}"
    )


def _key(line: dict[str, Any]) -> tuple[str, str, str]:
    return line["launcher"], line["kind"], line["name"]


def _parse(text: str) -> tuple[Any, str]:
    """The content of a line and why it is none; neither for a line that breaks off."""
    if "\0" in text:
        return None, "it holds NUL bytes, as a power cut leaves them"
    try:
        return parse_json(text), ""
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError) and _is_json_prefix(text, error):
            return None, ""
        return None, f"it is not a JSON object ({error})"


def _is_truncated(line: str) -> bool:
    return _parse(line) == (None, "")


def _is_json_prefix(text: str, error: json.JSONDecodeError) -> bool:
    """Whether a text is the beginning of a JSON object, sound as far as it goes."""
    if not text.startswith("{"):
        return False
    if error.msg.startswith("Unterminated string"):
        return not text.endswith("}")  # else a quotation mark is missing in a complete line
    return _BROKEN_OFF.fullmatch(text, error.pos) is not None


def _entry(line: dict[str, Any]) -> LedgerEntry:
    return LedgerEntry(
        kind=line["kind"], name=line["name"], launcher=line["launcher"], id=line.get("id"),
        details=line.get("details") or {}, is_confirmed=line["action"] == "created",
    )  # fmt: skip


def _line_error(line: Any, folder: Path) -> str:
    """Return why a line must not be used; empty: it is as a launcher writes it."""
    if not isinstance(line, dict):
        return "it is not a JSON object"
    wrong = _type_error(line) or _text_error(line)
    if wrong:
        return wrong
    if line["action"] in _WITH_ID and line.get("id") is None:
        return f"it is {line['action']} and has no id"
    if line["action"] == "noted":
        return ""  # nothing is asked about it or ended
    forms = _forms(line["launcher"])
    if forms is None:
        return ""  # the verb that loads the launcher says that there is none
    if (line["action"] == "submitted") != (line["kind"] == SUBMITTED) or line["kind"] not in forms:
        return f"{line['launcher']} has no kind={line['kind']!r} that is {line['action']}"
    return _form_error(line, forms[line["kind"]], folder)


def _type_error(line: dict[str, Any]) -> str:
    for key in ("action", "kind", "name", "launcher"):
        if not isinstance(line.get(key), str):
            return f"{key}={line.get(key)!r} is not text"
    if line["action"] not in _ACTIONS:
        return f"action={line['action']!r} is unknown"
    if not isinstance(line.get("id"), str | None):
        return f"id={line['id']!r} is not text"
    details = line.get("details") or {}
    if not isinstance(details, dict):
        return f"details={details!r} is not an object"
    for key, value in details.items():
        if not isinstance(value, str):
            return f"details.{key}={value!r} is not text"
    return ""


def _text_error(line: dict[str, Any]) -> str:
    """Return the error in a value of any launcher: an option of a program, or several lines."""
    values = {key: line.get(key) for key in ("kind", "name", "launcher", "id")}
    values |= {f"details.{key}": value for key, value in (line.get("details") or {}).items()}
    for key, value in values.items():
        if value is None:
            continue
        if value.startswith("-"):
            return f"{key}={value!r} begins with a hyphen, as an option of a program does"
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
            return f"{key}={value!r} has a control character"
    return ""


def _form_error(line: dict[str, Any], form: EntryForm, folder: Path) -> str:
    details = line.get("details") or {}
    values = {"name": line["name"]} if line.get("id") is None else {k: line[k] for k in _NAMED}
    values |= {f"details.{key}": value for key, value in details.items()}
    wanted = {"name": form.name, "id": form.id}
    wanted |= {f"details.{key}": value for key, value in {**form.details, **form.optional}.items()}
    wanted["details." + SIDE_DETAIL] = SIDE_LABEL
    missing = form.details.keys() - details.keys()
    if missing:
        return f"{line['kind']} has no details.{min(missing)}"
    for key, value in values.items():
        if key in wanted and not wanted[key].fullmatch(value):
            return f"{key}={value!r} is not what {line['launcher']} calls a {line['kind']}"
    return _folder_error(details, form.folder, folder)


def _folder_error(details: Mapping[str, str], form: re.Pattern[str] | None, run: Path) -> str:
    if form is None:
        return ""
    text = details.get("folder")
    if text is None:
        return "it has no details.folder"
    try:
        inside = Path(text).resolve().relative_to(run.resolve()).as_posix()
    # Before Python 3.13 resolve() raises RuntimeError for a loop of links.
    except (ValueError, OSError, RuntimeError):
        inside = ""
    if form.fullmatch(inside):
        return ""
    return (
        f"details.folder={text!r} is not where the job's folder is in {run} (if the run was moved, "
        "leave a symbolic link at its old place)"
    )


_NAMED = ("name", "id")


def _forms(launcher: str) -> Mapping[str, EntryForm] | None:
    """Return the forms that a launcher declares, by kind; None: there is no such launcher."""
    try:
        forms: Mapping[str, EntryForm] = load_launcher(launcher, _forms_error).forms
    except RequestError:
        return None
    return forms


def _forms_error(kind: Any) -> str:
    return "" if isinstance(getattr(kind, "forms", None), Mapping) else "has no forms"
