"""Prepares images in class folders: a list of files and classes, split for evaluation.

The folder is named by a fingerprint of the request, so the same request finds what is there; the
manifest, written last, is the commit.
"""

import json
from pathlib import Path
from typing import Any

from shardyard.config.fingerprint import digest
from shardyard.config.resolved import DataFacts
from shardyard.config.schema import Recipe
from shardyard.data.pieces import SCRATCH, HoldOut, hash_of, write_file
from shardyard.data.prepare import Progress, sole_writer
from shardyard.data.shards import MANIFEST
from shardyard.errors import RequestError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def prepare_images(
    recipe: Recipe,
    *,
    model_dir: Path | None,  # noqa: ARG001 - as data.prepare.prepare
    progress: Progress,
    rows: int | None = None,  # noqa: ARG001
    folder: Path | None = None,
) -> DataFacts:
    """List the images of ``data.source``, one folder a class; returns at once if it was done.

    Raises:
        RequestError: There is no such folder, or no images in it.
    """
    data = recipe.data
    source = Path(str(data.source)).expanduser().resolve()
    if not source.is_dir():
        raise RequestError(
            f"data.source={data.source!r} is no folder. Give one that holds a folder of images for "
            "each class."
        )
    classes = sorted(each.name for each in source.iterdir() if each.is_dir())
    files = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((source / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise RequestError(
            f"data.source={data.source!r} holds no images ({', '.join(SUFFIXES)}) in folders, one "
            "for each class."
        )
    listing = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path, _ in files]
    request = {"images": digest(listing), "eval_fraction": data.eval_fraction}
    if folder is None:
        folder = Path(data.dir).expanduser().resolve() / f"{source.name}-{digest(request)}"
    if not (folder / MANIFEST).exists():
        with sole_writer(folder, progress):
            _write(folder, files, classes, request, HoldOut(data.eval_fraction))
            (folder / SCRATCH).rmdir() if not any((folder / SCRATCH).iterdir()) else None
    return _facts(folder)


def _write(
    folder: Path,
    files: list[tuple[Path, int]],
    classes: list[str],
    request: dict[str, Any],
    rule: HoldOut,
) -> None:
    splits: dict[str, list[list[str | int]]] = {"train": [], "eval": []}
    for path, label in files:
        splits[rule.split_of(hash_of(str(path)))].append([str(path), label])
    content = {
        "request": request,
        "classes": classes,
        "splits": {name: {"files": listed} for name, listed in splits.items()},
    }
    write_file(folder / MANIFEST, json.dumps(content).encode(), folder=folder)


def _facts(folder: Path) -> DataFacts:
    content = json.loads((folder / MANIFEST).read_bytes())
    return DataFacts(
        dir=str(folder),
        fingerprint=digest([content["classes"], content["splits"]]),
        vocab_size=0,
        train_tokens=0,
        eval_tokens=0,
        train_documents=0,
        eval_documents=0,
        unigram_entropy=0.0,
        num_classes=len(content["classes"]),
        train_samples=len(content["splits"]["train"]["files"]),
        eval_samples=len(content["splits"]["eval"]["files"]),
    )
