"""The source `letters`: `letters://shelf` holds ten files made of nothing, with suffix `.ltr`."""

import io
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from shardyard.data.byte_ranges import SourceFile
from shardyard.data.stores.base import ListedFile


class Shelf:
    """Ten files, written backwards."""

    def find(self, entry: str, *, own: Collection[Path]) -> Iterator[ListedFile]:  # noqa: ARG002
        """All of them, whatever the shelf is called."""
        for number in range(10):
            name = f"{number}.ltr"
            yield ListedFile(f"{entry}/{name}", name, len(_content(name)), version=1)

    def open(self, file: SourceFile) -> BinaryIO:
        """One of them."""
        return io.BytesIO(_content(file.name))


def _content(name: str) -> bytes:
    text = "".join(f"Line {line} of a letter called {name}. " for line in range(60))
    return text[::-1].encode()
