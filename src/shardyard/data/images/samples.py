"""The samples of a prepared set of pictures, and their stream: read ahead, decoded in threads.

Shape suffixes in this file: H, W = rows and columns of pixels, C = red, green and blue
"""

from typing import TYPE_CHECKING

import numpy as np

from shardyard.data.images.cache import PictureBytes
from shardyard.data.images.decode import decode
from shardyard.data.images.index import ImageIndex
from shardyard.data.images.order import window_indices
from shardyard.data.images.threads import DecodeThreads
from shardyard.data.micro_batch import MicroBatch
from shardyard.data.order import Positions
from shardyard.data.samples import Prepare, Sample, side_by_side, unchanged
from shardyard.errors import DataError, SourceError
from shardyard.talk import warn

if TYPE_CHECKING:
    from shardyard.data.images.augment import View


_TOLD_AFTER_S = 30.0
_UNNAMED = "a picture"


class ImageSet:
    """One split: ``image`` uint8 (H, W, C) and ``label`` int64 (). Safe in several threads."""

    def __init__(self, index: ImageIndex, view: "View", *, size: int, cache_bytes: int) -> None:
        """Args:
        view: What is made of a decoded picture.
        size: H and W of every sample.
        cache_bytes: Of undecoded pictures that are kept.
        """
        self.index = index
        self.num_samples = index.num_samples
        self.contents = PictureBytes(index, cache_bytes)
        self._view = view
        self._padding = Sample(
            {"image": np.zeros((size, size, 3), np.uint8), "label": np.zeros((), np.int64)}, 0
        )

    def sample(self, index: int, epoch: int) -> Sample:
        """A picture as it is in that pass over the split.

        Raises:
            DataError: It cannot be decoded, or is not as it was when it was prepared.
        """
        content = self.contents.content(index)
        try:
            picture = decode(content, _UNNAMED)
        except SourceError as error:
            raise self._broken(index, error) from error
        label = np.array(self.index.rows[index]["label"], np.int64)
        image = self._view(picture, epoch=epoch, sample=index)
        return Sample({"image": image, "label": label}, 1)

    def _broken(self, index: int, error: SourceError) -> DataError:
        # named here alone: a name takes longer to read than a picture's place
        told = str(error).replace(_UNNAMED, self.index.told(index), 1)
        return DataError(
            f"{told} It was not read to its end when data were prepared (data.images.check=false), "
            "or has changed since. Prepare with data.images.check=true."
        )

    def padding(self) -> Sample:
        """A black picture, which counts nothing."""
        return self._padding


class ImageStream:
    """Pictures in the order of a run, laid side by side; as ``data.samples.Stream`` is for text."""

    def __init__(
        self,
        samples: ImageSet,
        threads: DecodeThreads,
        *,
        seed: int | None,
        prepare: Prepare = unchanged,
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
        self._is_told = False

    def sample_indices(self, positions: Positions) -> Positions:
        """Which pictures of the split are at these positions of the stream."""
        if self._seed is None:
            return positions
        window = self.samples.index.window
        return window_indices(positions, self.num_samples, window, seed=self._seed)

    def _tell_limit(self) -> None:
        """Say once what limits the rate, if these threads do."""
        threads = self.threads
        if not self._is_told and threads.saturated_s >= _TOLD_AFTER_S:
            self._is_told = True
            read_share = self.samples.contents.wait_s / threads.busy_s
            warn(limit_words(threads.threads, threads.saturated_s, read_share))

    def micro_batch(self, positions: range, size: int) -> MicroBatch:
        """The pictures at these positions, padded with weightless rows to ``size`` rows.

        Raises:
            DataError: A picture cannot be decoded, or is not as it was when it was prepared.
        """
        indices = self.sample_indices(np.array(positions, dtype=np.int64)).tolist()
        epochs = [position // self.num_samples for position in positions]
        self.samples.contents.ask(indices)
        made = self.threads.run(
            lambda place: self.samples.sample(indices[place], epochs[place]), len(indices)
        )
        self._tell_limit()
        return side_by_side(made, positions, self.samples.padding(), size, self._prepare)


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
