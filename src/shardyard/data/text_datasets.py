"""Text datasets of a recipe, as `prepare` makes them: one, or one per source of a mixture.

The datasets of a mixture's sources are next to its folder (``shards.py``). Other
mixtures of the same tokenizer use them too, with other weights or other sources.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from shardyard.config.data_choices import SLOTS, slots_of
from shardyard.config.dataset_name import MIXTURE_NAME
from shardyard.config.fingerprint import digest
from shardyard.config.mixture import single_source_recipes
from shardyard.config.resolved import DatasetMetadata, SourceMetadata
from shardyard.config.schema.data import Share
from shardyard.config.schema.recipe import Recipe
from shardyard.data.own.mixture import MixtureSources, opened_sources
from shardyard.data.prepare import (
    Progress,
    bos_token_of,
    check_rows,
    chosen_tokenizer,
    prepare,
    request_of,
    sole_writer,
    training_texts,
    write_tokenizer,
)
from shardyard.data.shards import LEARNT, MIXTURE, TokenShards
from shardyard.data.splits import find_corpus
from shardyard.data.work_units import SCRATCH, write_file
from shardyard.errors import RequestError
from shardyard.io.files import flush_folder, read_json_object

_READ_TOKENS = 2**24
"""Tokens of a dataset that are read at a time to count them."""


def prepare_text(
    recipe: Recipe,
    *,
    model_dir: Path | None,
    progress: Progress,
    rows: int | None = None,
    folder: Path | None = None,
) -> DatasetMetadata:
    """Prepare what a recipe asks for; returns at once if it is there already.

    Arguments and errors are those of ``data.prepare.prepare``.
    """
    if not recipe.data.mixture:
        return prepare(recipe, model_dir=model_dir, progress=progress, rows=rows, folder=folder)
    names = [share.name for share in recipe.data.mixture]
    alone = dict(zip(names, single_source_recipes(recipe), strict=True))
    with opened_sources(
        recipe, alone, model_dir=model_dir, progress=progress, rows=rows
    ) as sources:
        return _prepare_mixture(
            recipe, sources, model_dir=model_dir, progress=progress, rows=rows, folder=folder
        )


def _prepare_mixture(
    recipe: Recipe,
    sources: MixtureSources,
    *,
    model_dir: Path | None,
    progress: Progress,
    rows: int | None,
    folder: Path | None,
) -> DatasetMetadata:
    tokenizer = chosen_tokenizer(recipe, model_dir)
    corpus = {name: find_corpus(part).files for name, part in sources.files.items()}
    shares = recipe.data.mixture
    slots = slots_of([share.weight for share in shares])

    def request(name: str) -> dict[str, Any]:
        if name in sources.items:
            return {"items": sources.items[name].fingerprint}
        data = sources.files[name].data
        bos_token = bos_token_of(data, tokenizer, model_dir)
        return request_of(data, corpus[name], tokenizer, bos_token, is_part=True)

    if folder is None:
        above = Path(recipe.data.dir).expanduser().resolve()
        requests = [
            [count, request(share.name)] for count, share in zip(slots, shares, strict=True)
        ]
        folder = above / f"{MIXTURE_NAME}-{digest(requests)}"

    def texts() -> Iterator[str]:
        by_share = zip(slots, shares, strict=True)
        return chain.from_iterable(
            training_texts(
                sources.files[share.name].data, corpus[share.name], progress, share=count / SLOTS
            )
            for count, share in by_share
            if share.name in corpus
        )

    if not (folder / MIXTURE).exists():
        with sole_writer(folder, progress):
            write_tokenizer(folder, recipe.data, tokenizer, texts, model_dir)
            check_rows(folder, recipe, rows=rows, model_dir=model_dir)
    found = []
    for count, share in zip(slots, shares, strict=True):
        metadata = sources.items.get(share.name)
        if metadata is None:
            told = partial(report_progress_of, progress, share.name)
            shared = with_prepared_tokenizer(sources.files[share.name], folder)
            metadata = prepare(shared, model_dir=None, progress=told, is_part=True)
            _check_training_text(share, metadata, recipe)
        found.append(SourceMetadata(name=share.name, slots=count, data=metadata))
    if not (folder / MIXTURE).exists():
        with sole_writer(folder, progress):
            _commit(folder, found)
    return _combine_metadata(folder, found)


def with_prepared_tokenizer(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe of a dataset that takes the tokenizer of another, with the tokens added to it."""
    no_more = {"tokenizer_kind": "bpe", "add_tokens": (), "add_special_tokens": ()}
    shared = recipe.data.model_copy(update={"tokenizer": str(folder), **no_more})
    return recipe.model_copy(update={"data": shared})


def report_progress_of(
    progress: Progress, name: str, activity: str, done_bytes: int, total_bytes: int
) -> None:
    """Report progress of one of several datasets, with its name."""
    progress(f"{name}: {activity}", done_bytes, total_bytes)


def _check_training_text(share: Share, metadata: DatasetMetadata, recipe: Recipe) -> None:
    if metadata.train_tokens < 2:
        raise RequestError(
            f"data.mixture: {share.name!r} ({share.source or share.module}) has no document left "
            f"to train on: data.eval_fraction={recipe.data.eval_fraction} validates on all of "
            "them. Lower it, or give more text."
        )


def _commit(folder: Path, parts: Sequence[SourceMetadata]) -> None:
    content = {
        "format": 1,
        "unigram_entropy": _entropy(parts),
        "parts": [
            {
                "name": part.name,
                "slots": part.slots,
                "folder": os.path.relpath(part.data.dir, folder),
                "fingerprint": part.data.fingerprint,
            }
            for part in parts
        ],
    }
    flush_folder(folder)
    write_file(folder / MIXTURE, json.dumps(content, indent=1).encode() + b"\n", folder=folder)
    flush_folder(folder)
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)


def _entropy(parts: Sequence[SourceMetadata]) -> float:
    """Return the unigram entropy of the predicted tokens of all sources, in nats per token.

    Sources are weighted by their share of the mixture. 0: items are among them, which are not read.
    """
    if any(part.data.item_kind is not None for part in parts):
        return 0.0
    shares = np.zeros(parts[0].data.vocab_size)
    for part in parts:
        shards = TokenShards(Path(part.data.dir), "train")
        counts = np.zeros(len(shares), dtype=np.int64)
        for start in range(0, shards.num_tokens, _READ_TOKENS):
            stop = min(start + _READ_TOKENS, shards.num_tokens)
            tokens = shards.read(start, stop)
            if part.data.train_learnt is not None:
                tokens = tokens[shards.read(start, stop, LEARNT) != 0]
            counts += np.bincount(tokens, minlength=len(shares))
        shares += counts / max(1, counts.sum()) * part.slots / SLOTS
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum())


def _combine_metadata(folder: Path, parts: Sequence[SourceMetadata]) -> DatasetMetadata:
    """Return the facts of a mixture: sums over its sources."""
    content = read_json_object(folder / MIXTURE)
    sets = [part.data for part in parts]

    def total(name: str) -> int:
        return sum(getattr(each, name) for each in sets)

    def optional_total(name: str) -> int | None:
        return None if any(getattr(each, name) is None for each in sets) else total(name)

    def trained_tokens(split: str) -> int | None:
        """Sum the learned tokens; in a source of running text next to dialogues, every token
        counts."""
        found = [getattr(each, f"{split}_learnt") for each in sets]
        if all(number is None for number in found):
            return None
        tokens = [getattr(each, f"{split}_tokens") for each in sets]
        return sum(
            int(all_of_it if number is None else number)
            for all_of_it, number in zip(tokens, found, strict=True)
        )

    return DatasetMetadata(
        dir=str(folder),
        fingerprint=digest([[part.slots, part.data.fingerprint] for part in parts]),
        vocab_size=sets[0].vocab_size,
        train_tokens=total("train_tokens"),
        eval_tokens=total("eval_tokens"),
        train_documents=total("train_documents"),
        eval_documents=total("eval_documents"),
        # 0 where the loss is not that of a token
        unigram_entropy=content["unigram_entropy"]
        if any(each.unigram_entropy for each in sets)
        else 0.0,
        bos_token=next((each.bos_token for each in sets if each.bos_token is not None), None),
        train_bytes=optional_total("train_bytes"),
        eval_bytes=optional_total("eval_bytes"),
        readers=tuple({json.dumps(one): one for each in sets for one in each.readers}.values()),
        parts=tuple(parts),
        too_long=optional_total("too_long"),
        train_places=optional_total("train_places"),
        train_learnt=trained_tokens("train"),
        eval_learnt=trained_tokens("eval"),
    )
