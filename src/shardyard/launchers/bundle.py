"""Packs the recipe and the user's own code as one archive, named by its content.

Equal content is an equal archive on every machine and at every time: names are sorted,
times are zero, owners are left out. So a node knows that it runs the requested content, and
each archive is sent once.
"""

import gzip
import hashlib
import io
import os
import secrets
import stat
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from shardyard.errors import DataError, StorageError
from shardyard.io.files import flush_folder, make_folder
from shardyard.launchers.code_files import LIMIT_BYTES, check_no_credentials, code_files, read_code
from shardyard.launchers.private_files import packed_private_reason
from shardyard.units import format_bytes

_AGAIN = "Launch again, which writes a new one."


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One archive, gzipped."""

    digest: str
    """SHA-256 of its uncompressed content, in hexadecimal."""
    archive: bytes = field(repr=False)
    files: int
    names: tuple[str, ...] = ()
    """Files of launch.code in it, by their paths below `code/`."""
    excluded_files: Mapping[str, str] = field(default_factory=dict)
    """Files of the listed folders that are not sent, and why."""

    @property
    def name(self) -> str:
        """Return the name of a file that holds it."""
        return f"bundle-{self.digest[:16]}.tar.gz"


def bundle(
    code: Sequence[str],
    recipe_text: str,
    *,
    start: Path | None = None,
    limit_bytes: int = LIMIT_BYTES,
) -> Bundle:
    """Pack `recipe.yaml`, and `code/` with what launch.code lists. Reads files, writes none.

    Args:
        code: launch.code.
        start: Where its relative paths begin; None: the current folder.
        limit_bytes: Limit on the total size of the files.

    Raises:
        RequestError: A path has no match or leads outside, a file holds a credential, or all
            together are too large.
    """
    listed = code_files(code, (start or Path.cwd()).resolve(), limit_bytes=limit_bytes)
    content = {"recipe.yaml": (recipe_text.encode(), 0o644)}
    for name, data in read_code(listed.sent).items():
        content[f"code/{name}"] = (data, _mode(listed.sent[name]))
    archive = _tar(content)
    return Bundle(
        # The digest is of the tar, since versions of zlib may compress the same bytes differently.
        digest=hashlib.sha256(archive).hexdigest(),
        # gzip writes the current time into its header unless a time is given.
        archive=gzip.compress(archive, mtime=0),
        files=len(content),
        names=tuple(sorted(listed.sent)),
        excluded_files=listed.excluded_files,
    )


def write_bundle(packed: Bundle, folder: Path) -> Path:
    """Write it durably as ``bundle-<digest>.tar.gz``; a sound one that is there already is kept.

    Raises:
        StorageError: The folder cannot be written.
    """
    path = folder / packed.name
    try:
        read_archive(path, digest=packed.digest)
    except DataError:
        _write(path, packed.archive)
    return path


def unpack(path: Path, into: Path, *, digest: str, limit_bytes: int = 2 * LIMIT_BYTES) -> None:
    """Unpack an archive of ``bundle`` into a folder, once it is known to be the one meant.

    No file is written before every member is known to be a plain file or folder inside.

    Raises:
        DataError: It is damaged, another one, or holds what ``bundle`` never writes.
    """
    members = _members(path, digest=digest, limit_bytes=limit_bytes)
    for name, (content, mode) in members.items():
        # The mask drops setuid bits and the right of other users to write.
        _write(into / name, content, mode=mode & 0o755)


def damaged_files(path: Path, folder: Path, *, digest: str) -> list[str]:
    """Files of an unpacked archive that are missing or changed, by their names.

    Raises:
        DataError: The archive itself is damaged or another one.
    """
    members = _members(path, digest=digest, limit_bytes=2 * LIMIT_BYTES)
    return [
        name for name, (content, _) in sorted(members.items()) if not _holds(folder / name, content)
    ]


def read_archive(path: Path, *, digest: str, limit_bytes: int = 2 * LIMIT_BYTES) -> bytes:
    """The uncompressed content of a bundle, once its digest is known to be the one meant.

    Raises:
        DataError: It cannot be read, is too large, or has another digest.
    """
    try:
        # Opening a named pipe would block until a writer comes.
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError("it is not a plain file")
        with gzip.open(path) as file:
            # One byte beyond the limit tells that there is more: a small file may hold gigabytes.
            archive = file.read(limit_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"bundle {path} cannot be read: {error}. {_AGAIN}") from error
    if len(archive) > limit_bytes:
        raise DataError(f"bundle {path} unpacks to more than {format_bytes(limit_bytes)}. {_AGAIN}")
    found = hashlib.sha256(archive).hexdigest()
    if found != digest:
        raise DataError(
            f"bundle {path} has SHA-256 {found[:16]}..., not {digest[:16]}... as launched. It was "
            f"changed or damaged. {_AGAIN}"
        )
    return archive


def recheck_bundle(path: Path, *, digest: str) -> Bundle:
    """A bundle that was written before, without files that would not be packed today.

    Raises:
        DataError: It is damaged or another one.
        RequestError: Files of it hold tokens or keys.
    """
    members = _members(path, digest=digest, limit_bytes=2 * LIMIT_BYTES)
    code = {
        name.removeprefix("code/"): content
        for name, (content, _) in members.items()
        if name != "recipe.yaml"
    }
    private = {
        name: why for name, content in code.items() if (why := packed_private_reason(name, content))
    }
    check_no_credentials({name: content for name, content in code.items() if name not in private})
    kept = {
        name: each for name, each in members.items() if name.removeprefix("code/") not in private
    }
    # Repacked only where files are left out: otherwise the digest stays that of the launched code.
    archive = _tar(kept) if private else read_archive(path, digest=digest)
    return Bundle(
        digest=hashlib.sha256(archive).hexdigest(),
        archive=gzip.compress(archive, mtime=0),
        files=len(kept),
        names=tuple(sorted(code.keys() - private.keys())),
        excluded_files=dict(sorted(private.items())),
    )


def _members(path: Path, *, digest: str, limit_bytes: int) -> dict[str, tuple[bytes, int]]:
    """Content and mode of each file in a bundle."""
    archive = read_archive(path, digest=digest, limit_bytes=limit_bytes)
    members: dict[str, tuple[bytes, int]] = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar.getmembers():
            if not member.isfile() or not _is_inside(member.name):
                raise DataError(
                    f"bundle {path} holds {member.name!r}, which is not a plain file inside the "
                    f"folder. It was not made by shardyard; do not use it. {_AGAIN}"
                )
            content = tar.extractfile(member)
            assert content is not None  # a plain file
            members[member.name] = (content.read(), member.mode)
    return members


def _holds(path: Path, content: bytes) -> bool:
    """Whether a path is a plain file of exactly this content."""
    try:
        return not path.is_symlink() and path.is_file() and path.read_bytes() == content
    except OSError:
        return False


def _mode(file: Path) -> int:
    """Rights of a file in the archive: as of any file of code, and never more than it has here."""
    mode = file.stat().st_mode
    return (0o755 if os.access(file, os.X_OK) else 0o644) & (mode | 0o700)


def _tar(content: dict[str, tuple[bytes, int]]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, (data, mode) in sorted(content.items()):
            member = tarfile.TarInfo(name)  # its owner is 0 without a name, its time 0
            member.size = len(data)
            member.mode = mode
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and bool(path.parts)


def _write(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write the file as a whole or not at all: a reader never sees half a file."""
    try:
        make_folder(path.parent)
        # Linux limits a name to 255 bytes, and the draft adds ten.
        draft = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
        # with the rights that the umask leaves of the mode, as of any file that a user makes
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            # On disk before the rename: after a power cut the name must not lead to an empty file.
            os.fsync(file.fileno())
        draft.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}. Check that the folder is yours and has "
            "room."
        ) from error
