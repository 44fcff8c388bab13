"""The images of one split, by their numbers. Shape suffixes: H, W = rows and columns of pixels."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from shardyard.data.samples import Sample
from shardyard.data.shards import MANIFEST
from shardyard.errors import DataError

if TYPE_CHECKING:
    from shardyard.data.images.augment import View


class ImageSet:
    """A ``SampleSet``: ``image`` (H, W, 3) uint8 and ``label`` () int64, decoded when asked for."""

    def __init__(self, folder: Path, split: str, view: "View", *, size: int) -> None:
        """Open ``train`` or ``eval``.

        Args:
            view: What is made of a picture.
            size: H and W of every sample.

        Raises:
            DataError: The data set is missing or damaged.
        """
        try:
            content = json.loads((folder / MANIFEST).read_bytes())
            self._files: list[tuple[str, int]] = [
                (str(path), int(label)) for path, label in content["splits"][split]["files"]
            ]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{folder} holds no images that were prepared ({error}). Delete the folder, and "
                "prepare again."
            ) from error
        self._size, self._view = size, view
        self.num_samples = len(self._files)

    def sample(self, index: int, epoch: int) -> Sample:
        """One image.

        Raises:
            DataError: Its file cannot be read.
        """
        path, label = self._files[index]
        try:
            with Image.open(path) as opened:
                picture = opened.convert("RGB")
        except (OSError, UnidentifiedImageError) as error:
            raise DataError(
                f"{path} cannot be read as an image ({error}). Mend or remove it, and "
                "prepare again."
            ) from error
        pixels = self._view(picture, epoch=epoch, sample=index)
        return _sample(pixels, label, length=1)

    def padding(self) -> Sample:
        """A black image."""
        return _sample(np.zeros((self._size, self._size, 3), dtype=np.uint8), 0, length=0)


def _sample(image_HW3: npt.NDArray[np.uint8], label: int, *, length: int) -> Sample:
    return Sample({"image": image_HW3, "label": np.array(label, dtype=np.int64)}, length)
