"""Any causal language model of transformers as a module of one's own: made here, with its loss."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardyard.config.rules.generic_model import needs_mask
from shardyard.config.rules.model_problems import vocabulary_problems
from shardyard.config.schema.recipe import Recipe
from shardyard.data.micro_batch import IGNORED
from shardyard.errors import RecipeError, RequestError
from shardyard.models.attention import document_mask
from shardyard.models.folder_report import report_problems
from shardyard.parallel.vocab_loss import VocabLoss

_ROUNDING = 1e-4
"""Largest difference of logits in fp32, of the largest logit, that is rounding."""
_MASKED = torch.finfo(torch.bfloat16).min
"""Added to scores of tokens that are not seen; a number of fp32, too."""


def open_causal_lm(recipe: Recipe, folder: Path, *, vocab_size: int) -> PreTrainedModel:
    """The model of a folder in fp32, with its weights, or random ones from torch's generator.

    Raises:
        RequestError: transformers cannot open it, or not without code of its own; or its weights
            are not those of its config.json.
        RecipeError: The tokenizer has more tokens than it has rows.
    """
    wrong: list[str] = []
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config.use_cache = False
        if recipe.model.weights == "random":
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        else:
            model, told = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, use_safetensors=True,
                local_files_only=True, ignore_mismatched_sizes=True, output_loading_info=True,
            )  # fmt: skip
            wrong = report_problems(folder, told)
    except (ValueError, OSError, ImportError, KeyError) as error:
        why = str(error).splitlines()[0]
        raise RequestError(
            f"transformers cannot open {folder} as a causal language model: {why} Code of the "
            "folder's own is not run. Make sure that this version of transformers knows the model."
        ) from error
    if wrong:
        raise RequestError("\n".join(wrong))
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


def loss_of_documents(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The same where each document of a sample is for itself."""
    logits_BLV = _logits_of_documents(model, batch["tokens"], batch["positions"])
    return VocabLoss()(logits_BLV, batch["targets"]), (batch["targets"] != IGNORED).sum()


@torch.no_grad()
def refuse_mixed_documents(model: PreTrainedModel, setting: str) -> None:
    """Compute some short documents in two samples, and each alone.

    Args:
        setting: What asks that they be kept apart.

    Raises:
        RequestError: Their logits differ.
    """
    sizes = [(4, 1, 3), (2, 6)]
    rows = model.get_input_embeddings().weight.shape[0]
    tokens_BL = (torch.arange(16) * 7 + 1).remainder(rows).view(2, 8)
    positions_BL = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in sizes])
    documents = [
        document
        for row, each in zip(tokens_BL, sizes, strict=True)
        for document in torch.split(row, list(each))
    ]
    was_training = model.training
    model.eval()
    found = [model(input_ids=each[None], use_cache=False).logits[0] for each in documents]
    alone = torch.cat(found)
    try:
        together = _logits_of_documents(model, tokens_BL, positions_BL).flatten(0, 1)
        keeps_apart = bool((together - alone).abs().max() < _ROUNDING * alone.abs().max())
    except (TypeError, ValueError, RuntimeError):  # it takes no such positions or mask
        keeps_apart = False
    model.train(was_training)
    if not keeps_apart:
        raise RequestError(
            f"{setting}: documents of a sample are each for itself, but in this "
            f"{type(model).__name__} they change the logits of those behind them. Set "
            "data.pack=stream and data.attend_across_documents=true."
        )


def _logits_of_documents(model: Any, tokens_BL: Tensor, positions_BL: Tensor) -> Tensor:
    """Of positions that begin anew transformers makes the mask; where it does not, it is given."""
    given: dict[str, Tensor] = {}
    if needs_mask(model.config.model_type):
        may_attend_B1LL = document_mask(positions_BL)
        zeros = torch.zeros(may_attend_B1LL.shape, device=positions_BL.device)
        given["attention_mask"] = zeros.masked_fill(~may_attend_B1LL, _MASKED)
    logits_BLV: Tensor = model(
        input_ids=tokens_BL, position_ids=positions_BL, use_cache=False, **given
    ).logits
    return logits_BLV
