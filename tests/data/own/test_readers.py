"""Processes that read a dataset of the user's own: equal arrays however many there are."""

import gc
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from shardyard.data.order import SampleKey
from shardyard.data.own.readers import Readers, SplitReader
from shardyard.data.own.samples import reader_of
from shardyard.errors import DataError, RequestError
from tests.data.own.test_prepare import prepared, recipe_of

pytestmark = pytest.mark.heavy

KEYS: list[SampleKey] = [(index, epoch) for epoch in (0, 1) for index in range(0, 40, 3)]


def _source(name: str, folder: Path) -> SplitReader:
    return reader_of(recipe_of(name, folder), prepared(name, folder), vocab_size=300)


@pytest.fixture
def started() -> Iterator[list[Readers]]:
    readers: list[Readers] = []
    yield readers
    for each in readers:
        for process in each._processes.values():
            process.kill()
            process.join()


def test_items_are_equal_in_any_number_of_processes(tmp_path: Path, started: list[Readers]) -> None:
    source = _source("noisy", tmp_path)
    here = [source.read("train", index, epoch) for index, epoch in KEYS]
    random.seed(5)
    torch.manual_seed(5)
    before = (random.getstate(), torch.get_rng_state())
    for number in (1, 3):
        started.append(Readers(source, number))
        found = started[-1].read("train", KEYS)
        for one, other in zip(here, found, strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in one)
        assert started[-1].read("train", []) == []
        held_out = started[-1].read("eval", [(0, 0)])[0]
        assert not np.array_equal(held_out["tokens"], found[0]["tokens"])
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1]), "the training's draws are its own"
    epochs = [source.read("train", 0, epoch)["tokens"].tolist() for epoch in (0, 1)]
    assert epochs[0] != epochs[1], "each epoch has its own noise"


def test_a_batch_is_read_in_place_and_its_memory_used_again(
    tmp_path: Path, started: list[Readers]
) -> None:
    images = {"task": {"name": "image_classification"}, "model": {"preset": "resnet-tiny"}}
    recipe = recipe_of("pictures", tmp_path, **images)
    source = reader_of(recipe, prepared("pictures", tmp_path, **images), vocab_size=None)
    started.append(Readers(source, 2))
    taken: set[int] = set()
    kept = []
    for epoch in range(6):
        keys = [(index, epoch) for index in (3, 0, 5)]
        batch = started[0].read_stacked("train", keys, 4)
        wanted = [source.read("train", *key) for key in keys]
        for name in ("image", "label"):
            assert np.array_equal(batch[name][:3], [each[name] for each in wanted])
            assert not batch[name][3].any(), "a row of padding"
        if epoch < 2:  # as a tensor of one row, as a sample for a report is kept
            kept.append((torch.from_numpy(batch["image"])[1], wanted[1]["image"]))
        taken.add(batch["image"].ctypes.data)
        del batch
    assert len(taken) == 3, "two that are kept, and one that is used again"
    for row, pixels in kept:
        assert np.array_equal(row, pixels)


def test_an_error_in_a_reader_is_raised_here_and_reading_continues(
    tmp_path: Path, started: list[Readers]
) -> None:
    source = _source("broken", tmp_path)
    started.append(Readers(source, 2))
    place = next(
        at for at in range(source.samples["train"]) if source._source_index("train", at)[1] == 14
    )
    with pytest.raises(RequestError, match="item 14 of the train split failed at"):
        started[0].read("train", [(place - 1, 0), (place, 0), (place + 1, 0)])
    assert len(started[0].read("train", [(place - 1, 0), (place + 1, 0)])) == 2


def test_a_killed_reader_is_named(
    tmp_path: Path, started: list[Readers], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _source("killed", tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    started.append(Readers(source, 2))
    with pytest.raises(DataError, match=r"was killed by SIGKILL\. SIGKILL mostly means that"):
        started[0].read("train", [(at, 0) for at in range(source.samples["train"])])


def test_another_dataset_than_the_prepared_one_is_an_error(
    tmp_path: Path, started: list[Readers]
) -> None:
    found = prepared("noisy", tmp_path)
    other = recipe_of("noisy", tmp_path, data={"module_settings": {"number": 41}})
    started.append(Readers(reader_of(other, found, vocab_size=300), 1))
    with pytest.raises(DataError, match="has 41 items here, and had 40 when it was prepared"):
        started[0].read("train", [(0, 0)])


def test_readers_end_when_the_data_is_not_needed_any_more(tmp_path: Path) -> None:
    readers = Readers(_source("noisy", tmp_path), 2)
    readers.read("train", [(0, 0)])
    processes = list(readers._processes.values())
    del readers
    gc.collect()
    for process in processes:
        process.join(10)
        assert process.exitcode == 0


_PROGRAM = """
import signal, sys, time
from pathlib import Path
from tests.data.own.test_readers import Readers, _source
if __name__ == "__main__":
    readers = Readers(_source("noisy", Path(sys.argv[1])), 2)
    readers.read("train", [(0, 0)])
    print(*(process.pid for process in readers._processes.values()), flush=True)
    time.sleep(600)
"""


def test_readers_outlive_a_signal_to_drain_and_end_with_their_rank(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path)],
        stdout=subprocess.PIPE, text=True, cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
    ) as rank:  # fmt: skip
        assert rank.stdout is not None
        readers = [int(each) for each in rank.stdout.readline().split()]
        assert len(readers) == 2
        for reader in readers:
            os.kill(reader, signal.SIGTERM)
        time.sleep(0.3)
        assert all(_is_alive(reader) for reader in readers)
        rank.kill()
    end_s = time.monotonic() + 10
    while any(map(_is_alive, readers)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not any(map(_is_alive, readers))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
