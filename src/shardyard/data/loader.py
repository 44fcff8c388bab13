"""From token shards to the micro-batches of one rank, read ahead while the device computes.

Shape suffixes in this file:
    B = samples in a micro-batch
    L = tokens in a sample
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shardyard.data.order import Positions, sample_indices
from shardyard.data.shards import Tokens, TokenShards
from shardyard.errors import DataError, RequestError

IGNORED = -100
"""Target where nothing is to be predicted; the default ``ignore_index`` of torch's losses."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass reads: named fields, which a task knows by their names."""

    fields: Mapping[str, Tensor]
    """Name -> (B, ...), on the CPU. Of text: tokens, targets and positions, int64."""
    samples_B: Tensor
    """Position of each sample in the stream of samples, int64; -1 for a row of padding."""
    work: int
    """What went through the model, padding left out: of text, tokens."""

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def with_fields(self, **fields: Tensor) -> "MicroBatch":
        """The same samples with other values of some fields."""
        return replace(self, fields={**self.fields, **fields})

    @property
    def is_padding(self) -> bool:
        """Whether no sample is in it: it is there so that all ranks have equally many."""
        return bool((self.samples_B < 0).all())

    def cut(self) -> "MicroBatch":
        """Its samples without rows of padding; a row stays of what is padding alone."""
        rows = max(1, int((self.samples_B >= 0).sum()))
        if rows == len(self.samples_B):
            return self
        fields = {name: field[:rows] for name, field in self.fields.items()}
        return replace(self, fields=fields, samples_B=self.samples_B[:rows])

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch on a device."""
        if device.type == "cpu":
            return self
        fields = {name: _moved(field, device) for name, field in self.fields.items()}
        return replace(self, fields=fields, samples_B=_moved(self.samples_B, device))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    # only from pinned memory does a copy not wait for the device's earlier work
    pinned = tensor if tensor.device == device else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


class Samples(Protocol):
    """One split of a data set: what the loader and an evaluation read of it."""

    @property
    def num_samples(self) -> int:
        """Of the split."""

    def sample_indices(self, positions: Positions) -> Positions:
        """Which samples of the split are at these positions of the stream."""

    def micro_batch(self, positions: range, size: int) -> MicroBatch:
        """The samples at these positions, padded with weightless rows to ``size`` rows."""


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


def step_batches(
    source: Samples,
    *,
    positions: range,
    micro_batch: int,
    rank: int,
    world_size: int,
) -> list[MicroBatch]:
    """The micro-batches of one rank for one step (or one part of an evaluation).

    Micro-batch m holds samples [m * micro_batch, (m + 1) * micro_batch) of the step; rank r gets
    micro-batches r, r + world_size, ... Every rank gets equally many, so that collectives match:
    those that do not exist are wholly padding.
    """
    num_micro_batches = -(-len(positions) // micro_batch)
    per_rank = -(-num_micro_batches // world_size)
    return [
        source.micro_batch(positions[m * micro_batch : (m + 1) * micro_batch], micro_batch)
        for m in range(rank, per_rank * world_size, world_size)
    ]


class Loader:
    """Yields the micro-batches of this rank step by step and reads the next steps meanwhile.

    It reads ahead in a thread: the work is copying from mapped files, during which numpy and the
    kernel let other threads run, and a thread shares memory, costs no start-up and cannot be left
    behind when this process is killed.
    """

    def __init__(
        self,
        source: Samples,
        *,
        global_batch: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        start_step: int,
        end_step: int,
        prefetch_steps: int,
    ) -> None:
        """Args:
        global_batch: Samples in a step; step s, counted from 0, reads positions
            [s * global_batch, (s + 1) * global_batch) of the stream.
        start_step: First step to yield.
        end_step: The step after the last one.
        """
        self.wait_s = 0.0
        """Seconds that the last ``next`` waited for data."""
        self._source = source
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._rank = rank
        self._world_size = world_size
        self._waiting_steps = iter(range(start_step, end_step))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: deque[Future[list[MicroBatch]]] = deque()
        for _ in range(prefetch_steps):
            self._request_next()

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        """The micro-batches of the next step.

        Raises:
            DataError: A shard is damaged, or a token id is outside the vocabulary.
        """
        if not self._ahead:
            raise StopIteration
        began_s = time.perf_counter()
        batches = self._ahead.popleft().result()
        self.wait_s = time.perf_counter() - began_s
        self._request_next()
        return batches

    def close(self) -> None:
        """Stop reading ahead and wait until the thread has ended."""
        self._ahead.clear()
        self._waiting_steps = iter(range(0))
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _request_next(self) -> None:
        step = next(self._waiting_steps, None)
        if step is not None:
            self._ahead.append(self._thread.submit(self._read_step, step))

    def _read_step(self, step: int) -> list[MicroBatch]:
        return step_batches(
            self._source,
            positions=range(step * self._global_batch, (step + 1) * self._global_batch),
            micro_batch=self._micro_batch,
            rank=self._rank,
            world_size=self._world_size,
        )
