"""Any causal language model of transformers as a module of one's own: made here, with its loss."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardyard.config.model_problems import vocabulary_problems
from shardyard.config.schema import Recipe
from shardyard.data.micro_batch import IGNORED
from shardyard.errors import RecipeError, RequestError
from shardyard.parallel.vocab_loss import VocabLoss


def open_causal_lm(recipe: Recipe, folder: Path, *, vocab_size: int) -> PreTrainedModel:
    """The model of a folder in fp32, with its weights, or random ones from torch's generator.

    Raises:
        RequestError: transformers cannot open it, or not without code of its own.
        RecipeError: The tokenizer has more tokens than it has rows.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config.use_cache = False
        if recipe.model.weights == "random":
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, use_safetensors=True,
                local_files_only=True,
            )  # fmt: skip
    except (ValueError, OSError, ImportError, KeyError) as error:
        why = str(error).splitlines()[0]
        raise RequestError(
            f"transformers cannot open {folder} as a causal language model: {why} Code of the "
            "folder's own is not run. Make sure that this version of transformers knows the model."
        ) from error
    rows = model.get_input_embeddings().weight.shape[0]
    found = vocabulary_problems(
        tokenizer=str(recipe.data.tokenizer), vocab_size=vocab_size, rows=rows
    )
    if found:
        raise RecipeError(found, str(folder))
    opened: PreTrainedModel = model
    return opened


def blocks_of_causal_lm(model: PreTrainedModel) -> dict[str, nn.Module]:
    """What transformers says must stay together on one device: its blocks, by full name."""
    kinds = set(model._no_split_modules or ())
    named = {name: each for name, each in model.named_modules() if type(each).__name__ in kinds}
    inner = {name for name in named for other in named if name.startswith(f"{other}.")}
    return {name: each for name, each in named.items() if name not in inner}


def loss_of_causal_lm(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of a batch, and how many tokens are predicted."""
    logits_BLV = model(input_ids=batch["tokens"], use_cache=False).logits
    return VocabLoss()(logits_BLV, batch["targets"]), (batch["targets"] != IGNORED).sum()
