"""Rows with labels: columns, names of labels, and tokens as transformers' tokenizers make them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.data.labels.names import LabelValues, names_of_classes
from shardyard.data.labels.prepare import prepare_labelled
from shardyard.data.labels.rows import sample_row, token_row
from shardyard.data.labels.samples import LabelledSet
from shardyard.errors import RequestError, SourceError

WORDS = ["a", "film", "of", "quiet", "scenes", "and", "long", "shots", "told", "in", "3", "acts"]


def _prepare(
    folder: Path, rows: str | None, name: str = "train.csv", **sections: Any
) -> DatasetMetadata:
    """Prepare a table; None: it has been written."""
    if rows is not None:
        (folder / name).write_text(rows, encoding="utf-8")
    data = {
        "source": str(folder / name), "dir": str(folder / "prepared"), "tokenizer": "train",
        "tokenizer_kind": "wordpiece", "vocab_size": 260, "seq_len": 16, "eval_fraction": 0.2,
        **sections.pop("data", {}),
    }  # fmt: skip
    recipe = Recipe.model_validate(
        {
            "model": sections.pop("model", {"preset": "bert-tiny"}),
            "task": {"name": "sequence_classification", **sections.pop("task", {})},
            "data": data,
        }
    )
    return prepare_labelled(recipe, model_dir=None, progress=lambda *_: None)


def _table(labels: list[Any], columns: str = "text,label") -> str:
    rows = [f"{' '.join(WORDS[n % 5 : n % 5 + 5])} {n},{each}" for n, each in enumerate(labels)]
    return "\n".join([columns, *rows]) + "\n"


def _samples(data: DatasetMetadata, split: str = "train") -> LabelledSet:
    return LabelledSet(Path(data.dir), split, seq_len=16, vocab_size=300, reads_last=True)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["pos", "neg"] * 8, ("neg", "pos")),
        ([0, 1, 2, 0] * 4, ("LABEL_0", "LABEL_1", "LABEL_2")),
        ([0.5, 1, 2.25, 3] * 4, ()),
    ],
)
def test_labels_are_words_numbers_or_values(
    tmp_path: Path, labels: list[Any], names: tuple[str, ...]
) -> None:
    data = _prepare(tmp_path, _table(labels))
    assert (data.label_names, data.num_labels) == (names, max(1, len(names)))
    assert data.train_samples is not None and data.eval_samples
    assert data.train_samples + data.eval_samples == len(labels)
    rows = _samples(data)
    found = sorted(float(rows.sample(n, 0).fields["label"]) for n in range(rows.num_samples))
    held_out = _samples(data, "eval")
    found += [float(held_out.sample(n, 0).fields["label"]) for n in range(held_out.num_samples)]
    numbers = [names.index(each) if each in names else each for each in labels]
    assert sorted(found) == sorted(map(float, numbers))


def test_settings_name_columns_and_labels(tmp_path: Path) -> None:
    data = _prepare(
        tmp_path, _table([0, 1] * 8, columns="review,stars"),
        data={"keys": {"text": "review", "label": "stars"}, "labels": ["bad", "good"]},
    )  # fmt: skip
    assert data.label_names == ("bad", "good")


CLASSES = {"names": ["world", "sport", "trade"], "_type": "ClassLabel"}


def _write_classes(path: Path, columns: dict[str, list[Any]], features: dict[str, Any]) -> None:
    """Write a table as ``datasets`` writes it, with what it says of its columns."""
    about = json.dumps({"info": {"features": features}})
    table = pyarrow.table(columns).replace_schema_metadata({"huggingface": about})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
        return
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("name", ["train.parquet", "data-00000-of-00001.arrow"])
def test_classes_of_datasets_have_their_names(tmp_path: Path, name: str) -> None:
    texts, topics = [f"{' '.join(WORDS)} {n}" for n in range(16)], [0, 1] * 8
    _write_classes(tmp_path / name, {"text": texts, "topic": topics}, {"topic": CLASSES})
    keys: dict[str, Any] = {"eval_fraction": 0.2, "keys": {"label": "topic"}}
    data = _prepare(tmp_path, None, name, data=keys)
    assert (data.label_names, data.num_labels) == (("world", "sport", "trade"), 3)
    named = {**keys, "labels": ["a", "b"], "dir": str(tmp_path / "named")}
    assert _prepare(tmp_path, None, name, data=named).label_names == ("a", "b")


def test_classes_of_words_have_their_names(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {"tokens": [WORDS] * 9, "ner_tags": [[0, 1, 2] * 4] * 9}
    tags = {"names": ["O", "B-X", "I-X"], "_type": "ClassLabel"}
    for number, feature in enumerate(({"feature": tags, "_type": "List"}, [tags])):
        folder = tmp_path / str(number)
        folder.mkdir()
        _write_classes(folder / "train.parquet", columns, {"ner_tags": feature})
        data = _prepare(
            folder, None, "train.parquet", task={"name": "token_classification"},
            data={"seq_len": 40, "eval_fraction": 0},
        )  # fmt: skip
        assert data.label_names == ("O", "B-X", "I-X")


def test_files_that_number_their_classes_differently_are_rejected(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {"text": [" ".join(WORDS)] * 4, "label": [0, 1] * 2}
    for name, names in {"a": ["no", "yes"], "b": ["yes", "no"]}.items():
        feature = {"names": names, "_type": "ClassLabel"}
        _write_classes(tmp_path / f"{name}.parquet", columns, {"label": feature})
    with pytest.raises(RequestError, match=r"a\.parquet numbers .* no, yes, and .*b\.parquet yes"):
        _prepare(tmp_path, None, "*.parquet")


def test_a_model_keeps_its_own_order_of_the_same_classes() -> None:
    values = LabelValues()
    values.add([0, 1, 0])
    others: dict[str, Any] = {"configured": (), "problem_type": None, "of_tokens": False}
    found = values.names(of_files=("no", "yes"), of_model=("yes", "no"), **others)
    assert found.names == ("yes", "no") and [found.number(each) for each in (0, 1)] == [1, 0]
    found = values.names(of_files=("no", "yes"), of_model=("bad", "good"), **others)
    assert found.names == ("no", "yes") and [found.number(each) for each in (0, 1)] == [0, 1]
    assert values.names(of_files=("no",), of_model=(), **others).names == ("LABEL_0", "LABEL_1")


@pytest.mark.parametrize(
    "features",
    [None, [], {"label": {"dtype": "int64", "_type": "Value"}}, {"label": {"_type": "ClassLabel"}},
     {"label": {"names": ["a", "a"], "_type": "ClassLabel"}}],
)  # fmt: skip
def test_columns_that_are_no_classes_have_no_names(features: Any) -> None:
    assert names_of_classes(features, "label") == ()


def test_whole_numbers_are_values_on_request(tmp_path: Path) -> None:
    data = _prepare(tmp_path, _table([1, 5] * 8), task={"problem_type": "regression"})
    assert (data.label_names, data.num_labels) == ((), 1)


@pytest.mark.parametrize("too_long", ["cut", "drop"])
def test_pairs_are_tokenized_as_transformers_does(tmp_path: Path, too_long: str) -> None:
    rows = [
        {"sentence1": " ".join(WORDS[: n % 11 + 1]), "sentence2": " ".join(WORDS[n % 4 :][:n]),
         "label": n % 2}
        for n in range(1, 25)
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    data = _prepare(tmp_path, text, "train.jsonl", data={"too_long": too_long, "eval_fraction": 0})
    tokenizer = AutoTokenizer.from_pretrained(data.dir)
    pairs = [(row["sentence1"], row["sentence2"]) for row in rows]
    cut = tokenizer([a for a, _ in pairs], [b for _, b in pairs], truncation=True, max_length=16)
    whole = tokenizer([a for a, _ in pairs], [b for _, b in pairs])
    kept = [n for n in range(24) if too_long == "cut" or len(whole["input_ids"][n]) <= 16]
    assert len(kept) > 0 and data.too_long == sum(len(ids) > 16 for ids in whole["input_ids"]) > 0
    samples = _samples(data)
    assert samples.num_samples == len(kept)
    for number, row in enumerate(kept):
        sample = samples.sample(number, 0)
        for field, theirs in (("tokens", "input_ids"), ("segments", "token_type_ids")):
            np.testing.assert_array_equal(sample.fields[field][: sample.length], cut[theirs][row])
        assert sample.fields["reads"] == sample.length - 1


def test_a_words_label_is_that_of_its_first_token(tmp_path: Path) -> None:
    rows = [{"tokens": WORDS[n:], "ner_tags": ["B-X"] + ["O"] * (11 - n)} for n in range(8)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    task = {"name": "token_classification"}
    data = _prepare(
        tmp_path, text, "train.jsonl", task=task, data={"eval_fraction": 0, "seq_len": 60}
    )
    assert data.label_names == ("O", "B-X")
    tokenizer = AutoTokenizer.from_pretrained(data.dir)
    rows_read = LabelledSet(Path(data.dir), "train", seq_len=60, vocab_size=300, reads_last=False)
    for number, row in enumerate(rows):
        encoding = tokenizer(row["tokens"], is_split_into_words=True)
        expected, before = [], None
        for word in encoding.word_ids():
            is_first = word is not None and word != before
            expected.append(int(row["ner_tags"][word] == "B-X") if is_first else -100)
            before = word
        sample = rows_read.sample(number, 0)
        assert sample.fields["targets"][: sample.length].tolist() == expected
        assert (sample.fields["targets"][sample.length :] == -100).all()


@pytest.mark.parametrize(
    ("labels", "sections", "says"),
    [
        ([0] * 8, {}, "nothing to tell apart"),
        ([-1, 0] * 8, {}, "take them out"),
        (["a", "b"] * 8, {"task": {"problem_type": "regression"}}, "labels are words such as 'a'"),
        (["a", "b"] * 8, {"data": {"labels": ["a", "c"]}}, "lacks 'b'"),
        ([0, 2] * 8, {"data": {"labels": ["a", "b"]}}, "a row has label 2"),
        ([0, 1] * 8, {"data": {"seq_len": 4}}, r"data\.too_long=cut"),
        (
            [0.5, 1] * 8,
            {"task": {"problem_type": "single_label_classification"}},
            "task.problem_type=regression",
        ),
    ],
)  # fmt: skip
def test_labels_that_contradict_the_recipe_are_rejected(
    tmp_path: Path, labels: list[Any], sections: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        _prepare(tmp_path, _table(labels), **sections)


def test_a_row_without_tokens_is_rejected(tmp_path: Path) -> None:
    rows = "".join(
        json.dumps({"text": text, "label": n % 2}) + "\n"
        for n, text in enumerate(["a film", "long shots", "", "quiet scenes"] * 3)
    )
    causal = {"tokenizer_kind": "bpe", "vocab_size": 300}
    with pytest.raises(RequestError, match="label 0 has no tokens: its text is empty"):
        _prepare(tmp_path, rows, "rows.jsonl", data=causal, model={"preset": "llama-tiny"})


def test_text_without_columns_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"has no columns\. Give a table"):
        _prepare(tmp_path, "text\n", "train.txt")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"body": "a text"}, r"no column of text .* data\.keys=\{text: body\}"),
        ({"sentence": "a", "content": "b", "label": 1}, "several columns of text"),
        ({"text": "a"}, r"no column of label .* data\.keys=\{label: COLUMN\}"),
        ({"text": "a", "label": None}, "is empty"),
        ({"text": 3, "label": 1}, "holds 3, not a text"),
        ({"text": "a", "label": [1, 2]}, "holds a JSON list"),
    ],
)
def test_a_row_without_text_or_label_is_rejected(row: dict[str, Any], says: str) -> None:
    with pytest.raises(SourceError, match=says):
        sample_row(row, "here")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"tokens": ["a"], "ner_tags": ["O", "O"]}, "1 words .* 2 labels"),
        ({"tokens": "a b", "ner_tags": ["O"]}, "not a list of words"),
        ({"tokens": ["a"]}, "no column of labels of words"),
    ],
)
def test_a_row_without_a_label_for_each_word_is_rejected(row: dict[str, Any], says: str) -> None:
    with pytest.raises(SourceError, match=says):
        token_row(row, "here")
