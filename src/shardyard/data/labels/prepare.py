"""Preparation of rows with labels: texts become token ids, labels numbers, each row a sample.

The folder is named by a fingerprint of the request, so the same request finds the same data. The
manifest, written last, is the commit. Rows are tokenized as transformers' tokenizers do it: with
the tokenizer's own special tokens, pairs together, too long ones cut at the longer text.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from shardyard.config.dataset_name import source_word
from shardyard.config.fingerprint import digest
from shardyard.config.model.source import sample_tokens
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.data import Data
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row
from shardyard.data.byte_ranges import SourceFile, Span, escape_text
from shardyard.data.formats import format_named
from shardyard.data.labels.names import (
    LabelNames,
    LabelValues,
    names_of_classes,
    names_of_model,
)
from shardyard.data.labels.rows import LABELS, TAGS, LabelledRow, parse_row
from shardyard.data.own.stored import write_items
from shardyard.data.prepare import (
    Progress,
    check_rows,
    chosen_tokenizer,
    is_finished,
    sole_writer,
    write_tokenizer,
)
from shardyard.data.readers.arrow import read_features
from shardyard.data.readers.columns import TextOf
from shardyard.data.shards import LABELS_VERSION, MANIFEST, check_sizes, read_manifest
from shardyard.data.sources import read_sections
from shardyard.data.splits import Corpus, find_corpus
from shardyard.data.stores.base import open_file
from shardyard.data.tokenizer import TokenizerFiles
from shardyard.data.work_units import (
    SCRATCH,
    ValidationRule,
    cannot_write,
    encoder_in,
    file_entry,
    hash_of,
    write_file,
)
from shardyard.errors import RequestError, SourceError
from shardyard.io.files import flush_folder

IGNORED = -100
"""Label of no prediction, as in ``data.loader``, which imports torch."""

_AT_ONCE = 1024
"""Rows that are tokenized at a time."""
_ROWS_OF = {
    "samples": "shardyard.data.labels.rows:sample_row",
    "tokens": "shardyard.data.labels.rows:token_row",
}
_SPLITS = ("train", "eval")


def prepare_labelled(
    recipe: Recipe,
    *,
    model_dir: Path | None,
    progress: Progress,
    rows: int | None = None,
    folder: Path | None = None,
) -> DatasetMetadata:
    """Prepare a recipe's rows; returns at once if they are prepared already.

    Arguments are those of ``data.prepare.prepare``.

    Raises:
        RequestError: A file has no rows, or labels, texts and settings contradict each other.
        SourceError: A row cannot be read.
        StorageError: The file system rejected a write.
    """
    corpus = find_corpus(recipe)
    _require_rows(corpus.files)
    tokenizer = chosen_tokenizer(recipe, model_dir)
    of_model = names_of_model(model_dir)
    request = _request(recipe, corpus.files, tokenizer, of_model, sample_tokens(recipe, model_dir))
    if folder is None:
        above = Path(recipe.data.dir).expanduser().resolve()
        folder = above / f"{source_word(recipe.data.source)}-{digest(request)}"
    if not is_finished(folder):
        with sole_writer(folder, progress):
            if not (folder / MANIFEST).exists():
                table = _Table(recipe, corpus, progress)
                write_tokenizer(folder, recipe.data, tokenizer, table.words, model_dir)
                check_rows(folder, recipe, rows=rows, model_dir=model_dir)
                _write(folder, recipe, table, request, of_model)
            shutil.rmtree(folder / SCRATCH, ignore_errors=True)
    return corpus.with_file_lists(read_labelled_metadata(folder))


def read_labelled_metadata(folder: Path) -> DatasetMetadata:
    """Return metadata of prepared rows; compares all file sizes with the manifest.

    Raises:
        DataError: The dataset is missing or incomplete, or a file has another size.
    """
    manifest = read_manifest(folder, (LABELS_VERSION,))
    check_sizes(folder, manifest, manifest["files"])
    train, validation = (manifest["splits"][split] for split in _SPLITS)
    return DatasetMetadata(
        dir=str(folder),
        fingerprint=manifest["fingerprint"],
        vocab_size=manifest["vocab_size"],
        train_tokens=train["tokens"],
        eval_tokens=validation["tokens"],
        train_documents=train["samples"],
        eval_documents=validation["samples"],
        unigram_entropy=0.0,  # no token is predicted
        train_samples=train["samples"],
        eval_samples=validation["samples"],
        train_places=train["tokens"],
        too_long=train["too_long"] + validation["too_long"],
        num_labels=manifest["num_labels"],
        label_names=tuple(manifest["label_names"]),
    )


def _require_rows(files: Sequence[SourceFile]) -> None:
    plain = [file for file in files if not format_named(file.format).has_keys]
    if plain:
        raise RequestError(
            f"data.source: {escape_text(plain[0].name)} has no columns. Give a table "
            "(.csv, .tsv, .parquet) or JSON lines (.jsonl) with texts and labels."
        )


def _request(
    recipe: Recipe,
    files: Sequence[SourceFile],
    tokenizer: TokenizerFiles | None,
    of_model: Sequence[str],
    seq_len: int,
) -> dict[str, Any]:
    """Return all that the samples depend on."""
    data, task = recipe.data, recipe.task
    listing = [[file.path, file.size_bytes, file.version, file.split] for file in files]
    trained = [data.tokenizer_kind, data.vocab_size, data.add_special_tokens, data.add_tokens]
    return {
        "format": LABELS_VERSION,
        "labelled": task_row(task.name).labelled,
        "files": digest(listing),
        "keys": data.keys,
        "text_key": data.text_key,
        "labels": list(data.labels or of_model),
        "problem_type": task.problem_type,
        "seq_len": seq_len,
        "too_long": data.too_long,
        "eval_fraction": None if any(file.split for file in files) else data.eval_fraction,
        "tokenizer": trained
        if tokenizer is None
        else {name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.items()},
    }


class _Table:
    """The rows of a corpus, read as often as it takes; they are never all in memory."""

    def __init__(self, recipe: Recipe, corpus: Corpus, progress: Progress) -> None:
        data, row = recipe.data, task_row(recipe.task.name)
        assert row.labelled is not None
        keys = dict(data.keys or {})
        if data.text_key != Data().text_key:
            keys["text"] = data.text_key
        self._files = corpus.files
        self._text_of = TextOf(whole_row=_ROWS_OF[row.labelled], keys=tuple(sorted(keys.items())))
        self._progress = progress
        self._rule = ValidationRule(data.eval_fraction)
        self.of_tokens = row.labelled == "tokens"

    def words(self) -> Iterator[str]:
        """Texts to train a tokenizer on."""
        for _, row in self.rows("reading texts"):
            yield from row.texts

    def rows(self, activity: str) -> Iterator[tuple[str, LabelledRow]]:
        """Yield each row with its split, in the order of the files."""
        for split, text in self._sections(activity):
            yield split, parse_row(text)

    def divide(self) -> None:
        """Choose a row for a split that the hashes of rows leave empty."""
        hashes = {hash_of(text) for _, text in self._sections("dividing rows")}
        if not hashes:
            raise SourceError("data.source: its files hold no rows. Give files with rows.")
        if any(file.split for file in self._files) or not self._rule.fraction:
            return
        if len(hashes) == 1:
            raise RequestError(
                "data.source has one row, or copies of it, so none is left to validate on. Give "
                "more rows, or set data.eval_fraction=0."
            )
        filled = {self._rule.split_of(each) for each in hashes}
        if "eval" not in filled:
            self._rule = ValidationRule(self._rule.fraction, forced_eval=min(hashes))
        elif "train" not in filled:
            self._rule = ValidationRule(self._rule.fraction, forced_train=max(hashes))

    def label_names(self) -> tuple[str, ...]:
        """Names that ``datasets`` wrote into the files for numbered labels; none: there are none.

        Raises:
            RequestError: Two files give them in another order.
        """
        found: dict[tuple[str, ...], SourceFile] = {}
        for file in self._files:
            if file.format in ("parquet", "arrow"):
                found.setdefault(self._names_in(file), file)
        found.pop((), None)
        if len(found) > 1:
            (names, file), (others, other) = list(found.items())[:2]
            raise RequestError(
                f"data.source: {escape_text(file.name)} numbers its labels {', '.join(names)}, and "
                f"{escape_text(other.name)} {', '.join(others)}. Write the labels of both as words."
            )
        return next(iter(found), ())

    def _names_in(self, file: SourceFile) -> tuple[str, ...]:
        with open_file(file) as opened:
            columns, features = read_features(
                opened, escape_text(file.path), is_parquet=file.format == "parquet"
            )
        key, usual = ("ner_tags", TAGS) if self.of_tokens else ("label", LABELS)
        own = dict(self._text_of.keys).get(key)
        column = own or next((name for name in usual if name in columns), "")
        return names_of_classes(features, column)

    def _sections(self, activity: str) -> Iterator[tuple[str, str]]:
        total, done = sum(file.size_bytes for file in self._files), 0
        for file in self._files:
            self._progress(activity, done, total)
            for section in read_sections((Span(file, 0, file.size_bytes),), self._text_of):
                yield file.split or self._rule.split_of(hash_of(section.text)), section.text
            done += file.size_bytes
        self._progress(activity, total, total)


def _write(
    folder: Path,
    recipe: Recipe,
    table: _Table,
    request: dict[str, Any],
    of_model: Sequence[str],
) -> None:
    table.divide()
    values = LabelValues()
    for _, row in table.rows("reading labels"):
        values.add(row.label if table.of_tokens else [row.label])
    names = values.names(
        configured=recipe.data.labels,
        of_files=table.label_names(),
        of_model=of_model,
        problem_type=recipe.task.problem_type,
        of_tokens=table.of_tokens,
    )
    encode = _Encode(folder, recipe.data, names, seq_len=request["seq_len"], table=table)
    splits: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for split in _SPLITS:
        items = encode.items(split)
        first = next(items, None)
        stored: dict[str, Any] = {"samples": 0}
        if first is not None:
            try:
                stored, entries = write_items(folder, split, chain([first], items))
            except OSError as error:
                raise cannot_write(folder, error) from error
            files |= entries
        splits[split] = {
            "samples": stored["samples"],
            "tokens": encode.tokens,
            "too_long": encode.too_long,
            "stored": stored,
        }
    if not splits["train"]["samples"]:
        raise SourceError("data.source: no row is left to train on. Give more rows.")
    tokenizer = {
        path.name: file_entry(path.read_bytes())
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in (".json", ".jinja")
    }
    files = {**tokenizer, **files}
    manifest = {
        "format": LABELS_VERSION,
        "request": request,
        "fingerprint": digest({name: entry["sha256"] for name, entry in files.items()}),
        "vocab_size": encoder_in(folder).vocab_size,
        "num_labels": max(1, len(names.names)),
        "label_names": list(names.names),
        "splits": splits,
        "files": files,
    }
    flush_folder(folder)
    write_file(folder / MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n", folder=folder)
    flush_folder(folder)


class _Encode:
    """Rows as token ids and numbers of labels."""

    def __init__(
        self, folder: Path, data: Data, names: LabelNames, *, seq_len: int, table: _Table
    ) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # Text that spells a special token must not become one.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._data, self._names, self._seq_len, self._table = data, names, seq_len, table
        self.tokens = 0
        """Tokens of the last split."""
        self.too_long = 0
        """Rows of the last split that were cut or left out."""

    def items(self, split: str) -> Iterator[dict[str, Any]]:
        """Return the samples of a split: tokens, segments and label.

        Raises:
            RequestError: A row is too long, and ``data.too_long`` rejects that, or has no tokens.
        """
        self.tokens = self.too_long = longest = 0
        rows = (row for each, row in self._table.rows(f"tokenizing {split}") if each == split)
        while chunk := list(islice(rows, _AT_ONCE)):
            for row, encoding in zip(chunk, self._encoded(chunk), strict=True):
                longest = max(longest, len(encoding.ids))
                is_long = len(encoding.ids) > self._seq_len
                self.too_long += is_long
                if is_long and self._data.too_long == "cut":
                    encoding = self._cut(row)
                elif is_long:
                    continue
                if not encoding.ids:
                    raise RequestError(
                        f"data.source: a row with label {row.label!r} has no tokens: its text is "
                        "empty, and the tokenizer adds none. Take such rows out."
                    )
                self.tokens += len(encoding.ids)
                yield self._fields(row, encoding)
        if self.too_long and self._data.too_long == "refuse":
            raise RequestError(
                f"{self.too_long:,} rows of the {split} split have more tokens than data.seq_len="
                f"{self._seq_len}; the longest has {longest:,}. Set data.too_long=cut, which cuts "
                f"the end of the longer text, or data.seq_len={longest}."
            )

    def _encoded(self, rows: Sequence[LabelledRow]) -> list[Encoding]:
        if self._table.of_tokens:
            words = [row.texts for row in rows]
            return self._batch(words, is_pretokenized=True)
        texts = [row.texts[0] if len(row.texts) == 1 else tuple(row.texts) for row in rows]
        return self._batch(texts)

    def _batch(self, rows: Sequence[Any], *, is_pretokenized: bool = False) -> list[Encoding]:
        encode: Callable[..., list[Encoding]] = self._tokenizer.encode_batch
        return encode(list(rows), is_pretokenized=is_pretokenized, add_special_tokens=True)

    def _cut(self, row: LabelledRow) -> Encoding:
        self._tokenizer.enable_truncation(self._seq_len)
        try:
            return self._encoded([row])[0]
        finally:
            self._tokenizer.no_truncation()

    def _fields(self, row: LabelledRow, encoding: Encoding) -> dict[str, Any]:
        if self._table.of_tokens:
            label: Any = np.array(_first_tokens(row, encoding, self._names), dtype=np.int64)
        elif self._names.is_regression:
            label = np.float64(self._names.number(row.label))
        else:
            label = np.int64(self._names.number(row.label))
        return {
            "tokens": np.array(encoding.ids, dtype=np.int32),
            "segments": np.array(encoding.type_ids, dtype=np.uint8),
            "label": np.asarray(label),
        }


def _first_tokens(row: LabelledRow, encoding: Encoding, names: LabelNames) -> list[int]:
    """Return the label of each token: of the first of a word its own, of the others none."""
    found, before = [], None
    for word in encoding.word_ids:
        is_first = word is not None and word != before
        found.append(int(names.number(row.label[word])) if is_first else IGNORED)
        before = word
    return found
