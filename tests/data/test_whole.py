"""Whole documents as samples: none is cut, each comes once, and each is for itself."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from shardyard.data.loader import IGNORED
from shardyard.data.samples import Stream, TooLong, WholeDocuments, best_fit
from shardyard.data.shards import MANIFEST, TokenShards
from shardyard.errors import RequestError
from shardyard.io.files import write_json

SEQ_LEN = 8


def documents(folder: Path, lengths: Sequence[int]) -> TokenShards:
    """Documents of these lengths; token and learnt-mark of a place tell which place it is."""
    folder.mkdir(exist_ok=True)
    starts = np.cumsum([0, *lengths])
    np.arange(starts[-1], dtype="<u2").tofile(folder / "train-00000.bin")
    (np.arange(starts[-1]) % 251).astype("|u1").tofile(folder / "train-00000.mark.bin")
    np.save(folder / "train-00000.idx.npy", starts[:-1].astype("<i8"))
    names = ("train-00000.bin", "train-00000.mark.bin", "train-00000.idx.npy")
    count = {"tokens": int(starts[-1]), "documents": len(lengths)}
    manifest = {
        "format": 2,
        "dtype": "<u2",
        "columns": {"mark": "|u1"},
        "splits": {"train": {**count, "shards": [{"name": "train-00000", **count}]}},
        "files": {name: {"bytes": (folder / name).stat().st_size} for name in names},
    }
    write_json(folder / MANIFEST, manifest)
    return TokenShards(folder, "train")


def samples(
    folder: Path, lengths: Sequence[int], too_long: TooLong = "refuse", seq_len: int = SEQ_LEN
) -> WholeDocuments:
    shards = documents(folder, lengths)
    return WholeDocuments(shards, seq_len=seq_len, too_long=too_long, columns=("mark",))


def test_every_document_is_in_one_sample_and_whole(tmp_path: Path) -> None:
    draw = random.Random(3)
    lengths = [draw.randint(1, 65) for _ in range(300)]
    packed = samples(tmp_path, lengths, seq_len=64)
    starts = np.cumsum([0, *lengths])
    found = []
    for number in range(packed.num_samples):
        sample = packed.sample(number, 0)
        tokens, targets = sample.fields["tokens"], sample.fields["targets"]
        positions, marks = sample.fields["positions"], sample.fields["mark"]
        begins = np.flatnonzero(positions[: sample.length] == 0)
        for at, stop in zip(begins, [*begins[1:], sample.length], strict=True):
            document = int(np.searchsorted(starts, tokens[at]))
            found.append(document)
            place = np.arange(starts[document], starts[document + 1])
            assert tokens[at:stop].tolist() == place[:-1].tolist()
            assert targets[at:stop].tolist() == place[1:].tolist()
            assert marks[at + 1 : stop + 1].tolist() == (place[1:] % 251).tolist()
            assert positions[at:stop].tolist() == list(range(stop - at))
        assert (targets[sample.length :] == IGNORED).all()
        assert sample.length == 64 or positions[sample.length] == 0
    assert sorted(found) == [number for number, length in enumerate(lengths) if length > 1]
    assert packed.num_tokens == sum(lengths) - len(lengths)
    assert packed.num_samples <= 1.1 * packed.num_tokens / 64  # nearly full, in this order


def test_the_order_of_a_run_is_a_permutation_of_the_samples(tmp_path: Path) -> None:
    packed = samples(tmp_path, [5, 9, 3, 4, 7, 2, 6])
    stream = Stream(packed, seed=1)
    once = stream.sample_indices(np.arange(packed.num_samples))
    assert sorted(once.tolist()) == list(range(packed.num_samples))
    batch = stream.micro_batch(range(packed.num_samples), packed.num_samples + 1)
    assert batch.work == packed.num_tokens


def test_a_sample_takes_the_document_that_leaves_the_least_room() -> None:
    assert best_fit([5, 4, 3, 4, 8, 1], capacity=8) == [[0, 2], [1, 3], [4], [5]]
    assert best_fit([], capacity=8) == []


def test_a_document_that_is_too_long_is_refused_cut_or_left_out(tmp_path: Path) -> None:
    lengths = [9, 20, 4, 10]
    with pytest.raises(
        RequestError,
        match=r"2 of 4 documents of the train split do not fit into data\.seq_len=8; the longest "
        r"takes 19\. Set data\.seq_len=19, or data\.too_long to cut or drop",
    ):
        samples(tmp_path, lengths)
    cut = samples(tmp_path, lengths, "cut")
    assert (cut.num_samples, cut.num_too_long, cut.num_tokens) == (4, 2, 8 + 8 + 3 + 8)
    assert cut.sample(1, 0).fields["targets"].tolist() == list(range(10, 18))
    dropped = samples(tmp_path, lengths, "drop")
    assert (dropped.num_samples, dropped.num_too_long, dropped.num_tokens) == (2, 2, 8 + 3)
    with pytest.raises(RequestError, match=r"no document of the train split in .* is left of 1\."):
        samples(tmp_path, [20], "drop")
