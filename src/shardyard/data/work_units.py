"""One piece of a corpus becomes token shards: the unit of parallel and resumable work.

A piece's shards depend only on its text, the tokenizer and the rule of the validation split:
not on other pieces, nor on the workers. A piece is finished when its record exists, which is
written last.
"""

import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from shardyard.config.data_choices import PLAIN_TEXT
from shardyard.config.tasks import imported
from shardyard.data.byte_ranges import Span, TextSection, escape_text
from shardyard.data.readers.columns import TextOf
from shardyard.data.shards import LEARNT, bin_name, idx_name, token_dtype
from shardyard.data.sources import Piece, piece_size_bytes, read_sections
from shardyard.data.tokenizer import TextEncoder
from shardyard.errors import DataError, RejectedRowError, StorageError
from shardyard.io.files import flush_folder, read_json_object

# From a document to the ids of its tokens, and to what stands beside them.
#
# A row of ``config/data_choices.py`` names an encoder. What it puts beside the ids is kept in
# shards as a column of its own, and reaches a task that names it as a field of its micro-batches.


@dataclass(frozen=True, kw_only=True)
class Column:
    """One whole number for each token."""

    dtype: str
    """Type as numpy writes it, little-endian: ``|u1``, ``<u2``, ``<i4``."""
    begin: int
    """Value for the token that begins a document, where there is one."""
    end: int
    """Value for the token that ends a document."""


@dataclass(frozen=True)
class Encoded:
    """A document, or a section of one."""

    ids: Sequence[int] | npt.NDArray[Any]
    columns: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Values of each of the encoder's columns, as many as there are ids."""
    is_whole: bool = False
    """Whether it is a document of its own, with the tokens that begin and end it."""
    ends: bool = False
    """Whether the document ends here, though its section may not."""


class Encoder(Protocol):
    """Encoder of documents; equal text gives equal numbers."""

    columns: ClassVar[Mapping[str, Column]]

    def __init__(self, tokenizer: TextEncoder, **options: str) -> None:
        """Args:
        options: Settings of ``data`` that the row of ``data.format`` gives it.
        """

    def encode(self, section: TextSection) -> list[Encoded]:
        """The section, or the documents that it is learnt as.

        Raises:
            SourceError: It cannot be learnt; names its place.
        """

    @staticmethod
    def words(section: TextSection) -> str:
        """Return the text that a tokenizer is trained on."""


class PlainText:
    """Every token counts alike."""

    columns: ClassVar[Mapping[str, Column]] = {}

    def __init__(self, tokenizer: TextEncoder) -> None:
        self.tokenizer = tokenizer

    def encode(self, section: TextSection) -> list[Encoded]:
        return [Encoded(self.tokenizer.encode(section.text))]

    @staticmethod
    def words(section: TextSection) -> str:
        return section.text


SPLITS = ("train", "eval")
SCRATCH = "pieces"
"""Folder for records of finished pieces and files not yet whole; removed at the end."""


@dataclass(frozen=True)
class ValidationRule:
    """Choice of validation sections by a hash of their text.

    Neither order nor workers matter, and equal texts fall on the same side.
    """

    fraction: float
    forced_eval: int | None = None
    """Hash that is validation data for any fraction."""
    forced_train: int | None = None
    """Hash that is never held out."""

    def split_of(self, text_hash: int) -> str:
        if text_hash == self.forced_eval:
            return "eval"
        if text_hash == self.forced_train:
            return "train"
        return "eval" if text_hash < self.fraction * 2**64 else "train"


def hash_of(text: str) -> int:
    """Return 64 bits that depend only on the content of a section."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class _SplitBuilder:
    """Tokens of one split of one piece, and the columns next to them."""

    def __init__(
        self, encoder: TextEncoder, bos_id: int | None, columns: Mapping[str, Column]
    ) -> None:
        self._bos = [] if bos_id is None else [bos_id]
        self._dtype = token_dtype(encoder.vocab_size)
        self._end_of_text_id = encoder.end_of_text_id
        self._kinds = columns
        self._parts: list[npt.NDArray[Any]] = []
        self._columns: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in columns}
        self._is_open = False  # whether the last document still lacks its end-of-text token
        self.starts: list[int] = []
        self.num_tokens = 0
        self.num_bytes = 0
        """Bytes of the text, as UTF-8."""

    def add(self, encoded: Encoded, num_bytes: int, *, continues: bool) -> None:
        """Append a section; it starts a document unless it continues the one just appended."""
        if encoded.is_whole or not continues:
            self.close()
        if encoded.ends and not len(encoded.ids) and not self._is_open:
            return  # the document has ended already
        if encoded.is_whole:
            self.starts.append(self.num_tokens)
        elif not self._is_open:
            self.starts.append(self.num_tokens)
            begin = {name: [kind.begin] * len(self._bos) for name, kind in self._kinds.items()}
            self._append(Encoded(self._bos, begin))
        self._append(encoded)
        self.num_bytes += num_bytes
        self._is_open = not encoded.is_whole
        if encoded.ends:
            self.close()

    def close(self) -> None:
        """End the last document, if it has not ended."""
        if self._is_open:
            end = {name: [kind.end] for name, kind in self._kinds.items()}
            self._append(Encoded([self._end_of_text_id], end))
        self._is_open = False

    def tokens(self) -> npt.NDArray[Any]:
        return np.concatenate([np.empty(0, dtype=self._dtype), *self._parts])

    def predicted(self) -> npt.NDArray[Any]:
        """Tokens that a model learns to predict: those that are marked, or all."""
        tokens = self.tokens()
        return tokens[self.columns()[LEARNT] != 0] if LEARNT in self._kinds else tokens

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the columns next to the tokens, by name."""
        return {
            name: np.concatenate([np.empty(0, dtype=kind.dtype), *self._columns[name]])
            for name, kind in self._kinds.items()
        }

    def _append(self, encoded: Encoded) -> None:
        ids = encoded.ids
        self._parts.append(np.array(ids, dtype=self._dtype))
        for name, kind in self._kinds.items():
            wide = np.array(encoded.columns[name], dtype=np.int64)
            narrow = wide.astype(kind.dtype)
            if wide.shape != (len(ids),) or (narrow != wide).any():
                raise DataError(
                    f"column {name!r} has {len(wide)} numbers for {len(ids)} tokens, or one that "
                    f"{kind.dtype} does not hold: the encoder of this data.format is wrong. Fix "
                    "it, or use another data.format."
                )
            self._columns[name].append(narrow)
        self.num_tokens += len(ids)


@dataclass(frozen=True)
class TokenizePiece:
    """The task of turning one piece into shards."""

    folder: Path
    number: int
    piece: Piece
    text_of: TextOf
    hold_out: ValidationRule
    bos_token: str | None = None
    """Token that begins each document."""
    encoder: str = PLAIN_TEXT
    """module:class of what makes numbers of a document."""
    options: tuple[tuple[str, str], ...] = ()
    """Options of the encoder, by name."""

    @property
    def record_path(self) -> Path:
        return self.folder / SCRATCH / f"{self.number:05d}.json"

    @property
    def counts_path(self) -> Path:
        """Times each token is predicted in the piece's training split."""
        return self.folder / SCRATCH / f"{self.number:05d}.counts.npy"

    @property
    def size_bytes(self) -> int:
        return piece_size_bytes(self.piece)

    def __str__(self) -> str:
        first, *others = self.piece
        more = (
            f", and {len(others)} files more"
            if others
            else f", bytes {first.start:,} to {first.stop:,}"
        )
        return f"{escape_text(first.file.path)}{more}"

    def encoder_with(self, tokenizer: TextEncoder) -> Encoder:
        """Return the encoder of documents.

        Raises:
            RequestError: It cannot work with this tokenizer.
        """
        encoder: Encoder = imported(self.encoder)(tokenizer, **dict(self.options))
        return encoder

    def finished(self) -> dict[str, Any] | None:
        """The record of this very piece if it is finished."""
        try:
            record = read_json_object(self.record_path)
        except (FileNotFoundError, ValueError):
            return None
        return record if record["hold_out"] == asdict(self.hold_out) else None

    def __call__(self) -> None:
        """Write shards, counts and, last, the record.

        Raises:
            SourceError: Text cannot be read.
            StorageError: The file system rejected a write.
        """
        tokenizer = encoder_in(self.folder)
        encoder = self.encoder_with(tokenizer)
        bos_id = None if self.bos_token is None else tokenizer.id_of(self.bos_token)
        builders = {split: _SplitBuilder(tokenizer, bos_id, encoder.columns) for split in SPLITS}
        hashes: list[int] = []
        rejected: list[tuple[Span, int, str]] = []
        for span in self.piece:
            for number, section in enumerate(read_sections((span,), self.text_of)):
                try:
                    documents = encoder.encode(section)
                except RejectedRowError as error:
                    rejected.append((span, number, error.reason))
                    continue
                hashes.append(hash_of(section.text))
                split = span.file.split or self.hold_out.split_of(hashes[-1])
                _add_section(section, documents, builders, split)
        for builder in builders.values():
            builder.close()
        # A record of an earlier rule must not stand next to the shards of this one.
        self.record_path.unlink(missing_ok=True)
        record = {
            "hold_out": asdict(self.hold_out),
            "hashes": [min(hashes), max(hashes)] if hashes else [],
            "sections": len(hashes) + len(rejected),
            "rejected": len(rejected),
            "first_rejected": [self._row(*each) for each in rejected[:1]],
            "shards": {
                split: self._write_shard(split, builder)
                for split, builder in builders.items()
                if builder.num_tokens
            },
        }
        counts = np.bincount(builders["train"].predicted(), minlength=tokenizer.vocab_size)
        write_file(self.counts_path, _npy_bytes(counts), folder=self.folder)
        flush_folder(self.folder)
        write_file(self.record_path, json.dumps(record).encode(), folder=self.folder)

    def _row(self, span: Span, number: int, reason: str) -> str:
        """A rejected row in words. Reads the span again up to it: its line is counted from the
        file's beginning, which would have ended the reading of the others."""
        sections = read_sections((span,), self.text_of)
        place = str(next(islice(sections, number, None)).location)
        sections.close()
        return f"{place}: {reason}"

    def _write_shard(self, split: str, builder: _SplitBuilder) -> dict[str, Any]:
        name = f"{split}-{self.number:05d}"
        columns = builder.columns()
        contents = {
            bin_name(name): builder.tokens().tobytes(),
            idx_name(name): _npy_bytes(np.array(builder.starts, dtype="<i8")),
            **{bin_name(name, column): numbers.tobytes() for column, numbers in columns.items()},
        }
        for file_name, content in contents.items():
            write_file(self.folder / file_name, content, folder=self.folder)
        return {
            "name": name,
            "tokens": builder.num_tokens,
            "documents": len(builder.starts),
            **({} if self.text_of.whole_row else {"bytes": builder.num_bytes}),
            **({"learnt": int(columns[LEARNT].sum())} if LEARNT in columns else {}),
            "files": {file_name: file_entry(content) for file_name, content in contents.items()},
        }


def _add_section(
    section: TextSection,
    documents: Sequence[Encoded],
    builders: dict[str, _SplitBuilder],
    split: str,
) -> None:
    for other, builder in builders.items():
        if other != split:
            builder.close()  # a document that goes on in the other split ends here
    num_bytes = len(section.text.encode())
    for number, encoded in enumerate(documents):
        continues = number > 0 or not section.begins
        builders[split].add(encoded, 0 if number else num_bytes, continues=continues)
    if section.ends:
        builders[split].close()


def _npy_bytes(numbers: npt.NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, numbers, allow_pickle=False)
    return buffer.getvalue()


@lru_cache(maxsize=1)
def encoder_in(folder: Path) -> TextEncoder:
    """One tokenizer a process: a worker does many pieces."""
    found = (*folder.glob("*.json"), *folder.glob("*.jinja"))
    files = {path.name: path.read_bytes() for path in found}
    return TextEncoder(files, name=str(folder))


def file_entry(content: bytes) -> dict[str, Any]:
    """Return the manifest's entry for a file."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_file(path: Path, content: bytes, *, folder: Path) -> None:
    """Write a file of the dataset in ``folder``; under its name it is whole and durable.

    Raises:
        StorageError: The file system rejected the write.
    """
    scratch = folder / SCRATCH / f"{path.name}.{os.getpid()}"
    try:
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> StorageError:
    """The error for a prepared data set that cannot be written."""
    return StorageError(
        f"{path} cannot be written: {error.strerror}. Check that the folder is yours and has room "
        "(`df -h`), or choose another with data.dir; finished pieces are kept."
    )
