"""Losses, rewards and weights of reward models here and by TRL's RewardTrainer, on the same pairs.

A tiny Llama with a head of one number takes a few AdamW steps, each on all pairs, so that no order
of samples matters. TRL pads the answers; here pairs are packed.

    pip install trl==1.16.0
    python -m benchmarks.trl_reward
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.lm_eval_scores import BEGIN
from benchmarks.record import write_result
from benchmarks.trl_preference import (
    LAYOUTS,
    LR,
    PAIRS,
    STEPS,
    compared,
    trained_by_trl,
    trained_here,
    write_chat_model,
    write_pairs,
)

LOSSES: dict[str, dict[str, Any]] = {
    "reward": {},
    "centred": {"center_rewards": 0.05},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train by both; 1 if a number differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the result file")
    asked = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, pairs = write_classifier(folder), write_pairs(folder)
        for loss, task in LOSSES.items():
            theirs = trained_by_trl(folder / f"trl {loss}", model, pairs, task, by="trl_reward")
            for layout, processes in LAYOUTS.items():
                given = {"name": "reward", **task}
                ours = trained_here(folder / f"{loss} {layout}", model, pairs, given, processes)
                chosen, rejected = ours["rewards"]
                ours["rewards"] = [(chosen + rejected) / 2, chosen - rejected]
                row = compared(ours, theirs, before=load_file(model / "model.safetensors"))
                print(f"{loss}, {layout}: {row['largest_difference']}")
                found[f"{loss}, {layout}"] = row
    largest = {
        key: max(row["largest_difference"][key] for row in found.values())
        for key in ("loss", "rewards", "weights")
    }
    content = {"trl": version("trl"), "largest_difference": largest, "losses": found}
    write_result("trl-reward", content, asked.out)
    return int(largest["loss"] > 1e-5 or largest["weights"] > 1e-4)


def write_classifier(folder: Path) -> Path:
    """Write the tiny Llama with a random head of one number, which both begin with."""
    base, to = write_chat_model(folder / "base"), folder / "model"
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(base).save_pretrained(to)
    return to


def train_by_trl() -> None:
    """Train by TRL as a request on stdin says."""
    from datasets import Dataset  # only where they are installed
    from trl import RewardConfig, RewardTrainer

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    folder, model, pairs, task = json.loads(sys.stdin.read())
    rows = [json.loads(line) for line in Path(pairs).read_text().splitlines()]

    def dialogue(row: dict[str, str], key: str) -> list[dict[str, str]]:
        asked = {"role": "user", "content": row["prompt"]}
        return [asked, {"role": "assistant", "content": row[key]}]

    data = Dataset.from_list(
        [{key: dialogue(row, key) for key in ("chosen", "rejected")} for row in rows]
    )
    settings = RewardConfig(
        output_dir=folder, per_device_train_batch_size=PAIRS, per_device_eval_batch_size=PAIRS,
        max_steps=STEPS, learning_rate=LR, lr_scheduler_type="constant", warmup_steps=0,
        adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.0, max_grad_norm=0.0,
        logging_steps=1, center_rewards_coefficient=task.get("center_rewards"), max_length=None,
        bf16=False, gradient_checkpointing=False, use_cpu=True, report_to=[], save_strategy="no",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = BEGIN  # the token that ends a dialogue would not be read as its last
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    trainer = RewardTrainer(
        model=classifier, args=settings, train_dataset=data, eval_dataset=data,
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    evaluated = trainer.evaluate()
    trainer.model.save_pretrained(Path(folder) / "out")
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    result = {
        "loss": losses,
        "rewards": [evaluated["eval_mean_reward"], evaluated["eval_margin"]],
        "accuracy": evaluated["eval_accuracy"],
    }
    (Path(folder) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
