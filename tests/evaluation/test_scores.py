"""Scores equal those of lm-evaluation-harness, whatever the number of processes."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.lm_eval_scores import MODELS, scores_of, task_files, write_model
from benchmarks.record import RESULTS
from shardyard.control.evaluate import BUILTIN_TASKS, evaluate_model, table
from shardyard.data.eval_tasks.task_file import builtin_tasks, find_tasks
from shardyard.errors import RequestError
from shardyard.evaluation.run import _parse, evaluate_folder
from tests.cli.test_chat import is_running
from tests.elastic.agents import wait_until
from tests.hub import saved_llama

REFERENCE = json.loads((RESULTS / "cpu-2core" / "lm-eval-scores-20261130.json").read_text())


def evaluated(folder: Path, *words: str) -> dict[str, Any]:
    """Evaluate in this process, as the program does."""
    asked = _parse(["--folder", str(folder), *words])
    asked.tasks = find_tasks(asked.task)
    return evaluate_folder(folder, asked)


@pytest.mark.heavy
@pytest.mark.parametrize("name", MODELS)
def test_scores_equal_those_of_the_harness(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / name, begins=MODELS[name])
    words = [word for file in task_files() for word in ("--task", str(file))]
    ours = scores_of(evaluated(folder, *words))
    theirs = REFERENCE["models"][name]["harness"]
    assert REFERENCE["lm_eval"] == "0.4.13"
    assert ours.keys() == theirs.keys()
    drawn = {key for key in theirs if "perplexity_stderr" in key}  # by the harness, at random
    for key in theirs.keys() - drawn:
        assert ours[key] == pytest.approx(theirs[key], rel=1e-6, abs=1e-9), key


@pytest.mark.heavy
def test_two_processes_give_the_numbers_of_one(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", begins=False)
    files = [file for file in task_files() if file.stem in ("choices", "pages", "letters")]
    words = [word for file in files for word in ("--task", str(file))]
    one, two = (
        evaluated(folder, *words, "--batch-tokens", "512", "--processes", number)
        for number in ("1", "2")
    )
    assert (one["processes"], two["processes"]) == (1, 2)
    expected = scores_of(one)
    assert scores_of(two) == pytest.approx(expected, rel=1e-6)


@pytest.mark.heavy
def test_perplexity_of_a_text_is_that_of_transformers_loss(tmp_path: Path) -> None:
    folder, text = write_model(tmp_path / "model", begins=True), "The cat was in the barn."
    (tmp_path / "text.jsonl").write_text(json.dumps({"body": text}) + "\n")
    (result,) = evaluated(folder, "--text", str(tmp_path / "text.jsonl"), "--text-key", "body")[
        "results"
    ]
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        # the text's own first token is predicted too, after another one
        ids = torch.cat([ids[:, :1], ids], dim=1)
        loss = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids, labels=ids).loss.item()
    found = {row["metric"]: row["value"] for row in result["metrics"]}
    assert result["tokens"] == ids.shape[1] - 1 and result["bytes"] == len(text)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    bits = loss * result["tokens"] / math.log(2) / len(text)
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-6)


@pytest.mark.heavy
def test_small_batches_and_short_contexts(tmp_path: Path) -> None:
    folder, task = write_model(tmp_path / "model", begins=False), str(task_files()[-2])
    whole = evaluated(folder, "--task", task)
    small = evaluated(folder, "--task", task, "--batch-tokens", "1")
    assert scores_of(small) == pytest.approx(scores_of(whole), rel=1e-6)
    short = evaluated(folder, "--task", task, "--context", "16")
    assert short["requests"] > whole["requests"], "a text has more windows"
    with pytest.raises(RequestError, match="--context 97: the model reads up to 96 tokens"):
        evaluated(folder, "--task", task, "--context", "97")


def test_a_text_without_words_is_rejected(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", begins=False)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(RequestError, match=r"empty\.jsonl has no text.*Give another"):
        evaluated(folder, "--text", str(tmp_path / "empty.jsonl"))


@pytest.mark.heavy
def test_tasks_that_come_with_shardyard_can_be_scored(tmp_path: Path) -> None:
    assert tuple(builtin_tasks()) == BUILTIN_TASKS
    result = evaluate_model(saved_llama(tmp_path / "llama"), limit=3)
    assert [each["name"] for each in result["results"]] == list(BUILTIN_TASKS)
    assert all(each["examples"] == 3 for each in result["results"])
    rows = table(result)
    assert rows[0][:4] == ["shardyard_addition", "4", "3", "exact_match (first_number)"]


def test_what_is_no_language_model_is_rejected(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", begins=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["BertForMaskedLM"]})
    )
    with pytest.raises(RequestError, match=r"no causal language model: .* BertForMaskedLM"):
        evaluated(folder)
    (folder / "config.json").unlink()
    with pytest.raises(RequestError, match=r"neither a run nor a model: it has no config.json"):
        evaluated(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(RequestError, match=r"holds adapters.*--merged"):
        evaluated(folder)


def test_a_model_too_large_for_a_process_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model", begins=False)
    monkeypatch.setattr("shardyard.evaluation.language_model.free_memory_bytes", lambda _: 1000)
    with pytest.raises(RequestError, match=r"need .* and 1000 B are free.*--processes 1, --dtype"):
        evaluated(folder, "--processes", "2")


_WORKER = """
import os, sys, time
from pathlib import Path
from shardyard.evaluation import worker
def read_work(folder):
    (Path(folder) / f"pid-{sys.argv[2]}").write_text(str(os.getpid()))
    time.sleep(600)
worker.read_work = read_work
worker.main(sys.argv[1:])
"""
_PARENT = """
import sys
from pathlib import Path
from shardyard.evaluation import run
run.python_program = lambda module, *words: [sys.executable, "-c", sys.argv[2], *words]
run._run_workers(2, Path(sys.argv[1]))
"""


@pytest.mark.heavy
def test_the_processes_end_when_the_one_that_started_them_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(tmp_path), _WORKER])
    try:
        wait_until(lambda: len([*tmp_path.glob("pid-*")]) == 2)
        pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids), timeout_s=60)
