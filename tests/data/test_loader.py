"""The loader: every sample once, weightless padding, documents kept apart, nothing left running."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from shardyard.data.loader import IGNORED, Loader, MicroBatch, step_batches
from shardyard.data.order import sample_index
from shardyard.data.samples import Stream, TextWindows
from shardyard.data.shards import MANIFEST, TokenShards
from shardyard.errors import DataError, RequestError
from shardyard.io.files import write_json

SEQ_LEN = 8


def write_shards(folder: Path, tokens: list[int], starts: list[int]) -> TokenShards:
    """A data set of one training shard, written by hand."""
    folder.mkdir(exist_ok=True)
    np.array(tokens, dtype="<u2").tofile(folder / "train-00000.bin")
    np.save(folder / "train-00000.idx.npy", np.array(starts, dtype="<i8"))
    names = ("train-00000.bin", "train-00000.idx.npy")
    shard = {"name": "train-00000", "tokens": len(tokens), "documents": len(starts)}
    manifest = {
        "format": 1,
        "dtype": "<u2",
        "splits": {"train": {"tokens": len(tokens), "documents": len(starts), "shards": [shard]}},
        "files": {name: {"bytes": (folder / name).stat().st_size} for name in names},
    }
    write_json(folder / MANIFEST, manifest)
    return TokenShards(folder, "train")


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    """Tokens 1, 2, ..., 83: eleven samples of 8, the last with two targets."""
    return write_shards(tmp_path / "set", list(range(1, 84)), [0, 5, 8, 30])


def windows(shards: TokenShards, *, attend: bool = True) -> TextWindows:
    return TextWindows(shards, seq_len=SEQ_LEN, attend_across_documents=attend)


def train_source(shards: TokenShards, *, vocab_size: int = 84) -> Stream:
    checked = TokenShards(shards.folder, shards.split, vocab_size=vocab_size)
    return Stream(windows(checked), seed=3)


def eval_source(shards: TokenShards, *, attend: bool = True) -> Stream:
    return Stream(windows(shards, attend=attend), seed=None)


def predicted(batch: MicroBatch) -> int:
    return int((batch["targets"] != IGNORED).sum())


def row(batch: MicroBatch, number: int) -> tuple[list[int], list[int], list[int]]:
    return (
        batch["tokens"][number].tolist(),
        batch["targets"][number].tolist(),
        batch["positions"][number].tolist(),
    )


def test_a_sample_predicts_the_next_token_and_the_last_one_is_padded(shards: TokenShards) -> None:
    source = eval_source(shards)
    assert source.num_samples == 11
    first, last, padding = (
        row(source.micro_batch(positions, 1), 0)
        for positions in (range(1), range(10, 11), range(0))
    )
    counted = list(range(8))
    assert first == ([1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6, 7, 8, 9], counted)
    assert last == ([81, 82] + [0] * 6, [82, 83] + [IGNORED] * 6, counted)
    assert padding == ([0] * 8, [IGNORED] * 8, counted)


def test_tokens_are_counted_without_padding_and_whether_or_not_they_predict(
    shards: TokenShards,
) -> None:
    apart = eval_source(shards, attend=False).micro_batch(range(4), 6)  # two rows of padding
    assert (apart.work, predicted(apart)) == (4 * 8, 4 * 8 - 3)
    last = eval_source(shards).micro_batch(range(10, 11), 2)
    assert (last.work, predicted(last)) == (2, 2)
    assert eval_source(shards).micro_batch(range(0), 2).work == 0


def test_an_evaluation_predicts_every_token_once(shards: TokenShards) -> None:
    targets: list[int] = []
    for rank in range(3):
        for batch in step_batches(
            eval_source(shards), positions=range(11), micro_batch=2, rank=rank, world_size=3
        ):
            targets += batch["targets"][batch["targets"] != IGNORED].tolist()
    assert sorted(targets) == list(range(2, 84))


def test_documents_are_kept_apart_when_asked(shards: TokenShards) -> None:
    batch = eval_source(shards, attend=False).micro_batch(range(4), 4)
    # documents start at tokens 0, 5, 8 and 30
    assert row(batch, 0)[1:] == (
        [2, 3, 4, 5, IGNORED, 7, 8, IGNORED],
        [0, 1, 2, 3, 4, 0, 1, 2],
    )
    assert row(batch, 1)[1:] == (list(range(10, 18)), list(range(8)))
    assert row(batch, 3)[1:] == (
        [26, 27, 28, 29, 30, IGNORED, 32, 33],
        [0, 1, 2, 3, 4, 5, 0, 1],
    )


def test_training_samples_follow_the_permutation_of_each_epoch(shards: TokenShards) -> None:
    batch = train_source(shards).micro_batch(range(9, 14), 5)
    expected = [sample_index(position, 11, seed=3) * SEQ_LEN + 1 for position in range(9, 14)]
    assert batch["tokens"][:, 0].tolist() == expected
    assert batch.samples_B.tolist() == [9, 10, 11, 12, 13]


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 1), (2, 2), (3, 2), (4, 3), (9, 4)])
def test_every_sample_of_a_step_is_computed_once_on_any_number_of_ranks(
    shards: TokenShards, world_size: int, micro_batch: int
) -> None:
    by_rank = [
        step_batches(
            train_source(shards),
            positions=range(20, 30),
            micro_batch=micro_batch,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]
    num_micro_batches = -(-10 // micro_batch)
    assert {len(batches) for batches in by_rank} == {-(-num_micro_batches // world_size)}
    assert {batch["tokens"].shape for batches in by_rank for batch in batches} == {(micro_batch, 8)}
    samples = torch.cat([batch.samples_B for batches in by_rank for batch in batches])
    assert sorted(samples[samples >= 0].tolist()) == list(range(20, 30))
    for rank, batches in enumerate(by_rank):
        for turn, batch in enumerate(batches):
            first = 20 + (turn * world_size + rank) * micro_batch
            wanted = [p if p < 30 else -1 for p in range(first, first + micro_batch)]
            assert batch.samples_B.tolist() == wanted
            assert (batch["targets"][batch.samples_B < 0] == IGNORED).all()


def test_a_token_outside_the_vocabulary_is_refused(shards: TokenShards) -> None:
    with pytest.raises(DataError, match=r"token id 83.*vocabulary has 83 entries.*data\.tokenizer"):
        train_source(shards, vocab_size=83).micro_batch(range(11), 11)


def test_a_split_without_a_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"train split in .* has 1 tokens; one sample needs two"):
        train_source(write_shards(tmp_path / "tiny", [1], [0]))


def loader(source: Stream, *, start: int = 0, end: int = 24) -> Loader:
    return Loader(
        source,
        step_samples=4,
        micro_batch=2,
        rank=0,
        world_size=1,
        start=start,
        end=end,
        prefetch_steps=2,
    )


def samples_of(steps: list[list[MicroBatch]]) -> list[int]:
    return [sample for step in steps for batch in step for sample in batch.samples_B.tolist()]


def test_the_loader_yields_the_steps_from_its_start_to_its_end(shards: TokenShards) -> None:
    with loader(train_source(shards), start=8, end=20) as steps:
        assert samples_of(list(steps)) == list(range(8, 20))
        assert steps.wait_s >= 0
    with loader(train_source(shards), start=20, end=20) as steps:
        assert list(steps) == []


def test_a_step_that_begins_before_the_end_is_read_whole(shards: TokenShards) -> None:
    with loader(train_source(shards), start=6, end=11) as steps:
        assert samples_of(list(steps)) == list(range(6, 14))


class GatedSource(Stream):
    """Counts what was read, and reads nothing while ``gate`` is closed."""

    def open(self, gate: threading.Event) -> "GatedSource":
        self.gate, self.reads = gate, 0
        return self

    def micro_batch(self, positions: range, size: int) -> MicroBatch:
        assert self.gate.wait(10)
        self.reads += 1
        return super().micro_batch(positions, size)


def gated(shards: TokenShards, gate: threading.Event) -> GatedSource:
    return GatedSource(windows(shards), seed=3).open(gate)


def test_the_loader_reads_two_steps_ahead_and_no_more(shards: TokenShards) -> None:
    gate = threading.Event()
    gate.set()
    source = gated(shards, gate)
    steps = loader(source)
    next(steps)
    wait_until(lambda: source.reads == 6)  # one step taken, two ahead, two micro-batches each
    steps.close()
    assert source.reads == 6


def test_waiting_for_data_is_measured(shards: TokenShards) -> None:
    gate = threading.Event()
    with loader(gated(shards, gate)) as steps:
        opener = threading.Timer(0.05, gate.set)
        opener.start()
        next(steps)
        assert 0.02 < steps.wait_s < 10
        opener.join()


def test_an_error_in_the_thread_reaches_the_consumer(shards: TokenShards) -> None:
    with loader(train_source(shards, vocab_size=2)) as steps, pytest.raises(DataError):
        next(steps)


def test_closing_leaves_no_thread(shards: TokenShards) -> None:
    before = set(threading.enumerate())
    steps = loader(train_source(shards))
    next(steps)
    assert set(threading.enumerate()) - before
    steps.close()
    assert not set(threading.enumerate()) - before  # one of a test before may end meanwhile
    assert list(steps) == []
    steps.close()  # twice does no harm


def wait_until(is_so: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if is_so():
            return
        pause.wait(0.005)
    raise AssertionError("did not happen within 5 s")
