"""Small real runs that train adapters and a head over labels, and PEFT's own model next to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import BertForPreTraining, LlamaForCausalLM

from shardyard.checkpoint.export import export
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.config.rules.custom_module import require_shape
from shardyard.families.lora import is_adapter, peft_targets
from shardyard.models.build import hf_config
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.loop import Loop
from shardyard.train.training import Training
from tests.distributed.label_runs import (
    BATCH,
    STEPS,
    as_transformers_reads,
    auto_class,
    labelled_run,
    open_run,
    whole_of,
)
from tests.distributed.runs import Corpus, train_here

RATE = 0.05
SGD = {"name": "sgd", "lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "pairs": (
        "pairs", "bert-tiny",
        {"rank": 4, "alpha": 8, "targets": ["query", "value"], "modules_to_save": ["pooler"]},
    ),
    "last token": ("single", "llama-tiny", {"rank": 4, "rslora": True}),
    "tokens": ("tokens", "bert-tiny", {"rank": 2, "targets": ["output.dense", "key"]}),
    "numbers": ("numbers", "bert-tiny", {"rank": 2}),
}  # fmt: skip
"""Kind of rows, preset and ``model.lora`` by name."""


def base_folder(folder: Path, corpus: Corpus, kind: str, preset: str) -> Path:
    """Write a language model of a preset as somebody else would: without a head over labels."""
    run_dir = labelled_run(folder.parent / "shape", corpus, kind, preset)
    shape = require_shape(read_resolved(run_dir.resolved(0)).shape)
    plain = replace(shape, label_head=None, num_labels=0, label_names=(), judges_pairs=True)
    torch.manual_seed(1)
    made = LlamaForCausalLM if shape.is_causal else BertForPreTraining
    made._from_config(hf_config(plain)).save_pretrained(folder)
    return folder


def adapter_run(
    folder: Path, corpus: Corpus, name: str, base: Path, processes: int = 1, **sections: Any
) -> RunDir:
    """Write a run folder of a case, ready to train adapters next to a base."""
    kind, preset, lora = CASES[name]
    model = {"preset": None, "path": str(base), "lora": lora, **sections.pop("model", {})}
    return labelled_run(folder, corpus, kind, preset, processes, model=model, **sections)


def peft_model(training: Training) -> tuple[Any, dict[str, Any]]:
    """Return PEFT's model with the weights of a run that has not begun, and what it trains."""
    from peft import LoraConfig, get_peft_model

    lora, shape = training.resolved.recipe.model.lora, require_shape(training.resolved.shape)
    config = hf_config(shape)
    if shape.is_causal:
        config.pad_token_id = 0
    model = auto_class(shape).from_config(config, attn_implementation="eager")
    held = {n: whole_of(each).clone() for n, each in training.task.model.named_parameters()}
    model.load_state_dict({name: each for name, each in held.items() if not is_adapter(name)})
    assert lora.rank is not None
    adapted = get_peft_model(
        model,
        LoraConfig(
            task_type="SEQ_CLS" if shape.label_head == "samples" else "TOKEN_CLS",
            r=lora.rank, lora_alpha=int(lora.alpha), use_rslora=lora.rslora,
            target_modules=peft_targets(shape, lora.targets),
            modules_to_save=list(lora.modules_to_save) or None,
        ),
    )  # fmt: skip
    params = {_our_name(n): p for n, p in adapted.named_parameters() if p.requires_grad}
    for name, param in params.items():
        param.data.copy_(held[name])
    return adapted, params


def _our_name(name: str) -> str:
    name = name.removeprefix("base_model.model.")
    return name.replace(".modules_to_save.default", "").replace(".default", "")


def _rows(training: Training, step: int) -> dict[str, Tensor]:
    batch = training.train_source.micro_batch(range(step * BATCH, (step + 1) * BATCH), BATCH)
    return as_transformers_reads(batch, training)


class NextToPeft(NamedTuple):
    """What a run and PEFT's model have in common."""

    losses: list[float]
    """PEFT's, step by step."""
    trained: tuple[set[str], set[str]]
    """Names of what the run trains, and of what PEFT trains."""
    apart: dict[str, float]
    """How far each weight, and each gradient of the step after, is from PEFT's, by its size."""


def next_to_peft(run_dir: RunDir) -> NextToPeft:
    """Take the steps of a run in it, and in PEFT's model in a plain loop."""
    training = open_run(run_dir)
    adapted, params = peft_model(training)
    optimizer, losses = torch.optim.SGD(params.values(), lr=RATE), []
    for step in range(STEPS):
        loss = adapted(**_rows(training, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    loop = Loop(training)
    for _ in range(STEPS):
        loop.step()
    apart = {name: _far(training.tensors[f"model.{name}"], each) for name, each in params.items()}
    named = dict(training.task.model.named_parameters())
    trained = {name for name, param in named.items() if param.requires_grad}
    training.close()
    return NextToPeft(losses, (trained, set(params)), apart)


def _far(ours: Any, theirs: Tensor) -> float:
    theirs = theirs.detach()
    return float((whole_of(ours) - theirs).norm() / theirs.norm().clamp(min=1e-12))


class Opened(NamedTuple):
    """Logits of rows by exports of a run, and what they say of their labels."""

    adapter: Tensor
    """By PEFT, of the folder of adapters."""
    merged: Tensor
    """By transformers, of the folder with merged weights."""
    base: Tensor
    """Of the base with the head, without adapters."""
    loss: float
    """Of the folder of adapters, on the validation split."""
    id2label: dict[int, str]
    """Of the merged folder."""


def train_and_open(run_dir: RunDir, to: Path) -> Opened:
    """Train, export in both forms, and open each as its users do."""
    from peft import AutoPeftModelForSequenceClassification, AutoPeftModelForTokenClassification

    train_here(run_dir)
    resolved = read_resolved(run_dir.resolved(0))
    shape, checkpoint = require_shape(resolved.shape), choose_checkpoint(run_dir, "latest").path
    export(checkpoint, resolved, to / "adapter")
    export(checkpoint, resolved, to / "merged", merged=True)
    training = open_run(run_dir)
    source = training.eval_source
    assert source is not None
    batch = source.micro_batch(range(source.num_samples), source.num_samples)
    rows = as_transformers_reads(batch, training)
    training.close()
    of_tokens = shape.label_head == "tokens"
    opens: Any = (
        AutoPeftModelForTokenClassification if of_tokens else AutoPeftModelForSequenceClassification
    )
    more: dict[str, Any] = {"attn_implementation": "eager"}
    if shape.is_causal:
        more["pad_token_id"] = 0
    adapted = opens.from_pretrained(to / "adapter", num_labels=shape.num_labels, **more).eval()
    merged = auto_class(shape).from_pretrained(to / "merged", **more)
    with torch.no_grad():
        found = adapted(**rows)
        with adapted.disable_adapter():
            base = adapted(**rows).logits
        whole = merged.eval()(**rows).logits
    return Opened(found.logits, whole, base, float(found.loss), merged.config.id2label)


@contextmanager
def _saved_by_peft(run_dir: RunDir, to: Path, base: Path) -> Iterator[Any]:
    """Save an adapter with PEFT after some steps, and yield its model."""
    training = open_run(run_dir)
    adapted, params = peft_model(training)
    optimizer = torch.optim.SGD(params.values(), lr=RATE)
    for step in range(2):
        adapted(**_rows(training, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(to)
    yield adapted, training
    training.close()


def loss_of_saved_adapter(run_dir: RunDir, to: Path, base: Path) -> float:
    """Save PEFT's adapter, and return its loss on the first batch."""
    with _saved_by_peft(run_dir, to, base) as (adapted, training), torch.no_grad():
        return float(adapted(**_rows(training, 0)).loss)


def first_loss(run_dir: RunDir) -> float:
    """Train, and return the loss of the first step."""
    train_here(run_dir)
    return float(next(iter(read_steps(run_dir.metrics)))["loss"])
