"""Preparing a dataset of the user's own: text as a file of it, items by number, stored items."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.data.own.prepare import prepare_own
from shardyard.data.own.readers import SplitReader
from shardyard.data.own.samples import reader_of
from shardyard.data.own.stored import StoredItems
from shardyard.data.prepare import prepare
from shardyard.data.shards import TokenShards, read_manifest, verify
from shardyard.errors import RequestError
from tests.data.data_program import run_data_program
from tests.data.own import own_datasets

OWN = "tests.data.own.own_datasets"


def recipe_of(name: str, folder: Path, **sections: dict[str, Any]) -> Recipe:
    data = {"module": f"{OWN}:{name}", "dir": str(folder), "workers": 1, "vocab_size": 300}
    model = {"preset": "llama-tiny"}
    given = {"model": model, **sections, "data": {**data, **sections.get("data", {})}}
    return Recipe.model_validate(given)


def prepared(name: str, folder: Path, **sections: dict[str, Any]) -> DatasetMetadata:
    recipe = recipe_of(name, folder, **sections)
    return prepare_own(recipe, model_dir=None, progress=lambda *_: None)


def test_text_is_prepared_as_a_file_of_the_same_rows(tmp_path: Path) -> None:
    rows = own_datasets.texts("train")
    assert rows is not None
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    as_file = Recipe.model_validate({
        "model": {"preset": "llama-tiny"},
        "data": {"source": str(file), "dir": str(tmp_path / "f"), "workers": 1, "vocab_size": 300},
    })  # fmt: skip
    of_file = prepare(as_file, model_dir=None, progress=lambda *_: None)
    own = prepared("texts", tmp_path / "own")
    assert (own.fingerprint, own.train_tokens) == (of_file.fingerprint, of_file.train_tokens)
    for split in ("train", "eval"):
        one, other = (TokenShards(Path(each.dir), split) for each in (own, of_file))
        assert np.array_equal(one.read(0, one.num_tokens), other.read(0, other.num_tokens))
    names = {path.name for path in (tmp_path / "own").iterdir()}
    assert names == {Path(own.dir).name, ".rows.lock"} and Path(own.dir).name.startswith("texts-")
    # equal rows find the folder; other ones are another
    assert prepared("texts", tmp_path / "own") == own
    other_rows = prepared("texts", tmp_path / "own", data={"module_settings": {"ending": "!"}})
    assert other_rows.dir != own.dir


def test_dialogues_are_prepared_with_their_validation_split(tmp_path: Path) -> None:
    data = {"format": "chat", "chat_template": "chatml", "loss_share": [0.0, 1.0]}
    found = prepared("dialogues", tmp_path, data=data)
    assert (found.train_documents, found.eval_documents) == (12, 12)
    assert found.chat_rows == "messages" and found.train_learnt


def test_items_by_number_are_counted_and_checked(tmp_path: Path) -> None:
    found = prepared("noisy", tmp_path)
    assert (found.train_samples, found.eval_samples, found.item_kind) == (40, 7, "tokens")
    assert found.vocab_size == 300
    assert prepared("noisy", tmp_path) == found
    verify(Path(found.dir))
    shorter = prepared("noisy", tmp_path, data={"module_settings": {"number": 39}})
    assert shorter.fingerprint != found.fingerprint
    divided = prepared("undivided", tmp_path, data={"eval_fraction": 0.1})
    assert (divided.train_samples, divided.eval_samples) == (36, 4)


def test_each_item_is_in_one_split_where_the_dataset_has_no_eval_split(tmp_path: Path) -> None:
    found = prepared("undivided", tmp_path)
    assert (found.train_samples, found.eval_samples) == (38, 2)
    reader = _reader(recipe_of("undivided", tmp_path), found)
    places = [reader._source_index(split, at) for split in ("train", "eval") for at in range(
        reader.samples[split])]  # fmt: skip
    assert sorted(places) == [("train", at) for at in range(40)]


def test_items_that_can_only_be_iterated_are_written_once(tmp_path: Path) -> None:
    found = prepared("streamed", tmp_path)
    assert (found.train_samples, found.eval_samples) == (28, 2)
    manifest = read_manifest(Path(found.dir), ("items-1",))
    stored = StoredItems(Path(found.dir), "train", manifest["stored"]["train"])
    assert len(stored) == 30
    for index, ids in enumerate(own_datasets.Streamed(30)):
        assert stored[index]["tokens"].tolist() == ids[:-1].tolist()
        assert stored[index]["targets"].tolist() == ids[1:].tolist()
    verify(Path(found.dir))
    assert prepared("streamed", tmp_path) == found
    more = prepared("streamed", tmp_path, data={"module_settings": {"number": 31}})
    assert more.fingerprint != found.fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        Path(each.dir).name for each in (found, more)
    ), "no scratch folder is left"


def test_draws_that_no_seed_repeats_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared("noisy", tmp_path)
    assert not caplog.messages
    prepared("unseeded", tmp_path)
    assert "items of the train split differ between two reads" in caplog.text


def test_images_have_the_classes_of_their_dataset(tmp_path: Path) -> None:
    images = {"task": {"name": "image_classification"}, "model": {"preset": "resnet50"}}
    found = prepared("pictures", tmp_path, **images)
    assert (found.num_classes, found.item_kind, found.train_samples) == (2, "image", 24)
    assert read_manifest(Path(found.dir), ("items-1",))["classes"] == ["dark", "light"]
    with pytest.raises(RequestError, match=r"no class names\. Give it an attribute `classes`"):
        prepared("unnamed", tmp_path, **images)


@pytest.mark.parametrize(
    ("name", "sections", "words"),
    [
        ("nothing", {}, "returned None (the train split is what the run learns)"),
        ("number", {}, "returned 3 (for the train split). It is called as dataset(split, **data."),
        ("empty", {}, "the train split has no items"),
        ("wide", {}, "item 0 of the train split is {input_ids: a list"),
        ("objects", {}, "row 0 of the train split is no JSON"),
        ("gone", {}, "own_datasets.py has no gone. Define it"),
        ("noisy", {"data": {"module_settings": {"size": 1}}}, "unexpected keyword argument 'size'"),
        ("noisy", {"data": {"eval_fraction": 0.1}}, "returns an eval split. Leave data.eval_fr"),
        ("noisy", {"data": {"pack": "whole", "seq_len": 32}}, "data.pack=whole has no effect"),
        ("noisy", {"data": {"seq_len": 8}}, "has 27 tokens to read, and data.seq_len=8. Set data."),
        ("noisy", {"data": {"too_long": "drop"}}, "data.too_long=drop needs the length of every"),
        ("noisy", {"data": {"tokenizer": "train"}}, "have a tokenizer already. Name its folder"),
        ("noisy", {"task": {"generate_tokens": 8}}, "task.generate_tokens=8 needs the tokenizer"),
        ("noisy", {"task": {"name": "bert_pretraining"}, "model": {"preset": "bert-tiny"}},
         "task.name=bert_pretraining reads text, and its items are tokens"),
        ("texts", {"data": {"too_long": "cut"}}, "data.too_long=cut has no effect"),
        ("dialogues",
         {"data": {"format": "chat", "chat_template": "chatml", "loss_share": [0, 0.1]}},
         f"data.module={OWN}:dialogues: answers are "),
    ],
)  # fmt: skip
def test_a_mistake_names_the_fix(
    name: str, sections: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as caught:
        prepared(name, tmp_path, **sections)
    assert words in str(caught.value), str(caught.value)
    assert {path.name for path in tmp_path.glob(".*")} <= {".rows.lock"}


def test_an_error_of_the_dataset_names_the_item_and_the_line(tmp_path: Path) -> None:
    found = prepared("broken", tmp_path)  # its probes do not meet item 14
    reader = _reader(recipe_of("broken", tmp_path), found)
    with pytest.raises(RequestError) as caught:
        for index in range(reader.samples["train"]):
            reader.read("train", index, 0)
    assert "item 14 of the train split failed at " in str(caught.value)
    assert "own_datasets.py:" in str(caught.value) and '`raise KeyError("gone")`' in str(
        caught.value
    )


@pytest.mark.heavy
def test_what_the_user_prints_is_not_the_answer_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "printing.py").write_text(
        "import os\nprint('imported')\n\n"
        "def dataset(split):\n"
        "    print('called', flush=True)\n    os.system('echo from a child')\n"
        "    return [[1, 2, 3]] * 5\n"
    )
    recipe = recipe_of("noisy", tmp_path / "prepared", data={"module": "printing:dataset"})
    monkeypatch.chdir(tmp_path)
    ended = run_data_program(recipe, tmp_path)
    assert ended.exit_code == 0, ended.said
    assert ended.answer["train_samples"] == 5
    assert all(each in ended.said for each in ("imported", "called", "from a child"))


def _reader(recipe: Recipe, found: DatasetMetadata) -> SplitReader:
    return reader_of(recipe, found, vocab_size=300)
