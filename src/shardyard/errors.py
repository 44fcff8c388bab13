"""Every error a caller may catch.

    ShardyardError                exit code 1: the run failed
    ├── RequestError              2: the request is wrong; retrying it unchanged cannot help
    │   ├── RecipeError           2: one or more settings of a recipe are wrong (all of them listed)
    │   └── SetUpError            2: a node's surroundings keep its workers from starting
    ├── DataError                 1: a data file is missing, empty or damaged
    │   ├── JsonFileError         1: a file cannot be read as JSON (also a ValueError)
    │   └── SourceError           2: training text cannot be used as it is; it has to be fixed
    │       └── RejectedRowError  2: the model's chat template rejects a row
    ├── CheckpointError           1: a checkpoint cannot be written, read or trusted
    │   ├── StorageError          1: the file system rejected a write (full, read-only, gone)
    │   ├── NotFiniteError        1: the state holds NaN or infinity; it is not written
    │   └── LostRankError         1: another rank was lost meanwhile; a restart may continue
    ├── TrainingError             1: the training itself cannot continue (loss not finite, ...)
    │   └── OutOfMemoryError      1: a device, or the host, has too little memory for a step
    ├── LostNodeError             75: another node of the job is gone; all of them can restart
    ├── CapacityError             3: a requested resource is not available now
    │   └── LostError             3: the connection broke; retrying may help
    └── AccessError               4: permission is missing

A message has three parts: where and what (with the offending value), why, what to do now. Where a
page of the documentation helps, ``page`` names it and its section, and ``described`` shows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from shardyard.io.sanitize import sanitize


class ShardyardError(Exception):
    """Base of all errors raised on purpose; its text is shown to the user as it is.

    Args:
        page: Page and section of the documentation, such as ``hangs#pauses``; empty: that of the
            class.
    """

    exit_code: ClassVar[int] = 1
    page: str = ""
    """Page and section that explain it; empty: none."""

    def __init__(self, *arguments: object, page: str = "") -> None:
        super().__init__(*arguments)
        if page:
            self.page = page

    def to_json(self) -> dict[str, Any]:
        """Return what a program of ours answers in place of its result."""
        page = {"page": self.page} if self.page else {}
        return {"error": str(self), "exit_code": self.exit_code, **page}

    @property
    def described(self) -> str:
        """The message, and on a last line the page that explains it."""
        return f"{self}\ndocs: {self.page}" if self.page else str(self)


class RequestError(ShardyardError):
    """The request is wrong; the command started no work."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One wrong setting: ``path`` is its dotted name, ``text`` the value, the reason, the remedy.

    A text that begins with the value is written ``=16 does not ...`` and shown joined to the path:
    ``parallel.tp=16 does not ...``.
    """

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}{self.text}" if self.text[:1] == "=" else f"{self.path}: {self.text}"


class RecipeError(RequestError):
    """Settings of a recipe are wrong; carries all of them, not the first one.

    Args:
        problems: All that is wrong.
        source: What was read, to name it: a file, or "recipe".
        hint: What to do now, where it is the same for all problems.
        page: As for any error.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        source: str = "recipe",
        *,
        hint: str = "",
        page: str = "",
    ) -> None:
        self.problems = tuple(problems)
        self.source, self.hint = source, hint
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "\n".join(f"  {problem}" for problem in problems)
        end = f"\n{hint}" if hint else ""
        super().__init__(sanitize(f"{source} has {count}:\n{lines}{end}"), page=page)

    def with_problems(self, others: Sequence[Problem]) -> "RecipeError":
        """This error and further problems, those of settings that it names already left out."""
        known = {problem.path for problem in self.problems}
        further = [problem for problem in others if problem.path not in known]
        return RecipeError([*self.problems, *further], self.source, hint=self.hint, page=self.page)


class SetUpError(RequestError):
    """A variable, an interface or a limit of a machine keeps its workers from starting.

    No step was taken: a restart would end the same way, and no rank or node is to blame.
    """


class DataError(ShardyardError):
    """A data file is missing, empty or damaged."""


class JsonFileError(DataError, ValueError):
    """A file cannot be read as JSON: no plain file, too large, nested too deeply, another text.

    Args:
        path: Of the file.
        reason: Continues a sentence that begins with the path; without a full stop.
    """

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path} {reason}.")
        self.reason = reason


class SourceError(DataError):
    """A file of ``data.source`` cannot be used as it is; asking again unchanged cannot help."""

    exit_code = 2
    page = "troubleshooting#data-is-rejected"


class RejectedRowError(SourceError):
    """A row that cannot be used; ``data.max_rejected`` may leave it out.

    Args:
        reason: Why, without the place.
        location: Place of the row. Becomes text only with the message: finding a line reads the
            file again.
    """

    def __init__(self, reason: str, location: object) -> None:
        super().__init__(reason)
        self.reason = reason
        self.location = location

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


class CheckpointError(ShardyardError):
    """A checkpoint cannot be written, read or trusted."""


class StorageError(CheckpointError):
    """The file system rejected a write: full, read-only or gone."""

    page = "troubleshooting#disk-full-or-checkpoint-damaged"


class NotFiniteError(CheckpointError):
    """The state to be saved holds NaN or infinity: training could not continue from it."""

    page = "troubleshooting#loss-is-nan-or-spikes"


class LostRankError(CheckpointError):
    """Another rank was lost while all of them saved or loaded: its end is the cause, not this one.

    The one error raised on purpose that a restart may cure.
    """


class TrainingError(ShardyardError):
    """The training cannot continue; restarting it unchanged would end the same way."""


class OutOfMemoryError(TrainingError):
    """A device, or the host, has too little memory for a step of this training."""

    page = "troubleshooting#does-not-fit-or-cuda-out-of-memory"


class LostNodeError(ShardyardError):
    """Another node of the job is gone, or never came; a restart of all nodes may continue."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h
    page = "troubleshooting#killed-workers-and-exit-codes"


class CapacityError(ShardyardError):
    """A requested resource exists but is not available now."""

    exit_code = 3


class LostError(CapacityError):
    """The connection broke; asking again may help."""


class AccessError(ShardyardError):
    """A permission is missing."""

    exit_code = 4


EXIT_INTERRUPTED = 130
"""Ctrl-C: the last step is durable and the run can be resumed."""

EXIT_DRAINED = 143
"""SIGTERM: a verb has cleaned up; of a run the last step is durable and it can be resumed."""
