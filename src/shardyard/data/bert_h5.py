"""Writes samples as BERT's h5 files, for programs that read these.

Shape suffixes: N = samples, L = tokens of a sample, P = most hidden tokens of a sample.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shardyard.data.loader import IGNORED, MicroBatch, Samples
from shardyard.data.readers.bert_h5 import ARRAYS
from shardyard.data.readers.read_errors import extra
from shardyard.errors import RequestError, StorageError
from shardyard.io.files import publish_file

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many bytes of token ids of how many are done."""

_FIELDS = ("tokens", "targets", "positions", "segments", "next_sentence_labels")

_AT_ONCE = 256
_FILE_TOKENS = 2**23
"""Tokens of a file, which is held in memory before it is written."""


def write_splits(
    train: Samples, validation: Samples | None, folder: Path, *, epochs: int, progress: Progress
) -> None:
    """Write what a training of so many epochs sees, and once the validation split.

    Files of an earlier call are removed.

    Raises:
        RequestError: h5py is not installed, or samples are no pairs with masked tokens.
        StorageError: The file system rejected a write.
    """
    fields = train.micro_batch(range(1), 1).fields
    missing = [name for name in _FIELDS if name not in fields]
    if missing:
        raise RequestError(
            "h5 files hold pairs of texts with hidden tokens, and the samples of this task have "
            f"no {' and no '.join(missing)}. Set task.name=bert_pretraining."
        )
    written = write_h5(train, folder, epochs=epochs, split="train", progress=progress)
    if validation is not None:
        written += write_h5(validation, folder, epochs=1, split="eval", progress=progress)
    for path in {*folder.glob("*.hdf5"), *folder.glob("*.part")} - {*written}:
        path.unlink()  # of an earlier call that wrote more


def write_h5(
    stream: Samples, folder: Path, *, epochs: int, split: str, progress: Progress
) -> list[Path]:
    """Write so many epochs of a stream, in its order, as files ``SPLIT_00000.hdf5``."""
    h5py = extra("h5", "h5py", what="an h5 file")
    total = stream.num_samples * epochs
    of_file = max(1, _FILE_TOKENS // stream.micro_batch(range(1), 1)["tokens"].shape[1])
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, begin in enumerate(range(0, total, of_file)):
            path = folder / f"{split}_{number:05d}.hdf5"
            part = path.with_suffix(".part")
            with h5py.File(part, "w") as file:
                _fill(file, stream, range(begin, min(begin + of_file, total)), total, progress)
            publish_file(part, path)
            paths.append(path)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error}. Check that the folder is yours and has room "
            "(`df -h`), or choose another with data.dir."
        ) from error
    return paths


def _fill(file: Any, stream: Samples, positions: range, total: int, progress: Progress) -> None:
    parts = [*_rows(stream, positions, total, progress)]
    most = max(part["masked_lm_positions"].shape[1] for part in parts)
    for name, dtype in ARRAYS.items():
        rows = [_widened(part[name], most) if "_lm_" in name else part[name] for part in parts]
        file.create_dataset(name, data=np.concatenate(rows).astype(dtype), compression="gzip")


def _rows(
    stream: Samples, positions: range, total: int, progress: Progress
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    for begin in range(positions.start, positions.stop, _AT_ONCE):
        rows = range(begin, min(begin + _AT_ONCE, positions.stop))
        arrays = arrays_of(stream.micro_batch(rows, len(rows)))
        yield arrays
        sample_bytes = arrays["input_ids"][0].nbytes
        progress("writing h5 files", rows.stop * sample_bytes, total * sample_bytes)


def arrays_of(batch: MicroBatch) -> dict[str, npt.NDArray[Any]]:
    """The six arrays of a micro-batch of samples without rows of padding."""
    numbers = {name: _narrow(field) for name, field in batch.fields.items()}
    targets_NL = numbers["targets"]
    is_hidden_NL = targets_NL != IGNORED
    assert not is_hidden_NL[:, 0].any(), "[CLS] is hidden, and position 0 says that none is"
    counts_N = is_hidden_NL.sum(axis=1)
    positions_NP = np.zeros((len(targets_NL), max(1, counts_N.max())), dtype=np.int32)
    ids_NP = np.zeros_like(positions_NP)
    for row, count in enumerate(counts_N):
        positions_NP[row, :count] = np.flatnonzero(is_hidden_NL[row])
        ids_NP[row, :count] = targets_NL[row, is_hidden_NL[row]]
    is_text_NL = numbers["positions"] > 0  # padding stands at position 0
    is_text_NL[:, 0] = True
    return {
        "input_ids": numbers["tokens"],
        "input_mask": is_text_NL.astype(np.int8),
        "segment_ids": numbers["segments"].astype(np.int8),
        "masked_lm_positions": positions_NP,
        "masked_lm_ids": ids_NP,
        "next_sentence_labels": numbers["next_sentence_labels"].astype(np.int8),
    }


def _narrow(field: Tensor) -> npt.NDArray[np.int32]:
    narrow: npt.NDArray[np.int32] = field.numpy().astype(np.int32)
    return narrow


def _widened(array_NP: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    return np.pad(array_NP, ((0, 0), (0, width - array_NP.shape[1])))
