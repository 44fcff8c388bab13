"""BERT's own training on real text: how much it learns, and beside Hugging Face Trainer.

A small BERT learns hidden words and next sentences from the prose of Debian's documentation
packages (``python -m benchmarks.documentation FOLDER`` writes it). Two questions, each a row of the
result:

- What is learnt: held-out masked accuracy beside that of always saying the most frequent token, and
  held-out next-sentence accuracy (bars: 3 times as high, and 60 %).
- What it takes: optimizer steps and CPU seconds until held-out masked accuracy is a named one, by
  ``shardyard train`` and by Trainer (transformers' AutoModelForPreTraining, AdamW), with the same
  samples in the same order, rate, warm-up and batch, one process and two threads each. CPU seconds
  are those of all processes from their start, evaluations counted; Trainer reads samples that are
  made beforehand, ours makes them as it goes.

    python -m benchmarks.bert_pretraining FOLDER/documents.jsonl

Trainer needs ``accelerate`` (``pip install accelerate``); --without-trainer leaves it out.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import write_result
from shardyard.config.rules.custom_module import require_shape
from shardyard.models.build import hf_config
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.tasks.base import task_class

TIMES_THE_MOST_FREQUENT, NEXT_SENTENCE = 3.0, 0.6
"""The bars of what is learnt."""
CONTENDERS = ("shardyard", "trainer")
LR, WARMUP, DECAY, BETAS, EPS, CLIP = 1e-3, 100, 0.01, (0.9, 0.999), 1e-6, 1.0


@dataclass(frozen=True)
class Work:
    """What is trained."""

    folder: Path
    text: Path
    steps: int
    accuracy: float
    """Of held-out hidden tokens, at which a race ends."""
    every: int
    """Steps between evaluations."""
    vocabulary: int = 8192
    width: int = 128
    layers: int = 2
    seq_len: int = 128
    batch: int = 32

    def recipe(self) -> dict[str, Any]:
        """Of ``shardyard train``."""
        config = {
            "model_type": "bert", "vocab_size": self.vocabulary, "hidden_size": self.width,
            "num_hidden_layers": self.layers, "num_attention_heads": max(1, self.width // 32),
            "intermediate_size": 4 * self.width, "max_position_embeddings": self.seq_len,
            "type_vocab_size": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        }  # fmt: skip
        (self.folder / "model").mkdir(exist_ok=True)
        (self.folder / "model" / "config.json").write_text(json.dumps(config))
        return {
            "run": {"dir": str(self.folder / "runs"), "steps": self.steps},
            "model": {"path": str(self.folder / "model"), "weights": "random", "dropout": 0.0},
            "task": {"name": "bert_pretraining", "eval_every_steps": self.every},
            "data": {
                "source": str(self.text), "dir": str(self.folder / "prepared"),
                "format": "sentences", "tokenizer": "train", "tokenizer_kind": "wordpiece",
                "vocab_size": self.vocabulary, "seq_len": self.seq_len, "eval_fraction": 0.03,
            },
            "optim": {
                "lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY,
                "grad_clip": CLIP, "warmup_steps": WARMUP, "schedule": "constant",
                "global_batch": self.batch, "micro_batch": self.batch,
            },
            "checkpoint": {"every": self.steps},
            "cluster": {"device": "cpu", "devices": 1},
        }  # fmt: skip


def learn(work: Work) -> dict[str, Any]:
    """The whole run: evaluations, and whether the last one is behind both bars."""
    run = _shardyard(work, "learns")
    evaluations = [{"step": line["step"], **line["eval"]} for line in read_evaluations(run.metrics)]
    last = evaluations[-1]
    times = last["masked_accuracy"] / last["most_frequent_token"]
    lines = list(read_steps(run.metrics))
    return {
        "evaluations": evaluations,
        "times_the_most_frequent": times,
        "next_sentence_accuracy": last["next_sentence_accuracy"],
        "passed": times >= TIMES_THE_MOST_FREQUENT
        and last["next_sentence_accuracy"] >= NEXT_SENTENCE,
        "samples_per_s_apart": max(
            abs(line["samples_per_s"] * line["step_time_s"] / work.batch - 1) for line in lines
        ),
        "peak_memory_bytes": [
            lines[at]["peak_memory_bytes"] for at in (len(lines) // 4, len(lines) - 1)
        ],
    }


def race(work: Work, order: Sequence[str]) -> dict[str, Any]:
    """Steps and CPU seconds of each contender until the named accuracy."""
    found: dict[str, Any] = {}
    for name in order:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.monotonic()
        steps = _ours(work) if name == "shardyard" else _trainer(work)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        found[name] = {
            "steps": steps, "cpu_s": round(cpu_s, 1),
            "seconds": round(time.monotonic() - started, 1),
        }  # fmt: skip
    if len(found) == 2 and all(each["steps"] is not None for each in found.values()):
        ours, theirs = found["shardyard"], found["trainer"]
        found["steps_ratio"] = ours["steps"] / theirs["steps"]
        found["cpu_ratio"] = ours["cpu_s"] / theirs["cpu_s"]
    return {"accuracy": work.accuracy, **found}


def _ours(work: Work) -> int | None:
    run_id = f"races-{time.monotonic_ns()}"
    run = _shardyard(work, run_id, f"run.target.masked_accuracy={work.accuracy}")
    last = list(read_evaluations(run.metrics))[-1]
    return int(last["step"]) if last["eval"]["masked_accuracy"] >= work.accuracy else None


def _shardyard(work: Work, run_id: str, *settings: str) -> RunDir:
    recipe = work.folder / "recipe.yaml"
    recipe.write_text(json.dumps(work.recipe()))  # JSON is YAML
    command = [sys.executable, "-m", "shardyard", "train", str(recipe), f"run.id={run_id}"]
    subprocess.run([*command, *settings], env=_environment(), stdout=sys.stderr, check=True)
    return RunDir(work.folder / "runs" / run_id)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "2"}


# --- Hugging Face Trainer -------------------------------------------------------------------------


def write_samples(work: Work) -> None:
    """The samples of the run ``learns`` in its order, and the held-out ones, as Trainer reads."""
    resolved = read_resolved(RunDir(work.folder / "runs" / "learns").resolved(0))
    data = task_class(resolved.recipe.task.name).open_data(resolved)
    assert data.eval is not None
    for name, source, number in (
        ("train", data.train, work.steps * work.batch),
        ("eval", data.eval, data.eval.num_samples),
    ):
        pieces = [
            _as_transformers_reads(source.micro_batch(range(at, min(at + 256, number)), 256))
            for at in range(0, number, 256)
        ]
        joined = {key: torch.cat([piece[key] for piece in pieces])[:number] for key in pieces[0]}
        torch.save(joined, work.folder / f"{name}.pt")
    shape = require_shape(resolved.shape)
    hf_config(shape).save_pretrained(work.folder / "as-transformers")


def _as_transformers_reads(batch: Any) -> dict[str, Tensor]:
    is_text = batch["positions"] > 0
    is_text[:, 0] = True
    return {
        "input_ids": batch["tokens"].int(),
        "attention_mask": is_text.to(torch.int8),
        "token_type_ids": batch["segments"].to(torch.int8),
        "labels": batch["targets"].int(),
        "next_sentence_label": batch["next_sentence_labels"].to(torch.int8),
    }


def _trainer(work: Work) -> int | None:
    """In a process of its own, which prints its last evaluation."""
    words = [
        str(work.folder),
        str(work.steps),
        str(work.accuracy),
        str(work.every),
        str(work.batch),
    ]
    command = [sys.executable, "-m", "benchmarks.bert_pretraining", "--as-trainer", *words]
    answer = subprocess.run(
        command, env=_environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    lines = answer.stdout.splitlines()  # Trainer prints a summary behind ours
    last = json.loads([line for line in lines if line.startswith('{"step"')][-1])
    return int(last["step"]) if last["masked_accuracy"] >= work.accuracy else None


def train_by_trainer(folder: Path, *, steps: int, accuracy: float, every: int, batch: int) -> None:
    """What a user of Trainer writes for this; prints each evaluation as a line of JSON."""
    from torch.utils.data import Dataset, SequentialSampler
    from transformers import (
        AutoConfig,
        AutoModelForPreTraining,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    train, held_out = (torch.load(folder / f"{name}.pt", mmap=True) for name in ("train", "eval"))
    config = AutoConfig.from_pretrained(folder / "as-transformers")
    torch.manual_seed(0)
    model = AutoModelForPreTraining.from_config(config, attn_implementation="sdpa")

    class Samples(Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return len(train["labels"])

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {name: each[index].long() for name, each in train.items()}

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(Samples())

    class Judge(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % every and state.global_step != steps:
                return
            share = _masked_accuracy(model, held_out, batch=batch)
            print(json.dumps({"step": state.global_step, "masked_accuracy": share}), flush=True)
            control.should_training_stop = share >= accuracy

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=steps, per_device_train_batch_size=batch,
        learning_rate=LR, warmup_steps=WARMUP, lr_scheduler_type="constant_with_warmup",
        weight_decay=DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS,
        max_grad_norm=CLIP, optim="adamw_torch_fused", use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    InOrder(model=model, args=arguments, train_dataset=Samples(), callbacks=[Judge()]).train()


@torch.no_grad()
def _masked_accuracy(model: Any, held_out: dict[str, Tensor], *, batch: int) -> float:
    """The head on hidden tokens alone, as ours does."""
    model.eval()
    right = hidden = 0
    for at in range(0, len(held_out["labels"]), batch):
        part = {name: each[at : at + batch].long() for name, each in held_out.items()}
        labels = part.pop("labels")
        part.pop("next_sentence_label")
        states = model.bert(**part).last_hidden_state[labels != -100]
        guessed = model.cls.predictions(states).argmax(dim=-1)
        right += int((guessed == labels[labels != -100]).sum())
        hidden += len(guessed)
    model.train()
    return right / hidden


def main() -> None:
    """Train, race, and write the result."""
    if sys.argv[1:2] == ["--as-trainer"]:
        folder, steps, accuracy, every, batch = sys.argv[2:]
        train_by_trainer(
            Path(folder), steps=int(steps), accuracy=float(accuracy), every=int(every),
            batch=int(batch),
        )  # fmt: skip
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="documents.jsonl of benchmarks.documentation")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", type=int, default=250, help="steps between evaluations")
    parser.add_argument(
        "--accuracy", type=float, help="at which a race ends; twice that of the most frequent token"
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--without-trainer", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Work(
            Path(folder), given.text.resolve(), given.steps, 0.0, given.every,
            given.vocabulary, given.width, given.layers,
        )  # fmt: skip
        learnt = learn(work)
        twice = 2 * learnt["evaluations"][-1]["most_frequent_token"]
        work = replace(work, accuracy=twice if given.accuracy is None else given.accuracy)
        raced = None
        if not given.without_trainer:
            write_samples(work)
            raced = [race(work, order) for order in (CONTENDERS, CONTENDERS[::-1])]
        settings = {
            name: value for name, value in vars(work).items() if not isinstance(value, Path)
        }
        content = {"settings": settings, "learnt": learnt, "race": raced}
        write_result("bert-pretraining", content, given.out)
    print(
        json.dumps({"learnt": {**learnt, "evaluations": learnt["evaluations"][-1]}, "race": raced})
    )
    sys.exit(0 if learnt["passed"] else 1)


if __name__ == "__main__":
    main()
