"""Samples that were made elsewhere, with the tokens that are hidden, as training reads them.

Shape suffix: L = tokens in a sample.
"""

import json
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from shardyard.data.byte_ranges import TextSection
from shardyard.data.samples import Sample
from shardyard.data.shards import Tokens, TokenShards
from shardyard.data.work_units import Column, Encoded, PlainText
from shardyard.errors import RequestError, SourceError
from shardyard.io.files import parse_json

# Samples made elsewhere, with the tokens that are hidden: what prepared data keep of one.
#
# A record is as many tokens as all others of its set, padding included, and two columns say of each
# token what the arrays of the file say of it.

RECORD, HIDDEN = "record", "hidden"
"""Columns: what a token is in its record, and what stood there if it was hidden."""

OF_RECORD, IS_TEXT, SECOND, RANDOM_B = 1, 2, 4, 8
"""Bits of RECORD: a token of a record, and no [SEP] that ends a document; no padding; of segment 1;
the record's b is no continuation of its a."""
IGNORED = -100
"""Same value as ``micro_batch.IGNORED``; workers that prepare data do not import torch."""


def record_text(
    ids: list[int], *, length: int, second: list[int], hidden: list[tuple[int, int]], label: int
) -> str:
    """A record as text, which a reader hands to the encoder.

    Args:
        length: Tokens before the padding.
        second: Places of segment 1.
        hidden: Place and id of each token that was hidden.
        label: 1: b is no continuation of a.
    """
    return json.dumps([ids, length, second, hidden, label], separators=(",", ":"))


class Record(PlainText):
    """A record as tokens and columns."""

    columns: ClassVar[Mapping[str, Column]] = {
        RECORD: Column(dtype="|u1", begin=0, end=0),
        HIDDEN: Column(dtype="<i4", begin=IGNORED, end=IGNORED),
    }

    def encode(self, section: TextSection) -> list[Encoded]:
        """Raises:
        SourceError: An id is outside the vocabulary.
        """
        ids, length, second, places, label = parse_json(section.text)
        largest = max([*ids, *(token for _, token in places)])
        size = self.tokenizer.vocab_size
        if largest >= size:
            raise SourceError(
                f"{section.location}: there is token id {largest}, and the tokenizer has {size:,} "
                "tokens. Set data.tokenizer to the one that the files were made with."
            )
        every = OF_RECORD | (RANDOM_B if label else 0)
        kinds = [every | (IS_TEXT if place < length else 0) for place in range(len(ids))]
        hidden = [IGNORED] * len(ids)
        for place in second:
            kinds[place] |= SECOND
        for place, token in places:
            hidden[place] = token
        return [Encoded(ids, {RECORD: kinds, HIDDEN: hidden})]


class HiddenRecords:
    """The ``SampleSet`` of records: what is hidden is as the files have it, in every epoch.

    Fields: as of ``SentencePairs``, with targets, and position 0 for padding.
    """

    def __init__(self, shards: TokenShards, *, seq_len: int) -> None:
        """Raises:
        RequestError: Records have another length.
        DataError: The set is none of records.
        """
        shards.require_columns([RECORD, HIDDEN])
        self.num_samples = shards.num_documents
        self._shards = shards
        self._seq_len = seq_len
        self._stride = shards.num_tokens // max(1, shards.num_documents)
        first = shards.read(0, self._stride, RECORD) & OF_RECORD
        if int(first.sum()) != seq_len:
            raise RequestError(
                f"the records of {shards.folder} have {int(first.sum())} tokens, and data.seq_len="
                f"{seq_len}. Set data.seq_len to theirs."
            )
        self._offset = int(first.argmax())

    def sample(self, index: int, epoch: int) -> Sample:  # noqa: ARG002 - the same in every one
        """Record ``index``."""
        begin = index * self._stride + self._offset
        stop = begin + self._seq_len
        kinds = self._shards.read(begin, stop, RECORD)
        is_text = (kinds & IS_TEXT) > 0
        fields: dict[str, Tokens] = {
            "tokens": self._shards.read(begin, stop),
            "targets": self._shards.read(begin, stop, HIDDEN),
            "positions": np.arange(self._seq_len, dtype=np.int64) * is_text,
            "segments": np.minimum(kinds & SECOND, 1),
            "next_sentence_labels": np.array(int(kinds[0] & RANDOM_B > 0), dtype=np.int64),
        }
        return Sample(fields, int(is_text.sum()))

    def padding(self) -> Sample:
        """Return a padding sample: tokens 0 of segment 0, without anything to predict."""
        zeros = np.zeros(self._seq_len, dtype=np.int64)
        fields = {
            "tokens": zeros,
            "targets": np.full(self._seq_len, IGNORED, dtype=np.int64),
            "positions": zeros,
            "segments": zeros,
            "next_sentence_labels": np.array(IGNORED, dtype=np.int64),
        }
        return Sample(fields, 0)
