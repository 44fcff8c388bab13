"""``complete.json``: what every file of a folder must be, in bytes and SHA-256; written last.

A folder that holds it is whole, and can be held to it wherever it was copied to. The name is one
that no loader of Hugging Face's libraries asks for.
"""

import hashlib
import json
import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from shardyard.errors import DataError
from shardyard.io.files import parse_json, write_text

COMPLETE = "complete.json"
FORMAT = 1

_BLOCK_BYTES = 2**20
_LONGEST_NAME_BYTES = 1024
"""Limit on a name with its folders; S3 takes no longer key."""


@dataclass(frozen=True)
class FileDigest:
    """Expected size and digest of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class FolderDigests:
    """Content of ``complete.json``."""

    files: Mapping[str, FileDigest]
    """Name, with ``/`` between folders, -> what the file must be."""
    provenance: Mapping[str, Any]
    """Origin, such as run and step; the same content has the same."""

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(digest.bytes for digest in self.files.values())

    def text(self) -> str:
        """The file's text; the same files give the same text."""
        files = {name: asdict(self.files[name]) for name in sorted(self.files)}
        content = {"format": FORMAT, "made_of": dict(self.provenance), "files": files}
        return json.dumps(content, indent=1, allow_nan=False) + "\n"

    @property
    def sha256(self) -> str:
        """Return the digest of ``complete.json`` itself, which identifies the folder."""
        return hashlib.sha256(self.text().encode()).hexdigest()


def write_digests(folder: Path, provenance: Mapping[str, Any]) -> FolderDigests:
    """Read every file of a folder and write down what it is.

    Raises:
        StorageError: The folder cannot be written.
        OSError: A file cannot be read.
    """
    files = {
        str(path.relative_to(folder).as_posix()): digest_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / COMPLETE
    }
    complete = FolderDigests(files=files, provenance=provenance)
    write_text(folder / COMPLETE, complete.text())
    return complete


def read_digests(folder: Path) -> FolderDigests:
    """Return the expected content of a folder.

    Raises:
        DataError: There is no such file, or it is damaged; the text says only why.
    """
    try:
        return parse_digests((folder / COMPLETE).read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{COMPLETE} is missing, so it was never finished") from error
    except OSError as error:
        raise DataError(f"{COMPLETE} cannot be read: {error.strerror}") from error


def parse_digests(data: bytes) -> FolderDigests:
    """Parse the content of a ``complete.json``.

    Raises:
        DataError: It is none; the text says only why.
    """
    try:
        content = parse_json(data)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r} is not known here")
        files = {
            validate_name(name): parse_digest(entry) for name, entry in content["files"].items()
        }
        return FolderDigests(files=files, provenance=dict(content["made_of"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{COMPLETE} is damaged ({type(error).__name__}: {error})") from error


def parse_digest(entry: Any) -> FileDigest:
    """Return bytes and SHA-256 from their form in JSON.

    Raises:
        ValueError: They have another form.
    """
    size, sha256 = entry["bytes"], entry["sha256"]
    if type(size) is not int or size < 0:
        raise ValueError(f"{size!r} is not a number of bytes")
    if not isinstance(sha256, str) or len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
        raise ValueError(f"{sha256!r} is not a SHA-256")
    return FileDigest(size, sha256)


def validate_name(name: Any) -> str:
    """A name that stays below the folder that it is put into.

    Raises:
        ValueError: It is absolute, leads out, or holds what no file name should.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"{name!r} is not a file name")
    if name != str(PurePosixPath(name)) or name.startswith("/") or "\\" in name:
        raise ValueError(f"{name!r} is not a plain path below a folder")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{name!r} leads out of the folder")
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        raise ValueError(f"{name!r} holds a control character")
    if len(name.encode()) > _LONGEST_NAME_BYTES:
        raise ValueError(f"{name[:40]!r}... is longer than {_LONGEST_NAME_BYTES:,} bytes")
    return name


def digest_file(path: Path, seen: Callable[[int], None] = lambda _: None) -> FileDigest:
    """Read a file and return its size and digest.

    Args:
        seen: Called with the bytes of each block that was read.

    Raises:
        OSError: It cannot be read.
    """
    checksum, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum.update(block)
            size += len(block)
            seen(len(block))
    return FileDigest(size, checksum.hexdigest())


def digest_mismatch(path: Path, expected: FileDigest) -> str | None:
    """Why a file is not what it must be; None: it is."""
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"{size:,} bytes long instead of {expected.bytes:,}"
        found = digest_file(path).sha256
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if found != expected.sha256:
        return f"SHA-256 is {found[:12]}... instead of {expected.sha256[:12]}..."
    return None


def find_damage(folder: Path, complete: FolderDigests) -> list[str]:
    """Return how a folder differs from its ``complete.json``, a line per file; empty: sound."""
    return [
        f"{name}: {why}"
        for name, wanted in complete.files.items()
        if (why := digest_mismatch(folder / name, wanted)) is not None
    ]


# The header of a safetensors file, written and read without the library.
#
# Source: the format section of https://github.com/huggingface/safetensors: the length of a header,
# the header, which is JSON, and the tensors one behind the other.

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4,
    "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Name of a dtype in the header -> bytes of an element."""

_ALIGNMENT_BYTES = 64
"""Tensors begin at a multiple of this, so that a mapped file can be used in place."""


def header(tensors: Mapping[str, tuple[str, Sequence[int]]], about: Mapping[str, str]) -> bytes:
    """Return the bytes that come before the tensors.

    Args:
        tensors: Dtype and shape of each, in the order in which they follow.
        about: Additional metadata for readers.
    """
    content: dict[str, Any] = {"__metadata__": dict(about)}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


_MOST_HEADER_BYTES = 100_000_000
"""The library rejects longer headers."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    dtype: str
    """Dtype, as the header names it."""
    shape: tuple[int, ...]
    start: int
    """First byte, from the beginning of the file."""
    stop: int

    @property
    def is_floating(self) -> bool:
        """Whether its elements are floating-point numbers."""
        return self.dtype.startswith(("F", "BF"))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the names, dtypes, shapes and places of all tensors of a file; no tensor is read.

    Raises:
        ValueError: The file is no safetensors file, or is cut off. The text continues a sentence
            that begins with the file's name.
        OSError: It cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > _MOST_HEADER_BYTES:
            raise ValueError("is not a safetensors file: it begins with no length of a header")
        if length > size - 8:
            raise ValueError(
                f"is cut off or damaged: its header needs {length + 8:,} bytes, and it has {size:,}"
            )
        text = file.read(length)
    try:
        content = json.loads(text)
        content.pop("__metadata__", None)
        found = {
            name: StoredTensor(
                file=path,
                dtype=str(each["dtype"]),
                shape=tuple(int(side) for side in each["shape"]),
                start=8 + length + int(each["data_offsets"][0]),
                stop=8 + length + int(each["data_offsets"][1]),
            )
            for name, each in content.items()
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError("is not a safetensors file: its header cannot be read") from error
    end = max((tensor.stop for tensor in found.values()), default=8 + length)
    if end > size:
        raise ValueError(f"is cut off: it has {size:,} of its {end:,} bytes")
    if end < size:
        raise ValueError(f"is damaged: {size - end:,} bytes follow its last tensor")
    for name, tensor in found.items():
        item = ITEM_BYTES.get(tensor.dtype)
        if item is not None and tensor.stop - tensor.start != math.prod(tensor.shape) * item:
            raise ValueError(f"is damaged: the bytes of {name} do not match its shape and dtype")
    return found


def equal_content(one: StoredTensor, other: StoredTensor) -> bool:
    """Compare two tensors byte by byte; reads up to the first difference."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        left = one.stop - one.start
        while left > 0:
            count = min(left, _COMPARED_BYTES)
            if first.read(count) != second.read(count):
                return False
            left -= count
    return True


_COMPARED_BYTES = 4 * 2**20
