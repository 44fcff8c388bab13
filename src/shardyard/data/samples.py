"""Prepared text as samples of ``data.seq_len`` tokens, in the order of a run.

Shape suffixes in this file:
    B = samples in a micro-batch
    L = tokens in a sample
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from shardyard.data.micro_batch import IGNORED, MicroBatch
from shardyard.data.order import Positions, sample_indices
from shardyard.data.shards import Tokens, TokenShards
from shardyard.errors import DataError, RequestError

Prepare = Callable[[MicroBatch, Tensor], MicroBatch]
"""What a task makes of a micro-batch of text, and of the tokens that each of its rows has."""


def unchanged(batch: MicroBatch, lengths_B: Tensor) -> MicroBatch:  # noqa: ARG001 - a Prepare
    """Text as it is: each token predicts the next."""
    return batch


class _Source:
    """One split of a data set, seen as samples of ``seq_len`` tokens."""

    def __init__(
        self,
        shards: TokenShards,
        *,
        seq_len: int,
        vocab_size: int,
        attend_across_documents: bool,
        prepare: Prepare = unchanged,
        columns: Sequence[str] = (),
    ) -> None:
        """Args:
            vocab_size: Entries of the model's embedding; larger token ids are refused.
            prepare: What a task makes of a micro-batch of text.
            columns: What it reads of what stands beside the tokens, each a field (B, L + 1) int64:
                without the last it goes with tokens, without the first with targets. Padding is 0.

        Raises:
            RequestError: The split is too small for one sample.
            DataError: It has no such column.
        """
        self.seq_len = seq_len
        # T tokens make T - 1 targets; the last sample may be partly padding.
        self.num_samples = -(-(shards.num_tokens - 1) // seq_len)
        self._shards = shards
        self._vocab_size = vocab_size
        self._attend_across_documents = attend_across_documents
        self._prepare = prepare
        self._columns = columns
        for name in set(columns) - set(shards.columns):
            raise DataError(
                f"{shards.folder} has no column {name!r} (its columns: "
                f"{', '.join(shards.columns) or 'none'}), which this task reads. Set data.format "
                "to one that makes it."
            )
        if self.num_samples < 1:
            raise RequestError(
                f"the {shards.split} split in {shards.folder} has {shards.num_tokens} tokens; one "
                "sample needs two. Give more text, or change data.eval_fraction."
            )

    def sample_indices(self, positions: Positions) -> Positions:
        """Which samples of the split are at these positions of the stream."""
        raise NotImplementedError

    def micro_batch(self, positions: range, size: int) -> MicroBatch:
        """The samples at these positions, padded with weightless rows to ``size`` rows.

        Raises:
            DataError: A shard is damaged, or a token id is outside the vocabulary.
        """
        tokens_BL = np.zeros((size, self.seq_len), dtype=np.int64)
        targets_BL = np.full((size, self.seq_len), IGNORED, dtype=np.int64)
        positions_BL = np.tile(np.arange(self.seq_len, dtype=np.int64), (size, 1))
        samples_B = np.full(size, -1, dtype=np.int64)
        samples_B[: len(positions)] = positions
        lengths_B = np.zeros(size, dtype=np.int64)
        wide = (size, self.seq_len + 1)
        beside = {name: np.zeros(wide, dtype=np.int64) for name in self._columns}
        indices = self.sample_indices(samples_B[: len(positions)])
        for row, index in enumerate(indices.tolist()):
            start = index * self.seq_len
            stop = min(start + self.seq_len + 1, self._shards.num_tokens)
            tokens = self._read(start, stop)
            tokens_BL[row, : len(tokens) - 1] = tokens[:-1]
            targets_BL[row, : len(tokens) - 1] = tokens[1:]
            lengths_B[row] = len(tokens) - 1
            for name, values in beside.items():
                values[row, : len(tokens)] = self._shards.read(start, stop, name)
            if not self._attend_across_documents:
                starts = self._shards.document_starts_in(start, stop)
                _separate_documents(targets_BL[row], positions_BL[row], starts)
        fields = {"tokens": tokens_BL, "targets": targets_BL, "positions": positions_BL, **beside}
        batch = MicroBatch(
            fields={name: torch.from_numpy(field) for name, field in fields.items()},
            samples_B=torch.from_numpy(samples_B),
            work=int(lengths_B.sum()),
        )
        return self._prepare(batch, torch.from_numpy(lengths_B))

    def _read(self, start: int, stop: int) -> Tokens:
        # A step that indexed an embedding out of bounds would stop a GPU without saying why.
        tokens = self._shards.read(start, stop)
        largest = int(tokens.max())
        if largest >= self._vocab_size:
            raise DataError(
                f"{self._shards.folder}: the {self._shards.split} split holds token id {largest}, "
                f"but the model's vocabulary has {self._vocab_size:,} entries: the data were "
                "prepared with another tokenizer, or a shard is damaged. Set data.tokenizer to "
                "the model's own, or delete the folder and prepare again."
            )
        return tokens


def _separate_documents(targets_L: Tokens, positions_L: Tokens, starts: Tokens) -> None:
    """Count positions from each document's start, from which transformers derives the mask, and
    predict no first token of a document; ``starts`` is counted from the sample's first token."""
    targets_L[starts[starts > 0] - 1] = IGNORED
    for start in starts[starts < len(positions_L)].tolist():
        positions_L[start:] = np.arange(len(positions_L) - start)


class TrainSource(_Source):
    """The training split as an endless stream; every epoch has its own order."""

    def __init__(
        self,
        shards: TokenShards,
        *,
        seq_len: int,
        vocab_size: int,
        attend_across_documents: bool,
        seed: int,
        prepare: Prepare = unchanged,
        columns: Sequence[str] = (),
    ) -> None:
        super().__init__(
            shards,
            seq_len=seq_len,
            vocab_size=vocab_size,
            attend_across_documents=attend_across_documents,
            prepare=prepare,
            columns=columns,
        )
        self._seed = seed

    def sample_indices(self, positions: Positions) -> Positions:
        return sample_indices(positions, self.num_samples, seed=self._seed)


class EvalSource(_Source):
    """A split in its own order: position p is sample p, each once."""

    def sample_indices(self, positions: Positions) -> Positions:
        return positions
