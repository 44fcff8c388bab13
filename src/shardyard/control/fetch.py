"""Bring the files of a remote run into its folder here."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardyard.control.aux_jobs import SideTerms, run_side_job, side_request
from shardyard.control.run_location import RunLocation, nodes_folder
from shardyard.control.side_jobs import open_remote_files
from shardyard.errors import RequestError
from shardyard.io.aws import s3_client
from shardyard.io.digests import FileDigest, FolderDigests
from shardyard.io.files import make_folder, write_text
from shardyard.io.object_store import parse_location
from shardyard.launchers.base import SideJob
from shardyard.log import info, warn
from shardyard.own_processes import python_program
from shardyard.rundir.contracts import LINE_FILES
from shardyard.rundir.layout import RunDir
from shardyard.transfer.download import (
    FileSource,
    FolderSource,
    ProgressCallback,
    RemoteListing,
    check_free_space,
    missing_locally,
    read_listing,
    receive,
    receive_whole,
)
from shardyard.transfer.merge_jsonl import merge_lines
from shardyard.transfer.s3 import S3Source
from shardyard.units import format_bytes

# Bring listed files of a run into a folder here: sizes first, then progress, then the pointers.

_BEGUN = ".recipe.yaml.*"
"""All that there is of a copy whose fetch was killed as it wrote its first file."""


@dataclass(frozen=True, kw_only=True)
class FetchResult:
    """Result of a fetch."""

    to: Path
    steps: tuple[int, ...]
    files: int
    bytes: int
    """Bytes of the files that were missing here."""
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
class _Subfolder:
    """A folder of a source."""

    source: FileSource
    folder: str

    def read(self, name: str, offset: int) -> Iterator[bytes]:
        return self.source.read(f"{self.folder}/{name}", offset)


def download(
    source: FileSource,
    listing: RemoteListing,
    to: RunDir,
    *,
    run_dir: RunDir,
    progress: "Progress",
    dry_run: bool = False,
) -> FetchResult:
    """Bring what is missing.

    Args:
        to: The folder of the run here, or a copy.
        run_dir: The run's folder that the launcher keeps, whose recipe a copy gets.
        progress: Shows how far it is.

    Raises:
        RequestError: ``to`` holds something else.
        StorageError: There is no room, or it cannot be written.
        DataError: A file came wrong twice.
    """
    _check_target_folder(to, run_dir)
    for warning in listing.warnings:
        warn(f"{warning}.")
    others = {name: each for name, each in listing.others.items() if name not in LINE_FILES}
    lines = {name: each for name, each in listing.others.items() if name in LINE_FILES}
    missing = missing_locally(others, to.path)
    folders = {
        folder: lacking
        for folder, files in listing.checkpoints.items()
        if (lacking := missing_locally(files, to.path / folder))
    }
    wanted = [missing, lines, *folders.values()]
    size = sum(each.bytes for files in wanted for each in files.values())
    count = sum(len(files) for files in wanted)
    info(_sizes(listing, to.path, size))
    result = FetchResult(
        to=to.path, steps=listing.steps, files=count, bytes=size, warnings=listing.warnings
    )
    if dry_run:
        return result
    check_free_space(size, to.path)
    if to.path != run_dir.path:
        for begun in to.path.glob(_BEGUN):
            begun.unlink()
        write_text(to.recipe, run_dir.recipe.read_text(encoding="utf-8"))
    with progress(_all(listing, folders, missing, lines)) as seen:
        receive(source, missing, to.path, on_progress=seen)
        _download_lines(source, lines, to, on_progress=seen)
        for folder in folders:
            files = listing.checkpoints[folder]
            receive_whole(_Subfolder(source, folder), files, to.path / folder, on_progress=seen)
    _update_pointers(to, listing)
    return result


Progress = Callable[[int], AbstractContextManager[ProgressCallback]]
"""Shows how far so many bytes have come, as long as it is entered."""


@contextmanager
def log_progress(total_bytes: int) -> Iterator[ProgressCallback]:
    """A line every tenth."""
    done, next_tenth = 0, 1

    def on_progress(_name: str, size: int) -> None:
        nonlocal done, next_tenth
        done += size
        while total_bytes and done * 10 >= next_tenth * total_bytes and next_tenth < 10:
            info(f"{next_tenth * 10} %: {format_bytes(done)} of {format_bytes(total_bytes)}")
            next_tenth += 1

    yield on_progress


def _all(
    listing: RemoteListing,
    folders: Mapping[str, object],
    *others: Mapping[str, FileDigest],
) -> int:
    """Bytes that the progress counts: of a folder that lacks a file, all its files."""
    whole = [listing.checkpoints[folder] for folder in folders]
    return sum(each.bytes for files in (*whole, *others) for each in files.values())


def _download_lines(
    source: FileSource,
    lines: Mapping[str, FileDigest],
    to: RunDir,
    *,
    on_progress: ProgressCallback,
) -> None:
    make_folder(to.path)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=to.path) as scratch:
        receive(source, lines, Path(scratch), on_progress=on_progress)
        for name in lines:
            merge_lines(Path(scratch) / name, to.path / name)


def _update_pointers(to: RunDir, listing: RemoteListing) -> None:
    """Let ``latest`` and ``best`` name checkpoints that are here."""
    steps = to.checkpoint_steps()
    if listing.steps and steps:
        write_text(to.latest, to.checkpoint(steps[-1]).name + "\n")
    if listing.best is not None and listing.best in steps:
        write_text(to.best, to.checkpoint(listing.best).name + "\n")


def _check_target_folder(to: RunDir, run_dir: RunDir) -> None:
    if to.path == run_dir.path or not to.path.exists():
        return
    if not to.path.is_dir() or any(not each.match(_BEGUN) for each in to.path.iterdir()):
        try:
            is_same = to.recipe.read_bytes() == run_dir.recipe.read_bytes()
        except OSError:
            is_same = False
        if not is_same:
            raise RequestError(
                f"--to {to.path} exists and is not an empty folder, nor an earlier fetch of this "
                "run. Its files would mix. Give another folder, or remove that one."
            )


def _sizes(listing: RemoteListing, to: Path, missing_bytes: int) -> str:
    there = next(each for each in (to, *to.absolute().parents) if each.exists())
    free = format_bytes(shutil.disk_usage(there).free)
    return (
        f"{len(listing.files)} files, {format_bytes(listing.bytes)}; {format_bytes(missing_bytes)} "
        f"are not in {to} yet, which has {free} free"
    )


def fetch_run(
    home: RunLocation,
    target: RunDir,
    step: str,
    via: str | None,
    terms: SideTerms,
    *,
    progress: Progress = log_progress,
) -> FetchResult | None:
    """Bring a run by the shortest way that there is; None: a request was only shown."""
    location = None if via is None else parse_location(via)
    if home.folder is not None:
        if location is not None:
            raise RequestError(
                f"--via {via}: the files of run {home.run_dir.run_id} are in {home.folder.path}, "
                "which this machine sees. Leave --via out, or copy an export: shardyard export "
                f"{home.run_dir.handle} --to {via}"
            )
        if target.path.resolve() == home.folder.path.resolve():
            info(f"no files to fetch: {home.folder.path} is where the run's files are")
            return FetchResult(to=target.path, steps=(), files=0, bytes=0, warnings=())
        listing = list_local_folder(home.folder, step)
        source = FolderSource(folder=home.folder.path)
        return download(
            source, listing, target, run_dir=home.run_dir, progress=progress, dry_run=terms.dry_run
        )
    trained, recipe = home.remote
    if location is not None:
        side = SideJob(kind="fetch", arguments={"via": str(location), "step": step})
        request = side_request(home.run_dir, trained.launcher, side, recipe=recipe)
        if run_side_job(home.run_dir, trained.launcher, request, terms) is None:
            return None
        there = S3Source(client=s3_client(), location=location)
        listing = _of_complete(there.complete(), home.run_dir)
        return download(there, listing, target, run_dir=home.run_dir, progress=progress)
    with open_remote_files(home.run_dir, trained, recipe, terms) as nodes:
        if nodes is None:
            return None
        info(
            f"reading {nodes_folder(recipe, home.run_dir)}: the checkpoint is verified there first"
        )
        listing = nodes.source.list(step)
        return download(nodes.source, listing, target, run_dir=home.run_dir, progress=progress)


def list_local_folder(folder: RunDir, step: str) -> RemoteListing:
    """List what a run's folder on this machine holds, with the checkpoint of a step verified.

    Raises:
        ShardyardError: The error that the listing answered.
    """
    program = python_program("shardyard.checkpoint.select", str(folder.path))
    with subprocess.Popen(
        [*program, "--step", step], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        return read_listing(process.stdout)


def _of_complete(complete: FolderDigests, run_dir: RunDir) -> RemoteListing:
    """Return a listing of what was sent to S3, checked for its form."""
    run = complete.provenance.get("run")
    if run != run_dir.run_id:
        raise RequestError(
            f"the prefix holds files of run {run!r}, not of {run_dir.run_id!r}. Give another."
        )
    lines = [
        json.dumps({"file": name, **asdict(digest)}) for name, digest in complete.files.items()
    ]
    end = {key: complete.provenance.get(key) for key in ("steps", "best", "warnings")}
    return read_listing([*lines, json.dumps({"end": end})])
