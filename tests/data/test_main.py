"""`python -m shardyard.data`: one line of JSON on stdout, whatever happens; the talk on stderr."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.resolved import DatasetMetadata
from shardyard.data.shards import read_metadata
from shardyard.data.tokenizer import train_bpe

pytestmark = pytest.mark.heavy


def run(tmp_path: Path, recipe: str, *options: str) -> "subprocess.CompletedProcess[bytes]":
    path = tmp_path / "recipe.json"
    path.write_text(recipe)
    command = [sys.executable, "-m", "shardyard.data", str(path), *options]
    return subprocess.run(command, capture_output=True, timeout=60, check=False)


def recipe_of(source: Path, folder: Path, **settings: Any) -> str:
    data = {"source": str(source), "dir": str(folder / "prepared"), **settings}
    return json.dumps({"data": data})


def test_the_answer_is_the_facts_of_the_data_set(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(50)]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    for name, content in train_bpe(iter(texts), vocab_size=270).items():
        (model_dir / name).write_bytes(content)
    recipe = recipe_of(tmp_path / "x.jsonl", tmp_path)

    done = run(tmp_path, recipe, "--model-dir", str(model_dir))

    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert DatasetMetadata(**answer) == read_metadata(Path(answer["dir"]))
    assert answer["vocab_size"] <= 270
    assert answer["train_documents"] + answer["eval_documents"] == 50
    assert done.stderr == b"turning text into tokens: 0.0 of 0.0 MB\n"
    again = run(tmp_path, recipe, "--model-dir", str(model_dir))
    assert (again.stdout, again.stderr) == (done.stdout, b"")


def test_a_vocabulary_that_the_model_has_no_rows_for_is_refused_before_text_becomes_tokens(
    tmp_path: Path,
) -> None:
    (tmp_path / "x.txt").write_text("some text of a document")
    recipe = recipe_of(tmp_path / "x.txt", tmp_path, tokenizer="train", vocab_size=300)
    done = run(tmp_path, recipe, "--rows", "200")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["exit_code"]) == (2, 2)
    assert "data.tokenizer=train has 2" in answer["error"]
    assert "the model's embedding has 200 rows." in answer["error"]
    assert b"turning text into tokens" not in done.stderr


def test_a_wrong_request_is_answered_with_its_exit_code(tmp_path: Path) -> None:
    done = run(tmp_path, recipe_of(tmp_path / "no-such", tmp_path))
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["exit_code"]) == (2, 2)
    assert "no-such' does not exist" in answer["error"]
    assert done.stderr == b""


def test_a_wrong_first_line_is_told_before_any_work_and_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("oops")
    done = run(tmp_path, recipe_of(tmp_path / "x.jsonl", tmp_path))
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["exit_code"]) == (2, 2)
    assert "x.jsonl:1: not JSON" in answer["error"]
    assert done.stderr == b""  # no tokenizer was trained before


@pytest.mark.parametrize("text", ["{", '{"data": {"sauce": 1}}'])
def test_a_recipe_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    done = run(tmp_path, text)
    assert done.returncode == 2
    assert "recipe.json is not a recipe in JSON" in json.loads(done.stdout)["error"]
    assert b"Traceback" not in done.stderr
