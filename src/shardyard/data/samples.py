"""Samples of a prepared data set in the order of a run.

What a sample is, is said by a ``SampleSet``, one file each beside this one. A stream puts samples
in an order and lays them side by side. Shape suffixes in this file:
    B = samples in a micro-batch
    L = tokens in a sample
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardyard.data.micro_batch import MicroBatch
from shardyard.data.order import Positions, sample_indices

Prepare = Callable[[MicroBatch, Tensor], MicroBatch]
"""What a task makes of a micro-batch of text, and of the tokens that each of its rows has."""


def unchanged(batch: MicroBatch, lengths_B: Tensor) -> MicroBatch:  # noqa: ARG001 - a Prepare
    """Text as it is: each token predicts the next."""
    return batch


class Sample(NamedTuple):
    """One sample."""

    fields: Mapping[str, npt.NDArray[Any]]
    """Name -> (L,), or whatever form each sample of the set has; of text int64."""
    length: int
    """What goes through the model: of text, tokens, and what follows them is padding."""


class SampleSet(Protocol):
    """The samples of one split, by their numbers. Safe to use from several threads."""

    num_samples: int

    def sample(self, index: int, epoch: int) -> Sample:
        """Sample ``index`` as it is in that pass over the split, the first being 0.

        Raises:
            DataError: What it is read from is damaged, or a token id is outside the vocabulary.
        """

    def padding(self) -> Sample:
        """A row that teaches nothing, of the form that samples have; its length is 0."""


class Stream:
    """One set of samples in an order."""

    limit: str | None = None
    """Of mapped files nobody has met one."""

    def __init__(
        self, samples: SampleSet, *, seed: int | None, prepare: Prepare = unchanged
    ) -> None:
        """Args:
        seed: Of a stream without end, in which every epoch has its own order; None: the set's
            own order, each sample once.
        """
        self.num_samples = samples.num_samples
        self._samples = samples
        self._seed = seed
        self._prepare = prepare

    def sample_indices(self, positions: Positions) -> Positions:
        """Which samples of the split are at these positions of the stream."""
        if self._seed is None:
            return positions
        return sample_indices(positions, self.num_samples, seed=self._seed)

    def micro_batch(self, positions: range, size: int) -> MicroBatch:
        """The samples at these positions, padded with weightless rows to ``size`` rows.

        Raises:
            DataError: A shard is damaged, or a token id is outside the vocabulary.
        """
        indices = self.sample_indices(np.array(positions, dtype=np.int64)).tolist()
        samples = [
            self._samples.sample(index, position // self.num_samples)
            for position, index in zip(positions, indices, strict=True)
        ]
        return side_by_side(samples, positions, self._samples.padding(), size, self._prepare)


def side_by_side(
    samples: Sequence[Sample], positions: range, padding: Sample, size: int, prepare: Prepare
) -> MicroBatch:
    """A micro-batch of samples, padded with weightless rows to ``size`` rows.

    Args:
        positions: Of the samples in the stream, one each.
    """
    rows = [*samples, *[padding] * (size - len(samples))]
    samples_B = np.full(size, -1, dtype=np.int64)
    samples_B[: len(samples)] = positions
    lengths_B = torch.tensor([row.length for row in rows], dtype=torch.int64)
    batch = MicroBatch(
        fields={
            name: torch.from_numpy(np.stack([row.fields[name] for row in rows]))
            for name in padding.fields
        },
        samples_B=torch.from_numpy(samples_B),
        work=sum(row.length for row in rows),
        lengths_B=lengths_B,
    )
    return prepare(batch, lengths_B)
