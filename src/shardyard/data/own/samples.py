"""Samples of the user's dataset in the order of a run, read by ``Readers`` while it trains."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row
from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.data.order import SampleKey
from shardyard.data.own.dataset import DatasetCode
from shardyard.data.own.items import Fields, ItemForm, too_long
from shardyard.data.own.readers import Readers, SplitReader
from shardyard.data.samples import Prepare, Sample, Stream, stacked_batch
from shardyard.data.shards import ITEMS_VERSION, read_manifest
from shardyard.errors import RequestError


class ItemSet:
    """The ``SampleSet`` of one split of the user's dataset."""

    def __init__(
        self,
        readers: Readers,
        split: str,
        *,
        num_samples: int,
        to_sample: Callable[[Fields], Sample],
        padding: Sample,
    ) -> None:
        """Args:
        to_sample: Gives an item the form of a sample.
        padding: A row without weight.
        """
        self.num_samples = num_samples
        self.has_one_form = readers.has_one_form
        self._readers = readers
        self._split = split
        self._to_sample = to_sample
        self._padding = padding

    def sample(self, index: int, epoch: int) -> Sample:
        """Sample ``index`` as it is in that pass over the split."""
        return self.read([(index, epoch)])[0]

    def read_stacked(self, keys: Sequence[SampleKey], rows: int) -> Fields:
        """Read samples of one form side by side, as arrays (rows, ...) with zeros after them.

        Raises:
            RequestError, DataError: As ``read``.
        """
        return self._readers.read_stacked(self._split, keys, rows)

    def read(self, keys: Sequence[SampleKey]) -> list[Sample]:
        """Read samples side by side.

        Raises:
            RequestError: The user's dataset raised, or an item has a wrong form.
            DataError: A reader was killed, or the dataset is another than it was.
        """
        return [self._to_sample(each) for each in self._readers.read(self._split, keys)]

    def padding(self) -> Sample:
        """Return a row without weight."""
        return self._padding


class ItemStream(Stream):
    """Items of the user's dataset in an order; those of a micro-batch are read side by side."""

    def __init__(self, items: ItemSet, *, seed: int | None, prepare: Prepare) -> None:
        super().__init__(items, seed=seed, prepare=prepare)
        self._items = items

    def micro_batch(self, positions: range, size: int) -> MicroBatch:
        """Read as ``Stream.micro_batch``; items of one form come stacked from the readers."""
        if not self._items.has_one_form:
            return super().micro_batch(positions, size)
        fields = self._items.read_stacked(self._keys(positions), size)
        return stacked_batch(fields, positions, [1] * len(positions), self.prepare)


def open_items(
    resolved: Resolved, *, vocab_size: int | None, prepare: Callable[[str], Prepare]
) -> tuple[ItemStream, ItemStream | None]:
    """Both splits: the training samples without end, the validation samples each once.

    Args:
        vocab_size: Token ids that the model has; None: the items are no tokens.
        prepare: The task's change of a micro-batch, by split.
    """
    seed = resolved.recipe.run.seed
    streams = {
        split: ItemStream(items, seed=seed if split == "train" else None, prepare=prepare(split))
        for split, items in open_item_sets(resolved, vocab_size=vocab_size).items()
    }
    return streams["train"], streams.get("eval")


def open_item_sets(resolved: Resolved, *, vocab_size: int | None) -> dict[str, ItemSet]:
    """The samples of each split that has any, in sets that share their readers."""
    recipe = resolved.recipe
    source = reader_of(recipe, resolved.data, vocab_size=vocab_size)
    readers = Readers(source, int(recipe.data.module_workers))
    to_sample, padding = _sample_form(resolved, source.form)
    return {
        split: ItemSet(readers, split, num_samples=number, to_sample=to_sample, padding=padding)
        for split, number in source.samples.items()
        if number
    }


def reader_of(recipe: Recipe, data: DatasetMetadata, *, vocab_size: int | None) -> SplitReader:
    """The reader of a prepared dataset; ``vocab_size`` as in ``open_items``.

    Raises:
        DataError: The manifest is missing or damaged.
    """
    folder = Path(data.dir)
    manifest = read_manifest(folder, (ITEMS_VERSION,))
    return SplitReader(
        code=DatasetCode.of(recipe),
        form=ItemForm(
            kind=manifest["kind"],
            is_causal=task_row(recipe.task.name).is_causal is True,
            attends_across=recipe.data.attends_across,
            vocab_size=vocab_size,
            num_classes=data.num_classes,
            shapes=manifest["shapes"]
            and {name: (kind, tuple(shape)) for name, (kind, shape) in manifest["shapes"].items()},
        ),
        samples={split: manifest["splits"][split]["samples"] for split in ("train", "eval")},
        is_divided=manifest["is_divided"],
        stored=(folder, manifest["stored"]) if "stored" in manifest else None,
    )


def _sample_form(resolved: Resolved, form: ItemForm) -> tuple[Callable[[Fields], Sample], Sample]:
    """Return a function that makes a sample of an item, and a row of padding."""
    if form.shapes is not None:
        if form.kind == "image":
            _check_size(form.shapes["image"], resolved.recipe)
        zeros = {name: np.zeros(shape, dtype) for name, (dtype, shape) in form.shapes.items()}
        return lambda fields: Sample(fields, 1), Sample(zeros, 0)
    recipe = resolved.recipe
    seq_len, cuts = int(recipe.data.seq_len), recipe.data.too_long == "cut"

    def to_sample(fields: Fields) -> Sample:
        size = len(fields["tokens"])
        if size > seq_len and not cuts:
            raise too_long(size, recipe)
        kept = min(size, seq_len)
        padded = _padding(seq_len)
        for name, values in fields.items():
            padded[name][:kept] = values[:kept]
        if not recipe.data.attends_across:  # padding is a document of its own
            padded["positions"][kept:] = np.arange(seq_len - kept)
        return Sample(padded, kept)

    return to_sample, Sample(_padding(seq_len), 0)


def _padding(seq_len: int) -> Fields:
    return {
        "tokens": np.zeros(seq_len, dtype=np.int64),
        "targets": np.full(seq_len, IGNORED, dtype=np.int64),
        "positions": np.arange(seq_len, dtype=np.int64),
    }


def _check_size(shape: tuple[str, tuple[int, ...]], recipe: Recipe) -> None:
    """Raise where images of the user's dataset are not of the network's size."""
    kind, sides = shape
    height, width = sides[:2] if kind == "uint8" else sides[1:]
    size = int(recipe.data.images.size)
    if (height, width) != (size, size):
        text = f"its images are {height} x {width}, and data.images.size={size}"
        fix = f"Set data.images.size={height}" if height == width else "Crop them to a square"
        raise RequestError(
            f"data.module={recipe.data.module}: {text}. {fix}, or resize them in your dataset."
        )
