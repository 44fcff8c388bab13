"""The files of a prepared data set, and reading tokens from them.

manifest.json          written last: without it there is no data set
train-00000.bin        tokens of one piece of the corpus, uint16 or uint32, little-endian
train-00000.NAME.bin   a column of that name: a number for each token (format 2)
train-00000.idx.npy    where its documents start, int64, counted from the shard's first token
eval-00000.bin ...     the held-out split, likewise; a piece without such tokens has no files
tokenizer.json ...     the tokenizer, as transformers reads it

The folder of a mixture has the tokenizer of all its sources and ``mixture.json``, which names the
dataset of each source and its samples in a cycle. It is written last too.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardyard.errors import DataError, JsonFileError
from shardyard.io.files import read_json, read_json_object

if TYPE_CHECKING:
    from shardyard.config.resolved import DatasetMetadata, SourceMetadata

FORMAT_VERSION = 1
"""Format version of tokens without columns; also part of the folder's name."""
COLUMNS_VERSION = 2
"""Format version with columns next to the tokens, and their names and types in the manifest."""
OF_TEXT = (FORMAT_VERSION, COLUMNS_VERSION)
IMAGES_VERSION = "images-1"
"""Format version of images, by ``data/images/index.py``; also part of the folder's name."""
ITEMS_VERSION = "items-1"
"""Format version of items of the user's dataset, by ``data/own/``; also part of the folder's name.
"""
LABELS_VERSION = "labels-1"
"""Format version of rows with labels, by ``data/labels/``; also part of the folder's name."""
MANIFEST = "manifest.json"

LEARNT = "learnt"
"""Column that says of each token whether it has loss (1) or is only read (0)."""

Tokens = npt.NDArray[np.int64]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Smallest integer type that holds every token id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def bin_name(shard: str, column: str | None = None) -> str:
    """Return the file name of a shard's tokens, or of a column next to them."""
    return f"{shard}.bin" if column is None else f"{shard}.{column}.bin"


def idx_name(shard: str) -> str:
    return f"{shard}.idx.npy"


class TokenShards:
    """One split of a prepared dataset, mapped into memory: data is read on access.

    Safe to use from several threads.
    """

    def __init__(self, folder: Path, split: str, *, vocab_size: int | None = None) -> None:
        """Open ``train`` or ``eval`` after comparing the sizes of its files with the manifest.

        Args:
            vocab_size: Entries of the model's embedding: larger token ids are rejected on
                reading. None: they are not checked.

        Raises:
            DataError: The dataset is missing, incomplete, or a file has another size.
        """
        manifest = read_manifest(folder)
        shards = manifest["splits"][split]["shards"]
        self.folder = folder
        self.split = split
        self._vocab_size = vocab_size
        self.num_tokens: int = manifest["splits"][split]["tokens"]
        self.num_documents: int = manifest["splits"][split]["documents"]
        self._names: list[str] = [shard["name"] for shard in shards]
        self._starts = np.cumsum([0, *(shard["tokens"] for shard in shards)], dtype=np.int64)
        self._dtype = np.dtype(manifest["dtype"])
        self.columns: dict[str, str] = manifest.get("columns", {})
        """Column name -> numpy type of each column next to the tokens."""
        self._maps: dict[tuple[int, str | None], npt.NDArray[Any]] = {}
        self._documents: dict[int, Tokens] = {}
        names = [bin_name(shard, each) for shard in self._names for each in (None, *self.columns)]
        check_sizes(folder, manifest, [*names, *map(idx_name, self._names)])

    def read(self, start: int, stop: int, column: str | None = None) -> Tokens:
        """Return a copy of tokens [start, stop) of the split, or of a column next to them.

        Raises:
            DataError: A file is damaged, or a token id is outside the vocabulary.
        """
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        tokens = np.empty(stop - start, dtype=np.int64)
        for shard, first, last in self._overlaps(start, stop):
            offset = int(self._starts[shard])
            mapped = self._map(shard, column)
            tokens[first - start : last - start] = mapped[first - offset : last - offset]
        if column is None and self._vocab_size is not None:
            self._check_vocabulary(tokens)
        return tokens

    def require_columns(self, names: Sequence[str]) -> None:
        """Raise a DataError unless the set has these columns."""
        for name in set(names) - set(self.columns):
            raise DataError(
                f"{self.folder} has no column {name!r} (its columns: "
                f"{', '.join(self.columns) or 'none'}), which this task reads. Set data.format "
                "to one that makes it."
            )

    def document_starts_in(self, start: int, stop: int) -> Tokens:
        """Return the document starts in tokens [start, stop), ascending, counted from ``start``."""
        parts = []
        for shard, first, last in self._overlaps(start, stop):
            starts, offset = self._starts_of(shard), int(self._starts[shard])
            low, high = np.searchsorted(starts, (first - offset, last - offset))
            parts.append(starts[low:high] + (offset - start))
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def document_at(self, position: int) -> range:
        """The tokens of the document that holds a token of the split."""
        ((shard, _, _),) = self._overlaps(position, position + 1)
        starts, offset = self._starts_of(shard), int(self._starts[shard])
        number = int(np.searchsorted(starts, position - offset, side="right"))
        last = number == len(starts)
        stop = int(self._starts[shard + 1]) if last else offset + int(starts[number])
        return range(offset + int(starts[number - 1]), stop)

    @property
    def document_starts(self) -> Tokens:
        """Return the document starts in the split, ascending; takes 8 bytes per document."""
        return self.document_starts_in(0, self.num_tokens)

    def _check_vocabulary(self, tokens: Tokens) -> None:
        # A step that indexed an embedding out of bounds would stop a GPU without saying why.
        largest = int(tokens.max(initial=0))
        assert self._vocab_size is not None
        if largest >= self._vocab_size:
            raise DataError(
                f"{self.folder}: the {self.split} split holds token id {largest}, "
                f"but the model's vocabulary has {self._vocab_size:,} entries: the data were "
                "prepared with another tokenizer, or a shard is damaged. Set data.tokenizer to "
                "the model's own, or delete the folder and prepare again."
            )

    def _overlaps(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(shard, first token, last token + 1) of each shard that holds tokens of [start, stop)."""
        if start == stop:
            return []
        first_shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        last_shard = int(np.searchsorted(self._starts, stop, side="left"))
        return [
            (shard, max(start, int(self._starts[shard])), min(stop, int(self._starts[shard + 1])))
            for shard in range(first_shard, last_shard)
        ]

    def _map(self, shard: int, column: str | None) -> npt.NDArray[Any]:
        if (shard, column) not in self._maps:
            path = self.folder / bin_name(self._names[shard], column)
            dtype = self._dtype if column is None else np.dtype(self.columns[column])
            try:
                self._maps[shard, column] = np.memmap(path, dtype=dtype, mode="r")
            except (OSError, ValueError) as error:
                raise damaged(path, f"it cannot be mapped into memory ({error})") from error
        return self._maps[shard, column]

    def _starts_of(self, shard: int) -> Tokens:
        if shard not in self._documents:
            path = self.folder / idx_name(self._names[shard])
            try:
                self._documents[shard] = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise damaged(path, f"it is not an array of numbers ({error})") from error
        return self._documents[shard]


def read_manifest(folder: Path, formats: Sequence[int | str] = OF_TEXT) -> dict[str, Any]:
    """The manifest of a prepared data set.

    Args:
        formats: That the caller reads.

    Raises:
        DataError: There is none, or it is damaged or of another format version.
    """
    path = folder / MANIFEST
    try:
        manifest = read_json(path)
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} holds no prepared data set: {MANIFEST}, which is written last, is missing. "
            "Run `shardyard prepare` with the same recipe; it continues where it was stopped."
        ) from error
    except JsonFileError as error:
        raise damaged(path, f"it {error.reason}") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found not in formats:
        read = " and ".join(map(str, formats))
        raise damaged(path, f"its format is {found!r}, this version reads {read}")
    content: dict[str, Any] = manifest
    return content


def read_metadata(folder: Path) -> "DatasetMetadata":
    """Return the facts of a prepared dataset; compares all file sizes with the manifest.

    Raises:
        DataError: The dataset is missing or incomplete, or a file has another size.
    """
    # Not above: a worker that writes shards starts in half the time without all settings.
    from shardyard.config.resolved import DatasetMetadata

    manifest = read_manifest(folder)
    check_sizes(folder, manifest, manifest["files"])
    train, held_out = manifest["splits"]["train"], manifest["splits"]["eval"]
    return DatasetMetadata(
        dir=str(folder),
        fingerprint=manifest["fingerprint"],
        vocab_size=manifest["vocab_size"],
        train_tokens=train["tokens"],
        eval_tokens=held_out["tokens"],
        train_documents=train["documents"],
        eval_documents=held_out["documents"],
        unigram_entropy=manifest["unigram_entropy"],
        bos_token=manifest.get("bos_token"),  # sets of before had no such key, and none
        train_bytes=train.get("bytes"),
        eval_bytes=held_out.get("bytes"),
        readers=manifest.get("readers", ()),
        train_learnt=train.get("learnt"),
        eval_learnt=held_out.get("learnt"),
        train_samples=train.get("samples"),
        eval_samples=held_out.get("samples"),
        rejected=manifest.get("rejected"),
        rejected_of=manifest.get("rejected_of"),
        chat_rows=manifest.get("chat_rows"),
    )


def read_items_metadata(folder: Path) -> "DatasetMetadata":
    """Return what a dataset of items holds; compare the sizes of its files with the manifest.

    Raises:
        DataError: The dataset is missing or incomplete, or a file has another size.
    """
    # Not above, as in read_metadata.
    from shardyard.config.resolved import DatasetMetadata

    manifest = read_manifest(folder, (ITEMS_VERSION,))
    check_sizes(folder, manifest, manifest["files"])
    splits = manifest["splits"]
    return DatasetMetadata(
        dir=str(folder),
        fingerprint=manifest["fingerprint"],
        vocab_size=manifest["vocab_size"],
        train_tokens=0,
        eval_tokens=0,
        train_documents=0,
        eval_documents=0,
        unigram_entropy=0.0,
        train_samples=splits["train"]["samples"],
        eval_samples=splits["eval"]["samples"],
        num_classes=len(manifest["classes"]) if "classes" in manifest else None,
        item_kind=manifest["kind"],
    )


def verify(folder: Path) -> None:
    """Read every file of a prepared data set and compare its SHA-256 with the manifest.

    Raises:
        DataError: A file is missing, or its size or content is not as it was written.
    """
    manifest = read_manifest(folder, (*OF_TEXT, IMAGES_VERSION, ITEMS_VERSION, LABELS_VERSION))
    check_sizes(folder, manifest, manifest["files"])
    for name, entry in manifest["files"].items():
        with (folder / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != entry["sha256"]:
            raise damaged(
                folder / name,
                f"its SHA-256 is {found[:12]}..., the manifest says {entry['sha256'][:12]}...",
            )


def damaged(path: Path, reason: str) -> DataError:
    """The error for a file that is not as it was written."""
    return DataError(
        f"{path} is damaged: {reason}. Delete the folder {path.parent} and prepare again; the same "
        "text gives the same tokens."
    )


def check_sizes(folder: Path, manifest: dict[str, Any], names: Iterable[str]) -> None:
    """Raise a DataError unless files have the sizes that the manifest says."""
    for name in names:
        wanted_bytes = manifest["files"][name]["bytes"]
        try:
            found_bytes = (folder / name).stat().st_size
        except OSError as error:
            raise damaged(folder / name, f"it cannot be found ({error.strerror})") from error
        if found_bytes != wanted_bytes:
            raise damaged(
                folder / name, f"it has {found_bytes:,} bytes, the manifest says {wanted_bytes:,}"
            )


MIXTURE = "mixture.json"


def mixture_at(folder: Path) -> "list[SourceMetadata]":
    """The sources of the mixture in a folder, as they lie on this machine.

    Raises:
        DataError: A data set is missing or incomplete, or the mixture cannot be read.
    """
    from shardyard.config.resolved import SourceMetadata

    path = folder / MIXTURE
    try:
        content = read_json_object(path)
        named = [(each["name"], each["slots"], each["folder"]) for each in content["parts"]]
    except JsonFileError as error:
        raise damaged(path, f"it {error.reason}") from error
    except (OSError, KeyError, TypeError) as error:
        raise damaged(path, f"it cannot be read ({error})") from error
    found = []
    for name, slots, place in named:
        source = (folder / place).resolve()
        is_items = read_manifest(source, (*OF_TEXT, ITEMS_VERSION))["format"] == ITEMS_VERSION
        data = read_items_metadata(source) if is_items else read_metadata(source)
        found.append(SourceMetadata(name=name, slots=slots, data=data))
    return found
