"""The Hugging Face hub: repositories are fetched into a store, or into this machine's cache.

A store is one folder, on a volume that nodes share or on a node's own disk. It holds a folder for
each commit of a repository, ``<owner>--<name>@<first 12 digits>``, fetched by one process at a
time. A folder is whole once ``complete.json`` is there: every file with its bytes and SHA-256.
Readers check the files against that list, so that nodes can compare what they have by a digest.

huggingface_hub fetches the files. Finished ones stay when a process is killed, and a broken
connection continues within a file. Since 2.x, it restarts a file that a killed process had half
of, and leaves the half behind; those halves are removed here.
"""

import errno
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from shardyard.config.fingerprint import digest
from shardyard.config.model.hub_errors import HubOfflineError, HubSetting, translate_hub_errors
from shardyard.errors import CapacityError, DataError, RequestError, StorageError
from shardyard.io.digests import COMPLETE, FileDigest, FolderDigests, read_digests
from shardyard.io.files import locked, make_folder, publish_file, write_text
from shardyard.units import format_bytes

Level = Literal["tokenizer", "config", "weights"]
"""Part of a repository to fetch; each level includes those before it."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_PATTERNS: dict[Level, tuple[str, ...]] = {
    "tokenizer": _TOKENIZER_FILES,
    "config": ("*.json", "*.jinja"),
    "weights": ("*.json", "*.jinja", "*.safetensors"),
}
"""File patterns by level; no file of these runs code when opened."""

_LOCK = ".lock"
_PART = ".part"
_SCRATCH = ".cache"
"""Folder of huggingface_hub's records and partial files, in the folder that it fetches into."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
ANSWER_S = 10.0
"""For one answer of the hub, or of a proxy before it."""
_READ_BYTES = 2**20
_NO_ROOM_LEFT_BYTES = 2**20
"""For notes, the list and the file system's own blocks."""

LogFunction = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class HubRequest:
    """Request of a recipe to the hub."""

    kind: HubSetting
    name: str
    revision: str | None
    """Branch, tag or commit; None: the default branch."""
    level: Level

    @property
    def words(self) -> str:
        asked = f"{self.kind}={self.name}"
        return asked if self.revision is None else f"{asked} at revision {self.revision}"


@dataclass(frozen=True, kw_only=True)
class StoredRepository:
    """Content of complete.json in a folder of the store."""

    name: str
    commit: str
    level: Level
    revisions: tuple[str | None, ...]
    """Requested revisions that gave this commit; they are found again without the hub."""
    files: Mapping[str, FileDigest]
    mtimes_ns: Mapping[str, int]
    """A file of the same size and time is not read again."""

    @property
    def digest(self) -> str:
        """Equal where the files are."""
        return digest({name: file.sha256 for name, file in self.files.items()})


@dataclass(frozen=True, kw_only=True)
class _Expected:
    """Size and digests of a file, from the hub or the cache."""

    bytes: int
    sha256: str | None
    """SHA-256 of large files, which are in LFS."""
    blob: str | None
    """Git's SHA-1, of the others."""


@dataclass(frozen=True, kw_only=True)
class _Listing:
    """The files of a commit that are wanted."""

    commit: str
    files: Mapping[str, _Expected]


def fetch(request: HubRequest, store: Path | None, *, log: LogFunction) -> Path:
    """Fetch a repository, or find it fetched.

    Args:
        store: Folder in which nodes look for it; None: the Hugging Face cache of this machine.
        log: Called before a long fetch or wait.

    Returns:
        The folder of its files.

    Raises:
        RequestError: There is no such repository or revision; or what the store holds was changed.
        AccessError: The hub asks for permission.
        CapacityError: The hub cannot be reached.
        StorageError: The store or the cache cannot be written, or is full.
        DataError: What came is not what the hub has.
    """
    hide_bars_in_logs()
    return _into_cache(request) if store is None else _into_store(request, store, log)


def hide_bars_in_logs() -> None:
    """Let huggingface_hub draw its bars on a terminal only: a log of bars is thousands of lines."""
    if not sys.stderr.isatty():
        from huggingface_hub.utils.tqdm import disable_progress_bars  # takes 0.2 s, rarely needed

        disable_progress_bars()


def commit_of(folder: Path) -> str | None:
    """The commit that a folder of the store or of the cache holds; None: it is neither."""
    stored = _read_stored(folder, log=lambda _: None)
    if stored is not None:
        return stored.commit
    is_snapshot = folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name)
    return folder.name if is_snapshot else None


def digest_of(folder: Path) -> str | None:
    """Equal where two folders of a store hold the same files; None: it is none."""
    stored = _read_stored(folder, log=lambda _: None)
    return None if stored is None else stored.digest


def verified_repository(
    folder: Path, *, log: LogFunction = lambda _: None
) -> StoredRepository | None:
    """The list of a store's folder, once its files are held against it; None: it is not whole.

    A file whose size and time are as they were is taken for the same; any other is read.

    Raises:
        RequestError: A file was changed after it was fetched.
    """
    stored = _read_stored(folder, log=log)
    if stored is None:
        return None
    for name, file in stored.files.items():
        path = folder / name
        try:
            found = path.stat()
        except FileNotFoundError:
            log(f"note: {path} is gone; it is fetched again")
            return None
        if (found.st_size, found.st_mtime_ns) == (file.bytes, stored.mtimes_ns[name]):
            continue
        if found.st_size != file.bytes or digests_of(path).sha256 != file.sha256:
            raise RequestError(
                f"{path} was changed after it was fetched: it has {found.st_size:,} bytes and "
                f"another SHA-256 than {COMPLETE} next to it says. A run with it would not train "
                f"{stored.name} at {stored.commit[:12]}. Remove the file to have it fetched again; "
                "if the change is wanted, copy the folder elsewhere and name it with model.path."
            )
    return stored


def _into_cache(request: HubRequest) -> Path:
    from huggingface_hub import snapshot_download

    try:
        _ask(request)  # huggingface_hub has no limit for the first answer, and asks again and again
        with translate_hub_errors(request.words, setting=request.kind):
            found = snapshot_download(
                request.name,
                revision=request.revision,
                allow_patterns=list(_PATTERNS[request.level]),
            )
    except OSError as error:
        raise StorageError(
            f"{request.words} cannot be fetched into the Hugging Face cache of this machine: "
            f"{error.filename or 'its disk'}: {error.strerror}. Make room (`df -h`), or choose "
            "another folder with HF_HOME or model.dir."
        ) from error
    except (CapacityError, HubOfflineError):  # huggingface_hub looks there after some errors only
        cached = _in_cache(request, request.revision)
        if cached is None:
            raise
        return cached
    return Path(found)


def _into_store(request: HubRequest, store: Path, log: LogFunction) -> Path:
    revision = request.revision or ""
    if _COMMIT.fullmatch(revision):
        folder = store / _folder_name(request.name, revision)
        if _has_level(verified_repository(folder, log=log), request.level):
            return folder
    try:
        listing = _ask(request)
    except (CapacityError, HubOfflineError):
        commit = _stored_commit(request, store, log)
        folder = store / _folder_name(request.name, commit or "")
        if commit is not None and _has_level(verified_repository(folder, log=log), request.level):
            return folder
        cached = _in_cache(request, commit or request.revision)
        if cached is None:
            raise
        listing = _listing_of(cached, request.level)
    folder = store / _folder_name(request.name, listing.commit)
    with _translate_storage_errors(request, store), _sole_writer(folder, log):
        held = verified_repository(folder, log=log)
        if held is not None and _has_level(held, request.level):
            if request.revision not in held.revisions:
                with suppress(StorageError):  # a store that is only read
                    _write_complete(folder, held, request)
            return folder
        _download_and_verify(request, listing, folder, log)
    return folder


def _folder_name(name: str, commit: str) -> str:
    return f"{name.replace('/', '--')}@{commit[:12]}"


def _has_level(stored: StoredRepository | None, level: Level) -> bool:
    levels = get_args(Level)
    return stored is not None and levels.index(stored.level) >= levels.index(level)


def _ask(request: HubRequest) -> _Listing:
    """Ask the hub for its files."""
    from huggingface_hub import HfApi

    with translate_hub_errors(request.words, setting=request.kind):
        info = HfApi().model_info(
            request.name, revision=request.revision, files_metadata=True, timeout=ANSWER_S
        )
    files = {}
    for sibling in info.siblings or ():
        if _matches_level(sibling.rfilename, request.level):
            lfs = sibling.lfs
            files[sibling.rfilename] = _Expected(
                bytes=int(sibling.size or 0),
                sha256=None if lfs is None else lfs.sha256,
                blob=None if lfs is not None else sibling.blob_id,
            )
    return _Listing(commit=str(info.sha), files=files)


def _matches_level(name: str, level: Level) -> bool:
    return _is_inside(name) and any(fnmatch(name, pattern) for pattern in _PATTERNS[level])


def _is_inside(name: str) -> bool:
    """Whether a file's name, joined to a folder, stays in it."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts


def _stored_commit(request: HubRequest, store: Path, log: LogFunction) -> str | None:
    """The commit that the hub named when it was asked the same, of a folder of the store."""
    beginning = _folder_name(request.name, "")
    for folder in sorted(store.iterdir()) if store.is_dir() else ():
        held = _read_stored(folder, log=log) if folder.name.startswith(beginning) else None
        if held is not None and request.revision in held.revisions:
            return held.commit
    return None


def _in_cache(request: HubRequest, revision: str | None) -> Path | None:
    """Return the folder in this machine's cache, without asking the hub; None: it is not whole."""
    from huggingface_hub import errors, snapshot_download

    patterns = list(_PATTERNS[request.level])
    try:
        found = snapshot_download(
            request.name, revision=revision, allow_patterns=patterns, local_files_only=True
        )
    except (errors.LocalEntryNotFoundError, ValueError):
        return None
    return Path(found)


def _listing_of(cached: Path, level: Level) -> _Listing:
    names = [str(path.relative_to(cached)) for path in cached.rglob("*") if path.is_file()]
    files = {name: _of_blob(cached / name) for name in names if _matches_level(name, level)}
    return _Listing(commit=cached.name, files=files)


def _of_blob(path: Path) -> _Expected:
    """A file of the cache is a link to a blob that is named by its digest."""
    blob = path.resolve().name
    return _Expected(
        bytes=path.stat().st_size,
        sha256=blob if _SHA256.fullmatch(blob) else None,
        blob=blob if _COMMIT.fullmatch(blob) else None,
    )


@contextmanager
def _sole_writer(folder: Path, log: LogFunction) -> Iterator[None]:
    """Wait until no other process fetches this folder."""
    make_folder(folder)
    words = f"waiting for another process that fetches {folder}"
    with locked(folder / _LOCK, waits=lambda: log(words)):
        yield


def _download_and_verify(
    request: HubRequest, listing: _Listing, folder: Path, log: LogFunction
) -> None:
    """Fetch what the folder lacks, hold all of it against the listing, write the list last."""
    shutil.rmtree(folder / _SCRATCH, ignore_errors=True)  # halves that a killed process left
    for half in folder.rglob(f"*{_PART}"):
        half.unlink()
    missing = {
        name: file for name, file in listing.files.items() if not _has_size(folder / name, file)
    }
    total_bytes = sum(file.bytes for file in missing.values())
    _check_free_space(folder, total_bytes)
    if missing:
        log(f"fetching {request.words} ({format_bytes(total_bytes)}) into {folder}")
    _copy_from_cache(request, listing.commit, missing, folder)
    not_cached = {
        name: file for name, file in missing.items() if not _has_size(folder / name, file)
    }
    _download(request, listing.commit, not_cached, folder, is_forced=False)
    files = {name: _verified_file(request, listing, name, folder) for name in sorted(listing.files)}
    shutil.rmtree(folder / _SCRATCH, ignore_errors=True)
    stored = StoredRepository(
        name=request.name,
        commit=listing.commit,
        level=request.level,
        revisions=(),
        files=files,
        mtimes_ns={name: (folder / name).stat().st_mtime_ns for name in files},
    )
    _write_complete(folder, stored, request)


def _has_size(path: Path, file: _Expected) -> bool:
    try:
        return path.stat().st_size == file.bytes
    except OSError:
        return False


def _check_free_space(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes + _NO_ROOM_LEFT_BYTES > free_bytes:
        text = (
            f"{folder}: {format_bytes(needed_bytes)} are to be fetched and "
            f"{format_bytes(free_bytes)} are free"
        )
        raise OSError(errno.ENOSPC, text, str(folder))


def _download(
    request: HubRequest, commit: str, names: Mapping[str, Any], folder: Path, *, is_forced: bool
) -> None:
    if not names:
        return
    from huggingface_hub import snapshot_download

    with translate_hub_errors(request.words, setting=request.kind):
        snapshot_download(
            request.name,
            revision=commit,
            allow_patterns=sorted(names),
            local_dir=folder,
            force_download=is_forced,
        )


def _copy_from_cache(
    request: HubRequest, commit: str, names: Mapping[str, _Expected], folder: Path
) -> None:
    """Take what this machine has of the same commit already."""
    from huggingface_hub import try_to_load_from_cache

    for name in names:
        cached = try_to_load_from_cache(request.name, name, revision=commit)
        if isinstance(cached, str):
            path = folder / name
            make_folder(path.parent)
            part = path.with_name(f"{path.name}{_PART}")
            shutil.copyfile(cached, part)
            publish_file(part, path)


@dataclass(frozen=True)
class Digests:
    sha256: str
    blob: str


def digests_of(path: Path) -> Digests:
    """SHA-256, and the SHA-1 that Git gives a file; what was read is on the disk after that."""
    sha256, blob = hashlib.sha256(), hashlib.sha1(usedforsecurity=False)
    blob.update(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            sha256.update(part)
            blob.update(part)
        os.fsync(file.fileno())
    return Digests(sha256.hexdigest(), blob.hexdigest())


def _verified_file(request: HubRequest, listing: _Listing, name: str, folder: Path) -> FileDigest:
    """Hold one file against the hub's digest; one that is wrong is fetched once more."""
    expected, path = listing.files[name], folder / name
    found = digests_of(path)
    if not _digests_match(expected, found):  # damaged in the cache, perhaps
        path.unlink()
        try:
            _download(request, listing.commit, {name: expected}, folder, is_forced=True)
            found = digests_of(path)
        except (CapacityError, HubOfflineError, FileNotFoundError) as error:
            raise _damaged_in_cache(request, listing, name) from error
    if not _digests_match(expected, found):
        path.unlink()
        raise DataError(
            f"{path} has another digest than the hub gives for it (SHA-256 "
            f"{found.sha256[:16]}...): it was damaged on the way or on the disk. It is removed; do "
            "the same again, and check the disk if it comes back."
        )
    return FileDigest(bytes=path.stat().st_size, sha256=found.sha256)


def _damaged_in_cache(request: HubRequest, listing: _Listing, name: str) -> DataError:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(request.name, name, revision=listing.commit)
    where = Path(cached if isinstance(cached, str) else name)
    return DataError(
        f"{where} is damaged: its digest is another one than the cache's name for it says, and the "
        f"hub cannot be asked for it again. Remove it (`rm '{where.resolve()}'`), and do the same "
        "where the hub can be reached and HF_HUB_OFFLINE is not set."
    )


def _digests_match(expected: _Expected, actual: Digests) -> bool:
    return (expected.sha256 or actual.sha256) == actual.sha256 and (
        expected.blob or actual.blob
    ) == actual.blob


def _write_complete(folder: Path, stored: StoredRepository, request: HubRequest) -> None:
    revisions = dict.fromkeys((*stored.revisions, request.revision, stored.commit))
    made_of = {
        "hub": stored.name,
        "commit": stored.commit,
        "level": stored.level,
        "revisions": list(revisions),
        "mtimes_ns": dict(stored.mtimes_ns),
    }
    write_text(folder / COMPLETE, FolderDigests(files=stored.files, provenance=made_of).text())


def _read_stored(folder: Path, *, log: LogFunction) -> StoredRepository | None:
    if not (folder / COMPLETE).is_file():
        return None
    try:
        return _stored(read_digests(folder))
    except DataError as error:
        log(f"note: {folder}: {error}; its files are held against the hub again")
        return None


def _stored(complete: FolderDigests) -> StoredRepository:
    """The folder of a store, if the file is of one.

    Raises:
        DataError: It is of something else; the text says only why.
    """
    made_of = complete.provenance
    try:
        stored = StoredRepository(
            name=made_of["hub"],
            commit=made_of["commit"],
            level=made_of["level"],
            revisions=tuple(made_of["revisions"]),
            files=complete.files,
            mtimes_ns={name: int(made_of["mtimes_ns"][name]) for name in complete.files},
        )
        has_form = (
            isinstance(stored.name, str)
            and _COMMIT.fullmatch(stored.commit)
            and stored.level in get_args(Level)
            and all(entry is None or isinstance(entry, str) for entry in stored.revisions)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{COMPLETE} is of no model of the hub ({error!r})") from error
    if not has_form:
        raise DataError(f"{COMPLETE} is of no model of the hub")
    return stored


@contextmanager
def _translate_storage_errors(request: HubRequest, store: Path) -> Iterator[None]:
    try:
        yield
    except StorageError as error:  # of the list itself
        raise _cannot_store(request, store, str(error).partition(". ")[0]) from error
    except OSError as error:
        why = f"{error.filename or store}: {error.strerror or error}"
        raise _cannot_store(request, store, why) from error


def _cannot_store(request: HubRequest, store: Path, reason: str) -> StorageError:
    return StorageError(
        f"{request.words} cannot be fetched into {store}: {reason}. What is there stays, and is "
        "not "
        "fetched again. Make room (`df -h`) or give the run's user the right to write there, or "
        "choose another folder with model.dir."
    )
