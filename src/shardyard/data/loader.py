"""From samples to the micro-batches of one rank, read ahead while the device computes.

Shape suffixes in this file:
    B = samples in a micro-batch
    L = tokens in a sample
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from shardyard.data.order import Positions

# What one forward and backward pass reads. Shape suffix: B = samples in a micro-batch.

IGNORED = -100
"""Target where no prediction is made; the default ``ignore_index`` of torch's losses."""


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward and backward pass: named fields, which a task knows by their names."""

    fields: Mapping[str, Tensor]
    """Name -> (B, ...), on the CPU. Of text: tokens, targets and positions, int64."""
    samples_B: Tensor
    """Position of each sample in the stream of samples, int64; -1 for a row of padding."""
    work: int
    """Units that went through the model, without padding: for text, tokens."""
    lengths_B: Tensor | None = None
    """Tokens of each row, int64; padding follows them. None: rows are full."""

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
        """Return its samples without rows of padding; a batch of only padding keeps one row."""
        rows = max(1, int((self.samples_B >= 0).sum()))
        if rows == len(self.samples_B):
            return self
        fields = {name: field[:rows] for name, field in self.fields.items()}
        lengths_B = None if self.lengths_B is None else self.lengths_B[:rows]
        return replace(self, fields=fields, samples_B=self.samples_B[:rows], lengths_B=lengths_B)

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch on a device."""
        if device.type == "cpu":
            return self
        fields = {name: _moved(field, device) for name, field in self.fields.items()}
        lengths_B = None if self.lengths_B is None else _moved(self.lengths_B, device)
        samples_B = _moved(self.samples_B, device)
        return replace(self, fields=fields, samples_B=samples_B, lengths_B=lengths_B)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    # only from pinned memory does a copy not wait for the device's earlier work
    pinned = tensor if tensor.device == device else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


class Samples(Protocol):
    """One split of a data set: what the loader and an evaluation read of it."""

    @property
    def num_samples(self) -> int:
        """Number of samples of the split."""

    @property
    def limit(self) -> str | None:
        """Why samples come no quicker though they are waited for, in words; None: they do."""

    def sample_indices(self, positions: Positions) -> Positions:
        """Return the samples of the split at these positions of the stream."""

    def micro_batch(self, positions: range, size: int) -> MicroBatch:
        """The samples at these positions, padded with weightless rows to ``size`` rows."""


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
        step_samples: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        start: int,
        end: int,
        prefetch_steps: int,
        steps_at_once: int = 1,
    ) -> None:
        """Args:
        step_samples: Samples in a step.
        start: Position of the stream at which the first step begins.
        end: Position at which the stream ends; a step that begins before it is read whole.
        steps_at_once: Steps that are read side by side: more where the source has threads of
            its own, which continue with the next step when one has less work left than threads.
        """
        self.wait_s = 0.0
        """Seconds that the last ``next`` waited for data."""
        self._source = source
        self._step_samples = step_samples
        self._micro_batch = micro_batch
        self._rank = rank
        self._world_size = world_size
        self._starts = iter(range(start, end, step_samples))
        self._thread = ThreadPoolExecutor(max_workers=steps_at_once, thread_name_prefix="loader")
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
        self._starts = iter(range(0))
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
        start = next(self._starts, None)
        if start is not None:
            self._ahead.append(self._thread.submit(self._read_step, start))

    def _read_step(self, start: int) -> list[MicroBatch]:
        return step_batches(
            self._source,
            positions=range(start, start + self._step_samples),
            micro_batch=self._micro_batch,
            rank=self._rank,
            world_size=self._world_size,
        )
