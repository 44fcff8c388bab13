"""Decode the bytes of a file to a picture of red, green and blue, from any format.

What is odd but readable has one meaning. Formats are recognised by content, not by a name's
suffix. A picture is turned as its EXIF orientation says. Of several frames or pages the
first is taken. What shows through is laid over white. 16 bits a channel become the upper 8.
Grey is all three channels; palettes and CMYK become what Pillow's ``convert`` makes of
them.

Pillow lets other threads run while it decodes and resizes.
"""

import io
import math
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardyard.control_groups import usable_cores
from shardyard.data.byte_ranges import escape_text
from shardyard.data.readers.read_errors import extra
from shardyard.errors import SourceError
from shardyard.file_faults import POINTER_BYTES, pointer_file_error, web_page_error

if TYPE_CHECKING:
    from PIL.Image import Image


Buffer = bytes | memoryview

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "GIF", "TIFF")
"""Formats that are tried: Pillow's other readers start processes (EPS), or are of no
picture's use.
"""
MOST_PIXELS = 89_478_485
"""Most pixels of a picture; more are rejected, as a few kB can hold them. Pillow itself
warns at this number, 256 MiB of RGB.
"""

_ORIENTATION = 0x0112
_KINDS = "JPEG, PNG, WebP, BMP, PPM, GIF or TIFF"


def decode(content: Buffer, location: str) -> "Image":
    """The picture, in Pillow's mode RGB.

    Args:
        location: File, and member or row, for messages.

    Raises:
        SourceError: It is none, damaged, or has no defined meaning as RGB.
        RequestError: Pillow is not installed.
    """
    image = _open_image(content, location)
    try:
        # by the first frame; what is not read of it shows here
        image.load()
        return _to_rgb(_apply_exif_orientation(image), location)
    except SourceError:
        raise
    except Exception as error:
        raise _damaged(location, error) from error


def check(content: Buffer, location: str) -> str:
    """Read a picture to its end as cheaply as can be; returns its suffix in a shard.

    Raises:
        SourceError: As ``decode``.
    """
    image = _open_image(content, location)
    suffix = SUFFIXES[str(image.format)]
    try:
        if image.format == "JPEG":
            image.draft("RGB", (1, 1))  # an eighth of its size: all bytes are read still
        image.load()
        if image.mode not in ("RGB", "L", "CMYK"):
            _to_rgb(image, location)
    except SourceError:
        raise
    except Exception as error:
        raise _damaged(location, error) from error
    return suffix


SUFFIXES = {
    "JPEG": "jpg",
    "MPO": "jpg",  # JPEG with a second picture behind the first
    "PNG": "png",
    "WEBP": "webp",
    "BMP": "bmp",
    "DIB": "bmp",
    "PPM": "ppm",
    "GIF": "gif",
    "TIFF": "tif",
}


def pixels_of(image: "Image") -> npt.NDArray[np.uint8]:
    """(height, width, 3), uint8."""
    return np.asarray(image)


@cache
def _pillow() -> Any:
    image = extra("images", "PIL.Image", what="a picture")
    # It warns of damaged EXIF blocks, and of large pictures, which are refused here.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    return image


def _open_image(content: Buffer, location: str) -> "Image":
    if not content:
        raise SourceError(f"{location} is empty: it has no bytes. Copy it again, or take it out.")
    image = _pillow()
    try:
        img: Image = image.open(io.BytesIO(content), formats=FORMATS)
        width, height = img.size
    except (image.DecompressionBombError, image.DecompressionBombWarning) as error:
        raise _too_large(location, str(error)) from error
    except image.UnidentifiedImageError as error:
        start = bytes(content[:POINTER_BYTES])
        why = pointer_file_error(start, size=len(content)) or web_page_error(start)
        if why is not None:
            raise SourceError(f"{location} {why}") from error
        begins = escape_text(repr(bytes(content[:12]))[2:-1])
        raise SourceError(
            f"{location} is not a {_KINDS} (it begins with {begins}). Convert it to one of these, "
            "or take it out."
        ) from error
    except Exception as error:
        raise _damaged(location, error) from error
    if width * height > MOST_PIXELS:
        raise _too_large(location, f"{width} x {height} pixels")
    return img


def _apply_exif_orientation(image: "Image") -> "Image":
    """Turn a picture as its EXIF orientation says; a damaged EXIF block is ignored."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - what stands beside the picture is not it
        return image
    how = _TURNS.get(orientation)
    return image if how is None else image.transpose(how)


_TURNS: dict[Any, Any] = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""EXIF orientation -> Pillow's ``Transpose``, as its ``ImageOps.exif_transpose`` has it."""


def _to_rgb(image: "Image", location: str) -> "Image":
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16 bits of grey, which `convert` would cut off at 255
        return _grey_to_rgb(image, location)
    if image.mode == "F":
        raise SourceError(
            f"{location} holds floating-point numbers, whose black and white are unknown. Write it "
            "again with 8 or 16 bits a channel, or take it out."
        )
    if image.has_transparency_data:
        with_alpha = image.convert("RGBA")
        under: Image = _pillow().new("RGBA", image.size, "white")
        under.alpha_composite(with_alpha)
        return under.convert("RGB")
    return image.convert("RGB")


def _grey_to_rgb(image: "Image", location: str) -> "Image":
    grey = np.asarray(image)
    if grey.min() < 0 or grey.max() > 65_535:
        raise SourceError(
            f"{location} holds numbers from {grey.min()} to {grey.max()}, whose black and white "
            "are unknown. Write it again with 8 or 16 bits a channel, or take it out."
        )
    upper = (grey.astype(np.uint32) >> 8).astype(np.uint8)
    rgb: Image = _pillow().fromarray(upper).convert("RGB")
    return rgb


def _damaged(location: str, error: Exception) -> SourceError:
    why = escape_text(" ".join(str(error).split())[:160].rstrip(".")) or type(error).__name__
    return SourceError(
        f"{location} is damaged, cut off or of a kind that is not read: {why}. Copy or convert it, "
        "take it out, or set data.images.broken=leave_out."
    )


def _too_large(location: str, size: str) -> SourceError:
    return SourceError(
        f"{location} is too large a picture ({size}; at most {MOST_PIXELS:,} pixels are read). "
        "Make it smaller, or take it out."
    )


# Threads that decode: as many as a measured rate asks for.
#
# Threads, not processes: Pillow lets others run while it decodes, pictures need not be copied from
# one process into another, and nothing is left behind when this process is killed.

T = TypeVar("T")

_MEASURED_S = 2.0
_SATURATED = 0.9
"""Share of the threads at work from which on pictures are asked for quicker than they come."""
_SPARE = 1.25
"""More threads than were busy: the rate of a step varies."""


def decode_threads(threads: int | str) -> "DecodeThreads":
    """The threads that ``data.images.threads`` asks for."""
    if isinstance(threads, int):
        return DecodeThreads(threads)
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = max(1, usable_cores() // processes_here)
    return DecodeThreads(cores, is_fixed=False)


class DecodeThreads:
    """Does the same work for many numbers, in several threads. Several callers may use it."""

    def __init__(self, threads: int, *, is_fixed: bool = True) -> None:
        """Args:
        threads: At most.
        is_fixed: Whether it is that many; else as many as were busy lately, and some more.
        """
        self.threads = threads
        self.busy_s = 0.0
        """Seconds of work of all threads together, so far."""
        self.saturated_s = 0.0
        """Seconds until now in which hardly any of them waited for work."""
        self._most = threads
        self._is_fixed = is_fixed
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._since_s = time.perf_counter()
        self._busy_before_s = 0.0

    def run(self, work: Callable[[int], T], count: int) -> list[T]:
        """Return what ``work`` makes of 0 to ``count`` - 1; raise the first error it raises."""
        numbers = iter(range(count))
        results: dict[int, T] = {}

        def take() -> float:
            began_s = time.perf_counter()
            for number in numbers:  # one iterator for all: each number is taken once
                results[number] = work(number)
            return time.perf_counter() - began_s

        loops = [self._pool.submit(take) for _ in range(min(self.threads, count))]
        try:
            self.busy_s += sum(loop.result() for loop in loops)
        finally:
            for _ in numbers:  # after an error: nothing more is begun
                pass
        self._measure()
        return [results[number] for number in range(count)]

    def _measure(self) -> None:
        elapsed_s = time.perf_counter() - self._since_s
        if elapsed_s < _MEASURED_S:
            return
        busy = (self.busy_s - self._busy_before_s) / elapsed_s
        self.saturated_s = self.saturated_s + elapsed_s if busy > _SATURATED * self._most else 0.0
        if not self._is_fixed:
            self.threads = threads_for(busy, self._most)
        self._since_s, self._busy_before_s = time.perf_counter(), self.busy_s


def small_jpeg(pixels_HWC: npt.NDArray[np.uint8], *, side: int) -> bytes:
    """Encode a picture whose longer side is at most ``side`` pixels."""
    image = extra("images", "PIL.Image", what="A picture").fromarray(pixels_HWC)
    image.thumbnail((side, side))
    content = io.BytesIO()
    image.save(content, format="JPEG", quality=88)
    return content.getvalue()


def threads_for(busy: float, most: int) -> int:
    """Threads that the next seconds get.

    Args:
        busy: How many were at work on average. Where that is all there were, more are tried.
    """
    return min(most, max(1, math.ceil(_SPARE * busy)))
