"""Pictures whose pixels are a formula."""

import numpy as np
from PIL import Image


def picture(width: int, height: int) -> Image.Image:
    """Grey levels from 20 to 219, no two parts alike."""
    y, x = np.mgrid[0:height, 0:width]
    levels = np.stack([x * 37 + y * 11, x * x + 3 * y, x * 5 + y * y * 7 + x * y], axis=-1)
    return Image.fromarray((20 + levels % 200).astype(np.uint8))
