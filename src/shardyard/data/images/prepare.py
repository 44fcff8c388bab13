"""Prepare pictures for training: find them, check them, pack them into shards, index them.

Class folders and Parquet files are packed into tar shards of about 256 MB, in webdataset's
layout. Plain tar shards stay where they are, unless ``data.images.pack`` says otherwise.
What holds for text (``data/prepare.py``) holds here: the folder is named by the request,
finished pieces outlive a kill, the manifest comes last. The result is the same for any
number of workers.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardyard.config.dataset_name import source_word
from shardyard.config.fingerprint import digest
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.data import Data
from shardyard.config.schema.recipe import Recipe
from shardyard.config.sources import is_remote
from shardyard.control_groups import usable_cores
from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.data.images.commit import commit
from shardyard.data.images.image_iter import (
    images_of_digits,
    images_of_folders,
    images_of_parquet,
    images_of_tar,
)
from shardyard.data.images.index import read_metadata
from shardyard.data.images.sources import Listing, first_names, list_images
from shardyard.data.images.tar import InTar
from shardyard.data.images.work_units import ImageOptions, ImagePiece
from shardyard.data.order import permute_many
from shardyard.data.prepare import Progress, is_finished, sole_writer
from shardyard.data.shards import IMAGES_VERSION, MANIFEST, read_manifest
from shardyard.data.work_units import SCRATCH, SPLITS, ValidationRule
from shardyard.data.workers import run_unfinished
from shardyard.errors import DataError, RequestError, SourceError

_SHARD_BYTES = 256 * 10**6
_LEAST_BYTES = 2**20
_PACKING_KEY = 0x1A6E5
"""Key of the order in which pictures of class folders are packed: neighbours are of any
class.
"""


def prepare_images(
    recipe: Recipe,
    *,
    model_dir: Path | None,  # noqa: ARG001 - as every task's
    progress: Progress,
    rows: int | None = None,  # noqa: ARG001 - as every task's
    folder: Path | None = None,
) -> DatasetMetadata:
    """Prepare the pictures of one source; return at once if they are there already.

    Args:
        folder: Folder where another node has prepared the same; None: named by the request.

    Raises:
        RequestError: The source does not exist, or its classes or splits cannot be had.
        SourceError: A picture or a shard is broken.
        DataError: The source changes meanwhile, or what is there already is damaged.
        StorageError: The file system rejected a write.
    """
    data = recipe.data
    listing = list_images(recipe)
    packs = is_packed(data, listing)
    _check_eval_fraction(data, listing)
    request = request_of(data, listing, packs=packs)
    if folder is None:
        name = f"{source_word(data.source)}-{digest(request)}"
        folder = Path(data.dir).expanduser().resolve() / name
    if not is_finished(folder):
        with sole_writer(folder, progress):
            if not (folder / MANIFEST).exists():  # another process may just have written it
                _build(folder, recipe, listing, request, progress)
            # What a dying worker adds meanwhile is removed by the next call.
            shutil.rmtree(folder / SCRATCH, ignore_errors=True)
    manifest = read_manifest(folder, (IMAGES_VERSION,))
    metadata = replace(
        read_metadata(folder),
        unvalidated_classes=first_names(manifest.get("unvalidated", ())),
        broken_images=manifest.get("left_out", 0),
    )
    return listing.with_file_lists(metadata)


def is_packed(data: Data, listing: Listing) -> bool:
    """Whether pictures are written into shards of ours.

    Raises:
        RequestError: data.images.pack=false, and they cannot stay where they are.
    """
    packs = data.images.pack
    can_stay = all(file.format == "tar" for file in listing.files) or (
        listing.kind == "folders"
        and not any(isinstance(file, InTar) or is_remote(file.path) for file in listing.files)
    )
    if packs == "auto":
        return not (listing.kind == "shards" and can_stay)
    if not packs and not can_stay:
        raise RequestError(
            f"data.images.pack=false: data.source={data.source!r} are single files elsewhere, "
            "Parquet or packed tar files, of which no picture is read by itself. Leave "
            "data.images.pack out."
        )
    return packs


def _check_eval_fraction(data: Data, listing: Listing) -> None:
    usual = Data().eval_fraction
    if listing.has_validation_split and data.eval_fraction != usual:
        raise RequestError(
            f"data.eval_fraction={data.eval_fraction}, but data.source={data.source!r} has a "
            f"{listing.validation_source or 'fixed'} split, which is validated on. Leave "
            "data.eval_fraction out, or name only the train part."
        )


def request_of(data: Data, listing: Listing, *, packs: bool) -> dict[str, Any]:
    """All that the data set depends on; files by place, size and time of change, as of text, and by
    name, which may say the class."""
    images = data.images
    files = [[file.path, file.name, file.size_bytes, file.version] for file in listing.files]
    return {
        "format": IMAGES_VERSION,
        "files": digest(files),
        "kind": listing.kind,
        # as before where names say it
        "held_out": "val"
        if listing.validation_source == "validation"
        else listing.validation_source,
        **(
            {"eval_files": digest([file.path for file in listing.chosen])} if listing.chosen else {}
        ),
        "eval_fraction": None if listing.has_validation_split else data.eval_fraction,
        "packed": packs,
        "checked": images.check,
        "broken": images.broken,
        "keys": None if listing.kind == "folders" else [images.image_key, images.label_key],
        **({"table": True} if listing.from_tables else {}),
    }


def _build(
    folder: Path, recipe: Recipe, listing: Listing, request: dict[str, Any], progress: Progress
) -> None:
    data = recipe.data
    workers = usable_cores() if data.workers == "auto" else data.workers
    options = ImageOptions(
        hold_out=ValidationRule(0.0 if listing.has_validation_split else data.eval_fraction),
        packs=request["packed"],
        checks=data.images.check,
        leaves_out=data.images.broken == "leave_out",
    )
    pieces = pieces_of(folder, listing, data, options)
    on_progress = partial(progress, "looking at pictures")
    records = run_unfinished(pieces, workers=workers, on_progress=on_progress)
    forced = _forced_hold_out(records, data, options.hold_out)
    if forced != options.hold_out:
        options = replace(options, hold_out=forced)
        pieces = [replace(piece, options=options) for piece in pieces]
        run_unfinished(pieces, workers=workers, on_progress=on_progress)
    if list_images(recipe) != listing:
        raise DataError(
            f"data.source={data.source!r} changed while it was being prepared, so it may mix old "
            "and new pictures. Prepare again when no other process writes there."
        )
    stay = listing.files if listing.kind == "shards" else ()
    parts = None if request["packed"] else stay
    commit(folder, pieces, request, parts=parts, by_number=listing.classes_are_numbers)


def pieces_of(
    folder: Path, listing: Listing, data: Data, options: ImageOptions
) -> list[ImagePiece]:
    """Return the work, in parts that depend only on the source."""
    images = data.images
    if listing.kind == "folders":
        return _folder_pieces(folder, listing, options)
    pieces = []
    for number, file in enumerate(listing.files):
        split = listing.split_of(file)
        if listing.kind == "digits":
            read = partial(images_of_digits)
        elif listing.kind == "shards":
            read = partial(
                images_of_tar, file, split, label_key=images.label_key, scratch=folder / SCRATCH
            )
        else:
            read = partial(
                images_of_parquet,
                file,
                split,
                image_key=images.image_key,
                label_key=images.label_key,
            )
        words = escape_text(file.path)
        pieces.append(ImagePiece(folder, number, read, words, file.size_bytes, options))
    return pieces


def _folder_pieces(folder: Path, listing: Listing, options: ImageOptions) -> list[ImagePiece]:
    """Files in an order that mixes classes, some 256 MB a piece, or less of a small source."""
    count = len(listing.files)
    order = permute_many(np.arange(count), count, key=_PACKING_KEY)
    piece_bytes = min(max(listing.size_bytes // 32, _LEAST_BYTES), _SHARD_BYTES)
    pieces: list[ImagePiece] = []
    files: list[SourceFile] = []
    filled_bytes = 0
    for place, index in enumerate(order.tolist()):
        files.append(listing.files[index])
        filled_bytes += files[-1].size_bytes
        if filled_bytes >= piece_bytes or place == count - 1:
            read = partial(
                images_of_folders,
                tuple(files),
                tuple(map(listing.label_of, files)),
                tuple(map(listing.split_of, files)),
            )
            words = f"{escape_text(files[0].path)} and {len(files) - 1} other pictures"
            pieces.append(ImagePiece(folder, len(pieces), read, words, filled_bytes, options))
            files, filled_bytes = [], 0
    return pieces


def _forced_hold_out(
    records: Sequence[dict[str, Any]], data: Data, rule: ValidationRule
) -> ValidationRule:
    """The rule of the held-out split, bent for few pictures whose hashes leave a split empty."""
    filled = {split for record in records for split in record["splits"]}
    hashes = [number for record in records for number in record["hashes"]]
    if not hashes:
        raise SourceError(f"data.source={data.source!r} holds no picture that can be read.")
    if rule.fraction == 0 or filled == set(SPLITS):
        return rule
    if min(hashes) == max(hashes):
        raise RequestError(
            f"data.eval_fraction={data.eval_fraction} asks for a held-out split, but "
            f"data.source={data.source!r} is one picture, or copies of it. Give more, or set "
            "data.eval_fraction=0."
        )
    if "eval" not in filled:
        return replace(rule, forced_eval=min(hashes))
    return replace(rule, forced_train=max(hashes))
