"""From finished pieces to a data set: classes, one index a split, the manifest."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shardyard.config.fingerprint import digest
from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.data.images.index import OWN_FILE, ROW, Rows, index_name, names_name
from shardyard.data.images.order import Window
from shardyard.data.images.work_units import ImagePiece, npy_bytes
from shardyard.data.shards import IMAGES_VERSION, MANIFEST
from shardyard.data.work_units import SPLITS, file_entry, write_file
from shardyard.errors import RequestError, SourceError
from shardyard.io.files import flush_folder

_BLOCK_BYTES = 4 * 2**20
"""Read at once: a request to S3 then takes longer to answer than to begin."""
_MOST_IN_BLOCK = 4096
_SHOWN = 5
_LEFT_OUT = "left-out.txt"

Record = Mapping[str, Any]
Label = int | str


def class_numbers(
    records: Sequence[Record], *, by_number: bool
) -> tuple[list[str], dict[Label, int]]:
    """Names of the classes in their order, and the number of each label of the source.

    Args:
        by_number: Whether whole numbers are what they say; else they are names too.

    Raises:
        SourceError: Labels are no classes.
    """
    names_by_label: dict[Label, str | None] = {}
    for record in records:
        for label, name in record["classes"]:
            names_by_label[label] = names_by_label.get(label) or name
    numbers = [label for label in names_by_label if isinstance(label, int)]
    if len(numbers) < len(names_by_label) or not by_number:
        names = sorted(str(label) for label in names_by_label)
        order = {name: number for number, name in enumerate(names)}
        return names, {label: order[str(label)] for label in names_by_label}
    largest = max(numbers)
    if largest >= 2 * len(numbers) + 1000:
        raise SourceError(
            f"labels go up to {largest:,}, but only {len(numbers):,} of these numbers occur: they "
            "are not class numbers, or belong to another dataset. Correct them, or write names."
        )
    names = [names_by_label.get(number) or str(number) for number in range(largest + 1)]
    return names, {number: number for number in numbers}


def commit(
    folder: Path,
    pieces: Sequence[ImagePiece],
    request: Mapping[str, Any],
    *,
    parts: Sequence[SourceFile] | None,
    by_number: bool,
) -> None:
    """Write the index of both splits and, last, the manifest.

    Args:
        parts: Tar shards of the source that pictures stay in, one for each piece; empty: they stay
            in files of their own. None: they are packed.

    Raises:
        RequestError: A class has no picture to train on.
        SourceError: Labels are no classes.
        StorageError: The file system rejected a write.
    """
    records = [record for piece in pieces if (record := piece.finished()) is not None]
    assert len(records) == len(pieces)
    names, numbers = class_numbers(records, by_number=by_number)
    files: dict[str, Any] = {}
    splits: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    labels: list[str] = []
    window = Window(block=1)
    for split in SPLITS:
        index = _Index(pieces, records, split, numbers)
        index.mark_own_files(parts)
        for name, array in ((index_name(split), index.rows), (names_name(split), index.names)):
            content = npy_bytes(array)
            write_file(folder / name, content, folder=folder)
            files[name] = file_entry(content)
        files |= index.shards
        splits[split] = index.manifest_entry(parts)
        labels.append(hashlib.sha256(index.rows["label"].tobytes()).hexdigest())
        counts[split] = np.bincount(index.rows["label"], minlength=len(names))
        if split == "train" and (parts is None or parts):
            window = choose_window(index.rows)
    _check_train_classes(names, counts, request)
    _write_excluded(folder, records)
    contents = [
        about.get("file", about)["sha256"]
        for record in records
        for about in record["splits"].values()
    ]
    manifest = {
        "format": IMAGES_VERSION,
        "request": request,
        "fingerprint": digest([contents, labels, names, asdict(window)]),
        "classes": names,
        "window": asdict(window),
        "left_out": sum(record["num_broken"] for record in records),
        "unvalidated": _classes_without_validation(names, counts),
        "splits": splits,
        "files": files,
    }
    flush_folder(folder)
    content = json.dumps(manifest, indent=1).encode() + b"\n"
    write_file(folder / MANIFEST, content, folder=folder)
    flush_folder(folder)


def choose_window(rows: Rows) -> Window:
    """Choose how pictures are mixed: in blocks of neighbours where these are mixed already.

    Where many neighbours are of one class (unshuffled shards), each picture is read separately,
    from anywhere.
    """
    labels = rows["label"]
    if len(rows) < 2 or not is_mixed(labels):
        return Window(block=1)
    mean_bytes = float(rows["size"].mean()) + 1
    block = 2 ** max(0, int(np.log2(_BLOCK_BYTES / mean_bytes)))
    # no larger than the split: the order walks over every place behind its last picture
    block = min(block, _MOST_IN_BLOCK, 2 ** int(np.log2(len(rows))))
    return Window(block=block, run=min(16, 4 * block))


def is_mixed(labels: Any) -> bool:
    """Whether neighbours are of one class hardly more often than any two pictures are."""
    shares = np.bincount(labels) / len(labels)
    by_chance = float((shares**2).sum())
    of_neighbours = float((labels[1:] == labels[:-1]).mean())
    deviation = (by_chance / len(labels)) ** 0.5
    return bool(of_neighbours <= 1.5 * by_chance + 0.02 + 4 * deviation)


class _Index:
    """Rows of one split of all pieces, in the order of the pieces."""

    def __init__(
        self,
        pieces: Sequence[ImagePiece],
        records: Sequence[Record],
        split: str,
        numbers: Mapping[Label, int],
    ) -> None:
        rows, names = [], []
        self.shards: dict[str, Any] = {}
        self._own: list[dict[str, Any]] = []
        self._pieces: list[int] = []
        for piece, record in zip(pieces, records, strict=True):
            if split not in record["splits"]:
                continue
            about = record["splits"][split]
            of_piece = np.load(piece.array_path(split, "rows"), allow_pickle=False)
            table = np.array([numbers[label] for label, _ in record["classes"]], np.int32)
            of_piece["label"] = table[of_piece["label"]]
            of_piece["part"] = len(self._pieces)
            self._pieces.append(piece.number)
            if "shard" in about:
                self.shards[about["shard"]] = about["file"]
                self._own.append(
                    {
                        "name": about["shard"],
                        "path": None,
                        "version": 0,
                        "bytes": about["file"]["bytes"],
                    }
                )
            rows.append(of_piece)
            names.append(np.load(piece.array_path(split, "names"), allow_pickle=False))
        self.rows: Rows = np.concatenate(rows) if rows else np.empty(0, ROW)
        self.names = np.concatenate(names) if names else np.empty(0, "S1")

    def mark_own_files(self, parts: Sequence[SourceFile] | None) -> None:
        if parts is not None and not parts:
            self.rows["part"] = OWN_FILE

    def manifest_entry(self, parts: Sequence[SourceFile] | None) -> dict[str, Any]:
        listed = self._own
        if parts:
            listed = [
                {"name": p.name, "path": p.path, "version": p.version, "bytes": p.size_bytes}
                for p in (parts[number] for number in self._pieces)
            ]
        return {
            "samples": len(self.rows),
            "bytes": int(self.rows["size"].sum(dtype=np.int64)),
            "parts": listed,
        }


def _check_train_classes(
    names: Sequence[str], counts: Mapping[str, Any], request: Mapping[str, Any]
) -> None:
    """Raise if a class has only validation pictures."""
    is_alone = (counts["train"] == 0) & (counts["eval"] > 0)
    alone = [name for name, it_is in zip(names, is_alone, strict=True) if it_is]
    if not alone:
        return
    shown_names = ", ".join(escape_text(name) for name in alone[:_SHOWN])
    more = f" and {len(alone) - _SHOWN} more" if len(alone) > _SHOWN else ""
    remedy = (
        "Give pictures of them in train, or take them out of the validation data."
        if request["held_out"] is not None
        else "Give more pictures of them, or a smaller data.eval_fraction."
    )
    raise RequestError(
        f"data.source: {len(alone)} of {len(names)} classes have pictures only in the validation "
        f"split ({shown_names}{more}), so they could not be learnt. {remedy}"
    )


def _classes_without_validation(names: Sequence[str], counts: Mapping[str, Any]) -> list[str]:
    """Classes that are trained on and not validated on, where others are."""
    if not counts["eval"].sum():
        return []
    is_missing = (counts["eval"] == 0) & (counts["train"] > 0)
    return [name for name, it_is in zip(names, is_missing, strict=True) if it_is]


def _write_excluded(folder: Path, records: Sequence[Record]) -> None:
    told = [line for record in records for line in record["broken"]]
    if told:
        content = ("\n".join(told) + "\n").encode(errors="surrogateescape")
        write_file(folder / _LEFT_OUT, content, folder=folder)
