"""Named splits: which documents are trained on, validated on and left out."""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.control.attempt import split_lines
from shardyard.data.shards import TokenShards
from shardyard.data.text_datasets import prepare_text
from shardyard.errors import RequestError, SourceError


def write(folder: Path, *names: str) -> Path:
    """Files of four documents each, which say what file they are of."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"text": f"{name} number {number}"} for number in range(4)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def prepared(tmp_path: Path, **data: Any) -> DatasetMetadata:
    settings = {"dir": str(tmp_path / "prepared"), "vocab_size": 300, "workers": 1, **data}
    recipe = Recipe.model_validate({"data": settings})
    return prepare_text(recipe, model_dir=None, progress=lambda *_: None)


def files_in(facts: DatasetMetadata, split: str) -> set[str]:
    """Files that the documents of a split came from, each with all of its documents."""
    shards = TokenShards(Path(facts.dir), split)
    tokenizer = Tokenizer.from_file(str(Path(facts.dir) / "tokenizer.json"))
    text = tokenizer.decode(shards.read(0, shards.num_tokens).tolist())
    files = re.findall(r"([a-z][-a-z0-9]*\.jsonl) number", text)
    assert len(files) == 4 * len(set(files))
    return set(files)


def both(facts: DatasetMetadata) -> tuple[Collection[str], Collection[str]]:
    return files_in(facts, "train"), files_in(facts, "eval")


def test_validation_files_are_validated_on_and_test_files_left_out(tmp_path: Path) -> None:
    source = write(tmp_path / "text", "train.jsonl", "more.jsonl", "validation.jsonl", "test.jsonl")
    facts = prepared(tmp_path, source=str(source))
    assert both(facts) == ({"train.jsonl", "more.jsonl"}, {"validation.jsonl"})
    assert split_lines(facts) == [
        "validation files: validation.jsonl (4 documents)",
        "left out: test.jsonl (not training data by name; to train on one, name the file in "
        "data.source)",
    ]
    assert prepared(tmp_path, source=str(source)) == facts
    tokenizer = (Path(facts.dir) / "tokenizer.json").read_text()
    assert "train" in tokenizer and "valid" not in tokenizer  # nor is it trained on them


def test_eval_source_names_the_validation_data(tmp_path: Path) -> None:
    source = write(tmp_path / "text", "a.jsonl", "held.jsonl", "dev.jsonl")
    write(tmp_path / "other", "train.jsonl", "test.jsonl")
    held = prepared(tmp_path, source=str(source), eval_source=str(source / "held.jsonl"))
    assert both(held) == ({"a.jsonl"}, {"held.jsonl"})
    assert held.left_out_files == "dev.jsonl"
    chosen = [str(tmp_path / "other"), str(source / "held.jsonl")]
    several = prepared(tmp_path, source=str(source / "a.jsonl"), eval_source=chosen)
    assert both(several) == ({"a.jsonl"}, {"test.jsonl", "held.jsonl"})


def test_what_data_source_names_itself_is_trained_on_and_reported(tmp_path: Path) -> None:
    source = write(tmp_path / "text", "train.jsonl", "validation.jsonl", "test-1.jsonl")
    named = [str(source / "train.jsonl"), str(source / "validation.jsonl")]
    facts = prepared(tmp_path, source=named, eval_fraction=0)
    assert files_in(facts, "train") == {"train.jsonl", "validation.jsonl"}
    assert split_lines(facts) == [
        "trained on all the same: validation.jsonl (named as validation or test data, and "
        "data.source names it)"
    ]
    pattern = prepared(tmp_path, source=str(source / "test-*.jsonl"), eval_fraction=0)
    assert files_in(pattern, "train") == {"test-1.jsonl"}


def test_without_validation_the_files_named_so_are_left_out(tmp_path: Path) -> None:
    source = write(tmp_path / "text", "train.jsonl", "validation.jsonl")
    facts = prepared(tmp_path, source=str(source), eval_fraction=0)
    assert (files_in(facts, "train"), facts.eval_documents) == ({"train.jsonl"}, 0)
    assert facts.left_out_files == "validation.jsonl"


def test_a_source_of_a_mixture_has_its_own_validation_data(tmp_path: Path) -> None:
    a = write(tmp_path / "a", "train-0.jsonl", "dev-0.jsonl")
    b = write(tmp_path / "b", "b.jsonl", "c.jsonl")
    mixture = [
        {"name": "a", "source": str(a), "weight": 1},
        {"name": "b", "source": str(b / "b.jsonl"), "weight": 1, "eval_source": str(b / "c.jsonl")},
    ]
    facts = prepared(tmp_path, mixture=mixture)
    parts = [both(part.data) for part in facts.parts]
    assert parts == [({"train-0.jsonl"}, {"dev-0.jsonl"}), ({"b.jsonl"}, {"c.jsonl"})]
    assert split_lines(facts)[0] == "validation files of a: dev-0.jsonl (4 documents)"


@pytest.mark.parametrize(
    ("names", "data", "message"),
    [
        (["test.jsonl"], {}, r"has no file to train on: all are named as .*name the file itself: "),
        (
            ["a.jsonl"],
            {"eval_source": "a.jsonl"},
            r"data\.eval_source names all of them\. Validate",
        ),
        (["a.jsonl", "val.jsonl"], {"eval_fraction": 0.1}, r"=0\.1, but .* val\.jsonl\. Leave "),
        (["a.jsonl"], {"eval_source": "no.jsonl"}, r"data\.eval_source='.*no\.jsonl' does not ex"),
    ],
)
def test_what_contradicts_the_names_is_rejected(
    tmp_path: Path, names: list[str], data: dict[str, Any], message: str
) -> None:
    source = write(tmp_path / "text", *names)
    if "eval_source" in data:
        data = {**data, "eval_source": str(source / data["eval_source"])}
    with pytest.raises(RequestError, match=message):
        prepared(tmp_path, source=str(source), **data)


def test_validation_files_without_text_are_rejected(tmp_path: Path) -> None:
    source = write(tmp_path / "text", "train.jsonl", "validation.jsonl")
    (source / "validation.jsonl").write_text("\n")
    with pytest.raises(SourceError, match=r"its files for validation hold no text\. Give files"):
        prepared(tmp_path, source=str(source))
