"""How quickly pictures are read, decoded and cropped, beside one thread that decodes and others.

The script makes 4,000 JPEGs of 500 x 375 pixels (soft noise, quality 90) in ten class folders and
has them prepared by `shardyard`. In memory, pictures of a second:

- bare: one thread that decodes bytes in memory by the same decoder, nothing else; times the cores;
- decode: our stream, which reads, decodes, and cuts 224 x 224 out of the corner;
- crop-flip: our stream with a crop somewhere and every other picture mirrored;
- resized-crop: our stream as training has it (random resized crop, flip);
- folder: a plain `Dataset` over class folders (ImageFolder's way, with Pillow) and torch's
  `DataLoader`, a worker on each core; the same crop and flip, batches as ours;
- litdata, streaming: the same JPEG bytes in their formats, read by their loaders with the same
  decoder, crop and flip, where they are installed.

Cold: bytes of a second read from the shards by our cache, and from the same pictures as small
files in a permuted order, both after `posix_fadvise(DONTNEED)` on each file, which drops what is
clean of the page cache; a file system may keep it nonetheless, and then both are warm.

Ways run in turn, each round in another order; ratios are of one round, their median is told.

    python -m benchmarks.image_feeder        # some 10 minutes on 2 cores
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.record import write_result
from shardyard.config.schema.recipe import Recipe
from shardyard.data.images.cache import ImageBytes
from shardyard.data.images.crops import Box
from shardyard.data.images.decode import DecodeThreads, decode
from shardyard.data.images.index import ImageIndex
from shardyard.data.images.prepare import prepare_images
from shardyard.data.images.samples import ImageSet, ImageStream
from shardyard.data.images.transforms import Pixels, train_view
from shardyard.data.loader import Loader

CORES = len(os.sched_getaffinity(0))
SIDE = 224
BATCH = 64
BARS = {
    "decode_per_core_decode": 0.85,
    "crop_flip_per_bare_decode": 0.80,
    "crop_flip_per_folder": 1.0,
    "cold_crop_flip_per_folder": 1.0,
    "crop_flip_per_litdata": 1.2,
    "crop_flip_per_streaming": 1.2,
    "cold_bytes_per_small_files": 2.0,
}
Rates = dict[str, float]


def main() -> int:
    """Measure, print, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="for files in between; None: a temporary one")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rounds = measure(Path(folder), args.pictures, args.rounds)
    result = judge(rounds)
    print(table(result))
    write_result("image-feeder", {"pictures": args.pictures, "bars": BARS, **result}, args.out)
    return 0 if result["is_met"] else 1


def measure(folder: Path, pictures: int, rounds: int) -> list[Rates]:
    """Pictures of a second, and bytes of a second where the name says so, of each round."""
    source = make_pictures(folder / "source", pictures)
    given = {"source": str(source), "dir": str(folder / "out"), "eval_fraction": 0.0}
    recipe = Recipe.model_validate({"data": {**given, "images": {"size": SIDE}}})
    facts = prepare_images(recipe, model_dir=None, progress=lambda *_: None)
    ways = ways_of(folder, Path(facts.dir), source, recipe)
    found = []
    for number in range(rounds):
        names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        found.append({name: ways[name]() for name in names})
        print(f"round {number + 1} of {rounds}: {found[-1]}", file=sys.stderr)
    return found


def ways_of(
    folder: Path, prepared: Path, source: Path, recipe: Recipe
) -> dict[str, Callable[[], float]]:
    """Each way that can be had here."""
    index = ImageIndex(prepared, "train")
    files = sorted(source.rglob("*.jpg"))
    shards = sorted(prepared.glob("*.tar"))
    ways: dict[str, Callable[[], float]] = {
        "bare": partial(bare, index),
        "decode": partial(stream, index, corner),
        "crop-flip": partial(stream, index, crop_flip),
        "resized-crop": partial(stream, index, train_view(recipe)),
        "folder": partial(folder_loader, files),
        "cold-crop-flip": partial(cold, shards, partial(stream, index, crop_flip)),
        "cold-folder": partial(cold, files, partial(folder_loader, files)),
        "cold-shards-bytes": partial(cold, shards, partial(shard_bytes, index)),
        "cold-files-bytes": partial(cold, files, partial(file_bytes, files)),
    }
    for name, make in (("litdata", litdata_way), ("streaming", streaming_way)):
        try:
            ways[name] = make(folder / name, files)
        except Exception as error:  # noqa: BLE001 - another's package, in any state
            print(f"{name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
    return ways


def make_pictures(folder: Path, count: int) -> Path:
    """JPEGs of 500 x 375 pixels in ten class folders."""
    for number in range(count):
        draw = np.random.default_rng(number)
        small = Image.fromarray(draw.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        soft = np.asarray(small.resize((500, 375), Image.Resampling.BICUBIC)).astype(np.int16)
        grain = draw.integers(-12, 13, soft.shape, dtype=np.int16)
        place = folder / f"class-{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray((soft + grain).clip(0, 255).astype(np.uint8))
        picture.save(place / f"{number}.jpg", quality=90)
    return folder


def corner(image: Any, *, epoch: int, sample: int) -> Pixels:  # noqa: ARG001 - a View
    """The least that makes pictures one size."""
    return np.array(image.crop((0, 0, SIDE, SIDE)))


def crop_flip(image: Any, *, epoch: int, sample: int) -> Pixels:
    """A crop that depends on the picture, and every other one mirrored."""
    width, height = image.size
    place = (sample * 7919 + epoch * 104_729) % 1_000_003
    box = Box(place % (width - SIDE + 1), place % (height - SIDE + 1), SIDE, SIDE)
    cut = image.crop(box.corners)
    if sample % 2:
        cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(cut)


def bare(index: ImageIndex) -> float:
    """Pictures that one thread decodes in a second, times the cores."""
    contents = ImageBytes(index, 2**30)
    numbers = range(min(index.num_samples, 500))
    held = [bytes(contents.content(number)) for number in numbers]
    began_s = time.perf_counter()
    for content in held:
        decode(content, "bare")
    return CORES * len(held) / (time.perf_counter() - began_s)


def stream(index: ImageIndex, view: Any) -> float:
    """Pictures of a second of an epoch by our loader."""
    pictures = ImageSet(index, view, size=SIDE, cache_bytes=640 * 2**20)
    source = ImageStream(pictures, DecodeThreads(CORES), seed=0)
    began_s = time.perf_counter()
    with Loader(
        source,
        step_samples=BATCH,
        micro_batch=BATCH,
        rank=0,
        world_size=1,
        start=0,
        end=index.num_samples,
        prefetch_steps=2,
        steps_at_once=2,
    ) as loader:
        read = sum(len(batch.samples_B) for batch in itertools.chain.from_iterable(loader))
    return read / (time.perf_counter() - began_s)


class Files(Dataset[tuple[torch.Tensor, int]]):
    """Class folders as torchvision's ImageFolder reads them, with the same crop and flip."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        with self.files[number].open("rb") as file:
            picture = Image.open(file).convert("RGB")
        return torch.from_numpy(crop_flip(picture, epoch=0, sample=number)), number % 10


def loaded(dataset: Any, shuffle: bool | None = None) -> float:
    """Pictures of a second of an epoch by torch's DataLoader."""
    loader = DataLoader(dataset, BATCH, shuffle=shuffle, num_workers=CORES, prefetch_factor=2)
    began_s = time.perf_counter()
    read = sum(len(labels) for _, labels in loader)
    return read / (time.perf_counter() - began_s)


def folder_loader(files: Sequence[Path]) -> float:
    """The plain dataset over small files."""
    return loaded(Files(files), shuffle=True)


def of_bytes(content: bytes, number: int) -> tuple[torch.Tensor, int]:
    """What others make of the same bytes by the same decoder."""
    picture = decode(content, "other")
    return torch.from_numpy(crop_flip(picture, epoch=0, sample=number)), number % 10


def litdata_way(folder: Path, files: Sequence[Path]) -> Callable[[], float]:
    """Lightning's LitData: bytes in its chunks of 64 MB, shuffled."""
    import litdata
    from litdata.streaming.writer import BinaryWriter

    class Read(litdata.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[torch.Tensor, int]:
            row = super().__getitem__(index)
            return of_bytes(row["content"], row["number"])

    folder.mkdir(parents=True)
    writer = BinaryWriter(str(folder), chunk_bytes="64MB")
    for number, file in enumerate(files):
        writer[number] = {"content": file.read_bytes(), "number": number}
    writer.done()
    writer.merge()

    def way() -> float:
        loader = litdata.StreamingDataLoader(
            Read(str(folder), shuffle=True), batch_size=BATCH, num_workers=CORES
        )
        began_s = time.perf_counter()
        read = sum(len(labels) for _, labels in loader)
        return read / (time.perf_counter() - began_s)

    return way


def streaming_way(folder: Path, files: Sequence[Path]) -> Callable[[], float]:
    """MosaicML's Streaming: bytes in its shards of 64 MB, shuffled."""
    import streaming

    class Read(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> tuple[torch.Tensor, int]:
            row = super().__getitem__(at)
            return of_bytes(row["content"], row["number"])

    columns = {"content": "bytes", "number": "int"}
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=2**26) as writer:
        for number, file in enumerate(files):
            writer.write({"content": file.read_bytes(), "number": number})

    def way() -> float:
        streaming.base.util.clean_stale_shared_memory()
        return loaded(Read(local=str(folder), shuffle=True, batch_size=BATCH))

    return way


def cold(files: Sequence[Path], way: Callable[[], float]) -> float:
    """A way after what these files have in the page cache was let go."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return way()


def shard_bytes(index: ImageIndex) -> float:
    """Bytes of a second by our cache, in the order of an epoch."""
    source = ImageStream(
        ImageSet(index, corner, size=SIDE, cache_bytes=640 * 2**20), DecodeThreads(1), seed=0
    )
    contents = source.samples.contents
    began_s = time.perf_counter()
    read = 0
    for batch in _batches(index.num_samples):
        numbers = source.sample_indices(batch).tolist()
        contents.prefetch(source.sample_indices((batch + 2 * BATCH) % index.num_samples).tolist())
        read += sum(len(contents.content(number)) for number in numbers)
    return read / (time.perf_counter() - began_s)


def file_bytes(files: Sequence[Path]) -> float:
    """Bytes of a second of the same pictures as small files, in a permuted order."""
    order = np.random.default_rng(0).permutation(len(files))
    began_s = time.perf_counter()
    read = sum(len(files[number].read_bytes()) for number in order)
    return read / (time.perf_counter() - began_s)


def _batches(count: int) -> Iterator[Any]:
    for start in range(0, count, BATCH):
        yield np.arange(start, min(start + BATCH, count))


RATIOS = {
    "decode_per_core_decode": ("decode", "bare"),
    "crop_flip_per_bare_decode": ("crop-flip", "bare"),
    "resized_crop_per_bare_decode": ("resized-crop", "bare"),
    "crop_flip_per_folder": ("crop-flip", "folder"),
    "cold_crop_flip_per_folder": ("cold-crop-flip", "cold-folder"),
    "crop_flip_per_litdata": ("crop-flip", "litdata"),
    "crop_flip_per_streaming": ("crop-flip", "streaming"),
    "cold_bytes_per_small_files": ("cold-shards-bytes", "cold-files-bytes"),
}


def judge(rounds: Sequence[Rates]) -> dict[str, Any]:
    """Median ratios of the rounds, and which bars they miss; what was not measured has none."""
    ratios = {
        name: median(each[ours] / each[other] for each in rounds)
        for name, (ours, other) in RATIOS.items()
        if all(ours in each and other in each for each in rounds)
    }
    missed = [name for name, bar in BARS.items() if name in ratios and ratios[name] < bar]
    lacking = [name for name in BARS if name not in ratios]
    return {
        "rounds": list(rounds),
        "ratios": ratios,
        "missed": missed,
        "not_measured": lacking,
        "is_met": not missed,
    }


def table(result: dict[str, Any]) -> str:
    """The ratios beside their bars."""
    lines = [f"{'ratio':32} {'median':>8} {'bar':>6}"]
    for name, ratio in result["ratios"].items():
        lines.append(f"{name:32} {ratio:8.3f} {BARS.get(name, ''):>6}")
    lines += [f"missed: {name}" for name in result["missed"]]
    lines += [f"not measured: {name}" for name in result["not_measured"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
