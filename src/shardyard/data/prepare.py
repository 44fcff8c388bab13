"""Preparation of a dataset: text becomes token shards, once, in spite of interruptions.

The folder is named by a fingerprint of the request, so the same request finds the same data.
Work is cut into pieces that depend only on the request; finished pieces stay when the process
is killed. The manifest, written last, is the commit. The result is the same bytes for any
number of workers and interruptions. internals/data.md has the reasons.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardyard.config.data_choices import DATA_FORMATS, PLAIN_TEXT, is_template_file
from shardyard.config.dataset_name import source_word
from shardyard.config.fingerprint import digest
from shardyard.config.model.source import sample_tokens
from shardyard.config.model.vocabulary import check_tokens, vocabulary_in
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.rules.data import not_trained
from shardyard.config.schema.data import Data
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import imported, task_row
from shardyard.control_groups import usable_cores
from shardyard.data.byte_ranges import SourceFile
from shardyard.data.content_cache import find_equal, record_sources
from shardyard.data.conversations import check_rejected, check_rejected_in, rejected_of
from shardyard.data.formats import SECTION_BYTES, format_named
from shardyard.data.prepared_checks import (
    check_blocks,
    check_document_count,
    check_loss_share,
    with_true_pairs,
)
from shardyard.data.readers.columns import TextOf
from shardyard.data.shards import (
    COLUMNS_VERSION,
    FORMAT_VERSION,
    LEARNT,
    MANIFEST,
    read_metadata,
    token_dtype,
)
from shardyard.data.sources import (
    check_readable,
    first_rows,
    read_sections,
    readers_of,
    split_into_pieces,
)
from shardyard.data.splits import Corpus, find_corpus
from shardyard.data.tokenizer import (
    TextEncoder,
    TokenizerFiles,
    choose_bos,
    find_tokenizer,
    template_source,
    train_tokenizer,
    with_added_tokens,
)
from shardyard.data.work_units import (
    SCRATCH,
    SPLITS,
    Column,
    TokenizePiece,
    ValidationRule,
    cannot_write,
    encoder_in,
    file_entry,
    write_file,
)
from shardyard.data.workers import run_unfinished
from shardyard.errors import DataError, RecipeError, RequestError, SourceError
from shardyard.io.files import flush_folder, locked
from shardyard.plugins import PlugIn

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many bytes of text of how many are done."""

_LOCK = ".lock"
_BY_HASH_ALONE = "held_out_by_hash_alone"
_TOKENIZER_SAMPLE_BYTES = 32 * 2**20
"""Text a tokenizer is trained on, taken evenly from the whole corpus: some 10 s of one core."""


def prepare(
    recipe: Recipe,
    *,
    model_dir: Path | None,
    progress: Progress,
    rows: int | None = None,
    folder: Path | None = None,
    is_part: bool = False,
    eval_set: str | None = None,
) -> DatasetMetadata:
    """Prepare the dataset of one source; returns at once if it is there already.

    Args:
        model_dir: Folder of the model's own files, where ``data.tokenizer=auto`` looks first.
        rows: Rows of the model's table of tokens; None: as many as the tokenizer wants.
        folder: Folder where another node has prepared the same; None: named by the request. The
            name depends on the times of the files, which differ between nodes.
        is_part: Whether other sources are trained on too. The validation split then follows
            only the hashes, even where they select none: equal documents are on one side.
        eval_set: As of ``splits.find_corpus``: a dataset that is only validated on.

    Raises:
        RequestError: The source or the tokenizer does not exist, or no validation text is left.
        SourceError: Text cannot be read.
        DataError: Text changes meanwhile, or existing data is damaged.
        StorageError: The file system rejected a write.
    """
    data = recipe.data
    corpus = find_corpus(recipe, eval_set=eval_set)
    files = corpus.files
    tokenizer = chosen_tokenizer(recipe, model_dir)
    bos_token = bos_token_of(data, tokenizer, model_dir)
    request = request_of(data, files, tokenizer, bos_token, is_part=is_part)
    if folder is None:
        folder = _folder_of(data, request, files, progress)
    if not is_finished(folder):
        with sole_writer(folder, progress):
            if not (folder / MANIFEST).exists():  # another process may just have written it
                check_readable(files, _text_of(data))
                texts = partial(training_texts, data, files, progress)
                write_tokenizer(folder, data, tokenizer, texts, model_dir)
                check_rows(folder, recipe, rows=rows, model_dir=model_dir)
                _build(folder, recipe, corpus, request, progress)
            # What a dying worker adds meanwhile is removed by the next call.
            shutil.rmtree(folder / SCRATCH, ignore_errors=True)
    metadata = corpus.with_file_lists(read_metadata(folder))
    if metadata.rejected is not None:
        of = metadata.rejected_of or 1
        check_rejected(metadata.rejected, data, of=of, setting=corpus.setting)
    check_loss_share(metadata, data, setting=corpus.setting)
    check_document_count(metadata, recipe)
    metadata = with_true_pairs(metadata, recipe)
    task = task_row(recipe.task.name)
    if data.pack == "stream" and not task.compares_answers:
        return metadata
    # Not above: it imports torch, which takes more seconds than a small corpus.
    from shardyard.data.preference.samples import pairs_class
    from shardyard.data.samples import with_samples

    if task.compares_answers:  # whose loss is not that of a token
        metadata = replace(metadata, unigram_entropy=0.0)
        data = data.model_copy(update={"seq_len": sample_tokens(recipe, model_dir)})
        return with_samples(metadata, data, pairs_class(task), columns=(LEARNT,))
    return with_samples(metadata, data)


def _folder_of(
    data: Data, request: dict[str, Any], files: Sequence[SourceFile], progress: Progress
) -> Path:
    """Return the folder where the data of a request is or will be."""
    above = Path(data.dir).expanduser().resolve()
    folder = above / f"{source_word(data.source)}-{digest(request)}"
    if folder.exists():
        return folder
    words = "comparing files with what was prepared of as many bytes"
    equal = find_equal(above, request, files, on_read_start=lambda: progress(words, 0, 1))
    return folder if equal is None or not is_finished(equal) else equal


def _chat_template(data: Data) -> TokenizerFiles:
    """The file of the chat template that a recipe sets, if it sets one."""
    if data.chat_template is None:
        return {}
    return {"chat_template.jinja": template_source(data.chat_template).encode()}


def chosen_tokenizer(recipe: Recipe, model_dir: Path | None) -> TokenizerFiles | None:
    """The tokenizer that a recipe asks for; None: one is trained.

    Raises:
        RequestError: There is none such.
    """
    data = recipe.data
    store = None if recipe.model.dir is None else Path(recipe.model.dir).expanduser()
    tokenizer = find_tokenizer(data.tokenizer, model_dir, store=store)
    if tokenizer is not None and data.tokenizer_kind != Data().tokenizer_kind:
        why = not_trained(data.tokenizer_kind, str(model_dir))
        raise RequestError(f"data.tokenizer_kind{why}")
    if tokenizer is None:
        return None
    return with_added_tokens(tokenizer | _chat_template(data), data)


def bos_token_of(
    data: Data, tokenizer: TokenizerFiles | None, model_dir: Path | None = None
) -> str | None:
    """The token that each document begins with.

    Args:
        model_dir: Folder of the tokenizer where data.tokenizer is auto; named in errors.
    """
    if DATA_FORMATS[data.format].holds_ids:
        if tokenizer is None:
            raise RequestError(
                f"data.format={data.format}: the files hold ids of a tokenizer, which cannot be "
                "trained on them. Set data.tokenizer to the one that they were made with: its "
                "folder, or its vocab.txt."
            )
        return None
    if "bos" in DATA_FORMATS[data.format].ignores:
        return None
    name = _name_of_tokenizer(data, model_dir)
    return choose_bos(data.bos, tokenizer, data.tokenizer_kind, name=name)


def _name_of_tokenizer(data: Data, model_dir: Path | None) -> str:
    """Words for the tokenizer in an error: its folder where the recipe does not name it."""
    is_models = data.tokenizer == "auto" and model_dir is not None
    return str(model_dir) if is_models else f"data.tokenizer={data.tokenizer}"


def request_of(
    data: Data,
    files: Sequence[SourceFile],
    tokenizer: TokenizerFiles | None,
    bos_token: str | None = None,
    *,
    is_part: bool = False,
) -> dict[str, Any]:
    """Return all that the tokens depend on.

    Files are identified by name, size and time of change (remote: etag), not by content.
    Reading a large corpus takes hours, and the second call has to return at once.
    ``content_cache.py`` recognizes equal content with other times.
    """
    listing = [
        [file.path, file.size_bytes, file.version, *_format_in_request(file), *_split_of(file)]
        for file in files
    ]
    return {
        "format": FORMAT_VERSION,
        "files": digest(listing),
        "text_key": data.text_key
        if any(format_named(file.format).has_keys for file in files)
        else None,
        "tokenizer": {"trained_vocab_size": data.vocab_size, **_of_trained(data)}
        if tokenizer is None
        else {name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.items()},
        "eval_fraction": None if any(file.split for file in files) else data.eval_fraction,
        # as before where there is none
        **({} if bos_token is None else {"bos_token": bos_token}),
        **_format_request(data),
        **({_BY_HASH_ALONE: True} if is_part else {}),
    }


def _format_request(data: Data) -> dict[str, Any]:
    """Return how documents are encoded; empty for plain text, as before other formats existed."""
    row = DATA_FORMATS[data.format]
    if row.encoder == PLAIN_TEXT:
        return {}
    template = data.chat_template
    if template is not None and is_template_file(template):
        template = digest(template_source(template))
    given = {"chat_template": template, "keys": data.keys}
    named = {name: value for name, value in given.items() if value is not None}
    return {"data_format": data.format, **dict(_options(data)), **named}


def _options(data: Data) -> tuple[tuple[str, str], ...]:
    return tuple((name, getattr(data, name)) for name in DATA_FORMATS[data.format].options)


def _encoder_of(data: Data) -> str:
    return DATA_FORMATS[data.format].encoder


def _text_of(data: Data) -> TextOf:
    keys = tuple(sorted((data.keys or {}).items()))
    return TextOf(
        data.text_key,
        DATA_FORMATS[data.format].whole_row,
        keys,
        id_type=data.id_type,
        is_stream=data.id_rows == "blocks",
    )


def _chat_rows(data: Data, files: Sequence[SourceFile]) -> str:
    """Kinds of chat rows in the files; empty for other data."""
    row_name = DATA_FORMATS[data.format].row_name
    if row_name is None:
        return ""
    return ", ".join(first_rows(files, replace(_text_of(data), whole_row=row_name)))


def _format_in_request(file: SourceFile) -> list[str]:
    """Return the format of a file; empty where all versions agree, to find older data again.

    ``.jsonl`` was JSON lines always, and any other file text.
    """
    first_read_as = "jsonl" if file.path.endswith(".jsonl") else "text"
    return [] if file.format == first_read_as else [file.format]


def _split_of(file: SourceFile) -> list[str]:
    """Return a file's split; empty where hashes decide, as before files could be named."""
    return [] if file.split is None else [f"split={file.split}"]


def _of_trained(data: Data) -> dict[str, Any]:
    """Return the tokenizer's kind and added tokens; empty for defaults, as in older requests."""
    kind, added = data.tokenizer_kind, [data.add_special_tokens, data.add_tokens]
    return {
        **({} if kind == Data().tokenizer_kind else {"kind": kind}),
        **({"added": added} if any(added) else {}),
    }


def is_finished(folder: Path) -> bool:
    """Return whether a dataset is whole, and no process still cleans up after writing it."""
    return (folder / MANIFEST).exists() and not (folder / SCRATCH).exists()


@contextmanager
def sole_writer(folder: Path, progress: Progress) -> Iterator[None]:
    """Wait until no other process writes this data set."""
    words = "waiting for another process that prepares the same data"
    with ExitStack() as held:
        try:
            (folder / SCRATCH).mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder / _LOCK, waits=lambda: progress(words, 0, 1)))
            (folder / SCRATCH).mkdir(exist_ok=True)  # the former holder may have removed it
        except OSError as error:
            raise cannot_write(folder, error) from error
        yield


def write_tokenizer(
    folder: Path,
    data: Data,
    tokenizer: TokenizerFiles | None,
    texts: Callable[[], Iterator[str]],
    model_dir: Path | None = None,
) -> None:
    """Put the tokenizer's files into the data set, unless an earlier attempt has done so.

    tokenizer.json goes last: where it is, the others are.
    """
    if (folder / "tokenizer.json").exists():
        return
    if tokenizer is None:
        tokenizer = train_tokenizer(texts, kind=data.tokenizer_kind, vocab_size=data.vocab_size)
        tokenizer = with_added_tokens(tokenizer | _chat_template(data), data)
    else:
        TextEncoder(tokenizer, name=_name_of_tokenizer(data, model_dir))  # refuse it before work
    for name in sorted(tokenizer, key=lambda name: name == "tokenizer.json"):
        write_file(folder / name, tokenizer[name], folder=folder)


def check_rows(folder: Path, recipe: Recipe, *, rows: int | None, model_dir: Path | None) -> None:
    """Raise before anything is tokenised, not after an hour of it.

    Args:
        folder: The dataset's, with its tokenizer.

    Raises:
        RecipeError: It is not the tokenizer of the model, nor that with further tokens.
    """
    if rows is None:
        return
    given, size = vocabulary_in(folder), encoder_in(folder).vocab_size
    found = check_tokens(recipe, given, rows=rows, size=size, model_dir=model_dir)
    if found:
        raise RecipeError(found)


def training_texts(
    data: Data, files: Sequence[SourceFile], progress: Progress, *, share: float = 1.0
) -> Iterator[str]:
    """Text from the beginning of every piece, ``_TOKENIZER_SAMPLE_BYTES`` or a little more.

    Args:
        share: Of those bytes that these files give.
    """
    files = [file for file in files if file.split != "eval" and file.size_bytes]
    if not files:
        raise SourceError(
            f"data.source={data.source!r}: its files to train on hold no text. Give others."
        )
    pieces = split_into_pieces(files, _piece_bytes(files))
    quota_bytes = int(share * _TOKENIZER_SAMPLE_BYTES) // len(pieces)
    total_bytes = sum(
        min(quota_bytes, sum(span.stop - span.start for span in piece)) for piece in pieces
    )
    done_bytes = 0
    words = imported(_encoder_of(data)).words
    for piece in pieces:
        left_bytes = quota_bytes
        for section in read_sections(piece, _text_of(data)):
            yield words(section)
            section_bytes = len(section.text.encode())
            left_bytes -= section_bytes
            done_bytes = min(done_bytes + section_bytes, total_bytes)
            progress("training the tokenizer", done_bytes, total_bytes)
            if left_bytes <= 0:
                break


def _piece_bytes(files: Sequence[SourceFile]) -> int:
    """Bytes of text in one piece: some 500 pieces, of 1 to 128 MiB, in whole sections."""
    total_bytes = sum(file.size_bytes for file in files)
    wanted_bytes = min(max(total_bytes // 500, 2**20), 2**27)
    return wanted_bytes // SECTION_BYTES * SECTION_BYTES


def _build(
    folder: Path,
    recipe: Recipe,
    corpus: Corpus,
    request: dict[str, Any],
    progress: Progress,
) -> None:
    data, files = recipe.data, corpus.files
    pieces = split_into_pieces(files, _piece_bytes(files))
    workers = usable_cores() if data.workers == "auto" else data.workers
    text_of = replace(_text_of(data), end_id=encoder_in(folder).end_of_text_id)
    check_blocks(files, text_of, data)
    tasks = [
        TokenizePiece(
            folder,
            number,
            piece,
            text_of,
            ValidationRule(data.eval_fraction),
            bos_token=request.get("bos_token"),
            encoder=_encoder_of(data),
            options=_options(data),
        )
        for number, piece in enumerate(pieces)
    ]
    tasks[0].encoder_with(encoder_in(folder))  # refuse it before work
    on_progress = partial(progress, "turning text into tokens")
    records = run_unfinished(tasks, workers=workers, on_progress=on_progress)
    check_rejected_in(records, data, setting=corpus.setting)
    forced = _forced_hold_out(records, data, corpus, bends=_BY_HASH_ALONE not in request)
    if forced != tasks[0].hold_out:
        _remove_stale_shards(folder, records)
        tasks = [replace(task, hold_out=forced) for task in tasks]
        records = run_unfinished(tasks, workers=workers, on_progress=on_progress)
    record_sources(folder, files)
    if find_corpus(recipe, eval_set=corpus.eval_set).files != files:
        raise DataError(
            f"{corpus.setting}={data.source!r} changed while it was being prepared, so its tokens "
            "may mix old and new text. Prepare again when no other process writes there."
        )
    columns = imported(_encoder_of(data)).columns
    rows = _chat_rows(data, files)
    _commit(folder, records, request, _entropy(tasks), columns, readers_of(files), rows)


def _check_splits_not_empty(filled: Collection[str], data: Data, corpus: Corpus) -> None:
    """Raise if the files of a split hold no document.

    Raises:
        SourceError: They do not.
    """
    splits = {file.split for file in corpus.files}
    for split, words in (("train", "to train on"), ("eval", "for validation")):
        if split in splits - {*filled}:
            source = data.eval_source if split == "eval" and data.eval_source else data.source
            setting = "data.eval_source" if source is data.eval_source else corpus.setting
            raise SourceError(
                f"{setting}={source!r}: its files {words} hold no text. Give files with text."
            )


def _forced_hold_out(
    records: Sequence[dict[str, Any]], data: Data, corpus: Corpus, *, bends: bool
) -> ValidationRule:
    """The rule of the held-out split, bent for a small corpus whose hashes leave a split empty:
    then the section with the lowest hash is held out, or the one with the highest is not."""
    hashes = [text_hash for record in records for text_hash in record["hashes"]]
    if not hashes:
        raise SourceError(
            f"{corpus.setting}={data.source!r} is an empty corpus: its files hold no text. "
            "Give files with text."
        )
    rule = ValidationRule(data.eval_fraction)
    filled = {split for record in records for split in record["shards"]}
    if any(file.split for file in corpus.files):
        _check_splits_not_empty(filled, data, corpus)
        return rule
    if not bends or data.eval_fraction == 0 or filled == set(SPLITS):
        return rule
    if min(hashes) == max(hashes):
        raise RequestError(
            f"data.eval_fraction={data.eval_fraction} asks for a held-out split, but "
            f"data.source={data.source!r} is one document of at most {SECTION_BYTES // 1024} KiB "
            "(or copies of it). Give more text, or set data.eval_fraction=0."
        )
    if "eval" not in filled:
        return replace(rule, forced_eval=min(hashes))
    return replace(rule, forced_train=max(hashes))


def _remove_stale_shards(folder: Path, records: Sequence[dict[str, Any]]) -> None:
    """Remove the shards of an earlier rule: a piece may now have none of their names."""
    for record in records:
        for shard in record["shards"].values():
            for name in shard["files"]:
                (folder / name).unlink(missing_ok=True)


def _entropy(tasks: Sequence[TokenizePiece]) -> float:
    """Entropy of the unigram distribution of what is predicted in training, in nats per token."""
    counts: npt.NDArray[np.int64] = sum(np.load(task.counts_path) for task in tasks)
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())


def _bytes_of(shards: Sequence[dict[str, Any]]) -> int | None:
    """Return the bytes of the shards' text; None if a piece was finished without counting them."""
    if any("bytes" not in shard for shard in shards):
        return None
    return sum(int(shard["bytes"]) for shard in shards)


def _commit(
    folder: Path,
    records: Sequence[dict[str, Any]],
    request: dict[str, Any],
    entropy: float,
    columns: Mapping[str, Column],
    readers: Sequence[PlugIn],
    chat_rows: str,
) -> None:
    """Write the manifest. Times and the place are left out: the same text gives the same bytes."""
    tokenizer: TokenizerFiles = {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in (".json", ".jinja")
    }
    encoder = encoder_in(folder)
    shards = {
        split: [record["shards"][split] for record in records if split in record["shards"]]
        for split in SPLITS
    }
    files = {name: file_entry(content) for name, content in tokenizer.items()}
    for shard in (*shards["train"], *shards["eval"]):
        files |= shard["files"]
    holds_samples = DATA_FORMATS[request.get("data_format", "by_suffix")].holds_samples
    beside = {"columns": {name: np.dtype(kind.dtype).str for name, kind in columns.items()}}
    manifest = {
        "format": COLUMNS_VERSION if columns else FORMAT_VERSION,
        "request": request,
        "fingerprint": digest({name: entry["sha256"] for name, entry in files.items()}),
        "vocab_size": encoder.vocab_size,
        "end_of_text_id": encoder.end_of_text_id,
        "bos_token": request.get("bos_token"),
        "dtype": token_dtype(encoder.vocab_size).str,
        **(beside if columns else {}),
        "unigram_entropy": entropy,
        **rejected_of(records),
        **({"chat_rows": chat_rows} if chat_rows else {}),
        "splits": {
            split: {
                "tokens": sum(shard["tokens"] for shard in of_split),
                "documents": sum(shard["documents"] for shard in of_split),
                "bytes": None if holds_samples else _bytes_of(of_split),
                **(
                    {"samples": sum(shard["documents"] for shard in of_split)}
                    if holds_samples
                    else {}
                ),
                **({"learnt": sum(s["learnt"] for s in of_split)} if LEARNT in columns else {}),
                "shards": [
                    {key: shard[key] for key in ("name", "tokens", "documents")}
                    for shard in of_split
                ],
            }
            for split, of_split in shards.items()
        },
        "files": files,
        **({"readers": [each.to_json() for each in readers]} if readers else {}),
    }
    flush_folder(folder)
    content = json.dumps(manifest, indent=1).encode() + b"\n"
    write_file(folder / MANIFEST, content, folder=folder)
    flush_folder(folder)
