"""Export of a model of no family: as transformers itself writes it, which holds all of it."""

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from shardyard.checkpoint.buffers import buffers_of
from shardyard.checkpoint.ema import judged_name
from shardyard.checkpoint.export_files import (
    CONFIG,
    BesideWeights,
    changed_config,
    copy_files,
)
from shardyard.checkpoint.load import load_tensors, read_shapes
from shardyard.errors import RequestError


def write_generic(
    checkpoint: Path, beside: BesideWeights, folder: Path, *, dtype: torch.dtype
) -> None:
    """Write weights, config.json, and the files of the model's own folder.

    Raises:
        RequestError: That folder is gone, and with it what the model is.
        CheckpointError: The checkpoint cannot be read, or is of another model.
    """
    if beside.config is None:
        raise RequestError(
            f"{checkpoint} holds weights of a model of no family here, whose config.json lies in "
            "the folder that it came from, which is gone. Bring it back and export once more."
        )
    config: Any = AutoConfig.for_model(**beside.config)
    saved, about = read_shapes(checkpoint), beside.config
    if _has_own_head(config, saved):  # its folder held a head that differs from its table
        config.tie_word_embeddings = False
        about = {**about, "tie_word_embeddings": False}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors: dict[str, Tensor] = {
        f"model.{name}": param.detach() for name, param in model.named_parameters()
    }
    wanted = {**tensors, **buffers_of(model)}
    judged = {judged_name(name, saved): each for name, each in wanted.items()}
    load_tensors(checkpoint, judged, allow_extra=True)
    model.save_pretrained(folder)
    content = changed_config(about, architecture=type(model).__name__, dtype=dtype, ends={})
    (folder / CONFIG).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    copy_files(beside.copied, folder)


def _has_own_head(config: Any, saved: Container[str]) -> bool:
    """Whether a checkpoint has the head of a tied model beside its table."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    pairs = model.all_tied_weights_keys.items()
    return any(f"model.{head}" in saved and f"model.{table}" in saved for head, table in pairs)
