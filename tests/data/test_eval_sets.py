"""Sets of data.eval_sets as prepared data: all of a set for validation, none of it trained on."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.config.resolved import DatasetMetadata, EvalSetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.data.eval_sets import prepare_eval_sets
from shardyard.data.eval_tasks.prepare import examples_of, prepare_eval_tasks, read_eval_tasks
from shardyard.data.eval_tasks.prompts import example_of_json
from shardyard.data.eval_tasks.task import EvalTask
from shardyard.data.shards import TokenShards
from shardyard.data.text_datasets import prepare_text
from shardyard.data.tokenizer import TextEncoder
from shardyard.errors import RequestError, ShardyardError, SourceError


def write(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "train" / "web.jsonl", [f"one two {n} three {n * n}" for n in range(200)])
    write(tmp_path / "other.jsonl", [f"four five {n}" for n in range(50)])
    write(tmp_path / "hard" / "a.jsonl", [f"hard {n} question {n * 7}" for n in range(40)])
    return tmp_path


def prepared(
    folder: Path, sets: dict[str, Any], **data: Any
) -> tuple[DatasetMetadata, tuple[EvalSetMetadata, ...]]:
    usual = {
        "source": str(folder / "train"), "dir": str(folder / "out"), "vocab_size": 300,
        "workers": 1, "eval_fraction": 0.1, "eval_sets": sets,
    }  # fmt: skip
    task = data.pop("task", "causal_lm")
    if "mixture" in data:
        del usual["source"]
    recipe = Recipe.model_validate({"data": {**usual, **data}, "task": {"name": task}})
    metadata = prepare_text(recipe, model_dir=None, progress=lambda *_: None)
    sets_found = prepare_eval_sets(recipe, metadata, progress=lambda *_: None)
    return metadata, sets_found


def text_of(data: DatasetMetadata, split: str) -> str:
    shards = TokenShards(Path(data.dir), split)
    tokenizer = {"tokenizer.json": (Path(data.dir) / "tokenizer.json").read_bytes()}
    encoder = TextEncoder(tokenizer, name="t")
    return encoder._tokenizer.decode(shards.read(0, shards.num_tokens).tolist())


def test_all_of_a_set_is_validated_on_with_the_tokenizer_of_the_run(folder: Path) -> None:
    metadata, (hard, one) = prepared(folder, {"hard": str(folder / "hard"), "one": [str(
        folder / "hard" / "a.jsonl"
    )]})  # fmt: skip
    assert (hard.name, hard.data.eval_documents, hard.data.train_documents) == ("hard", 40, 0)
    assert one.data.dir == hard.data.dir  # the same files: one dataset
    files = [Path(each.dir) / "tokenizer.json" for each in (metadata, hard.data)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "hard 39 question 273" in text_of(hard.data, "eval")
    assert "hard" not in text_of(metadata, "train") + text_of(metadata, "eval")
    assert hard.data.validation_files == "a.jsonl"
    found = DatasetMetadata(**json.loads(json.dumps(asdict(metadata) | {"eval_sets": [
        asdict(hard)
    ]})))  # fmt: skip
    assert found.eval_sets == (hard,) and found.by_name == {"hard": hard.data}
    assert found.fingerprints == {
        metadata.dir: metadata.fingerprint, hard.data.dir: hard.data.fingerprint,
    }  # fmt: skip


def test_a_set_of_several_named_splits_is_its_validation_part(folder: Path) -> None:
    for name in ("train", "validation", "test"):
        write(folder / "splits" / f"{name}.jsonl", [f"{name} {n}" for n in range(9)])
    _, (found,) = prepared(folder, {"splits": str(folder / "splits")})
    assert found.data.validation_files == "validation.jsonl"


def test_a_file_that_names_keep_out_of_training_may_be_a_set(folder: Path) -> None:
    test = write(folder / "train" / "test.jsonl", ["of the test"] * 9)
    write(folder / "train" / "validation.jsonl", ["of the validation"] * 9)
    metadata, (found,) = prepared(folder, {"test": str(test)}, eval_fraction=0.05)
    assert metadata.left_out_files == "test.jsonl" == found.data.validation_files


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_file_that_is_trained_on_is_no_set(folder: Path, is_mixed: bool) -> None:
    (folder / "link.jsonl").symlink_to(folder / "train" / "web.jsonl")
    shares = [
        {"name": name, "source": str(folder / path), "weight": 1.0}
        for name, path in (("other", "other.jsonl"), ("web", "train"))
    ]
    words = r"data\.eval_sets\.x='.*link\.jsonl': .*train/web\.jsonl is trained on, too, by "
    with pytest.raises(RequestError, match=rf"{words}data\.source='.*train'\. Move it"):
        prepared(
            folder, {"x": str(folder / "link.jsonl")}, **({"mixture": shares} if is_mixed else {})
        )


def test_sets_of_a_mixture_have_its_tokenizer(folder: Path) -> None:
    shares = [{"name": "web", "source": str(folder / "train"), "weight": 1.0}]
    metadata, (hard,) = prepared(folder, {"hard": str(folder / "hard")}, mixture=shares)
    files = [Path(each.dir) / "tokenizer.json" for each in (metadata, hard.data)]
    assert files[0].read_bytes() == files[1].read_bytes() and hard.data.eval_documents == 40


def test_words_are_cut_and_begun_as_those_that_are_trained_on(folder: Path) -> None:
    metadata, (hard,) = prepared(
        folder, {"hard": str(folder / "hard")}, tokenizer_kind="wordpiece", task="masked_lm"
    )
    assert hard.data.bos_token == metadata.bos_token == "[CLS]"


ANSWERS = [{"prompt": f"What is {n} + {n}?", "completion": f"It is {2 * n}."} for n in range(40)]


def dialogues(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.heavy
@pytest.mark.parametrize("pack", ["stream", "whole"])
def test_dialogues_have_the_template_and_keys_of_the_run(folder: Path, pack: str) -> None:
    rows = [{"frage": row["prompt"], "antwort": row["completion"]} for row in ANSWERS]
    settings = {
        "source": dialogues(folder / "a.jsonl", rows), "format": "chat", "pack": pack,
        "keys": {"prompt": "frage", "completion": "antwort"}, "chat_template": "alpaca",
        "seq_len": 96,
    }  # fmt: skip
    _, (found,) = prepared(folder, {"b": dialogues(folder / "b.jsonl", rows[:9])}, **settings)
    text = text_of(found.data, "eval")
    assert text.count("### Instruction:") == text.count("### Response:") == 9
    assert found.data.eval_learnt and found.data.train_learnt == 0
    assert (found.data.eval_samples is None) == (pack == "stream")
    learnt = TokenShards(Path(found.data.dir), "eval").read(0, found.data.eval_tokens, "learnt")
    assert int(np.sum(learnt)) == found.data.eval_learnt


@pytest.mark.parametrize(
    ("rows", "kind", "words"),
    [
        ([], SourceError, r"data\.eval_sets\.b='.*' is an empty corpus"),
        ([{"text": ""}], SourceError, r"data\.eval_sets\.b='.*' is an empty corpus: its files"),
        ([{"words": "x"}], SourceError, r"b\.jsonl:1: no key 'text'"),
    ],
)
def test_a_set_that_cannot_be_read_is_named(
    folder: Path, rows: list[dict[str, str]], kind: type[ShardyardError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        prepared(folder, {"b": dialogues(folder / "b.jsonl", rows)})


def test_dialogues_of_a_set_without_answers_to_learn_are_named(folder: Path) -> None:
    settings = {
        "source": dialogues(folder / "a.jsonl", ANSWERS), "format": "chat",
        "chat_template": "alpaca",
    }  # fmt: skip
    long = [{"prompt": "word " * 3000, "completion": "a"}]
    with pytest.raises(RequestError, match=r"data\.eval_sets\.b='.*': answers are 0\.\d+% of the"):
        prepared(folder, {"b": dialogues(folder / "b.jsonl", long)}, **settings)


@pytest.mark.heavy
def test_documents_of_a_set_that_are_too_long_are_named(folder: Path) -> None:
    write(folder / "long.jsonl", ["long " * 200])
    words = r"data\.eval_sets\.b: data\.pack=whole: 1 of 1 documents of the eval split do not fit"
    with pytest.raises(RequestError, match=words):
        prepared(folder, {"b": str(folder / "long.jsonl")}, pack="whole", seq_len=64)


TASKS = Path(__file__).parents[1] / "evaluation" / "tasks"


def test_tasks_are_files_or_come_with_shardyard() -> None:
    named = {"ends": str(TASKS / "endings.yaml"), "facts": "shardyard_facts"}
    recipe = Recipe.model_validate({"data": {"eval_tasks": named}})
    found = read_eval_tasks(recipe)
    assert [(name, each.name) for name, each in found.items()] == [
        ("ends", "endings"), ("facts", "shardyard_facts"),
    ]  # fmt: skip


def test_questions_are_written_once_and_read_as_they_were(tmp_path: Path) -> None:
    named = {name: str(TASKS / f"{name}.yaml") for name in ("choices", "blanks_shots", "pages")}
    recipe = Recipe.model_validate({"data": {"eval_tasks": named}})
    facts: dict[str, Any] = {
        "fingerprint": "f", "vocab_size": 300, "train_tokens": 5, "eval_tokens": 9,
        "train_documents": 9, "eval_documents": 1, "unigram_entropy": 4.0, "dir": str(tmp_path),
    }  # fmt: skip
    files = prepare_eval_tasks(recipe, DatasetMetadata(**facts))
    assert files == prepare_eval_tasks(recipe, DatasetMetadata(**facts))
    answer = json.loads(json.dumps(asdict(DatasetMetadata(eval_tasks=files, **facts))))
    assert DatasetMetadata(**answer).eval_tasks == files
    assert len(list(tmp_path.rglob("*.json"))) == len(files) == 3
    for name, file in files:
        content, task = json.loads((tmp_path / file).read_text()), read_eval_tasks(recipe)[name]
        assert EvalTask.of_json(content["task"]) == task
        assert [example_of_json(each) for each in content["examples"]] == examples_of(task)


@pytest.mark.parametrize(
    ("word", "target", "words"),
    [
        ("none.yaml", "x/acc", r"data\.eval_tasks\.x=none\.yaml: no such file, and no task that"),
        ("shardyard_fact", "x/acc", r"Did you mean shardyard_facts\? Give a YAML file of lm-eval"),
        (
            str(TASKS / "letters.yaml"),
            "loss",
            "validation scores only given texts. Leave it out",
        ),
        (
            "shardyard_facts",
            "x/perplexity",
            r"has no perplexity. It has x/acc, x/acc_norm. Name",
        ),
    ],
)
def test_a_task_that_cannot_be_scored_is_an_error(word: str, target: str, words: str) -> None:
    recipe = Recipe.model_validate(
        {"data": {"eval_tasks": {"x": word}}, "run": {"target": {target: 1.0}}}
    )
    with pytest.raises(RequestError, match=words):
        read_eval_tasks(recipe)
