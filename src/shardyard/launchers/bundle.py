"""The recipe and the user's own code as one archive, named by what it holds.

Equal content is an equal archive on every machine and at every time: names are sorted, times are
zero, owners are left out. So a node knows that it runs what was asked, and nothing is sent twice.
"""

import gzip
import hashlib
import io
import os
import secrets
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from shardyard.config.globs import matches_of
from shardyard.config.reach import why_not_reached
from shardyard.errors import DataError, RequestError, StorageError
from shardyard.files import make_folder
from shardyard.units import format_bytes

LIMIT_BYTES = 64 * 2**20
"""Code is small; what is larger is data or weights that were listed by mistake."""

_NEVER = {".git", "__pycache__", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One archive, gzipped."""

    digest: str
    """SHA-256 of its uncompressed content, in hexadecimal."""
    archive: bytes = field(repr=False)
    files: int

    @property
    def name(self) -> str:
        """Of a file that holds it."""
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
        limit_bytes: Most that the files may have together.

    Raises:
        RequestError: A path matches nothing or leads outside, or all together are too large.
    """
    start = (start or Path.cwd()).resolve()
    listed = _code_files(code, start)
    _refuse_large(listed, limit_bytes)
    content = {"recipe.yaml": (recipe_text.encode(), False)}
    for name, file in listed.items():
        content[f"code/{name}"] = (file.read_bytes(), os.access(file, os.X_OK))
    archive = _tar(content)
    return Bundle(
        digest=hashlib.sha256(archive).hexdigest(),
        archive=gzip.compress(archive, mtime=0),
        files=len(content),
    )


def write_bundle(made: Bundle, folder: Path) -> Path:
    """Write it as ``bundle-<digest>.tar.gz``; one that is there already is kept.

    Raises:
        StorageError: The folder cannot be written.
    """
    path = folder / made.name
    if not path.is_file():
        _write(path, made.archive)
    return path


def unpack(path: Path, into: Path, *, digest: str, limit_bytes: int = 2 * LIMIT_BYTES) -> None:
    """Unpack an archive of ``bundle`` into a folder, once it is known to be the one meant.

    Nothing is written before every member is known to be a plain file or folder inside.

    Raises:
        DataError: It is damaged, another one, or holds what ``bundle`` never writes.
    """
    again = "Launch again, which writes a new one."
    try:
        with gzip.open(path) as file:
            archive = file.read(limit_bytes + 1)
    except (OSError, EOFError) as error:
        raise DataError(f"bundle {path} cannot be read: {error}. {again}") from error
    if len(archive) > limit_bytes:
        raise DataError(f"bundle {path} unpacks to more than {format_bytes(limit_bytes)}. {again}")
    found = hashlib.sha256(archive).hexdigest()
    if found != digest:
        raise DataError(
            f"bundle {path} has SHA-256 {found[:16]}..., not {digest[:16]}... as asked. It was "
            f"changed or damaged on its way. {again}"
        )
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = tar.getmembers()
        for member in members:
            if not member.isfile() or not _is_inside(member.name):
                raise DataError(
                    f"bundle {path} holds {member.name!r}, which is no plain file inside the "
                    f"folder. It was not made by shardyard; do not use it. {again}"
                )
        for member in members:
            content = tar.extractfile(member)
            assert content is not None  # a plain file
            _write(into / member.name, content.read(), mode=member.mode & 0o755)


def _code_files(entries: Iterable[str], start: Path) -> dict[str, Path]:
    """Name in the archive -> file."""
    found: dict[str, Path] = {}
    for entry in entries:
        given = start / Path(entry).expanduser()
        why_not = why_not_reached(str(given))
        if why_not is not None:
            raise RequestError(f"launch.code={entry} {why_not}")
        places = [given] if given.exists() else _matches(given)
        if not places:
            raise RequestError(
                f"launch.code: {entry!r} matches nothing in {start}. Give folders, files or globs "
                "of the code that the run needs."
            )
        for place in (place.resolve() for place in places):
            base = start if place.is_relative_to(start) else place.parent
            for file in _files_of(place):
                name = file.relative_to(base)
                if not _NEVER & set(name.parts):
                    _refuse_link(file, base, entry)
                    found[name.as_posix()] = file
    return found


def _matches(pattern: Path) -> list[Path]:
    """What a glob matches; unlike a file that is named, one that git ignores is not meant."""
    places = [Path(name) for name in matches_of(str(pattern))]
    return [place for place in sorted(places) if place.is_dir() or place in _around(place.parent)]


def _around(folder: Path) -> list[Path]:
    listed = _tracked(folder)
    return list(folder.iterdir()) if listed is None else listed


def _files_of(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
        return
    listed = _tracked(place)
    for path in place.rglob("*") if listed is None else listed:
        if path.is_file() or path.is_symlink():
            yield path


def _tracked(folder: Path) -> list[Path] | None:
    """What git knows of a folder or would take, .gitignore respected; None: no repository."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others"]
    try:
        answer = subprocess.run(
            [*command, "--exclude-standard", "--deduplicate"],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode != 0:
        return None
    return [folder / name for name in answer.stdout.split("\0") if name]


def _refuse_link(file: Path, base: Path, entry: str) -> None:
    target = file.resolve()
    if not target.is_file() or not target.is_relative_to(base):
        raise RequestError(
            f"launch.code: {entry!r} has the link {file}, which leads to {target}, no file in "
            f"{base}. Only what is listed is sent. List that place too, or remove the link."
        )


def _refuse_large(code: dict[str, Path], limit_bytes: int) -> None:
    sizes = {name: file.stat().st_size for name, file in code.items()}
    total = sum(sizes.values())
    if total <= limit_bytes:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    shown = ", ".join(f"{name} ({format_bytes(sizes[name])})" for name in largest)
    raise RequestError(
        f"launch.code lists {len(code):,} files of {format_bytes(total)}, more than "
        f"{format_bytes(limit_bytes)}. It is for code; data and weights belong on storage that the "
        f"nodes see. The largest are {shown}. Leave them out, by .gitignore or a narrower list."
    )


def _tar(content: dict[str, tuple[bytes, bool]]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, (data, is_program) in sorted(content.items()):
            member = tarfile.TarInfo(name)  # its owner is 0 without a name, its time 0
            member.size = len(data)
            member.mode = 0o755 if is_program else 0o644
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and bool(path.parts)


def _write(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """All of it or nothing: a reader never sees half a file."""
    try:
        make_folder(path.parent)
        draft = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
        # with the rights that the umask leaves of the mode, as of any file that a user makes
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        draft.replace(path)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}. Check that the folder is yours and has "
            "room."
        ) from error
