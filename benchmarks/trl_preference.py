"""Losses, rewards and weights of preference tuning here and by TRL's DPOTrainer, on the same pairs.

A tiny Llama takes a few AdamW steps, each on all pairs, so that no order of samples matters. TRL
pads the answers and keeps a copy of the model; here pairs are packed, and the reference's
log-probabilities come from a pass before the first step.

    pip install trl==1.16.0
    python -m benchmarks.trl_preference
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.lm_eval_scores import END, write_model
from benchmarks.record import write_result

LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "ipo": {"loss_type": "ipo"},
}
LAYOUTS = {"one process": 1, "zero 3": 2}
STEPS, PAIRS, BETA, LR, SEQ_LEN = 5, 24, 0.3, 3e-3, 96
TEMPLATE = "{% for m in messages %}{{ m.content + '" + END + "' }}{% endfor %}"
_WORDS = ["the", "and", "he", "in", "on", "was", "a", "then", "here", "as", "re", "ing", "nd"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train by both; 1 if a number differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the result file")
    asked = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, pairs = write_chat_model(folder / "model"), write_pairs(folder)
        for loss, task in LOSSES.items():
            theirs = trained_by_trl(folder / f"trl {loss}", model, pairs, task)
            for layout, processes in LAYOUTS.items():
                given = {"name": "preference", "beta": BETA, **task}
                ours = trained_here(folder / f"{loss} {layout}", model, pairs, given, processes)
                row = compared(ours, theirs, before=load_file(model / "model.safetensors"))
                print(f"{loss}, {layout}: {row['largest_difference']}")
                found[f"{loss}, {layout}"] = row
    largest = {
        key: max(row["largest_difference"][key] for row in found.values())
        for key in ("loss", "rewards", "weights")
    }
    content = {"trl": version("trl"), "largest_difference": largest, "losses": found}
    write_result("trl-preference", content, asked.out)
    return int(largest["loss"] > 1e-5 or largest["weights"] > 1e-4)


def write_chat_model(folder: Path) -> Path:
    """Write a tiny Llama whose template ends each turn with a token."""
    write_model(folder, begins=False)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**config, "chat_template": TEMPLATE, "eos_token": END}))
    return folder


def write_pairs(folder: Path) -> Path:
    """Write prompts with two answers of different lengths."""
    draw = random.Random(0)

    def text(most: int) -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(2, most)))

    path = folder / "pairs.jsonl"
    rows = [{"prompt": text(6), "chosen": text(8), "rejected": text(8)} for _ in range(PAIRS)]
    for each in (path, folder / "same.jsonl"):
        each.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained_here(
    folder: Path, model: Path, pairs: Path, task: dict[str, Any], processes: int
) -> dict[str, Any]:
    """Train by `shardyard train`, and export."""
    folder.mkdir()
    recipe: dict[str, Any] = {
        "run": {"name": "pairs", "dir": str(folder / "runs"), "epochs": STEPS},
        "model": {"path": str(model)},
        "task": {"eval_every_steps": None, **task},
        "data": {
            "source": str(pairs), "eval_source": str(pairs.with_name("same.jsonl")),
            "format": "preference_pairs",
            "dir": str(folder / "prepared"), "seq_len": SEQ_LEN,
        },
        "optim": {
            "lr": LR, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "grad_clip": None,
            "schedule": "constant", "warmup_steps": 0, "micro_batch": 2,
        },
        "precision": {"compute": "fp32"},
        "cluster": {"device": "cpu", "devices": processes},
        "parallel": {"dp_shard": processes, "zero": 3},
    }  # fmt: skip
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe))
    samples = _call("prepare", str(path), "--json")["train_samples"]
    recipe["optim"]["global_batch"] = samples
    path.write_text(json.dumps(recipe))
    _call("train", str(path))
    (run,) = (folder / "runs").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = next(line["eval"] for line in lines if "eval" in line)
    _call("export", str(run), "--to", str(folder / "out"), "--dtype", "float32")
    return {
        "loss": [line["loss"] for line in lines if "loss" in line],
        "rewards": [evaluated["chosen_reward"], evaluated["rejected_reward"]],
        "accuracy": evaluated["accuracy"],
        "weights": load_file(folder / "out" / "model.safetensors"),
    }


def _call(*words: str) -> Any:
    answer = subprocess.run(
        [sys.executable, "-m", "shardyard", *words], capture_output=True, text=True, check=False
    )
    if answer.returncode:
        raise SystemExit(f"shardyard {words[0]} ended with {answer.returncode}:\n{answer.stderr}")
    return json.loads(answer.stdout) if "--json" in words else None


def trained_by_trl(
    folder: Path, model: Path, pairs: Path, task: dict[str, Any], by: str = "trl_preference"
) -> dict[str, Any]:
    """The same by TRL, in a process of its own: its packages are imported nowhere else.

    Args:
        by: Module of the function that trains.
    """
    folder.mkdir()
    request = json.dumps([str(folder), str(model), str(pairs), task])
    program = f"from benchmarks.{by} import train_by_trl; train_by_trl()"
    answer = subprocess.run(
        [sys.executable, "-c", program], input=request, text=True, check=False, capture_output=True
    )
    if answer.returncode:
        raise SystemExit(f"TRL ended with {answer.returncode}:\n{answer.stderr}")
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return {**result, "weights": load_file(folder / "out" / "model.safetensors")}


def train_by_trl() -> None:
    """Train by TRL as a request on stdin says."""
    from datasets import Dataset  # only where they are installed
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    folder, model, pairs, task = json.loads(sys.stdin.read())
    rows = [json.loads(line) for line in Path(pairs).read_text().splitlines()]

    def dialogue(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    data = Dataset.from_list(
        [
            {
                "prompt": dialogue("user", row["prompt"]),
                "chosen": dialogue("assistant", row["chosen"]),
                "rejected": dialogue("assistant", row["rejected"]),
            }
            for row in rows
        ]
    )
    settings = DPOConfig(
        output_dir=folder, per_device_train_batch_size=PAIRS, per_device_eval_batch_size=PAIRS,
        max_steps=STEPS, learning_rate=LR, lr_scheduler_type="constant", warmup_steps=0,
        adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.0, max_grad_norm=0.0,
        logging_steps=1, beta=BETA, loss_type=[task.get("loss_type", "sigmoid")],
        max_length=None, bf16=False, gradient_checkpointing=False, use_cpu=True, report_to=[],
        save_strategy="no",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        ref_model=AutoModelForCausalLM.from_pretrained(model),
        args=settings, train_dataset=data, eval_dataset=data, processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    evaluated = trainer.evaluate()
    trainer.model.save_pretrained(Path(folder) / "out")
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    rewards = [evaluated[f"eval_rewards/{name}"] for name in ("chosen", "rejected")]
    result = {
        "loss": losses, "rewards": rewards, "accuracy": evaluated["eval_rewards/accuracies"]
    }  # fmt: skip
    (Path(folder) / "result.json").write_text(json.dumps(result))


def compared(ours: dict[str, Any], theirs: dict[str, Any], before: Any) -> dict[str, Any]:
    """Both results, and how far they are apart; weights by how far they have moved."""
    moved = sum(float(np.square(each - before[name]).sum()) for name, each in
                theirs["weights"].items())  # fmt: skip
    apart = sum(float(np.square(each - ours["weights"][name]).sum()) for name, each in
                theirs["weights"].items())  # fmt: skip
    both = {
        key: [ours[key], theirs[key]] for key in ("loss", "rewards", "accuracy")
    }  # fmt: skip
    far = {
        key: max(
            abs(a - b) / max(1e-3, abs(b)) for a, b in zip(ours[key], theirs[key], strict=True)
        )
        for key in ("loss", "rewards")
    }
    return {
        "shardyard and trl": both,
        "largest_difference": {**far, "weights": (apart / moved) ** 0.5},
    }


if __name__ == "__main__":
    sys.exit(main())
