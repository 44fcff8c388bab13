"""Writes samples as BERT's h5 files, for programs that read these.

Shape suffixes: N = samples, L = tokens of a sample, P = most hidden tokens of a sample.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shardyard.data.extras import extra
from shardyard.data.micro_batch import IGNORED, MicroBatch
from shardyard.data.readers.bert_h5 import ARRAYS
from shardyard.data.samples import Stream
from shardyard.errors import StorageError

Told = Callable[[str, int, int], None]
"""Called with what is being done, and how much of how much is done."""

_AT_ONCE = 256
_FILE_SAMPLES = 2**17
"""Samples of a file; some 20 MB packed at 128 tokens."""


def write_h5(stream: Stream, folder: Path, *, epochs: int, split: str, told: Told) -> list[Path]:
    """Write what a training of so many epochs sees, in its order, as files ``SPLIT_00000.hdf5``.

    Args:
        stream: Of pairs, with what a task hides of them.
        told: Of samples.

    Raises:
        RequestError: h5py is not installed.
        StorageError: The file system refused.
    """
    h5py = extra("h5", "h5py", what="an h5 file")
    total = stream.num_samples * epochs
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, begin in enumerate(range(0, total, _FILE_SAMPLES)):
            path = folder / f"{split}_{number:05d}.hdf5"
            part = path.with_suffix(".part")
            with h5py.File(part, "w") as file:
                _fill(file, stream, range(begin, min(begin + _FILE_SAMPLES, total)), total, told)
            part.replace(path)
            paths.append(path)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error}. Check that the folder is yours and has room "
            "(`df -h`), or name another with --to."
        ) from error
    return paths


def _fill(file: Any, stream: Stream, positions: range, total: int, told: Told) -> None:
    parts = [*_rows(stream, positions, total, told)]
    most = max(part["masked_lm_positions"].shape[1] for part in parts)
    for name, dtype in ARRAYS.items():
        rows = [_widened(part[name], most) if "_lm_" in name else part[name] for part in parts]
        file.create_dataset(name, data=np.concatenate(rows).astype(dtype), compression="gzip")


def _rows(
    stream: Stream, positions: range, total: int, told: Told
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    for begin in range(positions.start, positions.stop, _AT_ONCE):
        rows = range(begin, min(begin + _AT_ONCE, positions.stop))
        yield arrays_of(stream.micro_batch(rows, len(rows)))
        told("writing h5 files", rows.stop, total)


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
