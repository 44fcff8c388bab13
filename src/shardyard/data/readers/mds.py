"""MDS shards of MosaicML Streaming, as llm-foundry writes them with ids.

The form is that of streaming/base/format/mds (writer.py, reader.py, encodings.py): the number of
samples, where each begins, the columns as JSON, and the samples. Only columns of ids, their mask
and labels are decoded; pickled columns are never.

Shape suffix: M = samples of a shard.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shardyard.config.data_choices import ID_KEYS
from shardyard.data.byte_ranges import Span, TextSection, escape_text
from shardyard.data.readers.columns import TextOf
from shardyard.errors import SourceError
from shardyard.io.files import parse_json

_READ = (*ID_KEYS, "attention_mask", "labels")
_SHAPE_TYPES = ("|u1", "<u2", "<u4", "<u8")
_VALUE_TYPES = {
    8: "|u1", 9: "|i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"
}  # fmt: skip
"""Codes of whole numbers; other arrays hold no ids."""
_MOST_HEADER_BYTES = 2**28


def read_mds(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[TextSection]:
    """The samples of a shard.

    Raises:
        SourceError: It is damaged, or has no column of ids.
    """
    path = escape_text(span.file.path)
    try:
        begins_M, columns = _header(file, span)
        for number in range(len(begins_M) - 1):
            place = f"{path}, sample {number + 1:,}"
            file.seek(int(begins_M[number]))
            sample = file.read(int(begins_M[number + 1]) - int(begins_M[number]))
            row = _row(sample, columns)
            text = text_of(row, place)
            if text:
                yield TextSection(text, begins=True, ends=True, location=place)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        why = escape_text(" ".join(str(error).split())[:200])
        raise SourceError(
            f"{path} cannot be read as an MDS shard: {why}. It is cut off, damaged, or something "
            "else by that name. Copy or write it again."
        ) from error


def _header(file: BinaryIO, span: Span) -> tuple[npt.NDArray[Any], list[tuple[str, str, int]]]:
    """Return the first byte of each sample, with the file's end last, and the columns."""
    count = int(np.frombuffer(file.read(4), dtype="<u4")[0])
    if 4 * (count + 1) > min(span.file.size_bytes, _MOST_HEADER_BYTES):
        raise ValueError(f"{count:,} samples in {span.file.size_bytes:,} bytes")
    begins_M = np.frombuffer(file.read(4 * (count + 1)), dtype="<u4").astype(np.int64)
    is_ascending = (np.diff(begins_M) >= 0).all()
    if not is_ascending or begins_M[-1] != span.file.size_bytes or begins_M[0] < file.tell():
        raise ValueError("its samples do not end with the file")
    about = parse_json(file.read(int(begins_M[0]) - file.tell()))
    names, encodings, sizes = (
        about[key] for key in ("column_names", "column_encodings", "column_sizes")
    )
    return begins_M, [
        (str(name), str(encoding), int(size or 0))
        for name, encoding, size in zip(names, encodings, sizes, strict=True)
    ]


def _row(sample: bytes, columns: list[tuple[str, str, int]]) -> dict[str, Any]:
    """The columns of a sample; what is no ids, mask or labels stays bytes."""
    free = [size == 0 for _, _, size in columns]
    given = np.frombuffer(sample[: 4 * sum(free)], dtype="<u4").tolist()
    place = 4 * sum(free)
    row: dict[str, Any] = {}
    for name, encoding, fixed in columns:
        size = fixed or given.pop(0)
        content = sample[place : place + size]
        if len(content) != size:
            raise ValueError(f"a sample ends in its column {name!r}")
        row[name] = _decode(content, encoding, name) if name in _READ else content
        place += size
    return row


def _decode(content: bytes, encoding: str, name: str) -> npt.NDArray[Any]:
    """An array of whole numbers; llm-foundry's older shards have int64 as bare bytes."""
    if encoding == "bytes":
        return np.frombuffer(content, dtype="<i8")
    kind, *rest = encoding.split(":")
    if kind != "ndarray":
        raise ValueError(f"column {name!r} is {encoding}, and ids are in ndarray or bytes")
    dtype = np.dtype(rest[0]).newbyteorder("<").str if rest else _VALUE_TYPES[content[0]]
    place = 0 if rest else 1
    if len(rest) < 2:
        dimensions, code = divmod(content[place], 4)
        place += 1 + dimensions * np.dtype(_SHAPE_TYPES[code]).itemsize
        if dimensions != 1:
            raise ValueError(f"column {name!r} has {dimensions} dimensions, and ids have one")
    return np.frombuffer(content[place:], dtype=dtype)
