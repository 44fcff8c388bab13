"""Whole documents as samples: each holds as many as fit into it, and none goes on in another.

Which ones is settled by their lengths alone, so it is the same wherever it is asked, and the order
of a run stays a permutation of samples. Shape suffix: L = tokens in a sample.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from shardyard.config.resolved import DataFacts
from shardyard.config.schema.data import Data
from shardyard.data.micro_batch import IGNORED
from shardyard.data.samples import Sample
from shardyard.data.shards import Tokens, TokenShards
from shardyard.errors import RequestError

TooLong = Literal["refuse", "cut", "drop"]


def fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Numbers of the documents in each sample: each goes where it leaves the least room (best fit).

    Args:
        sizes: Places that each document takes, at most ``room``.
    """
    samples: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]  # room left -> samples
    rooms = 0  # bit r is set where a sample has r places left
    for number, size in enumerate(sizes):
        fitting = rooms >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            sample = with_room[left].pop()
            if not with_room[left]:
                rooms ^= 1 << left
        else:
            left, sample = room, len(samples)
            samples.append([])
        samples[sample].append(number)
        left -= size
        if left:
            with_room[left].append(sample)
            rooms |= 1 << left
    return samples


class WholeDocuments:
    """The ``SampleSet`` of documents side by side, each for itself: positions begin anew with each,
    by which attention stays inside of it, and no document predicts the next.

    A document of T tokens takes T - 1 places, as its last token is only predicted. Fields: tokens,
    targets and positions (L,); each column (L + 1,), of which all but the first go with targets.
    """

    def __init__(
        self,
        shards: TokenShards,
        *,
        seq_len: int,
        too_long: TooLong,
        columns: Sequence[str] = (),
    ) -> None:
        """Args:
            too_long: What becomes of documents that do not fit into a sample: cut keeps what does.
            columns: What is read of what stands beside the tokens.

        Raises:
            RequestError: No document is left, or one is too long and that is refused.
            DataError: There is no such column.
        """
        shards.require_columns(columns)
        self._shards, self._seq_len, self._columns = shards, seq_len, columns
        starts = shards.document_starts
        sizes = np.diff(np.append(starts, shards.num_tokens)) - 1
        is_long = sizes > seq_len
        self.num_too_long = int(is_long.sum())
        """Documents that were cut or left out."""
        if self.num_too_long and too_long == "refuse":
            longest = int(sizes.max())
            raise RequestError(
                f"data.pack=whole: {self.num_too_long:,} of {len(sizes):,} documents of the "
                f"{shards.split} split do not fit into data.seq_len={seq_len}; the longest takes "
                f"{longest:,}. Set data.seq_len={longest}, or data.too_long to cut or drop."
            )
        is_taken = sizes > 0  # one of a single token predicts nothing
        if too_long == "drop":
            is_taken &= ~is_long
        self._starts = starts[is_taken]
        self._sizes = np.minimum(sizes[is_taken], seq_len)
        samples = fit(self._sizes.tolist(), seq_len)
        self.num_samples = len(samples)
        if not samples:
            raise RequestError(
                f"data.pack=whole: no document of the {shards.split} split in {shards.folder} is "
                f"left of {len(sizes):,}. Give longer samples with data.seq_len, or more text."
            )
        self._documents = np.concatenate([np.array(each, dtype=np.int64) for each in samples])
        self._first = np.cumsum([0, *map(len, samples)], dtype=np.int64)

    @property
    def num_places(self) -> int:
        """Tokens that go through the model, padding left out."""
        return int(self._sizes.sum())

    def sample(self, index: int, epoch: int) -> Sample:  # noqa: ARG002 - the same in every one
        """The documents of sample ``index``, in the order of the split."""
        fields, at = self.padding().fields, 0
        for document in self._documents[self._first[index] : self._first[index + 1]]:
            start, size = int(self._starts[document]), int(self._sizes[document])
            tokens = self._shards.read(start, start + size + 1)
            fields["tokens"][at : at + size] = tokens[:-1]
            fields["targets"][at : at + size] = tokens[1:]
            fields["positions"][at : at + size] = np.arange(size)
            for name in self._columns:
                values = self._shards.read(start, start + size + 1, name)
                fields[name][at + 1 : at + 1 + size] = values[1:]
            at += size
        fields["positions"][at:] = np.arange(self._seq_len - at)  # padding is for itself too
        return Sample(fields, at)

    def padding(self) -> Sample:
        """Tokens 0 that predict nothing."""
        fields: dict[str, Tokens] = {
            "tokens": np.zeros(self._seq_len, dtype=np.int64),
            "targets": np.full(self._seq_len, IGNORED, dtype=np.int64),
            "positions": np.arange(self._seq_len, dtype=np.int64),
            **{name: np.zeros(self._seq_len + 1, dtype=np.int64) for name in self._columns},
        }
        return Sample(fields, 0)


def with_samples(facts: DataFacts, data: Data) -> DataFacts:
    """What is known of prepared data, with the samples that whole documents make.

    Raises:
        RequestError: A document is too long and that is refused, or none is left.
    """
    assert isinstance(data.seq_len, int)  # checked
    sets = {
        split: WholeDocuments(
            TokenShards(Path(facts.dir), split), seq_len=data.seq_len, too_long=data.too_long
        )
        for split, documents in (("train", facts.train_documents), ("eval", facts.eval_documents))
        if documents
    }
    train, held_out = sets["train"], sets.get("eval")
    return replace(
        facts,
        train_samples=train.num_samples,
        eval_samples=0 if held_out is None else held_out.num_samples,
        too_long=sum(each.num_too_long for each in sets.values()),
        train_places=train.num_places,
    )
