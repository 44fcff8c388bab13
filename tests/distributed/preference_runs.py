"""Small real runs on pairs of answers: real text, real preparation, transformers' own model."""

import copy
import json
import os
import random
import signal
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from shardyard.checkpoint.export import export
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.config.rules.custom_module import require_shape
from shardyard.config.schema.recipe import Recipe
from shardyard.data.loader import IGNORED
from shardyard.data.mixture import MixedStream
from shardyard.data.preference.samples import PackedPairs
from shardyard.data.shards import LEARNT, TokenShards
from shardyard.data.text_datasets import prepare_text
from shardyard.models.build import hf_config
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.run import train
from shardyard.train.training import Training
from tests.distributed.label_runs import open_run, whole_of
from tests.distributed.runs import Corpus, make_run, train_here

SEQ_LEN, BATCH, STEPS, LR, BETA = 256, 5, 4, 0.002, 0.3


def write_pairs(folder: Path, rows: int = 90) -> Path:
    """Write pairs of lines of the interpreter's modules: what follows a line, and another line."""
    folder.mkdir(parents=True)
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if len(line.split()) > 2 and len(line) < 36]
    draw = random.Random(0)
    found = []
    for number in range(rows):
        row: dict[str, Any] = {
            "prompt": lines[number],
            "chosen": lines[number + 1],
            "rejected": draw.choice(lines),
        }
        if number % 3 == 0:  # another shape, with a turn before that is only read
            start = [
                {"role": "user", "content": lines[number + 2]},
                {"role": "assistant", "content": lines[number + 3]},
                {"role": "user", "content": row["prompt"]},
            ]
            row = {
                key: [*start, {"role": "assistant", "content": row[key]}]
                for key in ("chosen", "rejected")
            }
        found.append(row)
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def sections_of(preset: str = "llama-tiny", **task: Any) -> dict[str, Any]:
    """Sections of a recipe that trains a model on such pairs."""
    return {
        "run": {"steps": STEPS},
        "model": {"preset": preset},
        "task": {"name": "preference", "beta": BETA, **task},
        "data": {
            "format": "preference_pairs", "chat_template": "chatml", "seq_len": SEQ_LEN,
            "vocab_size": 300, "tokenizer": "train", "eval_fraction": 0.2,
            "add_special_tokens": ("<|im_start|>", "<|im_end|>"),
        },
        "optim": {
            "name": "adamw", "lr": LR, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.0,
            "grad_clip": None, "schedule": "constant", "warmup_steps": 0, "global_batch": BATCH,
            "micro_batch": 2,
        },
        "checkpoint": {"every": 1000},
        "cluster": {"device": "cpu", "devices": 1},
    }  # fmt: skip


def prepare_pairs(folder: Path, **data: Any) -> Corpus:
    """Write and prepare pairs."""
    path = write_pairs(folder / "rows")
    given = sections_of()
    given["data"] |= {"source": str(path), "dir": str(folder / "prepared"), **data}
    facts = prepare_text(Recipe.model_validate(given), model_dir=None, progress=lambda *_: None)
    return Corpus(str(path), str(folder / "prepared"), facts)


def prepare_mixture(folder: Path) -> Corpus:
    """Write and prepare pairs of two sources; samples of one hold more pairs than of the other."""
    paths = [write_pairs(folder / name, rows=rows) for name, rows in (("many", 90), ("few", 30))]
    given = sections_of()
    given["data"] |= {
        "dir": str(folder / "prepared"),
        "mixture": [
            {"name": path.parent.name, "source": str(path), "weight": weight}
            for path, weight in zip(paths, (2.0, 1.0), strict=True)
        ],
    }
    facts = prepare_text(Recipe.model_validate(given), model_dir=None, progress=lambda *_: None)
    return Corpus(str(paths[0]), str(folder / "prepared"), facts)


def preference_run(
    folder: Path, corpus: Corpus, processes: int = 1, *, task: dict[str, Any] | None = None,
    **sections: Any,
) -> RunDir:  # fmt: skip
    """Write a run folder, ready to train."""
    given = sections_of(**(task or {}))
    given["cluster"]["devices"] = processes
    names = {*given, *sections}
    merged = {name: {**given.get(name, {}), **sections.get(name, {})} for name in names}
    return make_run(folder, corpus, merged)


class Pair(NamedTuple):
    """A preferred and a rejected text as the tokenizer gives them, and what of them is learnt."""

    tokens: list[Tensor]
    is_answer: list[Tensor]


def pairs_of(stream: Any, samples: Sequence[int]) -> Iterator[Pair]:
    """Read the pairs of samples from the prepared files, one after the other and unpacked."""
    sets = stream.sets if isinstance(stream, MixedStream) else [stream.samples]
    firsts = np.cumsum([0, *(each.num_samples for each in sets)])
    for sample in samples:
        source = int(np.searchsorted(firsts, sample, side="right")) - 1
        pairs, index = sets[source], sample - int(firsts[source])
        assert isinstance(pairs, PackedPairs)
        shards = pairs._shards
        assert isinstance(shards, TokenShards)
        for number in pairs.numbers[pairs.units_of(index)].tolist():
            tokens, is_answer = [], []
            for side in range(2):
                start = int(shards.document_starts[2 * number + side])
                document = shards.document_at(start)
                read = [shards.read(document.start, document.stop, name) for name in (None, LEARNT)]
                tokens.append(torch.from_numpy(read[0]))
                is_answer.append(torch.from_numpy(read[1]) != 0)
            yield Pair(tokens, is_answer)


def log_probabilities(model: nn.Module, pair: Pair) -> tuple[Tensor, Tensor]:
    """Log-probabilities of both answers (2,) by transformers' model, and their tokens (2,)."""
    sums, counts = [], []
    for tokens, is_answer in zip(*pair, strict=True):
        logits = model(input_ids=tokens[None]).logits[0, :-1].float()
        targets = torch.where(is_answer, tokens, IGNORED)[1:]
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        sums.append(-loss)
        counts.append(int((targets != IGNORED).sum()))
    return torch.stack(sums), torch.tensor(counts)


def loss_of(
    model: nn.Module, reference: nn.Module, pair: Pair, loss_type: str, smoothing: float
) -> Tensor:
    """The loss of one pair by the formulas of the papers."""
    policy, tokens = log_probabilities(model, pair)
    if loss_type == "orpo":
        chosen, rejected = (policy / tokens).unbind()
        odds = [each - torch.log(1 - each.exp()) for each in (chosen, rejected)]
        return -chosen - BETA * torch.log(torch.sigmoid(odds[0] - odds[1]))
    with torch.no_grad():
        before, _ = log_probabilities(reference, pair)
    ratios = policy - before
    if loss_type == "ipo":
        ratios = ratios / tokens
        return (ratios[0] - ratios[1] - 1 / (2 * BETA)).square()
    margin = BETA * (ratios[0] - ratios[1])
    right, wrong = torch.log(torch.sigmoid(margin)), torch.log(torch.sigmoid(-margin))
    return -(1 - smoothing) * right - smoothing * wrong


def transformers_model(training: Training) -> Any:
    """Return transformers' model of a run's shape, with the run's weights."""
    config = hf_config(require_shape(training.resolved.shape))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    weights = {
        name.removeprefix("model."): whole_of(tensor).clone()
        for name, tensor in training.tensors.items()
        if name.startswith("model.")
    }
    model.load_state_dict(weights)
    return model.train()


def next_to_a_plain_loop(run_dir: RunDir) -> tuple[list[float], dict[str, float]]:
    """Return losses of a plain loop, and how far apart the weights of the run end."""
    training = open_run(run_dir)
    task = training.resolved.recipe.task
    model = transformers_model(training)
    reference = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
    )
    stream: Any = training.train_source
    expected = []
    for step in range(STEPS):
        positions = torch.arange(step * BATCH, (step + 1) * BATCH).numpy()
        pairs = list(pairs_of(stream, stream.sample_indices(positions).tolist()))
        losses = [
            loss_of(model, reference, pair, task.loss_type, task.label_smoothing) for pair in pairs
        ]
        loss = torch.stack(losses).mean()
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
            / (param.detach() - begun.detach()).norm()
        )
        for (name, param), begun in zip(
            model.named_parameters(), reference.parameters(), strict=True
        )
    }
    training.close()
    return expected, apart


def evaluated_by_transformers(run_dir: RunDir) -> dict[str, float]:
    """Train, and return the scores of the validation pairs by transformers' models."""
    training = open_run(run_dir)
    reference = transformers_model(training).eval()
    loop = Loop(training)
    for _ in range(STEPS):
        loop.step()
    model = transformers_model(training).eval()
    stream: Any = training.eval_source
    found = list(pairs_of(stream, range(stream.num_samples)))
    with torch.no_grad():
        loss = torch.stack([loss_of(model, reference, each, "sigmoid", 0.0) for each in found])
        rewards = BETA * torch.stack(
            [
                log_probabilities(model, each)[0] - log_probabilities(reference, each)[0]
                for each in found
            ]
        )
    chosen, rejected = rewards.mean(dim=0).tolist()
    training.close()
    return {
        "loss": float(loss.mean()),
        "accuracy": float((rewards[:, 0] > rewards[:, 1]).float().mean()),
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }


class AdaptersOff(nn.Module):
    """PEFT's model without its adapters: the reference of TRL's trainer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = [model]  # no submodule of this one

    def forward(self, **given: Any) -> Any:
        with self._model[0].disable_adapter():
            return self._model[0](**given)


def loss_of_peft_on_export(run_dir: RunDir, base: Path, to: Path) -> float:
    """Train adapters, export them, and return the loss of PEFT's model beside its base."""
    train_here(run_dir)
    resolved = read_resolved(run_dir.resolved(0))
    export(choose_checkpoint(run_dir, "latest").path, resolved, to)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), to).eval()
    training = open_run(run_dir)
    stream: Any = training.eval_source
    with torch.no_grad():
        losses = [
            loss_of(model, AdaptersOff(model), pair, "sigmoid", 0.0)
            for pair in pairs_of(stream, range(stream.num_samples))
        ]
    training.close()
    return float(torch.stack(losses).mean())


def write_base(run_dir: RunDir, to: Path) -> None:
    """Write the model of a run before its first step as a folder of transformers."""
    training = open_run(run_dir)
    transformers_model(training).save_pretrained(to)
    training.close()


def train_with_events(run_dir: RunDir) -> None:
    """Train with the events of a real run."""
    events = EventWriter(run_dir.events, attempt=0, generation=0)
    train(run_dir, 0, Hooks(generation=0, drain_requested=lambda: False, events=events))
    events.close()


def train_until_killed(run_dir: RunDir) -> None:
    """Train three of four steps, wait for the checkpoint of the second, and die."""
    training = open_run(run_dir)
    loop = Loop(training)
    for _ in range(3):
        loop.step()
    training.saver.wait()
    os.kill(os.getpid(), signal.SIGKILL)
