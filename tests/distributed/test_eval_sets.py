"""Sets of data.eval_sets: their scores are those of a run that is validated on them, and plain
transformers'; a resume may add some."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from shardyard.checkpoint.export import export
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.data.eval_sets import prepare_eval_sets
from shardyard.data.text_datasets import prepare_text
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.loop import FINISHED
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here

SEQ_LEN = 32


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files to train on, and others: dialogues and running text."""
    folder = tmp_path_factory.mktemp("text")
    for name, count in (("train", 240), ("numbers", 50), ("squares", 31)):
        rows = [{"text": f"{name} {n} {n * n} {n**3}"} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        chats = [
            {"prompt": f"{name} {n}?" + " Think." * (n % 5), "completion": f"It is {n * n}."}
            for n in range(count)
        ]
        (folder / f"{name}-chat.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return folder


def settings(text: Path, folder: Path, *, suffix: str = "", **data: Any) -> dict[str, Any]:
    return {
        "source": str(text / f"train{suffix}.jsonl"), "dir": str(folder / "prepared"),
        "tokenizer": "train", "vocab_size": 400, "workers": 1, "seq_len": SEQ_LEN, **data,
    }  # fmt: skip


def prepared(data: dict[str, Any], sections: dict[str, Any]) -> Corpus:
    """Data of a recipe as the data program prepares it."""
    recipe = Recipe.model_validate({"data": data, "task": sections.get("task", {})})
    metadata = prepare_text(recipe, model_dir=None, progress=lambda *_: None)
    sets = prepare_eval_sets(recipe, metadata, progress=lambda *_: None)
    return Corpus(data["source"], data["dir"], replace(metadata, eval_sets=sets))


def evaluated(
    folder: Path, data: dict[str, Any], sections: dict[str, Any], processes: int = 1
) -> dict[str, Any]:
    """The line of the evaluation at the end of a run whose weights hardly change."""
    steady: dict[str, Any] = {
        "run": {"steps": 1},
        "optim": {"lr": 1e-12, "weight_decay": 0.0, "warmup_steps": 0, "micro_batch": 3},
        "cluster": {"devices": processes},
        "parallel": {"zero": 3} if processes > 1 else {},
        **sections,
        "data": data,
    }
    run_dir = make_run(folder, prepared(data, sections), steady)
    assert run_on_ranks(train_here, processes, run_dir) == [FINISHED] * processes
    (line,) = read_evaluations(run_dir.metrics)
    return line


MASKED = {"task": {"name": "masked_lm"}, "model": {"preset": "bert-tiny"}}
CHAT = {"format": "chat", "chat_template": "alpaca", "pack": "whole", "seq_len": 128}


@pytest.mark.parametrize(
    ("processes", "sections", "data"),
    [
        (1, {}, {}),
        (2, {}, {}),
        pytest.param(1, MASKED, {}, marks=pytest.mark.system),
        pytest.param(2, MASKED, {}, marks=pytest.mark.system),
        (2, {}, CHAT),
        pytest.param(1, {}, {**CHAT, "pack": "stream"}, marks=pytest.mark.system),
    ],
    ids=["text", "text-zero3", "masked", "masked-zero3", "chat-zero3", "chat-stream"],
)
def test_a_set_has_the_scores_of_a_run_that_is_validated_on_it(
    text: Path, tmp_path: Path, processes: int, sections: dict[str, Any], data: dict[str, Any]
) -> None:
    suffix = "-chat" if data else ""
    sets = {name: str(text / f"{name}{suffix}.jsonl") for name in ("numbers", "squares")}
    base = settings(text, tmp_path, suffix=suffix, **data)
    found = evaluated(tmp_path / "sets", {**base, "eval_sets": sets}, sections, processes)
    assert [*found["eval_sources"]] == ["numbers", "squares"]
    for name, source in sets.items():
        alone = evaluated(tmp_path / name, {**base, "eval_source": source}, sections)
        assert "eval_sources" not in alone and alone["eval"]["loss"] > 1
        assert found["eval_sources"][name] == pytest.approx(alone["eval"], rel=1e-6)


def test_the_loss_of_a_run_is_that_of_its_own_validation_split(text: Path, tmp_path: Path) -> None:
    base = settings(text, tmp_path)
    sets = {"numbers": str(text / "numbers.jsonl")}
    found = evaluated(tmp_path / "sets", {**base, "eval_sets": sets}, {})
    assert found["eval"] == evaluated(tmp_path / "none", base, {})["eval"]


def plain_loss(run_dir: RunDir, data: DatasetMetadata, folder: Path) -> tuple[float, int]:
    """Of the newest checkpoint over a set's files, window by window, by transformers alone."""
    export(choose_checkpoint(run_dir, "latest").path, read_resolved(run_dir.resolved(0)), folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    files = sorted(Path(data.dir).glob("eval-*.bin"))
    tokens = torch.from_numpy(np.concatenate([np.fromfile(f, "<u2") for f in files]).astype(int))
    total, number = 0.0, 0
    for start in range(0, len(tokens) - 1, SEQ_LEN):
        window = tokens[start : start + SEQ_LEN + 1]
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0]
        total += float(F.cross_entropy(logits.double(), window[1:], reduction="sum"))
        number += len(window) - 1
    return total / number, number


def test_a_resume_may_add_a_set_whose_loss_is_transformers(text: Path, tmp_path: Path) -> None:
    base = settings(text, tmp_path)
    sets = {"numbers": str(text / "numbers.jsonl"), "squares": str(text / "squares.jsonl")}
    run_dir = RunDir(tmp_path / "run")
    for attempt, named in enumerate((["numbers"], ["numbers", "squares"], ["squares"])):
        data = {**base, "eval_sets": {name: sets[name] for name in named}}
        sections: dict[str, Any] = {
            "run": {"steps": attempt + 1},
            "optim": {"decay_steps": 3, "warmup_steps": 0},
            "data": data,
        }
        previous = read_resolved(run_dir.resolved(attempt - 1)) if attempt else None
        make_run(run_dir.path, prepared(data, {}), sections, attempt=attempt, previous=previous)
        assert run_on_ranks(train_here, 1, run_dir, attempt) == [FINISHED]
    lines = read_evaluations(run_dir.metrics)
    assert [[*line["eval_sources"]] for line in lines] == [
        ["numbers"], ["numbers", "squares"], ["squares"],
    ]  # fmt: skip
    assert [step["step"] for step in read_steps(run_dir.metrics)] == [1, 2, 3]
    (found,) = read_resolved(run_dir.resolved(2)).data.eval_sets
    loss, number = plain_loss(run_dir, found.data, tmp_path / "export")
    scores = lines[-1]["eval_sources"]["squares"]
    assert scores["loss"] == pytest.approx(loss, rel=1e-6)
    assert scores["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    bits = loss / math.log(2) * number / (found.data.eval_bytes or 0)
    assert scores["bits_per_byte"] == pytest.approx(bits, rel=1e-6)


def test_a_run_ends_at_a_target_of_a_set_which_its_best_checkpoint_follows(
    text: Path, tmp_path: Path
) -> None:
    base = settings(text, tmp_path)
    data = {**base, "eval_sets": {"numbers": str(text / "numbers.jsonl")}}
    sections: dict[str, Any] = {
        "run": {"steps": 12, "target": {"numbers/loss": 5.85}},
        "task": {"eval_every_steps": 1},
        "checkpoint": {"keep_best": True},
        "data": data,
    }
    run_dir = make_run(tmp_path / "run", prepared(data, {}), sections)
    assert run_on_ranks(train_here, 1, run_dir) == [FINISHED]
    losses = {line["step"]: line["eval_sources"]["numbers"]["loss"]
              for line in read_evaluations(run_dir.metrics)}  # fmt: skip
    *before, last = losses.values()
    assert last <= 5.85 < min(before), losses
    assert max(losses) < 12 and choose_checkpoint(run_dir, "best").step == max(losses)
