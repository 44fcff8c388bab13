"""The samples of a prepared set of pictures, and their stream: read ahead, decoded in threads.

Shape suffixes in this file:
    B = samples in a micro-batch
    H, W = rows and columns of pixels
    C = red, green and blue
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardyard.data.images.cache import ImageBytes
from shardyard.data.images.decode import DecodeThreads, decode
from shardyard.data.images.index import ImageIndex
from shardyard.data.images.order import window_indices
from shardyard.data.loader import MicroBatch
from shardyard.data.order import Positions
from shardyard.data.samples import Prepare, identity_prepare
from shardyard.errors import DataError, SourceError

if TYPE_CHECKING:
    from shardyard.data.images.transforms import ImageTransform, Pixels


_TOLD_AFTER_S = 30.0
_SPAN = 4096
"""Positions whose pictures are looked up at once: for those of one micro-batch it takes as long."""
_UNNAMED = "a picture"


class ImageSet:
    """One split: pictures uint8 (H, W, C) and their labels. Safe in several threads."""

    def __init__(
        self, index: ImageIndex, view: "ImageTransform", *, size: int, cache_bytes: int
    ) -> None:
        """Args:
        view: What is made of a decoded picture.
        size: H and W of every sample.
        cache_bytes: Of undecoded pictures that are kept.
        """
        self.index = index
        self.num_samples = index.num_samples
        self.contents = ImageBytes(index, cache_bytes)
        self.size = size
        self._view = view

    def load_sample(self, index: int, epoch: int) -> "tuple[Pixels, int]":
        """A picture as it is in that pass over the split, and its label.

        Raises:
            DataError: It cannot be decoded, or is not as it was when it was prepared.
        """
        content = self.contents.content(index)
        try:
            image = decode(content, _UNNAMED)
        except SourceError as error:
            raise self._broken(index, error) from error
        return self._view(image, epoch=epoch, sample=index), self.index.rows[index]["label"]

    def _broken(self, index: int, error: SourceError) -> DataError:
        # named here alone: a name takes longer to read than a picture's place
        told = str(error).replace(_UNNAMED, self.index.describe(index), 1)
        return DataError(
            f"{told} It was not read to its end when data were prepared (data.images.check=false), "
            "or has changed since. Prepare with data.images.check=true."
        )


class ImageStream:
    """Pictures in the order of a run, laid side by side; as ``data.samples.Stream`` is for text."""

    def __init__(
        self,
        samples: ImageSet,
        threads: DecodeThreads,
        *,
        seed: int | None,
        prepare: Prepare = identity_prepare,
    ) -> None:
        """Args:
        threads: That decode; several streams may share them.
        seed: Of a stream without end; None: the set's own order, each picture once.
        """
        self.num_samples = samples.num_samples
        self.samples = samples
        self.threads = threads
        self._seed = seed
        self._prepare = prepare
        self._span = lru_cache(maxsize=4)(self._span_indices)

    def sample_indices(self, positions: Positions) -> Positions:
        """Return the pictures of the split at these positions of the stream."""
        if self._seed is None:
            return positions
        window = self.samples.index.window
        return window_indices(positions, self.num_samples, window, seed=self._seed)

    def _span_indices(self, number: int) -> list[int]:
        at = np.arange(number * _SPAN, (number + 1) * _SPAN, dtype=np.int64)
        indices: list[int] = self.sample_indices(at).tolist()
        return indices

    @property
    def limit(self) -> str | None:
        """Limit of the rate, in words, if these threads are the limit."""
        threads = self.threads
        if threads.saturated_s < _TOLD_AFTER_S:
            return None
        read_share = self.samples.contents.wait_s / threads.busy_s
        return limit_words(threads.threads, threads.saturated_s, read_share)

    def micro_batch(self, positions: range, size: int) -> MicroBatch:
        """The pictures at these positions, padded with weightless rows to ``size`` rows.

        Raises:
            DataError: A picture cannot be decoded, or is not as it was when it was prepared.
        """
        indices = [self._span(at // _SPAN)[at % _SPAN] for at in positions]
        epochs = [position // self.num_samples for position in positions]
        self.samples.contents.prefetch(indices)
        side = self.samples.size
        pixels_BHWC = np.zeros((size, side, side, 3), np.uint8)
        labels_B = np.zeros(size, np.int64)

        def make(row: int) -> None:  # who decodes also puts it where it belongs
            pixels_BHWC[row], labels_B[row] = self.samples.load_sample(indices[row], epochs[row])

        self.threads.run(make, len(indices))
        samples_B = np.full(size, -1, dtype=np.int64)
        samples_B[: len(indices)] = positions
        batch = MicroBatch(
            fields={"image": torch.from_numpy(pixels_BHWC), "label": torch.from_numpy(labels_B)},
            samples_B=torch.from_numpy(samples_B),
            work=len(indices),
        )
        return self._prepare(batch, (batch.samples_B >= 0).long())


def limit_words(threads: int, saturated_s: float, read_share: float) -> str:
    """Why steps wait, and what helps.

    Args:
        saturated_s: Seconds that all threads have been at work.
        read_share: Of their time, for bytes to come.
    """
    what, remedy = "decoding", "more cores for each process (data.images.threads), or smaller files"
    if read_share > 0.5:
        what = "reading"
        remedy = "storage that is nearer, more data.prefetch_steps, or packed shards"
    return (
        f"pictures come no quicker: {what} limits this job. All {threads} threads of this process "
        f"that decode have been at work for {saturated_s:.0f} s, {read_share:.0%} of it waiting "
        f"for bytes. What steps wait is data_wait_s in metrics.jsonl; what helps is {remedy}."
    )
