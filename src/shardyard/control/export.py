"""A checkpoint becomes a Hugging Face folder, where its files are."""

import shutil
from pathlib import Path
from typing import Any

from shardyard.control.aux_jobs import SideTerms, run_side_job, side_request
from shardyard.control.fetch import Progress, said_progress
from shardyard.control.run_location import RunHome, nodes_folder, refuse_without_checkpoint
from shardyard.control.side_jobs import Opened, opened
from shardyard.control.subprocesses import run_program
from shardyard.errors import DataError, RequestError
from shardyard.io.aws import s3_client
from shardyard.io.digests import (
    COMPLETE,
    Complete,
    damage_of,
    parse_complete,
    read_complete,
)
from shardyard.launchers.base import Executor, SideJob
from shardyard.log import say
from shardyard.rundir.layout import RunDir
from shardyard.transfer.download import receive_whole, refuse_without_room, steadily
from shardyard.transfer.s3 import (
    is_s3,
    parse_place,
    refuse_unusable,
    upload,
)
from shardyard.units import format_bytes

EXPORTS = "exports"
"""Folder in a run's folder: exports on their way elsewhere."""


def export_run(
    home: RunHome,
    to: str,
    asked: dict[str, Any],
    terms: SideTerms,
    *,
    progress: Progress = said_progress,
) -> dict[str, Any] | None:
    """Export a checkpoint from where it is; what was written. None: a request was shown alone.

    Args:
        to: A folder, or a place in S3.
        asked: ``step``, ``dtype`` or None, and ``merged``.
        terms: Of the side job, where only the nodes see the run's files.
        progress: Shows how far it is, where an export comes from the nodes.

    Raises:
        ShardyardError: The export's own, or the side job's.
    """
    if home.folder is not None:
        return export_from(home.folder, to, asked, dry_run=terms.dry_run)
    if home.run_dir.checkpoint_steps() and home.run_dir.attempts():
        say(
            "exporting what was fetched to this machine; `shardyard fetch "
            f"{home.run_dir.handle}` first brings what is newer"
        )
        return export_from(home.run_dir, to, asked, dry_run=terms.dry_run)
    return export_from_nodes(home, to, asked, terms, progress=progress)


def export_from(
    folder: RunDir, to: str, asked: dict[str, Any], *, dry_run: bool = False
) -> dict[str, Any]:
    """Export from a run's folder that this machine sees; what was written.

    Args:
        to: A folder, or a place in S3.
        asked: ``step``, ``dtype`` or None, and ``merged``.

    Raises:
        ShardyardError: The export's own.
    """
    options = export_options(asked)
    options += ["--dry-run"] if dry_run else []
    if not is_s3(to):
        return run_export(folder, "--to", to, options)
    place, client = parse_place(to), s3_client()
    refuse_unusable(client, place)
    told = run_export(folder, "--into", str(folder.path / EXPORTS), options)
    written = Path(told["to"])
    told["to"] = to
    if not dry_run:
        complete = read_complete(written)
        say(f"sending {len(complete.files)} files, {format_bytes(complete.bytes)}, to {place}")
        told["complete"]["was_there"] = not upload(
            client, written, complete, place, told=lambda name, _: say(f"there: {name}")
        )
        _forget(written)
    return told


def export_options(asked: dict[str, Any]) -> list[str]:
    """Of the program that exports, from what was asked."""
    options = ["--answer", "--step", str(asked["step"])]
    options += ["--dtype", str(asked["dtype"])] if asked["dtype"] else []
    return [*options, "--merged"] if asked["merged"] else options


def run_export(folder: RunDir, where: str, place: str, options: list[str]) -> dict[str, Any]:
    return run_program("shardyard.checkpoint.export", [str(folder.path), where, place, *options])


def export_from_nodes(
    home: RunHome,
    to: str,
    asked: dict[str, Any],
    terms: SideTerms,
    *,
    progress: Progress,
) -> dict[str, Any] | None:
    """Export where the nodes are; None: with ``dry_run`` a request was printed."""
    trained, recipe = home.far
    sight = trained.launcher.sees(recipe)
    stays = is_s3(to) or sight.holds(to)
    if not stays:
        _refuse_others(Path(to))
        if not isinstance(trained.launcher, Executor):
            raise RequestError(
                f"--to {to}: nodes of {trained.launcher.name} do not see that folder, and cannot "
                f"be read from here. Give --to s3://bucket/prefix, or a folder of {sight.mounts}."
            )
    if not terms.dry_run:
        refuse_without_checkpoint(trained)
    side = SideJob(kind="export", arguments={**asked, "to": to if stays else None})
    request = side_request(home.run_dir, trained.launcher, side, recipe=recipe)
    told = run_side_job(home.run_dir, trained.launcher, request, terms)
    if told is None:
        return None
    if stays and not is_s3(to):
        say(f"{to} is on the nodes' storage, where it was written and stays")
    if not stays:
        wanted = str(told["complete"]["sha256"])
        found = _export_here(Path(to), wanted)
        if not found:
            there = f"{nodes_folder(recipe, home.run_dir)}/{EXPORTS}/{Path(told['to']).name}"
            with opened(home.run_dir, trained, recipe, terms) as nodes:
                assert nodes is not None
                _bring(nodes, there, Path(to), wanted, progress)
        told["complete"]["was_there"] = found
        told["to"] = to
    return told


def _bring(nodes: Opened, there: str, to: Path, wanted: str, progress: Progress) -> None:
    """Bring an export from the nodes' storage, and remove it there."""
    source = nodes.of(there)
    complete = _complete(b"".join(steadily(source, COMPLETE, 0)), there)
    if complete.sha256 != wanted:
        raise DataError(
            f"{there} on the nodes' storage is not the export that was just made: something else "
            "wrote there. Repeat the command."
        )
    size = complete.bytes
    say(f"bringing {len(complete.files)} files, {format_bytes(size)}, to {to}")
    refuse_without_room(size, to)
    with progress(size) as seen:
        receive_whole(source, complete.files, to, told=seen, complete=complete)
    nodes.remove(there)


def _complete(data: bytes, where: str) -> Complete:
    try:
        return parse_complete(data)
    except DataError as error:
        raise DataError(f"{where} on the nodes' storage: {error}. Repeat the command.") from error


def _export_here(to: Path, wanted: str) -> bool:
    """Whether the export is here already, every file held to its digest.

    Raises:
        RequestError: Something else is there.
    """
    if not to.exists() or (to.is_dir() and next(to.iterdir(), None) is None):
        return False
    complete = read_complete(to)
    if complete.sha256 != wanted:
        raise RequestError(_others(to))
    if damage := damage_of(to, complete):
        raise RequestError(
            f"--to {to} holds this export, but it was changed since: {'; '.join(damage)}. Remove "
            "the folder and export again, or give another one."
        )
    return True


def _refuse_others(to: Path) -> None:
    """Raise before anything is submitted where the folder holds what is no export."""
    if not to.exists() or (to.is_dir() and next(to.iterdir(), None) is None):
        return
    try:
        read_complete(to)
    except DataError as error:
        raise RequestError(_others(to)) from error


def _others(to: Path) -> str:
    return (
        f"--to {to} exists and is not an empty folder; an export would mix with what is there. "
        "Give another folder, or remove that one."
    )


def _forget(written: Path) -> None:
    shutil.rmtree(written, ignore_errors=True)
    if written.parent.name == EXPORTS and not any(written.parent.iterdir()):
        written.parent.rmdir()
