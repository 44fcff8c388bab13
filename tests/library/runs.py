"""Small trainings through the library, for tests: what they came to, as plain numbers."""

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import shardyard
from shardyard.families.presets import PRESETS
from shardyard.models.build import hf_config

VOCABULARY = 304
SEQ_LEN = 16
SAMPLES = 8


def build(preset: str, *, tied: bool = False) -> Any:
    """A transformers model, the same on every rank."""
    torch.manual_seed(0)
    shape = replace(PRESETS[preset].shape, vocab_size=VOCABULARY, tie_word_embeddings=tied)
    kind = AutoModelForCausalLM if shape.is_causal else AutoModelForMaskedLM
    return kind.from_config(hf_config(shape), attn_implementation="eager")


def samples(step: int, *, pairs: bool = False) -> dict[str, torch.Tensor]:
    """What all ranks read in a step; some tokens are not predicted.

    Args:
        pairs: Each sample is one of two texts, and ends in padding, longer than the one before.
    """
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, SEQ_LEN), generator=draw)
    labels = tokens.clone()
    labels[::3, 5:9] = -100
    batch = {"input_ids": tokens, "labels": labels}
    if pairs:
        place, ends = torch.arange(SEQ_LEN), SEQ_LEN - torch.arange(SAMPLES)[:, None]
        batch["attention_mask"] = (place < ends).long()
        batch["token_type_ids"] = ((place > 4) & (place < ends)).long()
        labels[place >= ends] = -100
    return batch


def batches(
    mesh: shardyard.Mesh, step: int, *, number: int = 2, pairs: bool = False
) -> list[dict[str, torch.Tensor]]:
    """This rank's micro-batches of a step."""
    mine = {
        key: value[mesh.data_rank :: mesh.layout.data_ranks]
        for key, value in samples(step, pairs=pairs).items()
    }
    pieces = {key: value.chunk(number) for key, value in mine.items()}
    return [{key: pieces[key][i] for key in pieces} for i in range(number)]


def take_steps(
    model: Any,
    mesh: shardyard.Mesh,
    optimizer: torch.optim.Optimizer,
    steps: range,
    *,
    pairs: bool = False,
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    found = []
    for step in steps:
        loss = shardyard.accumulate(model, batches(mesh, step, pairs=pairs))
        norm = shardyard.clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss), float(norm)))
    return found
