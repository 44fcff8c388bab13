"""Files that lie by themselves, or in a tar file."""

from dataclasses import dataclass, field

from shardyard.data.byte_ranges import SourceFile, shown
from shardyard.data.stores.base import open_file
from shardyard.errors import SourceError


@dataclass(frozen=True, slots=True)
class InTar(SourceFile):
    """A member of a tar file: its path says both, for messages."""

    tar: SourceFile = field(kw_only=True)
    offset: int = field(kw_only=True)
    """Of its content in the tar file."""


def content_of(file: SourceFile) -> bytes:
    """The whole content of a file.

    Raises:
        SourceError: It cannot be read, or is shorter than it was.
    """
    try:
        if not isinstance(file, InTar):
            with open_file(file) as opened:
                return opened.read()
        with open_file(file.tar) as opened:
            opened.seek(file.offset)
            content = opened.read(file.size_bytes)
    except OSError as error:
        raise SourceError(
            f"{shown(file.path)} cannot be read: {error.strerror or error}. Check that it is there "
            "and readable, or take it out of data.source."
        ) from error
    if len(content) != file.size_bytes:
        raise SourceError(f"{shown(file.path)} changed while it was read. Prepare again.")
    return content
