"""Prepared pairs of answers as samples.

Shape suffixes: L = tokens in a sample, P = most pairs in a sample.
"""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from shardyard.data.samples import Sample, WholeDocuments
from shardyard.data.shards import LEARNT, Tokens


class AnswerPairs(WholeDocuments):
    """The ``SampleSet`` of pairs side by side, as many whole ones as fit.

    Fields besides those of whole documents: ``documents`` (L,), for each token its document in
    the sample, which is 2p for the preferred answer of pair p and 2p + 1 for the rejected one, -1
    for padding; ``pairs`` (P,), the numbers of the pairs in the split, -1 where there is none;
    ``reference`` (P, 2), the log-probabilities of both answers under the reference model in nats,
    fp64, once they are known.
    """

    setting: ClassVar[str] = "data.format=preference_pairs"
    unit: ClassVar[str] = "pair"
    unit_documents: ClassVar[int] = 2

    reference: npt.NDArray[np.float64] | None = None
    """Log-probabilities of the answers (pairs of the split, 2); None: not known yet."""

    def still_teaches(self, starts_U: Tokens, sizes_U: Tokens) -> bool:
        """Whether a token of each answer is left."""
        documents = zip(starts_U.tolist(), sizes_U.tolist(), strict=True)
        return all(
            self._shards.read(start, start + size + 1, LEARNT)[1:].any()
            for start, size in documents
        )

    def sample(self, index: int, epoch: int) -> Sample:
        """The pairs of sample ``index``."""
        found = super().sample(index, epoch)
        fields = dict(found.fields)
        units = self.units_of(index)
        sizes = self._sizes[units].ravel()
        fields["documents"][: sizes.sum()] = np.repeat(np.arange(len(sizes)), sizes)
        numbers = self.numbers[units]
        fields["pairs"][: len(numbers)] = numbers
        if self.reference is not None:
            fields["reference"][: len(numbers)] = self.reference[numbers]
        return Sample(fields, found.length)

    def padding(self) -> Sample:
        """Return tokens 0 without pairs."""
        most = int(np.diff(self._first).max())
        fields: dict[str, npt.NDArray[Any]] = {
            **super().padding().fields,
            "documents": np.full(self._seq_len, -1, dtype=np.int64),
            "pairs": np.full(most, -1, dtype=np.int64),
            "reference": np.zeros((most, 2)),
        }
        return Sample(fields, 0)
