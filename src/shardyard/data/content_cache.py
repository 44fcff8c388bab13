"""Find text by its content that was prepared before under other times or another path.

A folder is named by sizes and times of its files, as reading a large corpus takes hours. If
that finds no folder, but a set is there of as many files with the same sizes, their content
is compared. A file next to the set then records that these times mean that content, so it
is read once.
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shardyard.config.sources import is_remote
from shardyard.control_groups import usable_cores
from shardyard.data.byte_ranges import SourceFile
from shardyard.data.shards import MANIFEST
from shardyard.errors import DataError
from shardyard.io.files import read_json_object, write_json

SOURCES = "sources"
"""File next to the manifest, and no part of it: the same text gives the same bytes there.
Without a suffix, as files of JSON there belong to the tokenizer.
"""


def record_sources(folder: Path, files: Sequence[SourceFile]) -> None:
    """Keep what files held; reads them once more, while most are still in memory.

    Raises:
        DataError: One is gone.
    """
    write_json(folder / SOURCES, {"files": _listed(files, _content_of(files)), "known_as": []})


def find_equal(
    above: Path,
    request: dict[str, Any],
    files: Sequence[SourceFile],
    *,
    on_read_start: Callable[[], None],
) -> Path | None:
    """Find a prepared set of the same request whose text had the same content, file by file.

    Args:
        above: The folder of prepared sets.
        on_read_start: Called before files are read.

    Raises:
        DataError: A file is gone.
    """
    sizes = _listed(files, [""] * len(files))
    content: list[list[Any]] | None = None
    for path in sorted(above.glob(f"*/{SOURCES}")):
        kept = _read(path)
        if kept is None or not _matches_request(path.parent, request):
            continue
        if request["files"] in kept["known_as"]:
            return path.parent
        if [[*entry[:2], ""] for entry in kept["files"]] != sizes:
            continue
        if content is None:
            on_read_start()
            content = _listed(files, _content_of(files))
        if kept["files"] == content:
            known_as = [*kept["known_as"], request["files"]]
            write_json(path, {"files": kept["files"], "known_as": known_as})
            return path.parent
    return None


def _listed(files: Sequence[SourceFile], content: Sequence[str]) -> list[list[Any]]:
    """List what the tokens depend on: how a file is read, its size and content, and the order."""
    return [
        [_format_and_split(file), file.size_bytes, digest]
        for file, digest in zip(files, content, strict=True)
    ]


def _format_and_split(file: SourceFile) -> str:
    return file.format if file.split is None else f"{file.format}, {file.split}"


def _content_of(files: Sequence[SourceFile]) -> list[str]:
    with ThreadPoolExecutor(usable_cores()) as pool:  # hashing leaves the lock
        return list(pool.map(_sha256, files))


def _sha256(file: SourceFile) -> str:
    if is_remote(file.path):
        return str(file.version)
    try:
        with Path(file.path).open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise DataError(
            f"{file.path} cannot be read any more: {error.strerror}. Prepare again when no other "
            "process writes there."
        ) from error


def _read(path: Path) -> dict[str, Any] | None:
    try:
        kept = read_json_object(path)
        return kept if kept.keys() == {"files", "known_as"} else None
    except (OSError, ValueError):
        return None  # it only saves work


def _matches_request(folder: Path, request: dict[str, Any]) -> bool:
    """Whether a finished set is of this request, but for the times of its files."""
    try:
        kept = read_json_object(folder / MANIFEST)["request"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool({**kept, "files": None} == {**request, "files": None})
