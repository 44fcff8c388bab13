"""Profiles of a run: who asks for one, where it lies, what it says. Read by both halves.

A verb writes ``requests/profile.json``; rank 0 takes it up and removes it once it is done with it.
A profile is the folder ``profiles/step-<8 digits>/`` of its first step. While its ranks write, it
ends in ``.tmp``: what ends so after a kill is a part of one.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardyard.errors import StorageError
from shardyard.io.files import FILE_MODE, make_folder, read_json_object
from shardyard.rundir.layout import RunDir, step_of_name

FORMAT = 1
"""Version of profile.json."""
_UNFINISHED = ".tmp"


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """One wish for a profile."""

    id: str
    """Names it in events."""
    attempt: int
    """Attempt of the run that takes the profile; another one ignores the request."""
    steps: int
    ranks: str
    """In the words of ``config/rules/observe.py``."""
    asked_t: float
    """Unix seconds."""


def take_request(run_dir: RunDir) -> ProfileRequest | None:
    """Return the requested profile; None: no request, or no readable one."""
    try:
        request = ProfileRequest(**read_json_object(run_dir.profile_request))
        is_formed = type(request.steps) is int and type(request.attempt) is int
        return request if is_formed and isinstance(request.ranks, str) else None
    except (OSError, ValueError, TypeError):
        return None


def leave_request(run_dir: RunDir, request: ProfileRequest) -> bool:
    """Request a profile, unless another of the same attempt is requested.

    Returns:
        Whether it is requested now.

    Raises:
        StorageError: The folder cannot be written.
    """
    path = run_dir.profile_request
    other = take_request(run_dir)
    try:
        if other is not None and other.attempt != request.attempt:
            path.unlink(missing_ok=True)  # of an attempt that is over
        make_folder(path.parent)
        # whoever reads a part of it looks again
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(path, flags, FILE_MODE), "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(request)))
    except FileExistsError:
        return False
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}. A profile is requested by this file. "
            "Check that the run folder is yours and has room."
        ) from error
    return True


def drop_request(run_dir: RunDir) -> None:
    """Remove the request for a profile."""
    with suppress(OSError):
        run_dir.profile_request.unlink(missing_ok=True)


def new_request(attempt: int, *, steps: int, ranks: str) -> ProfileRequest:
    """A wish of this moment."""
    asked_t = time.time()
    return ProfileRequest(
        id=f"{attempt}-{int(asked_t * 1000):x}", attempt=attempt, steps=steps, ranks=ranks,
        asked_t=asked_t,
    )  # fmt: skip


def trace_name(rank: int) -> str:
    """File of one rank in the folder of a profile."""
    return f"rank-{rank}.json.gz"


def unfinished(folder: Path) -> Path:
    """Return the folder of a profile while it is written."""
    return folder.with_name(folder.name + _UNFINISHED)


def remove_unfinished(run_dir: RunDir) -> list[str]:
    """Remove parts of profiles that a kill has left; returns their names."""
    if not run_dir.profiles.is_dir():
        return []
    names = sorted(each.name for each in run_dir.profiles.iterdir())
    found = [name for name in names if name.endswith(_UNFINISHED)]
    for name in found:
        shutil.rmtree(run_dir.profiles / name, ignore_errors=True)
    return found


@dataclass(frozen=True, kw_only=True)
class ProfileTerm:
    """One row of a profile's table: seconds of a step."""

    name: str
    """Name of the plan's term, or of several of them together."""
    reason: str
    predicted_s: float | None
    """None: the plan has no such term, or there is no plan."""
    measured_s: float
    """Mean over the profiled ranks."""
    lowest_s: float
    lowest_rank: int
    highest_s: float
    highest_rank: int
    is_part: bool = False
    """Whether it is a part of the row above: not counted in sums."""


@dataclass(frozen=True, kw_only=True)
class ProfileSummary:
    """Contents of profile.json."""

    id: str
    step: int
    """The first profiled step."""
    steps: int
    attempt: int
    world_size: int
    ranks: tuple[int, ...]
    """Whose traces are there."""
    step_s: float
    """Time of a profiled step: what the terms add up to."""
    usual_s: float | None
    """Median of the steps before; None: there were none."""
    stood_still_s: float
    """Seconds to start the profile and write it, outside the steps."""
    trace_bytes: int
    """Size of all traces."""
    missing: Mapping[str, str]
    """Rank -> why it has no trace."""
    terms: tuple[ProfileTerm, ...]

    @property
    def slowdown(self) -> float | None:
        """Share by which profiled steps were longer than those before."""
        return None if not self.usual_s else self.step_s / self.usual_s - 1

    def to_json(self) -> dict[str, Any]:
        """profile.json."""
        return {"format": FORMAT, **asdict(self), "slowdown": self.slowdown}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "ProfileSummary":
        """Read ``to_json``.

        Raises:
            ValueError: It is none.
        """
        try:
            fields = {name: content[name] for name in ProfileSummary.__dataclass_fields__}
            fields["ranks"] = tuple(int(rank) for rank in content["ranks"])
            fields["terms"] = tuple(ProfileTerm(**term) for term in content["terms"])
            return ProfileSummary(**fields)
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"no profile of format {FORMAT}: {error!r}") from error


def read_profiles(
    run_dir: RunDir, events: Sequence[Mapping[str, Any]] = ()
) -> list[ProfileSummary]:
    """Return all profiles, in order of steps; of remote folders, as events report them.

    Args:
        events: Events of the run; they summarise a profile whose files were not fetched.
    """
    profiles: dict[int, ProfileSummary] = {}
    for content in [*_from_events(events), *_written(run_dir)]:
        with suppress(ValueError):
            profile = ProfileSummary.from_json(content)
            profiles[profile.step] = profile
    return [profiles[step] for step in sorted(profiles)]


def _from_events(events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for event in events:
        if event.get("kind") == "profiled" and isinstance(event.get("profile"), Mapping):
            yield event["profile"]


def _written(run_dir: RunDir) -> Iterator[Mapping[str, Any]]:
    folders = run_dir.profiles.iterdir() if run_dir.profiles.is_dir() else ()
    for folder in folders:
        if step_of_name(folder.name) is None:
            continue
        try:
            content = read_json_object(folder / "profile.json")
        except (OSError, ValueError):
            continue
        yield content
