"""Samples of a prepared dataset in the order of a run.

A ``SampleSet`` defines samples, in one file each next to this one. A stream puts samples in an
order and lays them side by side. Shape suffixes in this file:
    B = samples in a micro-batch
    L = tokens in a sample
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.data import Data
from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.data.order import Positions, SampleKey, sample_indices
from shardyard.data.shards import Tokens, TokenShards
from shardyard.errors import RequestError

Prepare = Callable[[MicroBatch, Tensor], MicroBatch]
"""A task's function of a micro-batch of text and the token count of each of its rows."""


def identity_prepare(batch: MicroBatch, lengths_B: Tensor) -> MicroBatch:  # noqa: ARG001 - a Prepare
    """Text as it is: each token predicts the next."""
    return batch


class Sample(NamedTuple):
    """One sample."""

    fields: Mapping[str, npt.NDArray[Any]]
    """Arrays by name: (L,), or the form that each sample of the set has; int64 for text."""
    length: int
    """Size of the model's input; for text, tokens, and all after them is padding."""


class SampleSet(Protocol):
    """The samples of one split, by their numbers. Safe to use from several threads."""

    num_samples: int

    def sample(self, index: int, epoch: int) -> Sample:
        """Sample ``index`` as it is in that pass over the split, the first being 0.

        Raises:
            DataError: What it is read from is damaged, or a token id is outside the vocabulary.
        """

    def padding(self) -> Sample:
        """Return a row without weight, of the form of samples; its length is 0."""


@runtime_checkable
class ReadsTogether(Protocol):
    """A set that reads several samples side by side."""

    def read(self, keys: Sequence[SampleKey]) -> list[Sample]:
        """Return the samples of these keys; errors are those of ``SampleSet.sample``."""


def read_samples(samples: SampleSet, keys: Sequence[SampleKey]) -> list[Sample]:
    """Read samples of a set: side by side if it can."""
    if isinstance(samples, ReadsTogether):
        return samples.read(keys)
    return [samples.sample(index, epoch) for index, epoch in keys]


def read_of_sets(
    sets: Sequence[SampleSet], numbers: Sequence[int], keys: Sequence[SampleKey]
) -> list[Sample]:
    """Read samples of several sets, in the order of the keys.

    Args:
        numbers: Set of each key, by its place in ``sets``.
    """
    found: dict[int, Sample] = {}
    for number in sorted({*numbers}):
        places = [place for place, each in enumerate(numbers) if each == number]
        of_set = read_samples(sets[number], [keys[place] for place in places])
        found |= zip(places, of_set, strict=True)
    return [found[place] for place in range(len(keys))]


class Stream:
    """One set of samples in an order."""

    limit: str | None = None
    """Words for what limits the rate of reading; None for mapped files, without a known limit."""

    def __init__(
        self, samples: SampleSet, *, seed: int | None, prepare: Prepare = identity_prepare
    ) -> None:
        """Args:
        seed: Of a stream without end, in which every epoch has its own order; None: the set's
            own order, each sample once.
        """
        self.num_samples = samples.num_samples
        self.samples = samples
        self._seed = seed
        self.prepare = prepare

    def sample_indices(self, positions: Positions) -> Positions:
        """Return the indices of the split's samples at these positions of the stream."""
        if self._seed is None:
            return positions
        return sample_indices(positions, self.num_samples, seed=self._seed)

    def micro_batch(self, positions: range, size: int) -> MicroBatch:
        """The samples at these positions, padded with weightless rows to ``size`` rows.

        Raises:
            DataError: A shard is damaged, or a token id is outside the vocabulary.
        """
        samples = self._read(self._keys(positions))
        return collate(samples, positions, self.samples.padding(), size, self.prepare)

    def _keys(self, positions: range) -> list[SampleKey]:
        """Return the sample and the pass over the split, of each position."""
        indices = self.sample_indices(np.array(positions, dtype=np.int64)).tolist()
        epochs = [position // self.num_samples for position in positions]
        return list(zip(indices, epochs, strict=True))

    def _read(self, keys: Sequence[SampleKey]) -> list[Sample]:
        return read_samples(self.samples, keys)


def collate(
    samples: Sequence[Sample], positions: range, padding: Sample, size: int, prepare: Prepare
) -> MicroBatch:
    """A micro-batch of samples, padded with weightless rows to ``size`` rows.

    Args:
        positions: Of the samples in the stream, one each.
    """
    rows = [*samples, *[padding] * (size - len(samples))]
    fields = {name: np.stack([row.fields[name] for row in rows]) for name in padding.fields}
    return stacked_batch(fields, positions, [row.length for row in samples], prepare)


def stacked_batch(
    fields: Mapping[str, npt.NDArray[Any]],
    positions: range,
    lengths: Sequence[int],
    prepare: Prepare,
) -> MicroBatch:
    """A micro-batch of arrays (B, ...) whose rows after those of ``positions`` are padding.

    Args:
        positions: Of the samples in the stream, one each.
        lengths: Of the samples.
    """
    size = len(next(iter(fields.values())))
    samples_B = torch.full((size,), -1, dtype=torch.int64)
    samples_B[: len(positions)] = torch.tensor(positions, dtype=torch.int64)
    lengths_B = torch.zeros(size, dtype=torch.int64)
    lengths_B[: len(lengths)] = torch.tensor(lengths, dtype=torch.int64)
    batch = MicroBatch(
        fields={name: torch.from_numpy(array) for name, array in fields.items()},
        samples_B=samples_B,
        work=sum(lengths),
        lengths_B=lengths_B,
    )
    return prepare(batch, lengths_B)


# Whole documents as samples: each holds as many as fit into it, and none goes on in another.
#
# Which ones is settled by their lengths alone, so it is the same wherever it is asked, and the
# order of a run stays a permutation of samples. Shape suffixes: L = tokens in a sample, N = units,
# U = documents of a unit.

TooLong = Literal["refuse", "cut", "drop"]


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of the documents in each sample: each goes where it leaves the least room (best fit).

    Args:
        sizes: Places that each document takes, at most ``capacity``.
    """
    samples: list[list[int]] = []
    by_free_tokens: list[list[int]] = [[] for _ in range(capacity + 1)]  # room left -> samples
    rooms = 0  # bit r is set where a sample has r places left
    for number, size in enumerate(sizes):
        fitting = rooms >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            sample = by_free_tokens[left].pop()
            if not by_free_tokens[left]:
                rooms ^= 1 << left
        else:
            left, sample = capacity, len(samples)
            samples.append([])
        samples[sample].append(number)
        left -= size
        if left:
            by_free_tokens[left].append(sample)
            rooms |= 1 << left
    return samples


class WholeDocuments:
    """The ``SampleSet`` of documents side by side, each independent of the others.

    Positions restart with each document, by which attention stays inside of it. No document
    predicts the next. A document of T tokens takes T - 1 places, as its last token is only
    predicted. Fields: tokens, targets and positions (L,); each column (L + 1,), of which all
    but the first belong to targets.
    """

    setting: ClassVar[str] = "data.pack=whole"
    """Setting that keeps documents whole, for messages."""
    unit: ClassVar[str] = "document"
    """Word for what stays together."""
    unit_documents: ClassVar[int] = 1
    """Documents that stay together, one after the other (U of a unit)."""
    reads_last: ClassVar[bool] = False
    """Whether the last token of a document takes a place, too, though no other follows it."""

    def __init__(
        self,
        shards: TokenShards,
        *,
        seq_len: int,
        too_long: TooLong,
        columns: Sequence[str] = (),
    ) -> None:
        """Args:
            too_long: Treatment of documents that do not fit into a sample: cut keeps the part
                that fits.
            columns: Columns to read next to the tokens.

        Raises:
            RequestError: No document is left, or one is too long and the setting rejects it.
            DataError: There is no such column.
        """
        shards.require_columns(columns)
        self._shards, self._seq_len, self._columns = shards, seq_len, columns
        starts = shards.document_starts
        unread = int(not self.reads_last)
        sizes_NU = (np.diff(np.append(starts, shards.num_tokens)) - unread).reshape(
            -1, self.unit_documents
        )
        total_N = sizes_NU.sum(axis=1)
        is_long_N = total_N > seq_len
        self.num_units = len(sizes_NU)
        """Units of the split, with those that are left out."""
        self.num_too_long = int(is_long_N.sum())
        """Units that were cut or left out."""
        if self.num_too_long and too_long == "refuse":
            longest = int(total_N.max())
            raise RequestError(
                f"{self.setting}: {self.num_too_long:,} of {self.num_units:,} {self.unit}s of the "
                f"{shards.split} split do not fit into data.seq_len={seq_len}; the longest takes "
                f"{longest:,}. Set data.seq_len={longest}, or data.too_long to cut or drop."
            )
        is_taken_N: npt.NDArray[np.bool_] = np.all(
            sizes_NU > 0, axis=1
        )  # one of a single token predicts nothing
        if too_long == "drop":
            is_taken_N &= ~is_long_N
        # the longer document of a unit is cut first
        others_NU = total_N[:, None] - sizes_NU
        room_NU = np.maximum(seq_len // self.unit_documents, seq_len - others_NU)
        sizes_NU = np.minimum(sizes_NU, room_NU)
        starts_NU = starts.reshape(-1, self.unit_documents)
        for number in np.flatnonzero(is_long_N & is_taken_N):
            is_taken_N[number] = self.still_teaches(starts_NU[number], sizes_NU[number])
        self.numbers = np.flatnonzero(is_taken_N)
        """Numbers in the split of the units that are taken."""
        self._starts, self._sizes = starts_NU[is_taken_N], sizes_NU[is_taken_N]
        samples = best_fit(self._sizes.sum(axis=1).tolist(), seq_len)
        self.num_samples = len(samples)
        if not samples:
            raise RequestError(
                f"{self.setting}: no {self.unit} of the {shards.split} split in {shards.folder} is "
                f"left of {self.num_units:,}. Give longer samples with data.seq_len, or more text."
            )
        self._units = np.concatenate([np.array(each, dtype=np.int64) for each in samples])
        self._first = np.cumsum([0, *map(len, samples)], dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model, padding left out."""
        return int(self._sizes.sum())

    def still_teaches(self, starts_U: Tokens, sizes_U: Tokens) -> bool:  # noqa: ARG002
        """Whether a unit that was cut to these sizes still has something to learn."""
        return True

    def units_of(self, index: int) -> Tokens:
        """Return the units in sample ``index``, as indices of ``numbers``."""
        return self._units[self._first[index] : self._first[index + 1]]

    def sample(self, index: int, epoch: int) -> Sample:  # noqa: ARG002 - the same in every one
        """The documents of sample ``index``, in the order of the split."""
        fields, at = self.padding().fields, 0
        units = self.units_of(index)
        documents = zip(self._starts[units].flat, self._sizes[units].flat, strict=True)
        for start, size in ((int(start), int(size)) for start, size in documents):
            fields["positions"][at : at + size] = np.arange(size)
            self._read_document(start, {name: each[at:] for name, each in fields.items()}, size)
            at += size
        fields["positions"][at:] = np.arange(self._seq_len - at)  # padding is for itself too
        return Sample(fields, at)

    def _read_document(self, start: int, fields: Mapping[str, Tokens], size: int) -> None:
        """Fill the first ``size`` places of fields with the document at ``start``."""
        tokens = self._shards.read(start, start + size + 1)
        fields["tokens"][:size] = tokens[:-1]
        fields["targets"][:size] = tokens[1:]
        for name in self._columns:
            values = self._shards.read(start, start + size + 1, name)
            fields[name][1 : 1 + size] = values[1:]

    def padding(self) -> Sample:
        """Return tokens 0 without predictions."""
        fields: dict[str, Tokens] = {
            "tokens": np.zeros(self._seq_len, dtype=np.int64),
            "targets": np.full(self._seq_len, IGNORED, dtype=np.int64),
            "positions": np.arange(self._seq_len, dtype=np.int64),
            **{name: np.zeros(self._seq_len + 1, dtype=np.int64) for name in self._columns},
        }
        return Sample(fields, 0)


def with_samples(
    metadata: DatasetMetadata,
    data: Data,
    kind: type[WholeDocuments] = WholeDocuments,
    *,
    columns: Sequence[str] = (),
) -> DatasetMetadata:
    """Return the facts of prepared data with the samples that whole documents make.

    Raises:
        RequestError: A document is too long and the recipe rejects that, or none is left.
    """
    assert isinstance(data.seq_len, int)  # checked
    sets = {
        split: kind(
            TokenShards(Path(metadata.dir), split),
            seq_len=data.seq_len,
            too_long=data.too_long,
            columns=columns,
        )
        for split, documents in (
            ("train", metadata.train_documents),
            ("eval", metadata.eval_documents),
        )
        if documents
    }
    train, held_out = sets.get("train"), sets.get("eval")
    return replace(
        metadata,
        train_samples=0 if train is None else train.num_samples,
        eval_samples=0 if held_out is None else held_out.num_samples,
        too_long=sum(each.num_too_long for each in sets.values()),
        train_places=0 if train is None else train.num_tokens,
    )


# Running text as samples: windows of ``data.seq_len`` tokens, one behind the other.
#
# Shape suffix: L = tokens in a sample.


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
            columns: Columns to read next to the tokens, each a field (L + 1,): without the last
                it belongs to tokens, without the first to targets. Padding is 0.

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
        """Return tokens 0 without predictions."""
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
