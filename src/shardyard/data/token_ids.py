"""Ids that another program made of text: how a reader hands them on, and what is learnt of them.

Shape suffix: N = ids.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from shardyard.config.data_choices import ID_KEYS
from shardyard.data.byte_ranges import TextSection, escape_text
from shardyard.data.readers.columns import some_keys
from shardyard.data.tokenizer import TextEncoder
from shardyard.data.work_units import Encoded, PlainText
from shardyard.errors import RequestError, SourceError

_LARGEST = 2**32 - 1
_IGNORED = -100
"""Label of a token without loss in transformers."""


def ids_text(ids_N: npt.NDArray[Any], location: object) -> str:
    """Ids as the text of a section: 4 characters for each, one for each of its bytes.

    Raises:
        SourceError: They are no whole numbers, or too small or large for an id.
    """
    if ids_N.dtype.kind not in "iu":
        raise SourceError(
            f"{location}: ids are whole numbers, and these are {ids_N.dtype}. Write the file again "
            "with an integer type."
        )
    if len(ids_N) and not 0 <= int(ids_N.min()) <= int(ids_N.max()) <= _LARGEST:
        worst = ids_N.min() if ids_N.min() < 0 else ids_N.max()
        raise SourceError(f"{location}: {worst} is no id of a token. Fix or remove it.")
    return ids_N.astype("<u4").tobytes().decode("latin-1")


def ids_of(text: str) -> npt.NDArray[np.uint32]:
    """The ids of a section's text."""
    return np.frombuffer(text.encode("latin-1"), dtype="<u4")


def row_text(row: Any, location: object) -> str:
    """The ids of a row, without those that its ``attention_mask`` names padding.

    Raises:
        SourceError: It has none, or marks tokens without loss.
    """
    keys = [key for key in ID_KEYS if isinstance(row, dict) and key in row]
    if len(keys) != 1:
        found = "is no object" if not isinstance(row, dict) else f"has the keys {some_keys(row)}"
        raise SourceError(
            f"{location}: a row of ids has one of {', '.join(ID_KEYS)}, and this {found}. Rename "
            "the key that holds the ids, or set data.format to what the rows are."
        )
    ids_N = _numbers(row, keys[0], location)
    if row.get("labels") is not None and (_numbers(row, "labels", location) == _IGNORED).any():
        raise SourceError(
            f"{location}: labels of {_IGNORED} mark tokens without loss, and data.format=token_ids "
            "learns every token. Prepare the dialogues from their text (data.format=chat), or take "
            "the column away."
        )
    if row.get("attention_mask") is not None:
        mask_N = _numbers(row, "attention_mask", location)
        if len(mask_N) != len(ids_N):
            raise SourceError(
                f"{location}: attention_mask has {len(mask_N):,} numbers for {len(ids_N):,} ids. "
                "Fix or remove the row."
            )
        ids_N = ids_N[mask_N != 0]
    return ids_text(ids_N, location)


def _numbers(row: dict[str, Any], key: str, location: object) -> npt.NDArray[Any]:
    """A list of whole numbers of a row as an array.

    Args:
        location: Only turned into words for an error: it counts the lines before it.

    Raises:
        SourceError: It is none.
    """
    try:
        numbers: npt.NDArray[Any] = np.asarray(row[key])
    except (ValueError, TypeError, OverflowError) as error:
        why = escape_text(str(error))
        raise SourceError(f"{location}, {key}: {why}. Fix or remove it.") from error
    if not numbers.size:
        return np.empty(0, dtype=np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iub":
        raise SourceError(
            f"{location}, {key} is no list of whole numbers. Fix it, or set data.format to what "
            "the rows are."
        )
    return numbers


class TokenIds(PlainText):
    """The documents of a section of ids, each up to the id that ends a text."""

    def __init__(
        self,
        tokenizer: TextEncoder,
        *,
        id_type: str,
        id_rows: str | None,  # noqa: ARG002 - whoever reads the rows joins them
    ) -> None:
        super().__init__(tokenizer)
        self._id_type = id_type

    def encode(self, section: TextSection) -> list[Encoded]:
        """Raises:
        SourceError: An id is outside the vocabulary.
        """
        ids_N = ids_of(section.text)
        self._check(ids_N, section.location)
        documents, begin = [], 0
        for stop in np.flatnonzero(ids_N == self.tokenizer.end_of_text_id).tolist():
            if stop > begin or (begin == 0 and not section.begins):
                documents.append(Encoded(ids_N[begin:stop], ends=True))
            begin = stop + 1
        if begin < len(ids_N):
            documents.append(Encoded(ids_N[begin:]))
        return documents

    @staticmethod
    def words(section: TextSection) -> str:
        """Raises:
        RequestError: Always: ids are no text to train a tokenizer on.
        """
        raise RequestError(f"{section.location}: ids are no text to train a tokenizer on.")

    def _check(self, ids_N: npt.NDArray[Any], location: object) -> None:
        size = self.tokenizer.vocab_size
        largest = int(ids_N.max(initial=0))
        if largest >= size:
            raise SourceError(
                f"{location}: there is token id {largest:,}, and the tokenizer has {size:,} "
                "tokens. Set data.tokenizer to the one that the files were made with, or "
                f"data.id_type, which is {self._id_type}, to the type of their numbers."
            )
