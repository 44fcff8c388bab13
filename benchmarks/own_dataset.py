"""Items of a dataset of one's own beside torch's DataLoader with as many worker processes.

Images as normalized floats, (3, 224, 224), 600 KB each, drawn in advance, so that what is measured
is how items come from the reading processes into a batch. Both read the same items; the two take
turns in one process, and a round's ratio is of its own two times.

    python -m benchmarks.own_dataset
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.record import write_result
from shardyard.data.loader import Loader, MicroBatch
from shardyard.data.own.dataset import DatasetCode
from shardyard.data.own.items import ItemForm
from shardyard.data.own.readers import Readers, SplitReader
from shardyard.data.own.samples import ItemSet, ItemStream
from shardyard.data.samples import Sample, identity_prepare

ITEMS, SIDE = 512, 224
PAGE = 1024
"""Floats of a page of memory."""


class Images(Dataset[tuple[Tensor, int]]):
    """Float images that are slices of one array of noise."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.noise = torch.randn(3 * SIDE * SIDE + ITEMS, generator=generator)

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """A copy, as a decoded and normalized picture is new memory."""
        return self.noise[index : index + 3 * SIDE * SIDE].view(3, SIDE, SIDE).clone(), index % 10


def images(split: str) -> Dataset[Any] | None:
    """The dataset as ``data.module`` names it."""
    return Images() if split == "train" else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Time rounds of both; 1 if the dataset's items come below 0.9 of the DataLoader's rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the result file")
    asked = parser.parse_args(arguments)
    readers = Readers(_source(), asked.processes)
    feeds: dict[str, Callable[[], Iterator[Any]]] = {
        "shardyard": lambda: _ours(readers, asked.batch),
        "dataloader": _dataloader(asked.batch, asked.processes),
    }
    for feed in feeds.values():
        _items_per_s(feed(), asked.batch)
    rounds = []
    for number in range(asked.rounds):
        order = [*feeds] if number % 2 else [*reversed(feeds)]
        rates = {name: _items_per_s(feeds[name](), asked.batch) for name in order}
        rounds.append({**rates, "ratio": rates["shardyard"] / rates["dataloader"]})
        print({name: round(value, 2) for name, value in rounds[-1].items()}, flush=True)
    ratios = sorted(each["ratio"] for each in rounds)
    content = {
        "median_ratio": statistics.median(ratios),
        "ratios": [ratios[0], ratios[-1]],
        "batch": asked.batch,
        "processes": asked.processes,
        "bytes_per_item": 3 * SIDE * SIDE * 4,
        "rounds": rounds,
    }
    write_result("own-dataset", content, asked.out)
    return 0 if content["median_ratio"] >= 0.9 else 1


def _source() -> SplitReader:
    shapes = {"image": ("float32", (3, SIDE, SIDE)), "label": ("int64", ())}
    return SplitReader(
        code=DatasetCode(import_path="benchmarks.own_dataset:images"),
        form=ItemForm(kind="image", num_classes=10, shapes=shapes),
        samples={"train": ITEMS, "eval": 0},
        is_divided=False,
    )


def _ours(readers: Readers, batch: int) -> Iterator[MicroBatch]:
    zeros: dict[str, npt.NDArray[Any]] = {
        "image": np.zeros((3, SIDE, SIDE), np.float32), "label": np.zeros((), np.int64)
    }  # fmt: skip
    items = ItemSet(
        readers, "train", num_samples=ITEMS,
        to_sample=lambda fields: Sample(fields, 1), padding=Sample(zeros, 0),
    )  # fmt: skip
    stream = ItemStream(items, seed=0, prepare=identity_prepare)
    loader = Loader(
        stream, step_samples=batch, micro_batch=batch, rank=0, world_size=1,
        start=0, end=ITEMS, prefetch_steps=2, steps_at_once=2,
    )  # fmt: skip
    with loader:
        for (micro_batch,) in loader:
            yield micro_batch


def _dataloader(batch: int, processes: int) -> Callable[[], Iterator[Any]]:
    # Processes that stay, as ours do: their start is not what is measured.
    loader = DataLoader(
        Images(), batch, shuffle=True, num_workers=processes, persistent_workers=True
    )
    return lambda: iter(loader)


def _items_per_s(batches: Iterator[Any], batch: int) -> float:
    """Items a second from the second batch to the last; the first waits for its reading.

    One number of each page is read, as a model reads all: shared memory is mapped by its use.
    """
    next(batches)
    begun, items = time.perf_counter(), 0
    for each in batches:
        images = each["image"] if isinstance(each, MicroBatch) else each[0]
        images.flatten()[::PAGE].sum()
        items += batch
    return items / (time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(main())
