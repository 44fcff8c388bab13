"""What an encoder puts beside the ids of tokens reaches the batch of a task that names it."""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from shardyard.config.data_choices import DATA_FORMATS, DataFormat
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.data import Data
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import imported
from shardyard.data.byte_ranges import TextSection
from shardyard.data.prepare import prepare
from shardyard.data.samples import Stream, TextWindows
from shardyard.data.shards import TokenShards, verify
from shardyard.data.tokenizer import TextEncoder
from shardyard.data.work_units import Column, Encoded, PlainText
from shardyard.errors import DataError

ROWS = [f"ask {number}> answer {number}" for number in range(40)]


class Answers(PlainText):
    """What stands behind > is to be learnt, and the end of the document."""

    columns: ClassVar[Mapping[str, Column]] = {"learn": Column(dtype="|u1", begin=0, end=1)}

    def encode(self, section: TextSection) -> list[Encoded]:
        question, mark, answer = section.text.partition(">")
        asked, answered = self.tokenizer.encode(question + mark), self.tokenizer.encode(answer)
        return [Encoded(asked + answered, {"learn": [0] * len(asked) + [1] * len(answered)})]


class TooMany(PlainText):
    columns: ClassVar[Mapping[str, Column]] = Answers.columns

    def encode(self, section: TextSection) -> list[Encoded]:
        ids = self.tokenizer.encode(section.text)
        return [Encoded(ids, {"learn": [0] * (len(ids) + 1)})]


class TooLarge(PlainText):
    columns: ClassVar[Mapping[str, Column]] = Answers.columns

    def encode(self, section: TextSection) -> list[Encoded]:
        ids = self.tokenizer.encode(section.text)
        return [Encoded(ids, {"learn": [256] * len(ids)})]


def prepared(folder: Path) -> DatasetMetadata:
    if not (folder / "x.jsonl").exists():
        (folder / "x.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    data = {"source": str(folder / "x.jsonl"), "dir": str(folder / "out"), "vocab_size": 300}
    recipe = Recipe.model_validate({"data": {**data, "workers": 1, "eval_fraction": 0.2}})
    return prepare(recipe, model_dir=None, progress=lambda *_: None)


def encode_by(kind: type, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(DATA_FORMATS, "by_suffix", DataFormat(encoder=f"{__name__}:{kind.__name__}"))


def source(folder: str, split: str, *columns: str) -> Stream:
    shards = TokenShards(Path(folder), split, vocab_size=300)
    windows = TextWindows(shards, seq_len=16, attend_across_documents=True, columns=columns)
    return Stream(windows, seed=None)


def test_a_column_goes_from_the_encoder_to_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = prepared(tmp_path)
    encode_by(Answers, monkeypatch)
    facts = prepared(tmp_path)
    assert facts.dir != plain.dir
    manifest = json.loads((Path(facts.dir) / "manifest.json").read_text())
    assert (manifest["format"], manifest["columns"]) == (2, {"learn": "|u1"})
    verify(Path(facts.dir))

    shards = TokenShards(Path(facts.dir), "train")
    ids, learn = (shards.read(0, shards.num_tokens, column) for column in (None, "learn"))
    tokenizer = TextEncoder(
        {path.name: path.read_bytes() for path in Path(facts.dir).glob("*.json")}, name="x"
    )
    mark, end = tokenizer.encode(">")[-1], manifest["end_of_text_id"]
    starts = [*shards.document_starts, shards.num_tokens]
    for start, stop in pairwise(starts):
        asked = ids[start:stop].tolist().index(mark) + 1
        assert learn[start:stop].tolist() == [0] * asked + [1] * (stop - start - asked)
        assert ids[stop - 1] == end

    train = source(facts.dir, "train", "learn")
    last = train.num_samples - 1
    batch = train.micro_batch(range(last, last + 1), 2)
    field, tokens = batch["learn"], batch["tokens"]
    assert field.shape == (2, 17) and field.dtype == torch.int64
    num = shards.num_tokens - last * 16
    assert field[0, :num].tolist() == learn[last * 16 :].tolist()
    assert field[0, num:].sum() + field[1].sum() == 0  # padding
    assert tokens[0, : num - 1].tolist() == ids[last * 16 : -1].tolist()
    assert "learn" not in source(facts.dir, "train").micro_batch(range(1), 1).fields


def test_a_column_that_the_data_do_not_have_is_told_with_those_they_have(tmp_path: Path) -> None:
    facts = prepared(tmp_path)
    with pytest.raises(DataError, match=r"no column 'learn' \(its columns: none\).*data\.format"):
        source(facts.dir, "eval", "learn")


@pytest.mark.parametrize("kind", [TooMany, TooLarge])
def test_an_encoder_that_is_wrong_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    encode_by(kind, monkeypatch)
    with pytest.raises(DataError, match=r"column 'learn' has \d+ numbers for \d+ tokens, or one"):
        prepared(tmp_path)


def test_tokens_alone_are_written_as_before(tmp_path: Path) -> None:
    """So that data of before are found, and earlier versions read them."""
    facts = prepared(tmp_path)
    manifest = json.loads((Path(facts.dir) / "manifest.json").read_text())
    assert manifest["format"] == manifest["request"]["format"] == 1
    assert not {"columns", "data_format"} & {*manifest, *manifest["request"]}
    assert np.fromfile(Path(facts.dir) / "train-00000.bin", "<u2").size == facts.train_tokens


def test_every_row_names_an_encoder_that_there_is() -> None:
    for row in DATA_FORMATS.values():
        encoder = imported(row.encoder)
        assert callable(encoder.encode) and callable(encoder.words)
        assert row.whole_row is None or callable(imported(row.whole_row))
        assert {*row.settings, *row.options, *row.ignores} <= Data.model_fields.keys()
