"""Running text as samples: windows of ``data.seq_len`` tokens, one behind the other.

Shape suffix: L = tokens in a sample.
"""

from collections.abc import Sequence

import numpy as np

from shardyard.data.micro_batch import IGNORED
from shardyard.data.samples import Sample
from shardyard.data.shards import Tokens, TokenShards
from shardyard.errors import RequestError


class TextWindows:
    """The ``SampleSet`` of running text: each token predicts the next, the last one of a window
    the first of the window behind it.

    Fields: tokens, targets and positions (L,); each column (L + 1,).
    """

    def __init__(
        self,
        shards: TokenShards,
        *,
        seq_len: int,
        attend_across_documents: bool,
        columns: Sequence[str] = (),
    ) -> None:
        """Args:
            columns: What is read of what stands beside the tokens, each a field (L + 1,): without
                the last it goes with tokens, without the first with targets. Padding is 0.

        Raises:
            RequestError: The split is too small for one sample.
            DataError: It has no such column.
        """
        shards.require_columns(columns)
        # T tokens make T - 1 targets; the last sample may be partly padding.
        self.num_samples = -(-(shards.num_tokens - 1) // seq_len)
        if self.num_samples < 1:
            raise RequestError(
                f"the {shards.split} split in {shards.folder} has {shards.num_tokens} tokens; one "
                "sample needs two. Give more text, or change data.eval_fraction."
            )
        self._shards = shards
        self._seq_len = seq_len
        self._attend_across_documents = attend_across_documents
        self._columns = columns

    def sample(self, index: int, epoch: int) -> Sample:  # noqa: ARG002 - the same in every one
        """Window ``index`` of the text."""
        start = index * self._seq_len
        stop = min(start + self._seq_len + 1, self._shards.num_tokens)
        fields = self.padding().fields
        tokens = self._shards.read(start, stop)
        length = len(tokens) - 1
        fields["tokens"][:length] = tokens[:-1]
        fields["targets"][:length] = tokens[1:]
        for name in self._columns:
            fields[name][: length + 1] = self._shards.read(start, stop, name)
        if not self._attend_across_documents:
            starts = self._shards.document_starts_in(start, stop)
            _separate_documents(fields["targets"], fields["positions"], starts)
        return Sample(fields, length)

    def padding(self) -> Sample:
        """Tokens 0 that predict nothing."""
        fields = {
            "tokens": np.zeros(self._seq_len, dtype=np.int64),
            "targets": np.full(self._seq_len, IGNORED, dtype=np.int64),
            "positions": np.arange(self._seq_len, dtype=np.int64),
            **{name: np.zeros(self._seq_len + 1, dtype=np.int64) for name in self._columns},
        }
        return Sample(fields, 0)


def _separate_documents(targets_L: Tokens, positions_L: Tokens, starts: Tokens) -> None:
    """Count positions from each document's start, from which transformers derives the mask, and
    predict no first token of a document; ``starts`` is counted from the sample's first token."""
    targets_L[starts[starts > 0] - 1] = IGNORED
    for start in starts[starts < len(positions_L)].tolist():
        positions_L[start:] = np.arange(len(positions_L) - start)
