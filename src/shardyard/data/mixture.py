"""Samples of several sets in one stream, dealt by weight in whole numbers in every cycle.

Position p of the stream is place p % SLOTS of cycle p // SLOTS. Each cycle has a
permutation of its own, and each set has as many of the permuted places as it has slots. The
set's own stream, whose epochs have orders of their own, advances by so many samples a
cycle. All follows from p, so that the only state is the position.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from shardyard.config.data_choices import SLOTS
from shardyard.data.loader import MicroBatch
from shardyard.data.order import (
    GOLDEN,
    Positions,
    SampleKey,
    mix,
    permute_many,
    sample_indices,
)
from shardyard.data.samples import (
    Prepare,
    Sample,
    SampleSet,
    collate,
    identity_prepare,
    read_of_sets,
    read_samples,
)


class MixturePart(NamedTuple):
    """A set of samples in a mixture."""

    samples: SampleSet
    slots: int
    """Slots of the set in each cycle."""


class MixedStream:
    """Sets of samples in one stream without end. Its epoch is as long as all sets together."""

    limit: str | None = None
    """Limit of the rate, in words; for mapped files none is known."""

    def __init__(
        self, parts: Sequence[MixturePart], *, seed: int, prepare: Prepare = identity_prepare
    ) -> None:
        self.sets = [part.samples for part in parts]
        self._lengths = [each.num_samples for each in self.sets]
        self._slots = [part.slots for part in parts]
        self._firsts = np.cumsum([0, *self._lengths])
        self._seed = seed
        self.prepare = prepare
        self.num_samples = sum(self._lengths)

    def sample_indices(self, positions: Positions) -> Positions:
        """Return the samples at these positions, counted through the sets one after the other."""
        sets, own = assign_sources(positions, self._slots, seed=self._seed)
        found = np.empty_like(positions)
        for number, length in enumerate(self._lengths):
            mine = sets == number
            indices = sample_indices(own[mine], length, seed=_seed_of(self._seed, number))
            found[mine] = self._firsts[number] + indices
        return found

    def micro_batch(self, positions: range, size: int) -> MicroBatch:
        """The samples at these positions, padded with weightless rows to ``size`` rows.

        Raises:
            DataError: A shard is damaged, or a token id is outside the vocabulary.
        """
        at = np.array(positions, dtype=np.int64)
        sets, own = assign_sources(at, self._slots, seed=self._seed)
        rows = zip(sets.tolist(), own.tolist(), self.sample_indices(at).tolist(), strict=True)
        keys = [
            (index - int(self._firsts[number]), position // self._lengths[number])
            for number, position, index in rows
        ]
        samples = read_of_sets(self.sets, sets.tolist(), keys)
        return collate(samples, positions, self.sets[0].padding(), size, self.prepare)


class WithOnes:
    """Samples with columns that their own set lacks: 1 at each token.

    This is for text that is trained on as a whole, mixed with dialogues whose answers are.
    """

    def __init__(self, samples: SampleSet, columns: Collection[str]) -> None:
        self._samples = samples
        self._columns = columns
        self.num_samples = samples.num_samples

    def sample(self, index: int, epoch: int) -> Sample:
        """Return a sample, as ``SampleSet`` does."""
        return self._with_columns(self._samples.sample(index, epoch))

    def read(self, keys: Sequence[SampleKey]) -> list[Sample]:
        """Return samples, as ``ReadsTogether`` does."""
        return [self._with_columns(sample) for sample in read_samples(self._samples, keys)]

    def padding(self) -> Sample:
        """Return padding, as ``SampleSet`` does."""
        return self._with_columns(self._samples.padding())

    def _with_columns(self, sample: Sample) -> Sample:
        ones = np.ones(len(sample.fields["tokens"]) + 1, dtype=np.int64)
        more = dict.fromkeys(self._columns, ones)
        return Sample({**sample.fields, **more}, sample.length)


class ConcatenatedSets:
    """Sets one after the other, as one."""

    def __init__(self, sets: Sequence[SampleSet]) -> None:
        self.sets = sets
        self._firsts = np.cumsum([0, *(each.num_samples for each in sets)])
        self.num_samples = int(self._firsts[-1])

    def sample(self, index: int, epoch: int) -> Sample:
        """Return a sample, as ``SampleSet`` does."""
        return self.read([(index, epoch)])[0]

    def read(self, keys: Sequence[SampleKey]) -> list[Sample]:
        """Return samples, as ``ReadsTogether`` does."""
        indices = [index for index, _ in keys]
        numbers = (np.searchsorted(self._firsts, indices, side="right") - 1).tolist()
        own = [
            (index - int(self._firsts[number]), epoch)
            for number, (index, epoch) in zip(numbers, keys, strict=True)
        ]
        return read_of_sets(self.sets, numbers, own)

    def padding(self) -> Sample:
        """Return padding, as ``SampleSet`` does."""
        return self.sets[0].padding()


def assign_sources(
    positions: Positions, slots: Sequence[int], *, seed: int
) -> tuple[Positions, Positions]:
    """For each position of the stream the number of the set, and the position in its own stream.

    Args:
        slots: Of each set in a cycle; their sum is ``SLOTS``.
    """
    counts = np.array(slots, dtype=np.int64)
    ends = np.cumsum(counts)
    cycles, places = np.divmod(positions, SLOTS)
    dealt = np.empty_like(positions)
    for cycle in np.unique(cycles):
        of_cycle = cycles == cycle
        key = mix(mix(seed - GOLDEN) + int(cycle))
        dealt[of_cycle] = permute_many(places[of_cycle], SLOTS, key=key)
    sets = np.searchsorted(ends, dealt, side="right").astype(np.int64)
    return sets, cycles * counts[sets] + dealt - (ends - counts)[sets]


def _seed_of(seed: int, number: int) -> int:
    """Return the seed of a set's own order: two equal sets are not read in step."""
    return mix(mix(seed) + number + 1)
