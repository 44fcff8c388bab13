"""Each picture exactly once an epoch, for any processes and threads, resumed anywhere."""

import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardyard.data.images.decode import DecodeThreads, threads_for
from shardyard.data.images.index import ImageIndex
from shardyard.data.images.order import Window
from shardyard.data.images.prepare import prepare_images
from shardyard.data.images.samples import ImageSet, ImageStream, limit_words
from shardyard.data.images.transforms import CenterCrop
from shardyard.data.loader import Loader
from shardyard.errors import DataError
from tests.data.images.made import class_folders
from tests.data.images.test_prepare_images import recipe_of

EPOCH, STEP, STEPS = 60, 14, 11
"""Pictures, pictures of a step, and steps: two epochs and a half, cut in the middle of steps."""
SMALL = Window(block=4, lane_blocks=2, lanes=3, run=2)


@dataclass(frozen=True)
class Ranks:
    """How a part of a run is read."""

    world_size: int
    threads: int
    at_once: int = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pictures")
    source = class_folders(place / "a", {"ant": range(20), "bee": range(20, 60)})
    recipe = recipe_of(source, place, eval_fraction=0)
    return Path(prepare_images(recipe, model_dir=None, progress=lambda *_: None).dir)


def stream_of(folder: Path, threads: int, cache_bytes: int = 2**20) -> ImageStream:
    index = ImageIndex(folder, "train")
    if index.window.block > 1:
        index.window = SMALL
    view = CenterCrop(size=8, share=1.0, resample=Image.Resampling.BILINEAR)
    pictures = ImageSet(index, view, size=8, cache_bytes=cache_bytes)
    return ImageStream(pictures, DecodeThreads(threads), seed=3)


def read(folder: Path, ranks: Ranks, steps: range) -> dict[int, bytes]:
    """Position in the stream -> the pixels that some rank got for it."""
    found: dict[int, bytes] = {}
    for rank in range(ranks.world_size):
        with Loader(
            stream_of(folder, ranks.threads),
            step_samples=STEP,
            micro_batch=3,
            rank=rank,
            world_size=ranks.world_size,
            start=steps.start * STEP,
            end=steps.stop * STEP,
            prefetch_steps=2,
            steps_at_once=ranks.at_once,
        ) as loader:
            for batch in itertools.chain.from_iterable(loader):
                for row, position in enumerate(batch.samples_B.tolist()):
                    if position >= 0:
                        assert position not in found
                        found[position] = batch["image"][row].numpy().tobytes()
    return found


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[int, bytes]:
    return read(folder, Ranks(world_size=1, threads=1), range(STEPS))


def test_each_picture_comes_once_in_each_epoch(folder: Path, whole: dict[int, bytes]) -> None:
    assert sorted(whole) == list(range(STEP * STEPS))
    epochs = [[whole[p] for p in range(e * EPOCH, (e + 1) * EPOCH)] for e in range(2)]
    assert len(set(epochs[0])) == EPOCH and set(epochs[0]) == set(epochs[1])
    assert epochs[0] != epochs[1]
    index = stream_of(folder, 1)
    numbers = index.sample_indices(np.arange(2 * EPOCH)).reshape(2, -1)
    assert (np.sort(numbers) == np.arange(EPOCH)).all()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_any_number_of_processes_and_threads_reads_the_same(
    world_size: int, threads: int, folder: Path, whole: dict[int, bytes]
) -> None:
    assert read(folder, Ranks(world_size, threads, at_once=2), range(STEPS)) == whole


@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_run_is_resumed_anywhere_at_another_world_size(
    at: int, folder: Path, whole: dict[int, bytes]
) -> None:
    before = read(folder, Ranks(2, 2), range(at))
    after = read(folder, Ranks(3, 4), range(at, STEPS))
    assert not before.keys() & after.keys()
    assert before | after == whole


def test_a_cache_that_holds_no_window_reads_each_picture_alone(folder: Path) -> None:
    stream = stream_of(folder, 2, cache_bytes=1)
    sizes = stream.samples.index.rows["size"]
    stream.micro_batch(range(EPOCH), EPOCH)
    assert stream.samples.contents.read_bytes == sizes.sum()


def test_each_block_is_read_once_where_a_window_fits(folder: Path) -> None:
    stream = stream_of(folder, 2)
    for start in range(0, EPOCH, 5):
        stream.micro_batch(range(start, start + 5), 5)
    size_bytes = sum(path.stat().st_size for path in folder.glob("*.tar"))
    assert stream.samples.contents.read_bytes < size_bytes


def _shared() -> list[str]:
    """What of this process's memory others could map, and its children."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    children = "".join((task / "children").read_text() for task in tasks if task.exists())
    return [*(line for line in maps if "/dev/shm" in line), *sorted(children.split())]


def test_nothing_is_shared_with_other_processes(folder: Path) -> None:
    """So a kill leaves nothing behind."""
    before = _shared()
    stream = stream_of(folder, 4)
    stream.micro_batch(range(20), 20)
    assert _shared() == before


def test_a_picture_that_changed_is_named(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "a", {"ant": range(7), "bee": range(7, 8)})
    recipe = recipe_of(source, tmp_path, {"pack": False}, eval_fraction=0)
    folder = Path(prepare_images(recipe, model_dir=None, progress=lambda *_: None).dir)
    (source / "ant" / "5.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"ant/5\.jpg is not as it was .* size is another one"):
        stream_of(folder, 2).micro_batch(range(8), 8)
    (source / "ant" / "5.jpg").unlink()
    with pytest.raises(DataError, match=r"ant/5\.jpg is not as it was .*No such file"):
        stream_of(folder, 2).micro_batch(range(8), 8)


def test_a_picture_that_nobody_looked_at_is_named_when_it_is_decoded(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "a", {"ant": range(7), "bee": range(7, 8)})
    (source / "ant" / "5.jpg").write_bytes(b"x" * 100)
    recipe = recipe_of(source, tmp_path, {"check": False}, eval_fraction=0)
    folder = Path(prepare_images(recipe, model_dir=None, progress=lambda *_: None).dir)
    with pytest.raises(DataError, match=r"ant/5\.jpg \(packed at byte .*data.images.check=true"):
        stream_of(folder, 2).micro_batch(range(8), 8)


@pytest.mark.parametrize(("busy", "threads"), [(0.0, 1), (0.7, 1), (1.0, 2), (3.1, 4), (16, 16)])
def test_threads_follow_how_many_were_busy(busy: float, threads: int) -> None:
    assert threads_for(busy, most=16) == threads


def test_work_that_fails_is_told_and_the_threads_go_on() -> None:
    threads = DecodeThreads(3)
    with pytest.raises(ZeroDivisionError):
        threads.run(lambda number: 1 // (number - 5), 20)
    assert threads.run(lambda number: number * number, 9) == [n * n for n in range(9)]


def test_threads_that_never_wait_for_work_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardyard.data.images.decode._MEASURED_S", 0.02)
    threads = DecodeThreads(2)
    for _ in range(3):
        threads.run(lambda _: time.sleep(0.02), 4)
    assert threads.saturated_s > 0.05
    time.sleep(0.1)
    threads.run(lambda _: time.sleep(0.02), 2)
    assert threads.saturated_s == 0


def test_a_job_that_decoding_limits_is_called_so(folder: Path) -> None:
    stream = stream_of(folder, 2)
    assert stream.limit is None
    stream.threads.saturated_s, stream.threads.busy_s = 40.0, 1000.0
    told = str(stream.limit)
    assert "decoding limits this job. All 2 threads" in told and "data_wait_s" in told
    assert "reading limits this job" in limit_words(4, 31.0, read_share=0.8)
