"""Prepared pairs of answers as samples.

Shape suffixes: L = tokens in a sample, P = most pairs in a sample.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from shardyard.config.tasks import TaskRow
from shardyard.data.samples import Sample, SampleSet, WholeDocuments
from shardyard.data.shards import LEARNT, Tokens


class PackedPairs(WholeDocuments):
    """The ``SampleSet`` of pairs side by side, as many whole ones as fit.

    The documents of a pair are the dialogues of its preferred and of its rejected answer. Fields
    besides those of whole documents: ``pairs`` (P,), the numbers of the pairs in the split, -1
    where there is none.
    """

    setting: ClassVar[str] = "data.format=preference_pairs"
    unit: ClassVar[str] = "pair"
    unit_documents: ClassVar[int] = 2

    def still_teaches(self, starts_U: Tokens, sizes_U: Tokens) -> bool:
        """Whether a token of each answer is left."""
        documents = zip(starts_U.tolist(), sizes_U.tolist(), strict=True)
        further = not self.reads_last
        return all(
            self._shards.read(start, start + size + further, LEARNT)[1:].any()
            for start, size in documents
        )

    def sample(self, index: int, epoch: int) -> Sample:
        """The pairs of sample ``index``."""
        found = super().sample(index, epoch)
        units = self.units_of(index)
        found.fields["pairs"][: len(units)] = self.numbers[units]
        return found

    def padding(self) -> Sample:
        """Return tokens 0 without pairs."""
        fields: dict[str, npt.NDArray[Any]] = {
            **super().padding().fields,
            "pairs": np.full(self.most_pairs, -1, dtype=np.int64),
        }
        return Sample(fields, 0)

    @cached_property
    def most_pairs(self) -> int:
        """Pairs of the sample that has most; in a mixture, of all sources."""
        return int(np.diff(self._first).max())

    def sizes_of(self, index: int) -> Tokens:
        """Return the places of each document in sample ``index``."""
        sizes: Tokens = self._sizes[self.units_of(index)].ravel()
        return sizes


class AnswerPairs(PackedPairs):
    """Pairs whose answers are predicted.

    Further fields: ``documents`` (L,), for each token its document in the sample, which is 2p for
    the preferred answer of pair p and 2p + 1 for the rejected one, -1 for padding; ``reference``
    (P, 2), the log-probabilities of both answers under the reference model in nats, fp64, once
    they are known.
    """

    reference: npt.NDArray[np.float64] | None = None
    """Log-probabilities of the answers (pairs of the split, 2); None: not known yet."""

    def sample(self, index: int, epoch: int) -> Sample:
        """The pairs of sample ``index``."""
        found = super().sample(index, epoch)
        sizes, numbers = self.sizes_of(index), self.numbers[self.units_of(index)]
        found.fields["documents"][: sizes.sum()] = np.repeat(np.arange(len(sizes)), sizes)
        if self.reference is not None:
            found.fields["reference"][: len(numbers)] = self.reference[numbers]
        return found

    def padding(self) -> Sample:
        """Return tokens 0 without pairs."""
        fields: dict[str, npt.NDArray[Any]] = {
            **super().padding().fields,
            "documents": np.full(self._seq_len, -1, dtype=np.int64),
            "reference": np.zeros((self.most_pairs, 2)),
        }
        return Sample(fields, 0)


class RatedPairs(PackedPairs):
    """Pairs whose answers get a reward, by the last token of each dialogue.

    No token is predicted, so there are no ``targets``. Further field: ``reads`` (P, 2), the places
    of the last tokens of both dialogues of a pair; 0 where there is none.
    """

    reads_last: ClassVar[bool] = True

    def sample(self, index: int, epoch: int) -> Sample:
        """The pairs of sample ``index``."""
        found = super().sample(index, epoch)
        ends = np.cumsum(self.sizes_of(index)) - 1
        found.fields["reads"][: len(ends) // 2] = ends.reshape(-1, 2)
        return found

    def _read_document(self, start: int, fields: Mapping[str, Tokens], size: int) -> None:
        fields["tokens"][:size] = self._shards.read(start, start + size)

    def padding(self) -> Sample:
        """Return tokens 0 without pairs."""
        fields = dict(super().padding().fields)
        del fields["targets"]
        return Sample({**fields, "reads": np.zeros((self.most_pairs, 2), dtype=np.int64)}, 0)


def match_most_pairs(sets: Sequence[SampleSet]) -> None:
    """Let samples of several sets have room for equally many pairs."""
    pairs = [each for each in sets if isinstance(each, PackedPairs)]
    assert len(pairs) == len(sets)
    most = max((each.most_pairs for each in pairs), default=0)
    for each in pairs:
        each.most_pairs = most


def pairs_class(task: TaskRow) -> type[PackedPairs]:
    """The samples that a task makes of pairs of answers."""
    return RatedPairs if task.gives_reward else AnswerPairs
