"""A task of a package trains as a plain loop does, in which its rule is written by hand."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from shardyard.config.rules.custom_module import require_shape
from shardyard.models.build import hf_config
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up
from tests.checkpoint.conftest import alone
from tests.distributed.runs import Corpus, make_run

__all__ = ["alone"]

LR, BATCH, STEPS, SEQ_LEN = 0.05, 6, 3, 32


def _labels(targets: Tensor, tokenizer: Tokenizer) -> Tensor:
    """Tokens with two vowels or more; -100 in place of the others."""
    words = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
    vowels = torch.tensor([sum(letter in "aeiou" for letter in word) for word in words])
    return torch.where(vowels[targets] >= 2, targets, -100)


@pytest.mark.heavy
@pytest.mark.usefixtures("letters", "alone")
def test_a_task_of_a_package_takes_the_steps_of_a_plain_loop(
    corpus: Corpus, tmp_path: Path
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS},
        "task": {"name": "vowels", "vowels": {"at_least": 2}},
        "optim": {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": LR, "warmup_steps": 0,
                  "schedule": "constant", "grad_clip": None, "micro_batch": 4},
    }  # fmt: skip
    run_dir = make_run(tmp_path / "run", corpus, sections)
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run_dir, 0, hooks, local_rank=0)
    model = LlamaForCausalLM._from_config(hf_config(require_shape(training.resolved.shape)))
    named = {n.removeprefix("model."): t for n, t in training.tensors.items() if n[:6] == "model."}
    model.load_state_dict({name: each.detach().clone() for name, each in named.items()})

    tokenizer = Tokenizer.from_file(str(Path(corpus.facts.dir) / "tokenizer.json"))
    tokens = torch.from_numpy(_tokens(corpus, "train"))
    expected = []
    for step in range(STEPS):
        positions = np.arange(step * BATCH, (step + 1) * BATCH)
        windows = training.train_source.sample_indices(positions)
        ids = torch.stack([tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in windows])
        labels = _labels(ids[:, 1:], tokenizer)
        logits = model(input_ids=ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        expected.append((float(loss.detach()), int((labels >= 0).sum())))
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                param -= LR * param.grad
    loop = Loop(training)
    for _ in range(STEPS):
        loop.step()
    training.close()
    found = [(line["loss"], line["targets"]) for line in read_steps(run_dir.metrics)]
    assert [each for _, each in found] == [each for _, each in expected]
    assert [each for each, _ in found] == pytest.approx([each for each, _ in expected], rel=1e-6)
    for name, param in model.named_parameters():
        torch.testing.assert_close(named[name], param.detach(), rtol=1e-5, atol=1e-6)

    held_out = torch.from_numpy(_tokens(corpus, "eval"))
    every = _labels(held_out, tokenizer)
    total, number = 0.0, 0
    for window, of_window in zip(_windows(held_out), _windows(every), strict=True):
        labels = of_window[1:]
        with torch.no_grad():
            logits = model(input_ids=window[None, :-1]).logits[0]
        total += float(F.cross_entropy(logits.double(), labels, reduction="sum"))
        number += int((labels >= 0).sum())
    (judged,) = read_evaluations(run_dir.metrics)
    scores = {"loss": total / number, "vowel_score": math.exp(-total / number)}
    assert judged["eval"] == pytest.approx(scores, rel=1e-5)


def _tokens(corpus: Corpus, split: str) -> Any:
    """All token ids of a split."""
    files = sorted(Path(corpus.facts.dir).glob(f"{split}-*.bin"))
    return np.concatenate([np.fromfile(file, "<u2") for file in files]).astype(np.int64)


def _windows(tokens: Tensor) -> list[Tensor]:
    """Each with the first token of the one behind it."""
    return [tokens[start : start + SEQ_LEN + 1] for start in range(0, len(tokens) - 1, SEQ_LEN)]
