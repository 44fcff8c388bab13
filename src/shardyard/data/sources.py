"""Source files of text, and how they are cut into pieces of equal work.

A piece is the unit of parallel and resumable work. Cutting needs sizes only: a range of bytes
represents all that begins in it. No file is read before its turn, and all workers share a
single huge file. ``stores/`` has the locations of files, ``formats.py`` how they are read.
"""

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NoReturn

from shardyard.config.sources import TEXT_OF_PYTHON
from shardyard.config.split_names import Kind, NamedSplit, splits_of, words_in
from shardyard.data.byte_ranges import SourceFile, Span, TextSection, escape_text
from shardyard.data.formats import (
    FORMATS,
    READ_KINDS,
    SECTION_BYTES,
    format_named,
    format_of,
    is_companion,
    kind_of,
    remedy_of,
)
from shardyard.data.readers.columns import TextOf
from shardyard.data.stores.base import ListedFile, find_all, open_file
from shardyard.errors import RequestError, SourceError
from shardyard.plugins import PlugIn, plug_in_named

_SHOWN_FILES = 4
_AT_ONCE = 16
"""Files whose beginnings are asked for side by side: far away, each takes a while to come."""

Piece = tuple[Span, ...]


def list_files(
    source: str | Sequence[str],
    data_format: str = "by_suffix",
    *,
    own: Collection[Path] = (),
    setting: str = "data.source",
) -> list[SourceFile]:
    """Return all files of ``data.source`` in a fixed order, none twice.

    Args:
        data_format: ``data.format``.
        own: Shardyard's folders (prepared data, runs): left out of a folder that they lie in.
        setting: The setting that names them, for messages.

    Raises:
        RequestError: A place does not exist, no file was found, or a found one is not readable.
        SourceError: All files are empty.
        AccessError: The rights to look at a remote place are missing.
        CapacityError: It cannot be reached.
    """
    entries = [source] if isinstance(source, str) else list(source)
    files: dict[str, SourceFile] = {}
    unsupported: dict[str, str] = {}
    for entry, found_files in find_all(entries, own=own, setting=setting):
        listed = [found for found in found_files if not is_companion(found.name, data_format)]
        formats = {
            found.path: format_of(PurePosixPath(found.name).name, data_format) for found in listed
        }
        unsupported |= {found.path: found.name for found in listed if formats[found.path] is None}
        named = _named_splits(entry, listed, formats)
        for found in listed:
            format = formats[found.path]
            if format is not None:
                split = named.get(found.path)
                file = SourceFile(
                    found.path, found.name, format, found.size_bytes, found.version, split
                )
                before = files.setdefault(found.path, file)
                if before.named is not None and split is None:  # another entry names it itself
                    files[found.path] = file
    if unsupported:
        _raise_unsupported(
            f"{setting}={source!r}",
            data_format,
            list(unsupported.values()),
            len(files) + len(unsupported),
        )
    if not files:
        raise RequestError(
            f"{setting}={source!r} names no file. Give a folder, file or glob that holds "
            f"{READ_KINDS}; hidden files in folders are left out."
        )
    if not any(file.size_bytes for file in files.values()):
        its = "its only file holds" if len(files) == 1 else f"its {len(files)} files hold"
        raise SourceError(
            f"{setting}={source!r} is an empty corpus: {its} no text. Give files with text."
        )
    return list(files.values())


def _named_splits(
    entry: str, listed: Sequence[ListedFile], formats: Mapping[str, str | None]
) -> dict[str, NamedSplit]:
    """Split that the name of each file of an entry names, by its path. What the entry itself
    names, as a file or by a keyword in its pattern, is meant to be read."""
    if entry == TEXT_OF_PYTHON:
        return {}
    below = {found.path: found.below_entry(entry) for found in listed}
    kinds: dict[str, Kind] = {
        below[path]: kind_of(below[path], format)
        for path, format in formats.items()
        if format is not None and below[path]
    }
    found = splits_of(kinds)
    asked = {
        split for each in listed[:1] for part in each.pattern.split("/") for split in words_in(part)
    }
    return {
        path: found[name]
        for path, name in below.items()
        if name in found and found[name] not in asked
    }


def readers_of(files: Iterable[SourceFile]) -> list[PlugIn]:
    """Return the plug-ins of packages that read some of the files, each once."""
    names = sorted({file.format for file in files} - FORMATS.keys())
    return [found for name in names if (found := plug_in_named("sources", name)) is not None]


def _raise_unsupported(
    source: str, data_format: str, names: Sequence[str], num_files: int
) -> NoReturn:
    named = ", ".join(escape_text(name) for name in names[:_SHOWN_FILES])
    more = f", and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else ""
    suffixes: dict[str, str] = {}
    for name in names:
        suffixes.setdefault(
            remedy_of(name, data_format), escape_text(Path(name).suffix) or "no suffix"
        )
    remedies = "; ".join(f"{suffix}: {remedy}" for remedy, suffix in suffixes.items())
    raise RequestError(
        f"{source}: {len(names)} of its {num_files} files are of no kind that is "
        f"read, which is {READ_KINDS}: {named}{more}. What to do, by suffix: {remedies}. "
        "To leave files of a folder out, name the others by a glob, such as 'FOLDER/**/*.md'."
    )


def check_readable(files: Sequence[SourceFile], text_of: TextOf) -> None:
    """Read the beginning of every file, to report a wrong key or encoding before any work.

    Raises:
        SourceError: Names the first few files whose beginning cannot be read, and why.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        told = pool.map(lambda file: _read_error(file, text_of), files)
        wrong = [why for why in told if why is not None]
    if wrong:
        more = f"\nand {len(wrong) - _SHOWN_FILES} files more" if len(wrong) > _SHOWN_FILES else ""
        raise SourceError("\n".join(wrong[:_SHOWN_FILES]) + more)


def _read_error(file: SourceFile, text_of: TextOf) -> str | None:
    stop = file.size_bytes
    if format_named(file.format).is_divisible:
        stop = min(stop, SECTION_BYTES)
    try:
        next(read_sections((Span(file, 0, stop),), text_of), None)
    except SourceError as error:
        return str(error)
    return None


_FIRST_FILES = 16
"""Files whose first row is looked at, to name what is in them."""


def first_rows(files: Sequence[SourceFile], text_of: TextOf) -> list[str]:
    """The text of the first row of the first files, each once."""
    found = []
    for file in files[:_FIRST_FILES]:
        stop = file.size_bytes
        if format_named(file.format).is_divisible:
            stop = min(stop, SECTION_BYTES)
        section = next(read_sections((Span(file, 0, stop),), text_of), None)
        found += [] if section is None else [section.text]
    return list(dict.fromkeys(found))


def split_into_pieces(files: Sequence[SourceFile], piece_bytes: int) -> list[Piece]:
    """Cut a corpus into pieces of ``piece_bytes`` to twice that, in order; the last may be less,
    and one with a file that cannot be divided more.

    Args:
        piece_bytes: A multiple of ``SECTION_BYTES``, so that no section is cut in two.
    """
    assert piece_bytes % SECTION_BYTES == 0, piece_bytes
    pieces: list[Piece] = []
    spans: list[Span] = []
    filled_bytes = 0
    for file in files:
        span_bytes = (
            piece_bytes if format_named(file.format).is_divisible else max(file.size_bytes, 1)
        )
        for start in range(0, file.size_bytes, span_bytes):
            stop = min(start + span_bytes, file.size_bytes)
            spans.append(Span(file, start, stop))
            filled_bytes += stop - start
            if filled_bytes >= piece_bytes:
                pieces.append(tuple(spans))
                spans, filled_bytes = [], 0
    if spans:
        pieces.append(tuple(spans))
    return pieces


def piece_size_bytes(piece: Piece) -> int:
    """Bytes of source text in a piece, up to the length of a line."""
    return sum(span.stop - span.start for span in piece)


def read_sections(piece: Piece, text_of: TextOf) -> Generator[TextSection, None, None]:
    """Read the documents of a piece in order; empty ones are left out.

    Raises:
        SourceError: A file cannot be read, is not UTF-8 text, or a row lacks the text.
    """
    for span in piece:
        try:
            with open_file(span.file) as file:
                for section in format_named(span.file.format).read(file, span, text_of):
                    is_block = text_of.is_stream
                    yield replace(section, begins=False, ends=False) if is_block else section
        except OSError as error:
            raise SourceError(
                f"{escape_text(span.file.path)} cannot be read: {error.strerror or error}. Check "
                "that it is there and readable, or take it out of data.source."
            ) from error
