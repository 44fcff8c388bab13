"""Bring listed files of a run into a folder here: sizes first, then progress, then the pointers."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.errors import RequestError
from shardyard.io.complete import FileDigest
from shardyard.io.files import make_folder, write_text
from shardyard.log import say, warn
from shardyard.rundir.fetched import LINE_FILES
from shardyard.rundir.layout import RunDir
from shardyard.transfer.listing import Listing
from shardyard.transfer.merge_jsonl import merge_lines
from shardyard.transfer.receive import (
    Source,
    Told,
    missing_here,
    receive,
    receive_whole,
    refuse_without_room,
)
from shardyard.units import format_bytes

_BEGUN = ".recipe.yaml.*"
"""All that there is of a copy whose fetch was killed as it wrote its first file."""


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What came of it."""

    to: Path
    steps: tuple[int, ...]
    files: int
    bytes: int
    """Of what was missing here."""
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "to": str(self.to),
            "steps": list(self.steps),
            "files": self.files,
            "bytes": self.bytes,
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class _Below:
    """A folder of a source."""

    source: Source
    folder: str

    def read(self, name: str, offset: int) -> Iterator[bytes]:
        return self.source.read(f"{self.folder}/{name}", offset)


def bring(
    source: Source,
    listing: Listing,
    to: RunDir,
    *,
    asked: RunDir,
    progress: "Progress",
    dry_run: bool = False,
) -> Brought:
    """Bring what is missing.

    Args:
        to: The folder of the run here, or a copy.
        asked: The run's folder that the launcher keeps, whose recipe a copy gets.
        progress: Shows how far it is.

    Raises:
        RequestError: ``to`` holds something else.
        StorageError: There is no room, or it cannot be written.
        DataError: A file came wrong twice.
    """
    _refuse_others(to, asked)
    for warning in listing.warnings:
        warn(f"{warning}.")
    beside = {name: each for name, each in listing.others.items() if name not in LINE_FILES}
    lines = {name: each for name, each in listing.others.items() if name in LINE_FILES}
    missing = missing_here(beside, to.path)
    folders = {
        folder: lacking
        for folder, files in listing.checkpoints.items()
        if (lacking := missing_here(files, to.path / folder))
    }
    wanted = [missing, lines, *folders.values()]
    size = sum(each.bytes for files in wanted for each in files.values())
    count = sum(len(files) for files in wanted)
    say(_sizes(listing, to.path, size))
    told = Brought(
        to=to.path, steps=listing.steps, files=count, bytes=size, warnings=listing.warnings
    )
    if dry_run:
        return told
    refuse_without_room(size, to.path)
    if to.path != asked.path:
        for begun in to.path.glob(_BEGUN):
            begun.unlink()
        write_text(to.recipe, asked.recipe.read_text(encoding="utf-8"))
    with progress(_all(listing, folders, missing, lines)) as seen:
        receive(source, missing, to.path, told=seen)
        _bring_lines(source, lines, to, told=seen)
        for folder in folders:
            files = listing.checkpoints[folder]
            receive_whole(_Below(source, folder), files, to.path / folder, told=seen)
    _point(to, listing)
    return told


Progress = Callable[[int], AbstractContextManager[Told]]
"""Shows how far so many bytes have come, as long as it is entered."""


@contextmanager
def said_progress(total_bytes: int) -> Iterator[Told]:
    """A line every tenth."""
    done, next_tenth = 0, 1

    def tell(_name: str, size: int) -> None:
        nonlocal done, next_tenth
        done += size
        while total_bytes and done * 10 >= next_tenth * total_bytes and next_tenth < 10:
            say(f"{next_tenth * 10} %: {format_bytes(done)} of {format_bytes(total_bytes)}")
            next_tenth += 1

    yield tell


def _all(
    listing: Listing,
    folders: Mapping[str, object],
    *others: Mapping[str, FileDigest],
) -> int:
    """Bytes that the progress counts: of a folder that lacks a file, all its files."""
    whole = [listing.checkpoints[folder] for folder in folders]
    return sum(each.bytes for files in (*whole, *others) for each in files.values())


def _bring_lines(
    source: Source, lines: Mapping[str, FileDigest], to: RunDir, *, told: Told
) -> None:
    make_folder(to.path)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=to.path) as scratch:
        receive(source, lines, Path(scratch), told=told)
        for name in lines:
            merge_lines(Path(scratch) / name, to.path / name)


def _point(to: RunDir, listing: Listing) -> None:
    """Let ``latest`` and ``best`` name checkpoints that are here."""
    steps = to.checkpoint_steps()
    if listing.steps and steps:
        write_text(to.latest, to.checkpoint(steps[-1]).name + "\n")
    if listing.best is not None and listing.best in steps:
        write_text(to.best, to.checkpoint(listing.best).name + "\n")


def _refuse_others(to: RunDir, asked: RunDir) -> None:
    if to.path == asked.path or not to.path.exists():
        return
    if not to.path.is_dir() or any(not each.match(_BEGUN) for each in to.path.iterdir()):
        try:
            is_same = to.recipe.read_bytes() == asked.recipe.read_bytes()
        except OSError:
            is_same = False
        if not is_same:
            raise RequestError(
                f"--to {to.path} exists and is not an empty folder, nor an earlier fetch of this "
                "run. Its files would mix. Give another folder, or remove that one."
            )


def _sizes(listing: Listing, to: Path, missing_bytes: int) -> str:
    there = next(each for each in (to, *to.absolute().parents) if each.exists())
    free = format_bytes(shutil.disk_usage(there).free)
    return (
        f"{len(listing.files)} files, {format_bytes(listing.bytes)}; {format_bytes(missing_bytes)} "
        f"are not in {to} yet, which has {free} free"
    )
