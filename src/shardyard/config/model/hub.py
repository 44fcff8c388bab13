"""The Hugging Face hub: repositories are fetched into a store, or into this machine's cache.

A store is one folder, on a volume that nodes share or on a node's own disk. It holds a folder for
each commit of a repository, ``<owner>--<name>@<first 12 digits>``, fetched by one process at a time
and whole once ``complete.json`` is there: every file with its bytes and SHA-256. Whoever opens it
holds the files against that list, so that nodes can compare what they have by a digest.

huggingface_hub fetches the files: finished ones stay when a process is killed, a broken connection
goes on within a file. Since 2.x it begins the file anew that a killed process had half of, and
leaves the half behind; those are removed here.
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
from shardyard.config.model.hub_errors import HubOfflineError, HubSetting, hub_errors_told
from shardyard.errors import CapacityError, DataError, RequestError, StorageError
from shardyard.io.digests import COMPLETE, Complete, FileDigest, read_complete
from shardyard.io.files import locked, make_folder, publish_file, write_text
from shardyard.units import format_bytes

Level = Literal["tokenizer", "config", "weights"]
"""How much of a repository is fetched; each level holds those before it."""

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
"""Nothing that runs code when opened."""

_LOCK = ".lock"
_PART = ".part"
_SCRATCH = ".cache"
"""Where huggingface_hub keeps its notes and half files, in the folder that it fetches into."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
ANSWER_S = 10.0
"""For one answer of the hub, or of a proxy before it."""
_READ_BYTES = 2**20
_NO_ROOM_LEFT_BYTES = 2**20
"""For notes, the list and the file system's own blocks."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a recipe asks of the hub."""

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
class Stored:
    """What complete.json says of a folder of the store."""

    name: str
    commit: str
    level: Level
    revisions: tuple[str | None, ...]
    """What was asked for when this commit was the answer; found again without the hub."""
    files: Mapping[str, FileDigest]
    mtimes_ns: Mapping[str, int]
    """A file of the same size and time is not read again."""

    @property
    def digest(self) -> str:
        """Equal where the files are."""
        return digest({name: file.sha256 for name, file in self.files.items()})


@dataclass(frozen=True, kw_only=True)
class _Expected:
    """What the hub, or the cache, says of a file."""

    bytes: int
    sha256: str | None
    """Of large files, which are in LFS."""
    blob: str | None
    """Git's SHA-1, of the others."""


@dataclass(frozen=True, kw_only=True)
class _Listing:
    """The files of a commit that are wanted."""

    commit: str
    files: Mapping[str, _Expected]


def fetch(wanted: Wanted, store: Path | None, *, say: Say) -> Path:
    """Fetch a repository, or find it fetched.

    Args:
        store: Where nodes look for it; None: the Hugging Face cache of this machine.
        say: Told before a long fetch or wait.

    Returns:
        The folder of its files.

    Raises:
        RequestError: There is no such repository or revision; or what the store holds was changed.
        AccessError: The hub asks for permission.
        CapacityError: The hub cannot be reached.
        StorageError: The store or the cache cannot be written, or is full.
        DataError: What came is not what the hub has.
    """
    if not sys.stderr.isatty():
        from huggingface_hub.utils.tqdm import disable_progress_bars  # takes 0.2 s, rarely needed

        disable_progress_bars()  # a log of bars is thousands of lines
    return _into_cache(wanted) if store is None else _into_store(wanted, store, say)


def commit_of(folder: Path) -> str | None:
    """The commit that a folder of the store or of the cache holds; None: it is neither."""
    stored = _read_stored(folder, say=lambda _: None)
    if stored is not None:
        return stored.commit
    is_snapshot = folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name)
    return folder.name if is_snapshot else None


def digest_of(folder: Path) -> str | None:
    """Equal where two folders of a store hold the same files; None: it is none."""
    stored = _read_stored(folder, say=lambda _: None)
    return None if stored is None else stored.digest


def verified(folder: Path, *, say: Say = lambda _: None) -> Stored | None:
    """The list of a store's folder, once its files are held against it; None: it is not whole.

    A file whose size and time are as they were is taken for the same; any other is read.

    Raises:
        RequestError: A file was changed after it was fetched.
    """
    stored = _read_stored(folder, say=say)
    if stored is None:
        return None
    for name, file in stored.files.items():
        path = folder / name
        try:
            found = path.stat()
        except FileNotFoundError:
            say(f"note: {path} is gone; it is fetched again")
            return None
        if (found.st_size, found.st_mtime_ns) == (file.bytes, stored.mtimes_ns[name]):
            continue
        if found.st_size != file.bytes or digests_of(path).sha256 != file.sha256:
            raise RequestError(
                f"{path} was changed after it was fetched: it has {found.st_size:,} bytes and "
                f"another SHA-256 than {COMPLETE} beside it says. A run from it would not be one "
                f"from {stored.name} at {stored.commit[:12]}. Remove the file to have it "
                "fetched again; if the change is wanted, copy the folder elsewhere and name it "
                "with model.path."
            )
    return stored


def _into_cache(wanted: Wanted) -> Path:
    from huggingface_hub import snapshot_download

    try:
        _ask(wanted)  # huggingface_hub has no limit for the first answer, and asks again and again
        with hub_errors_told(wanted.words, setting=wanted.kind):
            found = snapshot_download(
                wanted.name, revision=wanted.revision, allow_patterns=list(_PATTERNS[wanted.level])
            )
    except OSError as error:
        raise StorageError(
            f"{wanted.words} cannot be fetched into the Hugging Face cache of this machine: "
            f"{error.filename or 'its disk'}: {error.strerror}. Make room (`df -h`), or choose "
            "another folder with HF_HOME or model.dir."
        ) from error
    except (CapacityError, HubOfflineError):  # huggingface_hub looks there after some errors only
        cached = _in_cache(wanted, wanted.revision)
        if cached is None:
            raise
        return cached
    return Path(found)


def _into_store(wanted: Wanted, store: Path, say: Say) -> Path:
    revision = wanted.revision or ""
    if _COMMIT.fullmatch(revision):
        folder = store / _folder_name(wanted.name, revision)
        if _serves(verified(folder, say=say), wanted.level):
            return folder
    try:
        listing = _ask(wanted)
    except (CapacityError, HubOfflineError):
        commit = _commit_known_here(wanted, store, say)
        folder = store / _folder_name(wanted.name, commit or "")
        if commit is not None and _serves(verified(folder, say=say), wanted.level):
            return folder
        cached = _in_cache(wanted, commit or wanted.revision)
        if cached is None:
            raise
        listing = _listing_of(cached, wanted.level)
    folder = store / _folder_name(wanted.name, listing.commit)
    with _storage_errors_told(wanted, store), _sole_writer(folder, say):
        held = verified(folder, say=say)
        if held is not None and _serves(held, wanted.level):
            if wanted.revision not in held.revisions:
                with suppress(StorageError):  # a store that is only read
                    _write_complete(folder, held, wanted)
            return folder
        _bring(wanted, listing, folder, say)
    return folder


def _folder_name(name: str, commit: str) -> str:
    return f"{name.replace('/', '--')}@{commit[:12]}"


def _serves(stored: Stored | None, level: Level) -> bool:
    levels = get_args(Level)
    return stored is not None and levels.index(stored.level) >= levels.index(level)


def _ask(wanted: Wanted) -> _Listing:
    """What the hub has."""
    from huggingface_hub import HfApi

    with hub_errors_told(wanted.words, setting=wanted.kind):
        info = HfApi().model_info(
            wanted.name, revision=wanted.revision, files_metadata=True, timeout=ANSWER_S
        )
    files = {}
    for sibling in info.siblings or ():
        if _is_wanted(sibling.rfilename, wanted.level):
            lfs = sibling.lfs
            files[sibling.rfilename] = _Expected(
                bytes=int(sibling.size or 0),
                sha256=None if lfs is None else lfs.sha256,
                blob=None if lfs is not None else sibling.blob_id,
            )
    return _Listing(commit=str(info.sha), files=files)


def _is_wanted(name: str, level: Level) -> bool:
    return _is_inside(name) and any(fnmatch(name, pattern) for pattern in _PATTERNS[level])


def _is_inside(name: str) -> bool:
    """Whether a file's name, joined to a folder, stays in it."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts


def _commit_known_here(wanted: Wanted, store: Path, say: Say) -> str | None:
    """The commit that the hub named when it was asked the same, of a folder of the store."""
    beginning = _folder_name(wanted.name, "")
    for folder in sorted(store.iterdir()) if store.is_dir() else ():
        held = _read_stored(folder, say=say) if folder.name.startswith(beginning) else None
        if held is not None and wanted.revision in held.revisions:
            return held.commit
    return None


def _in_cache(wanted: Wanted, revision: str | None) -> Path | None:
    """What this machine's cache holds, without asking the hub; None: not all of it."""
    from huggingface_hub import errors, snapshot_download

    patterns = list(_PATTERNS[wanted.level])
    try:
        found = snapshot_download(
            wanted.name, revision=revision, allow_patterns=patterns, local_files_only=True
        )
    except (errors.LocalEntryNotFoundError, ValueError):
        return None
    return Path(found)


def _listing_of(cached: Path, level: Level) -> _Listing:
    names = [str(path.relative_to(cached)) for path in cached.rglob("*") if path.is_file()]
    files = {name: _of_blob(cached / name) for name in names if _is_wanted(name, level)}
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
def _sole_writer(folder: Path, say: Say) -> Iterator[None]:
    """Wait until no other process fetches this folder."""
    make_folder(folder)
    words = f"waiting for another process that fetches {folder}"
    with locked(folder / _LOCK, waits=lambda: say(words)):
        yield


def _bring(wanted: Wanted, listing: _Listing, folder: Path, say: Say) -> None:
    """Fetch what the folder lacks, hold all of it against the listing, write the list last."""
    shutil.rmtree(folder / _SCRATCH, ignore_errors=True)  # halves that a killed process left
    for half in folder.rglob(f"*{_PART}"):
        half.unlink()
    missing = {
        name: file for name, file in listing.files.items() if not _has_size(folder / name, file)
    }
    total_bytes = sum(file.bytes for file in missing.values())
    _refuse_full(folder, total_bytes)
    if missing:
        say(f"fetching {wanted.words} ({format_bytes(total_bytes)}) into {folder}")
    _copy_from_cache(wanted, listing.commit, missing, folder)
    not_cached = {
        name: file for name, file in missing.items() if not _has_size(folder / name, file)
    }
    _download(wanted, listing.commit, not_cached, folder, is_forced=False)
    files = {name: _verified_file(wanted, listing, name, folder) for name in sorted(listing.files)}
    shutil.rmtree(folder / _SCRATCH, ignore_errors=True)
    stored = Stored(
        name=wanted.name,
        commit=listing.commit,
        level=wanted.level,
        revisions=(),
        files=files,
        mtimes_ns={name: (folder / name).stat().st_mtime_ns for name in files},
    )
    _write_complete(folder, stored, wanted)


def _has_size(path: Path, file: _Expected) -> bool:
    try:
        return path.stat().st_size == file.bytes
    except OSError:
        return False


def _refuse_full(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes + _NO_ROOM_LEFT_BYTES > free_bytes:
        text = (
            f"{folder}: {format_bytes(needed_bytes)} are to be fetched and "
            f"{format_bytes(free_bytes)} are free"
        )
        raise OSError(errno.ENOSPC, text, str(folder))


def _download(
    wanted: Wanted, commit: str, names: Mapping[str, Any], folder: Path, *, is_forced: bool
) -> None:
    if not names:
        return
    from huggingface_hub import snapshot_download

    with hub_errors_told(wanted.words, setting=wanted.kind):
        snapshot_download(
            wanted.name,
            revision=commit,
            allow_patterns=sorted(names),
            local_dir=folder,
            force_download=is_forced,
        )


def _copy_from_cache(
    wanted: Wanted, commit: str, names: Mapping[str, _Expected], folder: Path
) -> None:
    """Take what this machine has of the same commit already."""
    from huggingface_hub import try_to_load_from_cache

    for name in names:
        cached = try_to_load_from_cache(wanted.name, name, revision=commit)
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


def _verified_file(wanted: Wanted, listing: _Listing, name: str, folder: Path) -> FileDigest:
    """Hold one file against the hub's digest; one that is wrong is fetched once more."""
    expected, path = listing.files[name], folder / name
    found = digests_of(path)
    if not _is_as(expected, found):  # damaged in the cache, perhaps
        path.unlink()
        try:
            _download(wanted, listing.commit, {name: expected}, folder, is_forced=True)
            found = digests_of(path)
        except (CapacityError, HubOfflineError, FileNotFoundError) as error:
            raise _damaged_in_cache(wanted, listing, name) from error
    if not _is_as(expected, found):
        path.unlink()
        raise DataError(
            f"{path} has another digest than the hub gives for it (SHA-256 "
            f"{found.sha256[:16]}...): it was damaged on the way or on the disk. It is removed; do "
            "the same again, and check the disk if it comes back."
        )
    return FileDigest(bytes=path.stat().st_size, sha256=found.sha256)


def _damaged_in_cache(wanted: Wanted, listing: _Listing, name: str) -> DataError:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(wanted.name, name, revision=listing.commit)
    where = Path(cached if isinstance(cached, str) else name)
    return DataError(
        f"{where} is damaged: its digest is another one than the cache's name for it says, and the "
        f"hub cannot be asked for it again. Remove it (`rm '{where.resolve()}'`), and do the same "
        "where the hub can be reached and HF_HUB_OFFLINE is not set."
    )


def _is_as(expected: _Expected, found: Digests) -> bool:
    return (expected.sha256 or found.sha256) == found.sha256 and (
        expected.blob or found.blob
    ) == found.blob


def _write_complete(folder: Path, stored: Stored, wanted: Wanted) -> None:
    revisions = dict.fromkeys((*stored.revisions, wanted.revision, stored.commit))
    made_of = {
        "hub": stored.name,
        "commit": stored.commit,
        "level": stored.level,
        "revisions": list(revisions),
        "mtimes_ns": dict(stored.mtimes_ns),
    }
    write_text(folder / COMPLETE, Complete(files=stored.files, made_of=made_of).text())


def _read_stored(folder: Path, *, say: Say) -> Stored | None:
    if not (folder / COMPLETE).is_file():
        return None
    try:
        return _stored(read_complete(folder))
    except DataError as error:
        say(f"note: {folder}: {error}; its files are held against the hub again")
        return None


def _stored(complete: Complete) -> Stored:
    """The folder of a store, if the file is of one.

    Raises:
        DataError: It is of something else; the text says only why.
    """
    made_of = complete.made_of
    try:
        stored = Stored(
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
def _storage_errors_told(wanted: Wanted, store: Path) -> Iterator[None]:
    try:
        yield
    except StorageError as error:  # of the list itself
        raise _cannot_store(wanted, store, str(error).partition(". ")[0]) from error
    except OSError as error:
        why = f"{error.filename or store}: {error.strerror or error}"
        raise _cannot_store(wanted, store, why) from error


def _cannot_store(wanted: Wanted, store: Path, why: str) -> StorageError:
    return StorageError(
        f"{wanted.words} cannot be fetched into {store}: {why}. What is there stays, and is not "
        "fetched again. Make room (`df -h`) or give the run's user the right to write there, or "
        "choose another folder with model.dir."
    )
