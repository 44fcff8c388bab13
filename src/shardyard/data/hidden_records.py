"""Samples that were made elsewhere, with the tokens that are hidden, as training reads them.

Shape suffix: L = tokens in a sample.
"""

import numpy as np

from shardyard.data.records import HIDDEN, IGNORED, IS_TEXT, OF_RECORD, RANDOM_B, RECORD, SECOND
from shardyard.data.samples import Sample
from shardyard.data.shards import Tokens, TokenShards
from shardyard.errors import RequestError


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
        """Tokens 0 of segment 0, with nothing to say of them."""
        zeros = np.zeros(self._seq_len, dtype=np.int64)
        fields = {
            "tokens": zeros,
            "targets": np.full(self._seq_len, IGNORED, dtype=np.int64),
            "positions": zeros,
            "segments": zeros,
            "next_sentence_labels": np.array(IGNORED, dtype=np.int64),
        }
        return Sample(fields, 0)
