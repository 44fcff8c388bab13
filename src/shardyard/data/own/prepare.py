"""Preparation of the user's dataset: text is tokenized as any, other items are checked.

- Text or dialogues: tokenized as a file of them is (``rows.py``).
- Items by number: a few are read twice and compared. Training reads them by number.
- Items that can only be iterated: written once (``stored.py``). Training reads them by number.

The folder is named by what was found, so the same dataset finds the same folder.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from shardyard.config.dataset_name import source_word
from shardyard.config.fingerprint import digest
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.data import Data
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row
from shardyard.data.own.dataset import SETTING, DatasetCode, OwnDataset
from shardyard.data.own.items import Fields, ItemForm, Kind, kind_of, shapes_of, too_long
from shardyard.data.own.rows import prepare_rows, scratch_folder
from shardyard.data.own.stored import write_items
from shardyard.data.prepare import (
    Progress,
    check_rows,
    chosen_tokenizer,
    is_finished,
    sole_writer,
    write_tokenizer,
)
from shardyard.data.shards import (
    ITEMS_VERSION,
    MANIFEST,
    read_items_metadata,
)
from shardyard.data.tokenizer import TokenizerFiles
from shardyard.data.work_units import SCRATCH, encoder_in, file_entry, write_file
from shardyard.errors import RequestError
from shardyard.io.files import flush_folder
from shardyard.log import warn

_PROBES = 8
"""Items that are read to identify a dataset and to find draws that no seed repeats."""


def prepare_own(
    recipe: Recipe,
    *,
    model_dir: Path | None,
    progress: Progress,
    rows: int | None = None,
    folder: Path | None = None,
) -> DatasetMetadata:
    """Prepare the dataset of ``data.module``; arguments are those of ``data.prepare.prepare``.

    Raises:
        RequestError: The user's function or an item of its dataset cannot be used.
        StorageError: The file system rejected a write.
    """
    opened = open_splits(recipe, progress)
    if opened.validation is not None and recipe.data.eval_fraction != Data().eval_fraction:
        raise RequestError(
            f"data.eval_fraction={recipe.data.eval_fraction}, but {SETTING}={recipe.data.module} "
            "returns an eval split. Leave data.eval_fraction out, or return None for that split."
        )
    if opened.kind == "rows":
        rows_of = opened.rows
        return prepare_rows(
            recipe, rows_of["train"], rows_of.get("eval"),
            model_dir=model_dir, progress=progress, rows=rows, folder=folder,
        )  # fmt: skip
    check_task(recipe, opened.kind)
    tokenizer = _tokenizer_of(recipe, model_dir, opened.kind)
    return prepare_items(recipe, opened, tokenizer, rows=rows, folder=folder)


@dataclass(frozen=True, kw_only=True)
class OpenedSplits:
    """The user's dataset, with its first item read."""

    kind: Kind
    train: OwnDataset
    validation: OwnDataset | None
    first: Any
    """First item of the train split."""
    others: Iterator[Any]
    """Items after it, of a dataset that can only be iterated."""

    @property
    def rows(self) -> dict[str, Iterator[Any]]:
        """Rows of each split."""
        train, validation = self.train, self.validation
        rows = train.items() if train.is_indexed else chain([self.first], self.others)
        return {"train": rows, **({} if validation is None else {"eval": validation.items()})}


def open_splits(recipe: Recipe, progress: Progress) -> OpenedSplits:
    """Open both splits of ``data.module`` and read the first item, which tells the kind.

    Raises:
        RequestError: The user's function or the item cannot be used, or there is no item.
    """
    progress(f"opening {SETTING}={recipe.data.module}", 0, 1)
    code = DatasetCode.of(recipe)
    train, validation = code.open("train"), code.open("eval")
    assert train is not None  # an error else
    items = iter([train.item(0)] if train.is_indexed else train.items())
    first = next(items, None)
    if first is None:
        raise RequestError(f"{SETTING}={recipe.data.module}: the train split has no items.")
    return OpenedSplits(
        kind=kind_of(first, recipe), train=train, validation=validation, first=first, others=items
    )


def prepare_items(
    recipe: Recipe,
    opened: OpenedSplits,
    tokenizer: TokenizerFiles | None,
    *,
    rows: int | None,
    folder: Path | None,
) -> DatasetMetadata:
    """Prepare items that training reads by number; arguments are those of ``prepare_own``.

    Args:
        tokenizer: Of token ids; None: it is not known.

    Raises:
        RequestError: An item cannot be used.
        StorageError: The file system rejected a write.
    """
    train, validation, first = opened.train, opened.validation, opened.first
    form = ItemForm(
        kind=opened.kind,
        is_causal=task_row(recipe.task.name).is_causal is True,
        attends_across=recipe.data.attends_across,
        num_classes=None if opened.kind != "image" else len(_classes(train)),
    )
    if opened.kind != "tokens":
        form = replace(form, shapes=shapes_of(_fields(form, train, first, 0)))
    with scratch_folder(recipe.data) as scratch:
        if train.is_indexed:
            content = _probe(form, train, validation, recipe)
        else:
            items = chain([first], opened.others)
            content = _store(form, train, items, validation, scratch, recipe.data)
        content |= {
            "kind": opened.kind,
            "shapes": form.shapes,
            **({} if opened.kind != "image" else {"classes": _classes(train)}),
        }
        code = DatasetCode.of(recipe)
        return _commit(recipe, content, scratch, tokenizer, rows=rows, folder=folder, code=code)


def check_task(recipe: Recipe, kind: str) -> None:
    """Raise where the task or a setting does not read such items.

    Raises:
        RequestError: It says what to change.
    """
    row, data = task_row(recipe.task.name), recipe.data
    if not row.reads_items:
        raise RequestError(
            f"{SETTING}={data.module}: task.name={recipe.task.name} reads text, and its items are "
            f"{kind}. Return text under the key {data.text_key!r}."
        )
    for key, why in (
        ("pack", "its items are samples already, one each"),
        ("bos", "its items are token ids, or no text"),
        ("tokenizer_kind", "no tokenizer is trained on its items"),
    ):
        if getattr(data, key) != getattr(Data(), key):  # as JSON, a recipe gives all settings
            raise RequestError(
                f"data.{key}={getattr(data, key)} has no effect with {SETTING}={data.module}: "
                f"{why}. Leave it out."
            )
    if data.too_long == "drop":
        raise RequestError(
            "data.too_long=drop needs the length of every item before training, and "
            f"{SETTING}={data.module} is read while training. Use cut, or drop them in your "
            "dataset."
        )


def _tokenizer_of(recipe: Recipe, model_dir: Path | None, kind: str) -> TokenizerFiles | None:
    """The tokenizer to keep next to token ids; None: there is none, or the items are no tokens."""
    data, task = recipe.data, recipe.task
    if kind != "tokens":
        return None
    if data.tokenizer == "train":
        raise RequestError(
            f"data.tokenizer=train: {SETTING}={data.module} returns token ids, so they have a "
            "tokenizer already. Name its folder, or leave it out and set data.vocab_size."
        )
    tokenizer = chosen_tokenizer(recipe, model_dir)
    if tokenizer is not None:
        return tokenizer
    needs = {
        "task.name=masked_lm": not task_row(task.name).is_causal,
        f"task.generate_tokens={task.generate_tokens}": task.generate_tokens > 0,
    }
    for setting, is_needed in needs.items():
        if is_needed:
            raise RequestError(
                f"{setting} needs the tokenizer of the ids that {SETTING}={data.module} returns. "
                "Set data.tokenizer to its folder."
            )
    return None


def _classes(dataset: OwnDataset) -> list[str]:
    """Names of the classes, as torchvision's and Hugging Face's datasets have them."""
    own = dataset.dataset
    names = getattr(own, "classes", None)
    features = getattr(own, "features", None)
    if names is None and isinstance(features, Mapping):
        found = (getattr(features.get(key), "names", None) for key in ("label", "labels"))
        names = next((each for each in found if each), None)
    if not isinstance(names, list | tuple) or not names:
        raise RequestError(
            f"{SETTING}: the dataset of the train split has no class names. Give it an attribute "
            "`classes`, a list of their names in the order of their numbers, as torchvision's "
            "datasets have."
        )
    return [str(name) for name in names]


def _fields(form: ItemForm, dataset: OwnDataset, item: Any, index: int) -> Fields:
    try:
        return form.fields(item)
    except ValueError as error:
        raise dataset.rejected(item, index, str(error)) from error


def _probe(
    form: ItemForm, train: OwnDataset, validation: OwnDataset | None, recipe: Recipe
) -> dict[str, Any]:
    """Describe datasets whose items have numbers: lengths, and a digest of a few items."""
    if validation is not None and not validation.is_indexed:
        raise RequestError(
            f"{SETTING}={recipe.data.module}: the train split has numbered items, and the eval "
            "split has not. Return the same kind of dataset for both."
        )
    samples = {"train": len(train), "eval": 0 if validation is None else len(validation)}
    content: dict[str, Any] = {**_divided(samples, recipe.data), "probes": []}
    for dataset in (train, validation):
        if dataset is None or not len(dataset):
            continue
        last = len(dataset) - 1
        places = sorted({last * number // (_PROBES - 1) for number in range(_PROBES)})
        items = [dataset.item(place) for place in places]
        arrays = [_fields(form, dataset, *each) for each in zip(items, places, strict=True)]
        _check_lengths(arrays, recipe)
        found = [_digest(each) for each in arrays]
        again = [_digest(_fields(form, dataset, dataset.item(place), place)) for place in places]
        if found == again:
            content["probes"].append(found)
            continue
        warn(
            f"{SETTING}={recipe.data.module}: items of the {dataset.split} split differ between "
            "two reads with equal seeds, so a resumed run is not exact. Draw random numbers from "
            "`random`, `numpy.random` or `torch` without seeding them, which Shardyard seeds for "
            "each item."
        )
    return content


def _check_lengths(items: Iterable[Fields], recipe: Recipe) -> None:
    """Raise where an item is too long for a sample: before training, for those that are read."""
    seq_len = recipe.data.seq_len
    longest = max(len(fields.get("tokens", ())) for fields in items)
    if isinstance(seq_len, int) and longest > seq_len and recipe.data.too_long == "refuse":
        raise too_long(longest, recipe)


def _divided(samples: dict[str, int], data: Data) -> dict[str, Any]:
    """Hold a share of the train items out, where the dataset has no eval split of its own."""
    is_divided = not samples["eval"] and data.eval_fraction > 0 and samples["train"] > 1
    if is_divided:
        validation = min(max(1, round(samples["train"] * data.eval_fraction)), samples["train"] - 1)
        samples = {"train": samples["train"] - validation, "eval": validation}
    return {"samples": samples, "is_divided": is_divided}


def _digest(fields: Fields) -> str:
    found = hashlib.sha256(json.dumps(shapes_of(fields)).encode())
    for _, array in sorted(fields.items()):
        found.update(array.tobytes())
    return found.hexdigest()[:16]


def _store(
    form: ItemForm,
    train: OwnDataset,
    items: Iterable[Any],
    validation: OwnDataset | None,
    scratch: Path,
    data: Data,
) -> dict[str, Any]:
    """Write the items of both splits; a split without an end never finishes."""

    def arrays(dataset: OwnDataset, found: Iterable[Any]) -> Iterator[Fields]:
        for number, item in enumerate(found):
            yield _fields(form, dataset, item, number)

    stored: dict[str, Any] = {}
    files: dict[str, Any] = {}
    splits = [(train, items)]
    if validation is not None:
        splits.append((validation, validation.items()))
    for dataset, found in splits:
        written, entries = write_items(scratch, dataset.split, arrays(dataset, found))
        stored[dataset.split] = written
        files |= entries
    samples = {split: stored[split]["samples"] if split in stored else 0 for split in _SPLITS}
    return {**_divided(samples, data), "stored": stored, "files": files}


_SPLITS = ("train", "eval")


def _commit(
    recipe: Recipe,
    content: dict[str, Any],
    scratch: Path,
    tokenizer: TokenizerFiles | None,
    *,
    rows: int | None,
    folder: Path | None,
    code: DatasetCode,
) -> DatasetMetadata:
    """Write the folder of the dataset, the manifest last, unless it is there."""
    data = recipe.data
    request = {
        "format": ITEMS_VERSION,
        "module": code.import_path,
        "settings": dict(code.settings),
        "items": content,
        "tokenizer": None if tokenizer is None else _digest_of_files(tokenizer),
        "vocab_size": data.vocab_size if tokenizer is None else None,
    }
    if folder is None:
        word = source_word(code.import_path.partition(":")[2])
        above = Path(data.dir).expanduser().resolve()
        folder = above / f"{word}-{digest(request)}"
    if not is_finished(folder):
        with sole_writer(folder, lambda *_: None):
            if not (folder / MANIFEST).exists():
                _write_folder(folder, recipe, content, request, scratch, tokenizer, rows=rows)
            shutil.rmtree(folder / SCRATCH, ignore_errors=True)
    return read_items_metadata(folder)


def _write_folder(
    folder: Path,
    recipe: Recipe,
    content: dict[str, Any],
    request: dict[str, Any],
    scratch: Path,
    tokenizer: TokenizerFiles | None,
    *,
    rows: int | None,
) -> None:
    files = dict(content.get("files", {}))
    for name in files:
        (scratch / name).replace(folder / name)
    vocab_size = recipe.data.vocab_size if rows is None else rows
    if tokenizer is not None:
        write_tokenizer(folder, recipe.data, tokenizer, lambda: iter(()))
        files |= {name: file_entry(each) for name, each in tokenizer.items()}
        vocab_size = encoder_in(folder).vocab_size
        check_rows(folder, recipe, rows=rows, model_dir=None)
    manifest = {
        "format": ITEMS_VERSION,
        "request": request,
        "fingerprint": digest({**request, "format": None}),
        "vocab_size": vocab_size if content["kind"] == "tokens" else 0,
        "splits": {split: {"samples": content["samples"][split]} for split in _SPLITS},
        **{key: value for key, value in content.items() if key not in ("samples", "files")},
        "files": files,
    }
    flush_folder(folder)
    write_file(folder / MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n", folder=folder)
    flush_folder(folder)


def _digest_of_files(files: Mapping[str, bytes]) -> str:
    """Digest of files, by name and content."""
    return digest({name: hashlib.sha256(each).hexdigest() for name, each in files.items()})
