"""Small real runs on rows with labels: real text, real preparation, transformers' own models."""

import json
import os
import random
import signal
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from shardyard.checkpoint.export import export
from shardyard.checkpoint.load import SavedTensors, read_shapes
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.config.rules.custom_module import require_shape
from shardyard.config.schema.recipe import Recipe
from shardyard.data.labels.prepare import prepare_labelled
from shardyard.data.loader import MicroBatch
from shardyard.families.shape import ModelShape
from shardyard.models.build import hf_config
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up
from shardyard.train.training import Training
from tests.distributed.runs import Corpus, make_run, train_here

SEQ_LEN, BATCH, STEPS, LR = 32, 7, 4, 0.005
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {"dp_replicate": 2}),
    "zero-1": (2, {"dp_shard": 2, "zero": 1}),
    "zero-2": (2, {"dp_shard": 2, "zero": 2}),
    "zero-3": (2, {"dp_shard": 2, "zero": 3}),
    "tp": (2, {"tp": 2}),
    "cp": (2, {"cp": 2}),
    "pp": (2, {"pp": 2}),
    "tp and cp": (4, {"tp": 2, "cp": 2}),
    "tp and dp": (4, {"tp": 2, "dp_shard": 2}),
}
TAGS = ("O", "B-NUM", "I-NUM", "B-NAME", "I-NAME")


def write_rows(folder: Path, kind: str, rows: int = 90) -> Path:
    """Write a table of lines of the interpreter's modules, labelled by what is in them."""
    folder.mkdir(parents=True)
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text(encoding="utf-8")
    lines = [line.split() for line in text.splitlines() if 3 < len(line.split()) < 12]
    draw = random.Random(0)
    found = []
    for number in range(rows):
        words, other = draw.choice(lines), draw.choice(lines)
        if kind == "tokens":
            tags = [_tag(word, number) for word in words]
            found.append({"id": number, "tokens": words, "ner_tags": tags})
            continue
        labels: dict[str, Any] = {
            "pairs": ["other", "longer", "same"][(len(words) > len(other)) + (number % 3 == 0)],
            "numbers": len(words) / 4 + 0.25,
            "single": int(any("self" in word for word in words)),
        }
        row = {"text": " ".join(words)}
        if kind == "pairs":
            row = {"sentence1": " ".join(words), "sentence2": " ".join(other)}
        found.append({**row, "label": labels[kind]})
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def _tag(word: str, number: int) -> str:
    if word[0].isdigit() or "(" in word:
        return "B-NUM" if number % 2 else "I-NUM"
    return "B-NAME" if word[0].isupper() else "I-NAME" if "_" in word else "O"


TASKS = {
    "pairs": "sequence_classification",
    "numbers": "sequence_classification",
    "single": "sequence_classification",
    "tokens": "token_classification",
}


def sections_of(kind: str, preset: str) -> dict[str, Any]:
    """Sections of a recipe that trains a model on such rows."""
    is_bert = preset.startswith("bert")
    tokenizer = {"tokenizer_kind": "wordpiece"} if is_bert else {}
    return {
        "run": {"steps": STEPS},
        "model": {"preset": preset},
        "task": {"name": TASKS[kind]},
        "data": {
            "seq_len": SEQ_LEN, "vocab_size": 300, "tokenizer": "train", "eval_fraction": 0.2,
            "too_long": "cut", **tokenizer,
        },
        "optim": {
            "name": "adamw", "lr": LR, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.0,
            "grad_clip": None, "schedule": "constant", "warmup_steps": 0, "global_batch": BATCH,
            "micro_batch": 2,
        },
        "checkpoint": {"every": 1000},
        "cluster": {"device": "cpu", "devices": 1},
    }  # fmt: skip


def prepare_rows(folder: Path, kind: str, preset: str, **data: Any) -> Corpus:
    """Write and prepare rows."""
    path = write_rows(folder / "rows", kind)
    given = sections_of(kind, preset)
    given["data"] |= {"source": str(path), "dir": str(folder / "prepared"), **data}
    facts = prepare_labelled(Recipe.model_validate(given), model_dir=None, progress=lambda *_: None)
    return Corpus(str(path), str(folder / "prepared"), facts)


def labelled_run(
    folder: Path, corpus: Corpus, kind: str, preset: str, processes: int = 1, **sections: Any
) -> RunDir:
    """Write a run folder, ready to train."""
    given = sections_of(kind, preset)
    given["cluster"]["devices"] = processes
    names = {*given, *sections}
    merged = {name: {**given.get(name, {}), **sections.get(name, {})} for name in names}
    return make_run(folder, corpus, merged)


def open_run(run_dir: RunDir) -> Training:
    """Set up a run in this process."""
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    return set_up(run_dir, 0, hooks, local_rank=0)


def as_transformers_reads(batch: MicroBatch, training: Training) -> dict[str, Tensor]:
    """Return the arguments of transformers' model; padding is marked by a mask."""
    assert batch.lengths_B is not None
    mask_BL = torch.arange(batch["tokens"].shape[1]) < batch.lengths_B[:, None]
    shape = require_shape(training.resolved.shape)
    given = {
        "input_ids": batch["tokens"],  # filled up with 0, which ends texts and is in none
        "attention_mask": mask_BL.long(),
        "labels": batch["targets"] if "targets" in batch.fields else batch["label"],
    }
    if given["labels"].is_floating_point():
        given["labels"] = given["labels"].float()
    if shape.family.token_types is not None:
        given["token_type_ids"] = batch["segments"]
    return given


def transformers_model(training: Training) -> PreTrainedModel:
    """Return transformers' model of a run's shape, with the run's weights."""
    shape = require_shape(training.resolved.shape)
    config = hf_config(shape)
    if shape.family.token_types is None:
        config.pad_token_id = 0
    model: PreTrainedModel = auto_class(shape).from_config(config, attn_implementation="eager")
    weights = {
        name.removeprefix("model."): whole_of(tensor).clone()
        for name, tensor in training.tensors.items()
        if name.startswith("model.")
    }
    model.load_state_dict(weights)
    return model


def whole_of(tensor: Any) -> Tensor:
    """All of a tensor that ranks hold in parts."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def next_to_a_plain_loop(run_dir: RunDir) -> tuple[list[float], dict[str, float]]:
    """Return losses of a plain loop, and how far apart the weights of the run end."""
    training = open_run(run_dir)
    model = transformers_model(training)
    begun = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
    )
    expected = []
    for step in range(STEPS):
        batch = training.train_source.micro_batch(range(step * BATCH, (step + 1) * BATCH), BATCH)
        loss = model(**as_transformers_reads(batch, training)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    loop = Loop(training)
    for _ in range(STEPS):
        loop.step()
    apart = distances(model, training, begun)
    training.close()
    return expected, apart


def distances(model: nn.Module, training: Training, begun: dict[str, Tensor]) -> dict[str, float]:
    """How far each weight of the run is from the plain loop's, by how far that has moved."""
    return {
        name: float(
            (whole_of(training.tensors[f"model.{name}"]) - param.detach()).norm()
            / (param.detach() - begun[name]).norm()
        )
        for name, param in model.named_parameters()
    }


def train_until_killed(run_dir: RunDir) -> None:
    """Train three of four steps, wait for the checkpoint of the second, and die."""
    training = open_run(run_dir)
    loop = Loop(training)
    for _ in range(3):
        loop.step()
    training.saver.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def loss_of_transformers_on_export(run_dir: RunDir, to: Path) -> float:
    """Train, export, and return the loss of transformers' model on the validation split."""
    train_here(run_dir)
    resolved = read_resolved(run_dir.resolved(0))
    export(choose_checkpoint(run_dir, "latest").path, resolved, to)
    training = open_run(run_dir)
    source, shape = training.eval_source, require_shape(resolved.shape)
    assert source is not None
    batch = source.micro_batch(range(source.num_samples), source.num_samples)
    model = auto_class(shape).from_pretrained(to, attn_implementation="eager").eval()
    with torch.no_grad():
        loss = float(model(**as_transformers_reads(batch, training)).loss)
    training.close()
    return loss


def auto_class(shape: ModelShape) -> Any:
    """Return the class of transformers that opens a model with such labels."""
    of_tokens = shape.label_head == "tokens"
    return AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification


def saved_weights(run_dir: RunDir) -> dict[str, Tensor]:
    """Return the weights of the checkpoint of the last step."""
    shapes = read_shapes(run_dir.checkpoint(STEPS))
    saved = SavedTensors.in_folder(run_dir.checkpoint(STEPS))
    return {name: saved.rows(name, 0, shape[0], torch.float32) for name, (shape, _) in
            shapes.items() if name.startswith("model.")}  # fmt: skip
