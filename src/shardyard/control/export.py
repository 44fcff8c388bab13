"""A checkpoint becomes a Hugging Face folder, where its files are."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardyard.control.aux_jobs import SideTerms, run_side_job, side_request
from shardyard.control.fetch import Progress, log_progress
from shardyard.control.run_location import RunLocation, check_has_checkpoint, nodes_folder
from shardyard.control.side_jobs import RemoteFiles, open_remote_files
from shardyard.control.subprocesses import run_program
from shardyard.errors import DataError, RequestError
from shardyard.io.aws import s3_client
from shardyard.io.digests import (
    COMPLETE,
    FolderDigests,
    find_damage,
    parse_digests,
    read_digests,
)
from shardyard.io.object_store import parse_location
from shardyard.launchers.base import Executor, SideJob
from shardyard.log import info
from shardyard.report.model_card import is_unedited_card, model_card
from shardyard.report.run_data import read_run
from shardyard.rundir.layout import RunDir
from shardyard.transfer.download import check_free_space, receive_whole, steadily
from shardyard.transfer.hub import HubRepository, check_repository, is_hub, parse_repository, push
from shardyard.transfer.s3 import check_access, is_s3, upload
from shardyard.units import format_bytes

EXPORTS = "exports"
"""Folder in a run's folder: exports on their way elsewhere."""


def export_run(
    home: RunLocation,
    to: str,
    requested: dict[str, Any],
    terms: SideTerms,
    *,
    is_public: bool = False,
    progress: Progress = log_progress,
) -> dict[str, Any] | None:
    """Export a checkpoint from where it is, and return what was written.

    None: a request was only shown.

    Args:
        to: A folder, a location in S3, or a repository of the Hugging Face hub.
        requested: ``step``, ``dtype`` or None, and ``merged``.
        is_public: Whether a repository that is made is public.
        terms: Terms of the side job, where only the nodes see the run's files.
        progress: Shows how far it is, where an export comes from the nodes.

    Raises:
        ShardyardError: The export's own, or the side job's.
    """
    if is_hub(to):
        return _export_to_hub(
            home, parse_repository(to), requested, terms, is_public=is_public, progress=progress
        )
    if is_public:
        raise RequestError(
            f"--public is for a repository of the Hugging Face hub, and --to is {to}. Leave it out."
        )
    if home.folder is not None:
        return export_from(home.folder, to, requested, dry_run=terms.dry_run)
    if home.run_dir.checkpoint_steps() and home.run_dir.attempts():
        info(
            "exporting what was fetched to this machine; `shardyard fetch "
            f"{home.run_dir.handle}` first brings what is newer"
        )
        return export_from(home.run_dir, to, requested, dry_run=terms.dry_run)
    return export_from_nodes(home, to, requested, terms, progress=progress)


def export_from(
    folder: RunDir, to: str, requested: dict[str, Any], *, dry_run: bool = False
) -> dict[str, Any]:
    """Export from a run's folder that this machine sees; what was written.

    Args:
        to: A folder, or a location in S3.
        requested: ``step``, ``dtype`` or None, and ``merged``.

    Raises:
        ShardyardError: The export's own.
    """
    options = export_options(requested)
    options += ["--dry-run"] if dry_run else []
    if not is_s3(to):
        return run_export(folder, "--to", to, options)
    target, client = parse_location(to), s3_client()
    check_access(client, target)
    result = run_export(folder, "--into", str(folder.path / EXPORTS), options)
    written = Path(result["to"])
    result["to"] = to
    if not dry_run:
        complete = read_digests(written)
        info(f"sending {len(complete.files)} files, {format_bytes(complete.bytes)}, to {target}")
        result["complete"]["was_there"] = not upload(
            client, written, complete, target, told=lambda name, _: info(f"there: {name}")
        )
        _forget(written)
    return result


def _export_to_hub(
    home: RunLocation,
    repository: HubRepository,
    requested: dict[str, Any],
    terms: SideTerms,
    *,
    is_public: bool,
    progress: Progress,
) -> dict[str, Any] | None:
    """Export next to the run, or bring an export from the nodes, and push it from this machine.

    None: with ``dry_run`` the request of a side job was shown.
    """
    state = check_repository(repository)
    if is_public and state is not None and state.is_private:
        raise RequestError(
            f"--public: {repository}: the repository exists and is private. Leave --public out, "
            f"and change who sees it at https://huggingface.co/{repository.name}/settings."
        )
    run_dir = home.folder or home.run_dir
    if home.folder is not None or (run_dir.checkpoint_steps() and run_dir.attempts()):
        options = export_options(requested) + (["--dry-run"] if terms.dry_run else [])
        result = run_export(run_dir, "--into", str(run_dir.exports), options)
        written = Path(result["to"])
    else:
        place = f"{repository.name}@{repository.branch}".replace("/", "--")
        written = run_dir.exports / f"hub-{place}"
        found = export_from_nodes(
            home, str(written), requested, terms, progress=progress, is_scratch=True
        )
        if found is None:
            return None
        result = found
    result["to"] = str(repository)
    if terms.dry_run:
        return result
    complete = read_digests(written)
    card = None
    if state is None or state.card is None or is_unedited_card(state.card):
        card = model_card(
            repository.name,
            read_run(run_dir) if run_dir.attempts() else None,
            written,
            branch=repository.branch,
            step=int(complete.provenance["step"]),
            size_bytes=complete.bytes,
        )
    else:
        info(f"the model card of {repository} was written by somebody, and stays as it is")
    info(f"pushing {len(complete.files)} files, {format_bytes(complete.bytes)}, to {repository}")
    was_missing = push(
        repository, state, written, complete, card=card, is_public=is_public,
        on_progress=lambda name, _: info(f"there: {name}"),
    )  # fmt: skip
    result["complete"]["was_there"] = not was_missing
    _forget(written)
    return result


def export_options(requested: dict[str, Any]) -> list[str]:
    """Return the options of the program that exports, from what was asked."""
    options = ["--answer", "--step", str(requested["step"])]
    options += ["--dtype", str(requested["dtype"])] if requested["dtype"] else []
    return [*options, "--merged"] if requested["merged"] else options


def run_export(folder: RunDir, where: str, path: str, options: list[str]) -> dict[str, Any]:
    return run_program("shardyard.checkpoint.export", [str(folder.path), where, path, *options])


def export_from_nodes(
    home: RunLocation,
    to: str,
    requested: dict[str, Any],
    terms: SideTerms,
    *,
    progress: Progress,
    is_scratch: bool = False,
) -> dict[str, Any] | None:
    """Export where the nodes are; None: with ``dry_run`` a request was printed.

    Args:
        is_scratch: Whether ``to`` is a folder of ours: an export that is left there is used again
            if it is the same, and else replaced.
    """
    trained, recipe = home.remote
    sight = trained.launcher.node_paths(recipe)
    stays = is_s3(to) or sight.holds(to)
    if not stays:
        if not is_scratch:
            _check_target_folder(Path(to))
        if not isinstance(trained.launcher, Executor):
            raise RequestError(
                f"--to {to}: nodes of {trained.launcher.name} do not see that folder, and cannot "
                f"be read from here. Give --to s3://bucket/prefix, or a folder of {sight.mounts}."
            )
    if not terms.dry_run:
        check_has_checkpoint(trained)
    side = SideJob(kind="export", arguments={**requested, "to": to if stays else None})
    request = side_request(home.run_dir, trained.launcher, side, recipe=recipe)
    result = run_side_job(home.run_dir, trained.launcher, request, terms)
    if result is None:
        return None
    if stays and not is_s3(to):
        info(f"{to} is on the nodes' storage, where it was written and stays")
    if not stays:
        wanted = str(result["complete"]["sha256"])
        if is_scratch:
            _remove_other_export(Path(to), wanted)
        found = _is_exported_locally(Path(to), wanted)
        if not found:
            there = f"{nodes_folder(recipe, home.run_dir)}/{EXPORTS}/{Path(result['to']).name}"
            with open_remote_files(home.run_dir, trained, recipe, terms) as nodes:
                assert nodes is not None
                _download_export(nodes, there, Path(to), wanted, progress)
        result["complete"]["was_there"] = found
        result["to"] = to
    return result


def _download_export(
    nodes: RemoteFiles, remote_path: str, to: Path, expected_sha256: str, progress: Progress
) -> None:
    """Bring an export from the nodes' storage, and remove it there."""
    source = nodes.of(remote_path)
    complete = _complete(b"".join(steadily(source, COMPLETE, 0)), remote_path)
    if complete.sha256 != expected_sha256:
        raise DataError(
            f"{remote_path} on the nodes' storage is not the export that was just made: something "
            "else wrote there. Repeat the command."
        )
    size = complete.bytes
    info(f"bringing {len(complete.files)} files, {format_bytes(size)}, to {to}")
    check_free_space(size, to)
    with progress(size) as seen:
        receive_whole(source, complete.files, to, on_progress=seen, complete=complete)
    nodes.remove(remote_path)


def _complete(data: bytes, where: str) -> FolderDigests:
    try:
        return parse_digests(data)
    except DataError as error:
        raise DataError(f"{where} on the nodes' storage: {error}. Repeat the command.") from error


def _is_exported_locally(to: Path, expected_sha256: str) -> bool:
    """Whether the export is here already, every file held to its digest.

    Raises:
        RequestError: Something else is there.
    """
    if not to.exists() or (to.is_dir() and next(to.iterdir(), None) is None):
        return False
    complete = read_digests(to)
    if complete.sha256 != expected_sha256:
        raise RequestError(_others(to))
    if damage := find_damage(to, complete):
        raise RequestError(
            f"--to {to} holds this export, but it was changed since: {'; '.join(damage)}. Remove "
            "the folder and export again, or give another one."
        )
    return True


def _remove_other_export(to: Path, expected_sha256: str) -> None:
    """Empty a folder of ours that holds another export, or one that was changed since."""
    with suppress(DataError):
        complete = read_digests(to)
        if complete.sha256 == expected_sha256 and not find_damage(to, complete):
            return
    shutil.rmtree(to, ignore_errors=True)


def _check_target_folder(to: Path) -> None:
    """Raise before anything is submitted where the folder holds what is no export."""
    if not to.exists() or (to.is_dir() and next(to.iterdir(), None) is None):
        return
    try:
        read_digests(to)
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
