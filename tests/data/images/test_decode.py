"""What an odd picture becomes as RGB, and that a broken one is named."""

import io

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from shardyard.data.images.decode import FORMATS, MOST_PIXELS, check, decode, pixels_of
from shardyard.errors import SourceError
from tests.data.images.made import noise, saved

RED = np.array([255, 0, 0])


def pixels(content: bytes) -> npt.NDArray[np.uint8]:
    check(content, "here")
    return pixels_of(decode(content, "here"))


def test_a_plain_picture_is_what_pillow_makes_of_it() -> None:
    content = saved(noise(1), "JPEG")
    expected = np.asarray(Image.open(io.BytesIO(content)))
    assert (pixels(content) == expected).all()
    assert pixels(content).shape == (16, 24, 3) and pixels(content).dtype == np.uint8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_exif_says(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    plain = np.asarray(noise(2))
    turns = {
        1: plain,
        2: plain[:, ::-1],
        3: plain[::-1, ::-1],
        4: plain[::-1],
        5: plain.swapaxes(0, 1),
        6: plain.swapaxes(0, 1)[:, ::-1],
        7: plain.swapaxes(0, 1)[::-1, ::-1],
        8: plain.swapaxes(0, 1)[::-1],
    }
    assert (pixels(saved(noise(2), "PNG", exif=exif)) == turns[orientation]).all()


def test_grey_is_all_three_channels() -> None:
    grey = np.arange(0, 240, dtype=np.uint8).reshape(12, 20)
    assert (pixels(saved(Image.fromarray(grey), "PNG")) == grey[:, :, None]).all()


def test_sixteen_bits_become_the_upper_eight() -> None:
    wide = (np.arange(12 * 20, dtype=np.uint16) * 273).reshape(12, 20)
    for format in ("PNG", "TIFF"):
        found = pixels(saved(Image.fromarray(wide), format))
        assert (found == (wide >> 8)[:, :, None]).all()


def test_black_and_white_and_palettes_are_their_colours() -> None:
    dots = Image.fromarray((np.indices((8, 8)).sum(0) % 2 * 255).astype(np.uint8)).convert("1")
    assert (pixels(saved(dots, "PNG")) == np.asarray(dots)[:, :, None] * 255).all()
    palette = Image.new("P", (4, 4), 3)
    palette.putpalette([0] * 9 + [255, 0, 0])
    assert (pixels(saved(palette, "PNG")) == RED).all()


def test_what_shows_through_is_laid_over_white() -> None:
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert (pixels(saved(clear, "PNG")) == 255).all()
    half = pixels(saved(Image.new("LA", (4, 4), (0, 128)), "PNG"))
    assert (half == 127).all()
    palette = Image.new("P", (4, 4), 3)
    palette.putpalette([0] * 9 + [9, 9, 9])
    assert (pixels(saved(palette, "GIF", transparency=3)) == 255).all()


def test_cmyk_is_what_pillow_converts_it_to() -> None:
    content = saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100)
    assert (abs(pixels(content).astype(int) - RED) <= 2).all()


def test_of_an_animation_the_first_picture_is_taken() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for format in ("GIF", "WEBP", "PNG", "TIFF"):
        options = {"lossless": True} if format == "WEBP" else {}
        content = saved(frames[0], format, save_all=True, append_images=frames[1:], **options)
        assert (pixels(content) == RED).all(), format


def test_the_suffix_is_that_of_the_content() -> None:
    found = {check(saved(noise(1), format), "here") for format in ("JPEG", "PNG", "WEBP", "GIF")}
    assert found == {"jpg", "png", "webp", "gif"}


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_says_nothing() -> None:
    content = saved(noise(2), "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff")
    assert pixels(content).shape == (16, 24, 3)


JPEG, PNG = saved(noise(1, (64, 48)), "JPEG"), saved(noise(1, (64, 48)), "PNG")
BROKEN = {
    "empty": (b"", "here is empty"),
    "cut off": (JPEG[: len(JPEG) // 2], "here is damaged, cut off"),
    "cut off in its head": (JPEG[:20], "here is not a JPEG|here is damaged"),
    "its last bytes are missing": (PNG[:-40], "here is damaged, cut off"),
    "zeros": (bytes(1000), "here is not a JPEG"),
    "a page of a web server": (
        b"<html>404 Not Found</html>",
        "is a web page .HTML., not the file itself",
    ),
    "a drawing": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "here is not a JPEG"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "here is not a JPEG"),
    "floating-point": (saved(Image.new("F", (4, 4)), "TIFF"), "floating-point numbers"),
    "32 bits": (saved(Image.new("I", (4, 4), 70_000), "TIFF"), "numbers from 70000 to 70000"),
    "wrong checksum": (PNG[:60] + b"\0\0\0\0" + PNG[64:], "here is damaged"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_picture_is_named(kind: str) -> None:
    content, words = BROKEN[kind]
    for look in (check, decode):
        with pytest.raises(SourceError, match=words):
            look(content, "here")


def test_a_small_file_cannot_fill_the_memory() -> None:
    side = int(MOST_PIXELS**0.5) + 200
    content = saved(Image.new("1", (side, side)), "PNG")
    assert len(content) < 100_000
    for look in (check, decode):
        with pytest.raises(SourceError, match="too large a picture"):
            look(content, "bomb.png")


def test_pillow_is_asked_for_nothing_that_starts_a_process() -> None:
    assert not {"EPS", "FITS", "IMT", "WMF"} & set(FORMATS)
