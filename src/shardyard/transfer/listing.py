"""What the far side says it has, held to its form before anything is written.

The lines are those of ``shardyard.checkpoint.listing``.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shardyard.errors import (
    AccessError,
    CapacityError,
    DataError,
    RequestError,
    ShardyardError,
)
from shardyard.io.complete import FileDigest, checked_name, parse_digest
from shardyard.io.files import parse_json
from shardyard.rundir.fetched import checkpoint_of, is_fetched

_ERRORS: dict[int, type[ShardyardError]] = {
    error.exit_code: error for error in (ShardyardError, RequestError, CapacityError, AccessError)
}


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Files of a run elsewhere."""

    files: dict[str, FileDigest] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    """Of the checkpoints among them."""
    best: int | None = None
    """The step that the run's ``best`` names."""
    warnings: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(digest.bytes for digest in self.files.values())

    @property
    def checkpoints(self) -> dict[str, dict[str, FileDigest]]:
        """Folder of a checkpoint -> its files, by their names in it."""
        found: dict[str, dict[str, FileDigest]] = {}
        for name, digest in self.files.items():
            folder = checkpoint_of(name)
            if folder is not None:
                found.setdefault(folder, {})[name.removeprefix(f"{folder}/")] = digest
        return found

    @property
    def others(self) -> dict[str, FileDigest]:
        """Files beside the checkpoints."""
        return {n: digest for n, digest in self.files.items() if checkpoint_of(n) is None}


def read_listing(lines: Iterable[str]) -> Listing:
    """What the lines of a listing say.

    Raises:
        ShardyardError: What the far side answered; its class follows the exit code.
        DataError: A line is of another form, or a name would lead out of the run's folder.
    """
    files: dict[str, FileDigest] = {}
    for line in lines:
        try:
            content = parse_json(line)
            if "error" in content:
                kind = _ERRORS.get(content.get("exit_code"), ShardyardError)
                raise kind(str(content["error"]))
            if "end" in content:
                return _listing(files, content["end"])
            name = checked_name(content["file"])
            if not is_fetched(name):
                raise ValueError(f"{name!r} is no file that a run's other side may bring")
            files[name] = parse_digest(content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"the far side listed what is not of the form of a listing: {error}. Nothing was "
                "written. Its image may hold another version of shardyard; use the same here and "
                "there."
            ) from error
    raise DataError("the far side's listing has no end. Nothing was written. Repeat the command.")


def _listing(files: dict[str, FileDigest], end: Any) -> Listing:
    steps, best = end["steps"], end["best"]
    if any(type(step) is not int or step < 0 for step in [*steps, 0 if best is None else best]):
        raise ValueError(f"{steps!r} and {best!r} are no steps")
    warnings = tuple(str(text) for text in end["warnings"])
    return Listing(files=files, steps=tuple(steps), best=best, warnings=warnings)
