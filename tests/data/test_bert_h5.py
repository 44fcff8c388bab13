"""BERT's h5 files: what is written, read back, is the same; and how a wrong one is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from shardyard.config.load import load_recipe
from shardyard.config.resolved import DatasetMetadata
from shardyard.data import bert_h5 as writer
from shardyard.data import premasked
from shardyard.data.bert_h5 import write_h5
from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.data.premasked import HiddenRecords
from shardyard.data.prepare import prepare
from shardyard.data.readers.bert_h5 import ARRAYS
from shardyard.data.samples import Stream
from shardyard.data.sentence_pairs import SentencePairs, pair_marks
from shardyard.data.shards import TokenShards
from shardyard.errors import RequestError, SourceError
from tests.data.test_pairs import document, prepared

h5py = pytest.importorskip("h5py", reason="h5py is an extra")

SEQ_LEN = 32
Arrays = dict[str, npt.NDArray[Any]]


def hide(batch: MicroBatch, lengths_B: Tensor) -> MicroBatch:
    """Every third token of a text behind the first is hidden behind id 4."""
    places_L = torch.arange(batch["tokens"].shape[1])
    is_text_BL = places_L < lengths_B[:, None]
    is_chosen_BL = is_text_BL & (places_L % 3 == 1)
    return batch.with_fields(
        tokens=torch.where(is_chosen_BL, 4, batch["tokens"]),
        targets=torch.where(is_chosen_BL, batch["tokens"], IGNORED),
        positions=batch["positions"] * is_text_BL,
    )


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> DatasetMetadata:
    folder = tmp_path_factory.mktemp("h5") / "text"
    return prepared(folder, [document(number) for number in range(20)])


@pytest.fixture(scope="module")
def stream(facts: DatasetMetadata) -> Stream:
    folder = Path(facts.dir)
    pairs = SentencePairs(TokenShards(folder, "train"), pair_marks(folder), seq_len=SEQ_LEN, seed=1)
    return Stream(pairs, seed=1, prepare=hide)


def from_h5(source: Path, tokenizer: str, **settings: object) -> DatasetMetadata:
    of_data = {
        "source": source,
        "dir": source.parent / "prepared",
        "format": "bert_h5",
        "tokenizer": tokenizer,
        "eval_fraction": 0.0,
        "workers": 1,
        **settings,
    }
    overrides = [f"data.{name}={value}" for name, value in of_data.items()]
    recipe = load_recipe(overrides=["model.preset=bert-tiny", *overrides])
    return prepare(recipe, model_dir=None, progress=lambda *_: None)


def test_what_is_written_is_read_as_the_same_samples(
    stream: Stream, facts: DatasetMetadata, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_FILE_TOKENS", 100 * SEQ_LEN + 1)
    monkeypatch.setattr(writer, "_AT_ONCE", 7)
    told: list[int] = []
    paths = write_h5(
        stream,
        tmp_path / "h5",
        epochs=2,
        split="train",
        progress=lambda _, done, __: told.append(done),
    )
    total = 2 * stream.num_samples
    assert len(paths) == -(-total // 100) and told[-1] == total * SEQ_LEN * 4
    again = from_h5(tmp_path / "h5", facts.dir)
    assert again.train_samples == again.num_samples("train", SEQ_LEN) == total
    read = Stream(HiddenRecords(TokenShards(Path(again.dir), "train"), seq_len=SEQ_LEN), seed=None)
    expected, found = (each.micro_batch(range(total), total) for each in (stream, read))
    assert set(found.fields) == set(expected.fields)
    for name, field in expected.fields.items():
        assert torch.equal(found[name], field), name
    assert found.work == expected.work
    padded = read.micro_batch(range(1), 2)
    assert (padded["targets"][1] == IGNORED).all() and padded["next_sentence_labels"][1] == IGNORED


def test_files_have_the_arrays_and_types_that_others_read(stream: Stream, tmp_path: Path) -> None:
    (path,) = write_h5(stream, tmp_path, epochs=1, split="train", progress=lambda *_: None)
    batch = stream.micro_batch(range(stream.num_samples), stream.num_samples)
    with h5py.File(path) as file:
        assert {name: file[name].dtype.str[1:] for name in file} == ARRAYS
        for row in range(stream.num_samples):
            # as run_pretraining.py of DeepLearningExamples takes them
            positions = file["masked_lm_positions"][row]
            index = len(positions)
            padded = (positions == 0).nonzero()[0]
            if len(padded):
                index = padded[0]
            labels = np.full(SEQ_LEN, IGNORED)
            labels[positions[:index]] = file["masked_lm_ids"][row][:index]
            assert (labels == batch["targets"][row].numpy()).all()
            length = file["input_mask"][row].sum()
            assert file["input_ids"][row][length - 1] in (3, 4)  # [SEP], or hidden
    assert premasked.IGNORED == IGNORED


def sound(rows: int = 40) -> Arrays:
    """Arrays of a file as they should be."""
    draw = np.random.default_rng(0)
    ids = draw.integers(5, 90, (rows, 16))
    mask = (np.arange(16) < draw.integers(8, 17, rows)[:, None]).astype("i1")
    return {
        "input_ids": ids.astype("i4"),
        "input_mask": mask,
        "segment_ids": (np.arange(16) > 5).astype("i1") * mask,
        "masked_lm_positions": np.tile(np.array([2, 5, 0], "i4"), (rows, 1)),
        "masked_lm_ids": np.tile(np.array([7, 0, 0], "i4"), (rows, 1)),
        "next_sentence_labels": draw.integers(0, 2, rows).astype("i1"),
    }


def write(path: Path, arrays: Arrays) -> None:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, compression="gzip")


def changed(name: str, place: Any, value: int) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name] = arrays[name].astype("i8")
        arrays[name][place] = value

    return change


def shortened(name: str, index: Any) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name] = arrays[name][index]

    return change


WRONG: dict[str, tuple[Callable[[Arrays], object], str]] = {
    "missing": (lambda arrays: arrays.pop("masked_lm_ids"), "no array 'masked_lm_ids' .*holds"),
    "floats": (
        lambda arrays: arrays.update(input_ids=arrays["input_ids"] * 1.5),
        "input_ids holds float64, not whole numbers",
    ),
    "fewer rows": (shortened("next_sentence_labels", slice(7)), "sizes .* do not fit"),
    "narrower": (shortened("segment_ids", np.s_[:, :7]), r"segment_ids \[40, 7\]"),
    "one axis": (shortened("input_ids", 3), r"input_ids \[16\]"),
    "other width": (shortened("masked_lm_ids", np.s_[:, :2]), "do not fit"),
    "id below 0": (changed("input_ids", (3, 2), -1), "sample 4: input_ids holds a number below 0"),
    "id beyond": (changed("input_ids", (3, 2), 2**40), "sample 4: input_ids"),
    "id of another": (
        changed("input_ids", (3, 2), 50_000),
        r"5, sample 4: there is token id 50000",
    ),
    "hidden beyond": (
        changed("masked_lm_ids", (8, 1), 9_999),
        r"5, sample 9: there is token id 9999",
    ),
    "mask with holes": (changed("input_mask", (9, 3), 0), "sample 10: input_mask is not 1"),
    "mask of 2": (changed("input_mask", (9, 3), 2), "sample 10: input_mask is not 1"),
    "all padding": (changed("input_mask", 11, 0), "sample 12: input_mask says that all"),
    "segment": (changed("segment_ids", (1, 1), 2), "sample 2: segment_ids"),
    "label": (changed("next_sentence_labels", 39, 7), "sample 40: next_sentence_labels"),
    "place beyond": (changed("masked_lm_positions", (0, 1), 16), "sample 1: masked_lm_positions"),
    "place below": (changed("masked_lm_positions", (0, 1), -2), "sample 1: masked_lm_positions"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_told_with_its_place(
    name: str, facts: DatasetMetadata, tmp_path: Path
) -> None:
    change, why = WRONG[name]
    arrays = sound()
    change(arrays)
    write(tmp_path / "a.hdf5", arrays)
    with pytest.raises(SourceError, match=rf"(?s).*{why}"):
        from_h5(tmp_path / "a.hdf5", facts.dir)


def test_a_sound_file_is_prepared_and_held_out(facts: DatasetMetadata, tmp_path: Path) -> None:
    write(tmp_path / "a.hdf5", sound())
    found = from_h5(tmp_path / "a.hdf5", facts.dir, eval_fraction=0.3)
    assert found.train_samples and found.eval_samples
    assert found.train_samples + found.eval_samples == 40
    assert found.train_bytes is None
    held_out = HiddenRecords(TokenShards(Path(found.dir), "eval"), seq_len=16)
    assert held_out.num_samples == found.eval_samples
    assert sorted(set(held_out.sample(0, 0).fields["targets"].tolist())) == [IGNORED, 0, 7]
    with pytest.raises(RequestError, match=r"have 16 tokens, and data\.seq_len=128"):
        HiddenRecords(TokenShards(Path(found.dir), "eval"), seq_len=128)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:100],
        lambda raw: b"not hdf5 at all " * len(raw),
        lambda raw: raw[:3000] + bytes(1500) + raw[4500:],
    ],
)
def test_a_damaged_file_is_told(
    damage: Callable[[bytes], bytes], facts: DatasetMetadata, tmp_path: Path
) -> None:
    path = tmp_path / "a.hdf5"
    write(path, sound(400))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SourceError, match=r"a\.hdf5"):
        from_h5(path, facts.dir)


def test_what_would_fill_the_memory_or_lies_elsewhere_is_refused(
    facts: DatasetMetadata, tmp_path: Path
) -> None:
    path = tmp_path / "a.hdf5"
    cases: list[tuple[Callable[[Any], object], str]] = [
        (
            lambda file: file.create_dataset("input_ids", (10**11, 16), "i4", chunks=(10, 16)),
            "no numbers in this file",
        ),
        (
            lambda file: file.create_dataset("input_ids", (10**8, 16), "i4", chunks=(10**7, 16)),
            "no numbers in this file|smaller chunks",
        ),
        (
            lambda file: file.__setitem__("input_ids", h5py.ExternalLink("/etc/x.h5", "/a")),
            "no array 'input_ids'",
        ),
        (
            lambda file: file.create_dataset("input_ids", (4,), h5py.vlen_dtype("i2")),
            "rows of equal length",
        ),
    ]
    for make, why in cases:
        with h5py.File(path, "w") as file:
            make(file)
        with pytest.raises(SourceError, match=rf"a\.hdf5: .*({why})"):
            from_h5(path, facts.dir)


def test_the_tokenizer_of_the_files_has_to_be_named(tmp_path: Path) -> None:
    write(tmp_path / "a.hdf5", sound())
    with pytest.raises(RequestError, match=r"ids of a tokenizer.*data\.tokenizer"):
        from_h5(tmp_path / "a.hdf5", "train")


def test_h5_files_and_others_are_not_mixed(facts: DatasetMetadata, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a.hdf5", sound())
    with pytest.raises(RequestError, match=r"a\.hdf5.*\.hdf5: .*data\.format=bert_h5"):
        from_h5(tmp_path / "in", facts.dir, format="by_suffix")
    (tmp_path / "in" / "b.txt").write_text("text")
    with pytest.raises(RequestError, match=r"b\.txt.*takes only \.h5, \.hdf5, \.hdf"):
        from_h5(tmp_path / "in", facts.dir)
