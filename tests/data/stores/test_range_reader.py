"""Ranges of a far file: read as if it were here, asked for once, gone on with where they broke."""

import io
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.data.byte_ranges import SourceFile, Span
from shardyard.data.formats import FORMATS
from shardyard.data.readers.columns import TextOf
from shardyard.data.stores.range_reader import RangedFile, changed, matcher
from shardyard.errors import LostError

CONTENT = random.Random(0).randbytes(3_000_000)
FILE = SourceFile("s3://b/x", "x", "text", len(CONTENT), "1")


class Far:
    """Sends a range, or breaks as it is told."""

    def __init__(self, *breaks: int | None) -> None:
        self.breaks = list(breaks)
        """Bytes before each answer breaks; None: it ends in silence, at once."""
        self.asked: list[tuple[int, int]] = []
        self.pauses: list[float] = []

    def read(self, _file: SourceFile, start: int, stop: int) -> Iterator[bytes]:
        self.asked.append((start, stop))
        if not self.breaks:
            yield CONTENT[start:stop]
            return
        left = self.breaks.pop(0)
        if left is not None:
            yield CONTENT[start : min(stop, start + left)]
            raise LostError("gone")

    def open(self) -> io.BufferedReader:
        return io.BufferedReader(RangedFile(FILE, self.read, sleep=self.pauses.append))


def test_any_order_of_reading_gives_the_bytes_that_are_there() -> None:
    far, draw = Far(*[50_000] * 9), random.Random(1)
    with far.open() as file:
        for _ in range(200):
            start, size = draw.randrange(len(CONTENT)), draw.choice([0, 1, 100, 70_000, 900_000])
            assert file.seek(start) == start
            assert file.read(size) == CONTENT[start : start + size]
        assert file.seek(-10, io.SEEK_END) == len(CONTENT) - 10
        assert file.read() == CONTENT[-10:]
        assert file.read() == b""


def test_a_file_read_from_end_to_end_is_sent_once_in_growing_parts() -> None:
    far = Far()
    with far.open() as file:
        for start in range(0, len(CONTENT), 65536):
            file.seek(start + 65536 - 1)  # readers of text look for the end of a section first
            file.read(65536)
            file.seek(start)
            assert file.read(65536) == CONTENT[start : start + 65536]
    assert (
        sum(stop - start for start, stop in far.asked) < len(CONTENT) + 2**20
    )  # once some more, where it begins
    assert len(far.asked) < 12


def test_only_what_is_missing_is_asked_for_again() -> None:
    far = Far(100, 0, None, 1000)
    with far.open() as file:
        assert file.read(5000) == CONTENT[:5000]
    starts = [start for start, _ in far.asked]
    assert starts == [0, 100, 100, 100, 1100]
    assert far.pauses == [0.5, 1.0]  # after what brought nothing; twice as long each time


@pytest.mark.parametrize("how", [0, None])
def test_where_nothing_comes_any_more_it_ends_after_some_tries(how: int | None) -> None:
    far = Far(*[how] * 99)
    with (
        far.open() as file,
        pytest.raises(LostError, match=r"gone|6 times in a row.*prepare again"),
    ):
        file.read(10)
    assert far.pauses == [0.5, 1.0, 2.0, 4.0, 8.0]


def test_what_happens_far_away_is_told_as_it_is_through_a_reader_of_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an extra")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = pyarrow.table({"text": [random.Random(n).randbytes(3000).hex() for n in range(200)]})
    parquet.write_table(rows, tmp_path / "x.parquet", compression="none", use_dictionary=False)
    content = (tmp_path / "x.parquet").read_bytes()
    file = SourceFile("s3://b/x.parquet", "x", "parquet", len(content), "1")

    def read(error: Exception) -> None:
        def broken(_file: SourceFile, start: int, stop: int) -> Iterator[bytes]:
            if start < 300_000:
                raise error
            yield content[start:stop]

        with io.BufferedReader(RangedFile(file, broken, sleep=lambda _: None)) as opened:
            list(FORMATS["parquet"].read(opened, Span(file, 0, len(content)), TextOf()))

    for error in (LostError("gone"), changed(file, "its etag is another one")):
        with pytest.raises(type(error), match=str(error)):
            read(error)


@pytest.mark.parametrize(
    ("pattern", "fits", "fits_not"),
    [
        ("s3://b/*.txt", ["s3://b/a.txt"], ["s3://b/.a.txt", "s3://b/c/a.txt", "s3://b/a.txt2"]),
        ("s3://b/**/a?.txt", ["s3://b/a1.txt", "s3://b/c/d/a1.txt"], ["s3://b/.c/a1.txt"]),
        ("s3://b/**", ["s3://b/x", "s3://b/c/x"], ["s3://c/x", "s3://b/.c/x"]),
        (
            "s3://b/[a-c]x.[!p]*",
            ["s3://b/bx.txt"],
            ["s3://b/dx.txt", "s3://b/ax.py", "s3://b/a/.t"],
        ),
        ("s3://b/a+(1)[[]x.txt", ["s3://b/a+(1)[x.txt"], ["s3://b/aa1[x.txt"]),
    ],
)
def test_a_glob_fits_as_it_does_in_folders(
    pattern: str, fits: list[str], fits_not: list[str]
) -> None:
    assert [text for text in fits + fits_not if matcher(pattern)(text)] == fits
