"""BERT's h5 files: samples that were made elsewhere, with the tokens that are hidden.

The form of NVIDIA DeepLearningExamples (PyTorch/LanguageModeling/BERT, create_pretraining_data.py),
which Habana's DeepSpeed-BERT reads too: of each sample a row, ``masked_lm_positions`` padded with
0, ``next_sentence_labels`` 1 where b is no continuation of a. Every number is looked at: a wrong
one would be learnt in silence, or stop a device without saying why.

Shape suffixes: N = samples, L = tokens of a sample, P = most hidden tokens of a sample.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shardyard.data.byte_ranges import Span, TextSection, escape_text
from shardyard.data.premasked import record_text
from shardyard.data.readers.columns import TextOf
from shardyard.data.readers.read_errors import extra
from shardyard.errors import SourceError

ARRAYS = {
    "input_ids": "i4",  # (N, L)
    "input_mask": "i1",  # (N, L): 1 for text, 0 for padding
    "segment_ids": "i1",  # (N, L)
    "masked_lm_positions": "i4",  # (N, P)
    "masked_lm_ids": "i4",  # (N, P)
    "next_sentence_labels": "i1",  # (N,)
}
"""Name -> type on disk."""

_TOKENS_AT_ONCE = 2**18
_MOST_TOKENS = 2**15
"""Most tokens of a sample; BERT's have 128 or 512."""
_MOST_CHUNK_BYTES = 2**28
"""Most bytes that are unpacked to read one row."""
_LARGEST = 2**31 - 1

Arrays = Mapping[str, npt.NDArray[Any]]


def read(file: BinaryIO, span: Span, _text_of: TextOf) -> Iterator[TextSection]:
    """The samples of a file.

    Raises:
        RequestError: h5py is not installed.
        SourceError: It is no such file, or holds what cannot be.
    """
    path = escape_text(span.file.path)
    h5py = extra("h5", "h5py", what=path)
    with _as_source_error(path), h5py.File(file, "r") as content:
        arrays = {name: _array(h5py, content, name, path) for name in ARRAYS}
        rows, width = _sizes(arrays, path)
        step = max(1, _TOKENS_AT_ONCE // width)
        for begin in range(0, rows, step):
            part = {name: array[begin : begin + step] for name, array in arrays.items()}
            yield from _sections(part, begin, path)


@contextmanager
def _as_source_error(path: str) -> Iterator[None]:
    """Turn errors of h5py into an error that names the file."""
    try:
        yield
    except (OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system, and not of what stands in the file
        why = " ".join(str(error).split())[:200].rstrip(".")
        raise SourceError(
            f"{path} cannot be read as HDF5: {escape_text(why)}. It is cut off, damaged, or "
            "something else by that name. Copy or write it again."
        ) from error


def _array(h5py: Any, content: Any, name: str, path: str) -> Any:
    """One of the six, which lies in the file itself.

    Raises:
        SourceError: It is missing, or none that can be read.
    """
    link = content.get(name, getlink=True)
    array = content[name] if isinstance(link, h5py.HardLink) else None
    if not isinstance(array, h5py.Dataset):
        there = ", ".join(escape_text(key[:40]) for key in sorted(content)[:10]) or "nothing"
        raise SourceError(
            f"{path}: no array {name!r} (it holds {there}). BERT's h5 files have "
            f"{', '.join(ARRAYS)}. Write the file again."
        )
    if array.dtype.kind not in "iu":
        raise SourceError(
            f"{path}: {name} holds {array.dtype}, not whole numbers of one size. Write the file "
            "again with rows of equal length."
        )
    if array.is_virtual or array.external or (array.size and not array.id.get_storage_size()):
        raise SourceError(f"{path}: {name} has no numbers in this file. Write it again with them.")
    if np.prod(array.chunks or (1,)) * array.dtype.itemsize > _MOST_CHUNK_BYTES:
        raise SourceError(
            f"{path}: {name} is packed in parts of {array.chunks} numbers, each of which is "
            "unpacked at once. Write it again with smaller chunks."
        )
    return array


def _sizes(arrays: Mapping[str, Any], path: str) -> tuple[int, int]:
    """Rows, and tokens of each.

    Raises:
        SourceError: The arrays are of different sizes.
    """
    shapes = {name: array.shape for name, array in arrays.items()}
    rows_and_tokens, hidden = shapes["input_ids"], shapes["masked_lm_positions"]
    fits = len(rows_and_tokens) == len(hidden) == 2
    rows = rows_and_tokens[0] if fits else 0
    fits &= shapes["input_mask"] == shapes["segment_ids"] == rows_and_tokens
    fits &= shapes["masked_lm_ids"] == hidden and hidden[:1] == (rows,)
    fits &= shapes["next_sentence_labels"] in ((rows,), (rows, 1))
    if not fits or not 1 <= rows_and_tokens[1] <= _MOST_TOKENS or hidden[1] > _MOST_TOKENS:
        told = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise SourceError(
            f"{path}: the sizes of its arrays do not fit each other, or a sample has more than "
            f"{_MOST_TOKENS:,} tokens: {told}. Write the file again."
        )
    return rows, rows_and_tokens[1]


def _sections(part: Arrays, begin: int, path: str) -> Iterator[TextSection]:
    part = {name: array.astype(np.int64) for name, array in part.items()}
    _check_values(part, begin, path)
    lengths_N = part["input_mask"].sum(axis=1)
    for row in range(len(lengths_N)):
        positions_P = part["masked_lm_positions"][row]
        count = int((np.append(positions_P, 0) == 0).argmax())
        ids_P = part["masked_lm_ids"][row]
        text = record_text(
            part["input_ids"][row].tolist(),
            length=int(lengths_N[row]),
            second=np.flatnonzero(part["segment_ids"][row]).tolist(),
            hidden=list(zip(positions_P[:count].tolist(), ids_P[:count].tolist(), strict=True)),
            label=int(part["next_sentence_labels"].reshape(-1)[row]),
        )
        yield TextSection(
            text, begins=True, ends=True, location=f"{path}, sample {begin + row + 1:,}"
        )


def _check_values(part: Arrays, begin: int, path: str) -> None:
    """Raise for the first row that holds what cannot be."""
    ids_NL, mask_NL = part["input_ids"], part["input_mask"]
    positions_NP = part["masked_lm_positions"]
    lengths_N1 = mask_NL.sum(axis=1, keepdims=True)
    places_L = np.arange(ids_NL.shape[1])
    count_N1 = np.cumprod(positions_NP > 0, axis=1).sum(axis=1, keepdims=True)
    is_hidden_NP = np.arange(positions_NP.shape[1]) < count_N1
    wrong = {
        "input_ids holds a number below 0 or above 2,147,483,647": _out_of(ids_NL, _LARGEST),
        "input_mask is not 1 for text and then 0 for padding": mask_NL != (places_L < lengths_N1),
        "input_mask says that all is padding": lengths_N1 == 0,
        "segment_ids holds other numbers than 0 and 1": _out_of(part["segment_ids"], 1),
        "next_sentence_labels holds another number than 0 and 1": _out_of(
            part["next_sentence_labels"].reshape(len(ids_NL), -1), 1
        ),
        "masked_lm_positions names a place that is padding, or none": (positions_NP < 0)
        | (is_hidden_NP & (positions_NP >= lengths_N1)),
        "masked_lm_ids holds a number below 0 or above 2,147,483,647": is_hidden_NP
        & _out_of(part["masked_lm_ids"], _LARGEST),
    }
    for what, is_wrong in wrong.items():
        rows = np.flatnonzero(is_wrong.any(axis=1))
        if len(rows):
            raise SourceError(
                f"{path}, sample {begin + int(rows[0]) + 1:,}: {what}. Write the file again, or "
                "take it out of data.source."
            )


def _out_of(numbers: npt.NDArray[Any], largest: int) -> npt.NDArray[np.bool_]:
    outside: npt.NDArray[np.bool_] = (numbers < 0) | (numbers > largest)
    return outside
