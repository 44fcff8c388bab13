"""Small real runs of reward models on pairs of answers, next to transformers' own classifier."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from shardyard.checkpoint.export import export
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.config.rules.custom_module import require_shape
from shardyard.config.schema.recipe import Recipe
from shardyard.data.text_datasets import prepare_text
from shardyard.models.build import hf_config
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.layout import RunDir
from shardyard.train.loop import Loop
from shardyard.train.training import Training
from tests.distributed.label_adapters import peft_model
from tests.distributed.label_runs import open_run, whole_of
from tests.distributed.preference_runs import (
    BATCH,
    STEPS,
    Pair,
    pairs_of,
    sections_of,
    write_pairs,
)
from tests.distributed.runs import Corpus, make_run, train_here

LR = 0.1


def _sections(task: dict[str, Any]) -> dict[str, Any]:
    optim = {
        "name": "sgd", "lr": LR, "weight_decay": 0.0, "grad_clip": None, "schedule": "constant",
        "warmup_steps": 0, "global_batch": BATCH, "micro_batch": 2,
    }  # fmt: skip
    return {**sections_of(), "task": {"name": "reward", **task}, "optim": optim}


def prepare_rated(folder: Path) -> Corpus:
    """Write and prepare pairs."""
    path = write_pairs(folder / "rows")
    given = _sections({})
    given["data"] |= {"source": str(path), "dir": str(folder / "prepared")}
    facts = prepare_text(Recipe.model_validate(given), model_dir=None, progress=lambda *_: None)
    return Corpus(str(path), str(folder / "prepared"), facts)


def reward_run(
    folder: Path, corpus: Corpus, processes: int = 1, *, task: dict[str, Any] | None = None,
    **sections: Any,
) -> RunDir:  # fmt: skip
    """Write a run folder, ready to train."""
    given = _sections(task or {})
    given["cluster"]["devices"] = processes
    names = {*given, *sections}
    merged = {name: {**given.get(name, {}), **sections.get(name, {})} for name in names}
    return make_run(folder, corpus, merged)


def rewards(model: nn.Module, pair: Pair) -> Tensor:
    """Rewards of both answers (2,) by transformers' model, one dialogue at a time and unpacked."""
    return torch.stack([model(input_ids=tokens[None]).logits[0, 0] for tokens in pair.tokens])


def transformers_model(training: Training) -> Any:
    """Return transformers' classifier of one label of a run's shape, with the run's weights."""
    config = hf_config(require_shape(training.resolved.shape))
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    model.load_state_dict(
        {
            name.removeprefix("model."): whole_of(tensor).clone()
            for name, tensor in training.tensors.items()
            if name.startswith("model.")
        }
    )
    return model


def _loss_of(model: nn.Module, pairs: Iterable[Pair], center_rewards: float) -> Tensor:
    """Mean loss of pairs by the formulas of the papers."""
    losses = []
    for pair in pairs:
        chosen, rejected = rewards(model, pair)
        pull = center_rewards * (chosen + rejected) ** 2
        losses.append(-F.logsigmoid(chosen - rejected) + pull)
    return torch.stack(losses).mean()


def next_to_a_plain_loop(run_dir: RunDir) -> tuple[list[float], dict[str, float]]:
    """Return losses of a plain loop, and how far apart the weights of the run end.

    With adapters the model is PEFT's. Steps of SGD sum up gradients; a weight is rounded to 1e-7
    of its size, whatever its gradient.
    """
    training = open_run(run_dir)
    if training.resolved.recipe.model.lora.rank is None:
        model = transformers_model(training).train()
        params = dict(model.named_parameters())
    else:
        model, params = peft_model(training)
        model.config.pad_token_id = None  # no dialogue is padded
    begun = {name: param.detach().clone() for name, param in params.items()}
    optimizer = torch.optim.SGD(params.values(), lr=LR)
    stream: Any = training.train_source
    expected = []
    for step in range(STEPS):
        positions = torch.arange(step * BATCH, (step + 1) * BATCH).numpy()
        pairs = pairs_of(stream, stream.sample_indices(positions).tolist())
        loss = _loss_of(model, pairs, training.resolved.recipe.task.center_rewards)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    loop = Loop(training)
    for _ in range(STEPS):
        loop.step()
    apart = {
        name: float(
            (whole_of(training.tensors[f"model.{name}"]) - param.detach()).norm()
            / ((param.detach() - begun[name]).norm() + 0.01 * param.detach().norm())
        )
        for name, param in params.items()
    }
    training.close()
    return expected, apart


def scores_of_export(run_dir: RunDir, rows: Path, to: Path, merged: bool) -> dict[str, float]:
    """Train and export, and return the scores of the validation pairs by transformers alone.

    Its tokenizer renders the rows, pads them, and its classifier rates them in one batch.
    """
    train_here(run_dir)
    checkpoint = choose_checkpoint(run_dir, "latest").path
    export(checkpoint, read_resolved(run_dir.resolved(0)), to, merged=merged)
    tokenizer: Any = AutoTokenizer.from_pretrained(to)
    model = AutoModelForSequenceClassification.from_pretrained(to, num_labels=1).eval()
    rated = {}
    for line in rows.read_text().splitlines():
        sides = _dialogues(json.loads(line))
        batch = tokenizer.apply_chat_template(
            sides, return_dict=True, return_tensors="pt", padding=True
        )
        ids = tuple(tokenizer.apply_chat_template(each, return_dict=False) for each in sides)
        with torch.no_grad():
            rated[str(ids)] = model(**batch).logits[:, 0]
    training = open_run(run_dir)
    stream: Any = training.eval_source
    found = [
        rated[str(tuple(tokens.tolist() for tokens in pair.tokens))]
        for pair in pairs_of(stream, range(stream.num_samples))
    ]
    training.close()
    return _scores(torch.stack(found))


def _scores(rewards_N2: Tensor) -> dict[str, float]:
    chosen, rejected = rewards_N2.unbind(-1)
    return {
        "loss": float(-F.logsigmoid(chosen - rejected).mean()),
        "accuracy": float((chosen > rejected).float().mean()),
        "margin": float((chosen - rejected).mean()),
        "chosen_reward": float(chosen.mean()),
        "rejected_reward": float(rejected.mean()),
    }


def _dialogues(row: dict[str, Any]) -> list[list[dict[str, str]]]:
    """Both dialogues of a row of ``write_pairs``."""
    if "prompt" not in row:
        return [row["chosen"], row["rejected"]]
    asked = {"role": "user", "content": row["prompt"]}
    return [[asked, {"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")]
