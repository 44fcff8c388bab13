"""Files of ids: Megatron's .bin and .idx, bare .bin of nanoGPT and llm.c, .npy, datatrove's .ds.

The forms are those of Megatron-LM (core/datasets/indexed_dataset.py), nanoGPT (data/*/prepare.py),
llm.c (dev/data/data_common.py), NumPy and datatrove (pipeline/tokens/tokenizer.py). A span has the
documents that begin in its bytes. Numbers are little-endian.

Shape suffixes: N = ids of a document, D = documents, S = sequences of Megatron.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shardyard.config.sources import is_remote
from shardyard.data.byte_ranges import SourceFile, Span, TextSection, escape_text
from shardyard.data.formats import SECTION_BYTES
from shardyard.data.readers.columns import TextOf
from shardyard.data.stores.base import store_of
from shardyard.data.token_ids import ids_text
from shardyard.errors import RequestError, SourceError

_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Type codes of an .idx; 6 and 7 are floats, which are no ids."""
_LLM_C = {20240520: "<u2", 20240801: "<u4"}
"""First number of llm.c's header -> type of the ids behind it."""
_LLM_C_BYTES = 1024
_NPY = b"\x93NUMPY"
MOST_DOCUMENT_IDS = 2**26
"""A longer stretch without an end is held to be made with another tokenizer."""


def read_bin(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[TextSection]:
    """The documents of a .bin: by the .idx next to it, else up to the id that ends a text.

    Raises:
        SourceError: It is damaged, or its numbers are of another type.
    """
    if not span.file.path.endswith(".bin"):
        raise SourceError(
            f"{_name(span)} is what a link named .bin leads to, and an .idx belongs next to the "
            "file itself. Copy both to one folder, or name the folder of the files."
        )
    with ExitStack() as stack:
        index = _companion(span.file, ".bin", ".idx", stack)
        if index is not None:
            yield from _by_index(file, span, *_megatron_documents(index, span))
            return
        head = file.read(_LLM_C_BYTES)
        known = int.from_bytes(head[:4], "little") if len(head) == _LLM_C_BYTES else 0
        if known in _LLM_C:
            yield from _by_end(file, span, _Numbers(_LLM_C[known], _LLM_C_BYTES, span), text_of)
            return
        numbers = _Numbers(np.dtype(text_of.id_type).newbyteorder("<").str, 0, span)
        _check_type(head, numbers, span, text_of)
        yield from _by_end(file, span, numbers, text_of)


def read_npy(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[TextSection]:
    """The documents of an array of one dimension, each up to the id that ends a text.

    Raises:
        SourceError: It is damaged, or another array.
    """
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, _, dtype = read(file)
    except (ValueError, KeyError, EOFError) as error:
        raise SourceError(
            f"{_name(span)} cannot be read as NumPy's .npy: {escape_text(str(error))}. It is cut "
            "off, damaged, or something else by that name. Copy or write it again."
        ) from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise SourceError(
            f"{_name(span)} holds {dtype} of shape {list(shape)}. Ids are whole numbers in one "
            "dimension: write it again with ids.reshape(-1), one text behind the other."
        )
    numbers = _Numbers(dtype.str, file.tell(), span)
    if numbers.count != shape[0]:
        raise SourceError(
            f"{_name(span)} holds {numbers.count:,} of its {shape[0]:,} numbers. It is cut off: "
            "copy or write it again."
        )
    yield from _by_end(file, span, numbers, text_of)


def read_datatrove(file: BinaryIO, span: Span, text_of: TextOf) -> Iterator[TextSection]:
    """The documents of a .ds by its .ds.index, with the size of ids by its .ds.metadata.

    Raises:
        SourceError: One of the three is missing or damaged.
    """
    del text_of
    with ExitStack() as stack:
        index = _companion(span.file, ".ds", ".ds.index", stack)
        about = _companion(span.file, ".ds", ".ds.metadata", stack)
        if index is None or about is None:
            raise SourceError(
                f"{_name(span)}: {'.ds.index' if index is None else '.ds.metadata'} is not next to "
                "it, which datatrove writes too. Copy it there."
            )
        line = about.readline(4096).decode(errors="replace").strip()
        size = line.rpartition("|")[2]
        if size not in ("2", "4"):
            raise SourceError(
                f"{_name(span)}: its .ds.metadata begins with {escape_text(line[:80])!r}, not with "
                "TOKENIZER|2 or TOKENIZER|4. Write the file again with datatrove."
            )
        stops_D = _mapped(index, "<u8")
        numbers = _Numbers(f"<u{size}", 0, span)
        bounds = _Bounds(
            len(stops_D), lambda d: int(stops_D[d - 1]) if d else 0, lambda d: int(stops_D[d])
        )
        yield from _by_index(file, span, numbers, bounds)


class _Numbers:
    """Position and type of the ids in a file."""

    def __init__(self, dtype: str, first_byte: int, span: Span) -> None:
        """Raises:
        SourceError: The file ends within an id.
        """
        self.dtype = np.dtype(dtype)
        self.first_byte = first_byte
        self.count, rest = divmod(span.file.size_bytes - first_byte, self.dtype.itemsize)
        if rest:
            raise SourceError(
                f"{_name(span)} has {span.file.size_bytes:,} bytes, which is no whole number of "
                f"ids of {self.dtype.itemsize} bytes. It is cut off, or data.id_type is not "
                f"{self.dtype.name}."
            )

    def first_in(self, byte: int) -> int:
        """Number of the first id that begins at a byte or behind it."""
        return max(0, -(-(byte - self.first_byte) // self.dtype.itemsize))

    def read(self, file: BinaryIO, start: int, stop: int) -> npt.NDArray[Any]:
        """Ids [start, stop)."""
        file.seek(self.first_byte + start * self.dtype.itemsize)
        content = file.read((stop - start) * self.dtype.itemsize)
        return np.frombuffer(content, dtype=self.dtype)


@dataclass(frozen=True)
class _Bounds:
    """Documents of a file, by an index next to it."""

    count: int
    start: Callable[[int], int]
    """Number of a document -> its first id."""
    stop: Callable[[int], int]


def _by_index(
    file: BinaryIO, span: Span, numbers: _Numbers, bounds: _Bounds
) -> Iterator[TextSection]:
    """The documents whose first ids are in the span."""
    first, last = numbers.first_in(span.start), numbers.first_in(span.stop)
    number = bisect_left(range(bounds.count), first, key=bounds.start)
    while number < bounds.count and (start := bounds.start(number)) < last:
        stop = bounds.stop(number)
        location = f"{_name(span)}, document {number + 1:,}"
        if not start <= stop <= numbers.count:
            raise SourceError(
                f"{location}: its index says ids {start:,} to {stop:,}, and the file has "
                f"{numbers.count:,}. The two do not belong together: copy both again."
            )
        if stop > start:
            text = ids_text(numbers.read(file, start, stop), location)
            yield TextSection(text, begins=True, ends=True, location=location)
        number += 1


def _by_end(
    file: BinaryIO, span: Span, numbers: _Numbers, text_of: TextOf
) -> Iterator[TextSection]:
    """The documents that begin in the span, each up to an id that ends a text or the file."""
    step = SECTION_BYTES // numbers.dtype.itemsize
    start, last = numbers.first_in(span.start), numbers.first_in(span.stop)
    if text_of.end_id is None:  # only looked at: the tokenizer is not there yet
        stop = min(start + step, numbers.count)
        if stop > start:
            text = ids_text(numbers.read(file, start, stop), _name(span))
            yield TextSection(text, begins=True, ends=True, location=_name(span))
        return
    found = start if start == 0 else _behind_end(file, numbers, start - 1, last, text_of.end_id)
    while found is not None and found < last:
        start, parts = found, []
        stop = start
        found = None
        while found is None and stop < numbers.count:
            part_N = numbers.read(file, stop, min(stop + step, numbers.count))
            ends = np.flatnonzero(part_N == text_of.end_id)
            if len(ends):
                found = stop + int(ends[0]) + 1
                part_N = part_N[: ends[0] + 1]
            parts.append(part_N)
            stop += len(part_N)
            if stop - start > MOST_DOCUMENT_IDS:
                raise SourceError(
                    f"{_name(span)}, id {start + 1:,}: there is no id {text_of.end_id}, which ends "
                    f"a text, in {MOST_DOCUMENT_IDS:,} ids. Set data.tokenizer to the one that the "
                    "file was made with; a text that is so long has to be cut into files."
                )
        location = f"{_name(span)}, id {start + 1:,}"
        text = ids_text(np.concatenate(parts), location)
        yield TextSection(text, begins=True, ends=True, location=location)


def _behind_end(
    file: BinaryIO, numbers: _Numbers, start: int, last: int, end_id: int
) -> int | None:
    """The id behind the first that ends a text from ``start`` on; None: none ends before last."""
    step = SECTION_BYTES // numbers.dtype.itemsize
    for begin in range(start, last, step):
        ends = np.flatnonzero(numbers.read(file, begin, min(begin + step, last)) == end_id)
        if len(ends):
            return begin + int(ends[0]) + 1
    return None


def _check_type(head: bytes, numbers: _Numbers, span: Span, text_of: TextOf) -> None:
    """Raise where the beginning looks like numbers of another size, which no bound would show."""
    if head.startswith(_NPY):
        raise SourceError(f"{_name(span)} is an array of NumPy. Name it .npy.")
    itemsize = numbers.dtype.itemsize
    ids_N = np.frombuffer(head[: len(head) // itemsize * itemsize], dtype=numbers.dtype)
    low, high = ids_N[0::2], ids_N[1::2]
    # The upper halves of ids that are twice as wide are 0, or small where a vocabulary is large.
    if len(high) >= 64 and int(high.max()) < 16 and int(low.max()) >= 256:
        raise SourceError(
            f"{_name(span)}: every second number is below 16, as in ids of {2 * itemsize} bytes, "
            f"and data.id_type={text_of.id_type} has {itemsize}. Set data.id_type="
            f"{'uint32' if itemsize == 2 else 'int64'}."
        )


def _megatron_documents(index: BinaryIO, span: Span) -> tuple[_Numbers, _Bounds]:
    """The ids and the documents of a .bin by its .idx.

    Raises:
        SourceError: The .idx is none, or damaged.
    """
    name = _name(span).removesuffix(".bin") + ".idx"
    head = index.read(34)
    version = int.from_bytes(head[9:17], "little")
    dtype = _MEGATRON_TYPES.get(head[17] if len(head) == 34 else 0)
    if not head.startswith(_MEGATRON) or version != 1 or dtype is None:
        raise SourceError(
            f"{name} is no index of Megatron's of version 1 with whole numbers. Write both files "
            "again with tools/preprocess_data.py, or take the .idx away if the .bin is bare ids."
        )
    sequences = int.from_bytes(head[18:26], "little")
    ends = int.from_bytes(head[26:34], "little")
    content = _mapped(index, "|u1")
    places = np.cumsum([34, 4 * sequences, 8 * sequences, 8 * ends]).tolist()
    if len(content) < places[-1] or ends < 1:
        raise SourceError(
            f"{name} has {len(content):,} bytes, and {places[-1]:,} are needed for "
            f"{sequences:,} sequences. It is cut off: copy or write it again."
        )
    lengths_S = content[places[0] : places[1]].view("<i4")
    bytes_S = content[places[1] : places[2]].view("<i8")
    first_sequences_D = content[places[2] : places[3]].view("<i8")
    numbers = _Numbers(dtype, 0, span)
    size = numbers.dtype.itemsize

    def start(document: int) -> int:
        sequence = int(first_sequences_D[document])
        return int(bytes_S[sequence]) // size if 0 <= sequence < sequences else numbers.count

    def stop(document: int) -> int:
        sequence = int(first_sequences_D[document + 1]) - 1
        if sequence < int(first_sequences_D[document]):
            return start(document)
        in_index = sequence < sequences
        return int(bytes_S[sequence]) // size + int(lengths_S[sequence]) if in_index else -1

    return numbers, _Bounds(ends - 1, start, stop)


def _companion(file: SourceFile, suffix: str, ending: str, stack: ExitStack) -> BinaryIO | None:
    """A file next to another, opened; None: it is not there."""
    path = file.path.removesuffix(suffix) + ending
    if not is_remote(path):
        try:
            return stack.enter_context(Path(path).open("rb"))
        except FileNotFoundError:
            return None
    store = store_of(path)
    try:
        found = next(iter(store.find(path, own=())), None)
    except RequestError:
        return None
    if found is None:
        return None
    listed = SourceFile(found.path, found.name, file.format, found.size_bytes, found.version)
    return stack.enter_context(store.open(listed))


def _mapped(file: BinaryIO, dtype: str) -> npt.NDArray[Any]:
    """A whole file as numbers; a local one is read where it is looked at."""
    try:
        file.fileno()
    except OSError:
        file.seek(0)
        return np.frombuffer(file.read(), dtype=dtype)
    file.seek(0, 2)
    count = file.tell() // np.dtype(dtype).itemsize
    if not count:
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r", shape=(count,))


def _name(span: Span) -> str:
    return escape_text(span.file.path)
