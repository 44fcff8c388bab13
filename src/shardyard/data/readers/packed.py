"""Packed files: how one is unpacked as it is read, and how one that cannot be is told."""

import bz2
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO, cast

from shardyard.data.byte_ranges import SourceFile, shown
from shardyard.data.readers.read_errors import rewound
from shardyard.errors import SourceError


@contextmanager
def unpacking(file: SourceFile, *wrong: type[Exception]) -> Iterator[None]:
    """What unpacking raises becomes an error that names the file.

    Args:
        wrong: Of the library that does it, beside what several raise.
    """
    told: tuple[type[Exception], ...] = (EOFError, zlib.error, OSError, *wrong)
    try:
        yield
    except told as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system, and not of what stands in the file
        raise SourceError(
            f"{shown(file.path)} cannot be unpacked: {error}. It is cut off, damaged, or packed in "
            "another way than its name says. Test it (`gzip -t`, `zstd -t`, `bzip2 -t`), then copy "
            "or pack it again."
        ) from error


def bunzipped(file: BinaryIO) -> IO[bytes]:
    """A file packed by bzip2, in one stream or several, from its beginning."""
    return cast(IO[bytes], bz2.BZ2File(rewound(file)))
