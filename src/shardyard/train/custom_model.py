"""Any causal language model of transformers as a module of one's own: made here, with its loss."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardyard.config.model.vocabulary import check_tokens, vocabulary_in
from shardyard.config.rules.custom_module import MODEL, needs_mask
from shardyard.config.schema.recipe import Recipe
from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.models.attention import document_mask
from shardyard.models.batch_norm import BatchNorms
from shardyard.models.build import freeze
from shardyard.models.folder_report import loading_errors
from shardyard.models.random import key_of
from shardyard.own_code import load_own
from shardyard.parallel.apply import REMEDY, parallelize_custom
from shardyard.parallel.custom_module import (
    blocks_named,
    check_weights_equal,
    module_errors,
    reject_scalars,
)
from shardyard.parallel.ddp import is_replicated
from shardyard.parallel.loss import VocabLoss
from shardyard.parallel.low_precision import DTYPES
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.custom import CustomComputation, Loss

Outputs = Callable[[Any, Any], Any]
"""(model, batch) -> what a loss gets."""

_ROUNDING = 1e-4
"""Largest difference of logits in fp32, of the largest logit, that is rounding."""
_MASKED = torch.finfo(torch.bfloat16).min
"""Added to scores of tokens that are not seen; a number of fp32, too."""


def open_causal_lm(
    recipe: Recipe, folder: Path, *, vocab_size: int, tokenizer_dir: Path | None = None
) -> PreTrainedModel:
    """The model of a folder in fp32, with its weights, or random ones from torch's generator.

    It gets a row for each token that was added to its tokenizer.

    Args:
        vocab_size: Rows that the tokenizer needs.
        tokenizer_dir: Folder of the tokenizer; None: only the number of its tokens is known.

    Raises:
        RequestError: transformers cannot open it, or not without code of its own; or its weights
            are not those of its config.json.
        RecipeError: The tokenizer is not the model's own, nor that with further tokens.
    """
    errors: list[str] = []
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # The cache of keys and values serves generation. In training it would only hold memory.
        config.use_cache = False
        if recipe.model.weights == "random":
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        else:
            model, told = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, use_safetensors=True,
                local_files_only=True, ignore_mismatched_sizes=True, output_loading_info=True,
            )  # fmt: skip
            errors = loading_errors(folder, told)
    except (ValueError, OSError, ImportError, KeyError) as error:
        why = str(error).splitlines()[0]
        raise RequestError(
            f"transformers cannot open {folder} as a causal language model: {why} Code of the "
            "folder's own is not run. Make sure that this version of transformers knows the model."
        ) from error
    if errors:
        raise RequestError("\n".join(errors))
    opened: PreTrainedModel = model
    rows, given = opened.get_input_embeddings().weight.shape[0], vocabulary_in(tokenizer_dir)
    found = check_tokens(recipe, given, rows=rows, size=vocab_size, model_dir=folder)
    if found:
        raise RecipeError(found, str(folder))
    if vocab_size > rows:
        _grow(opened, vocab_size, is_mean=recipe.model.new_embeddings == "mean")
    return opened


@torch.no_grad()
def _grow(model: PreTrainedModel, vocab_size: int, *, is_mean: bool) -> None:
    """Add rows of the embedding and the head: their mean, or random as transformers has them."""
    rows = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    if not is_mean:
        return
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    params = {table.weight}
    if head is not None and head.weight is not table.weight:  # the bias of a tied one begins as 0
        params |= {*head.parameters()}
    for param in params:
        param[rows:] = param[:rows].double().mean(dim=0).to(param.dtype)


def blocks_of_transformer(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the blocks that transformers keeps together on one device, by full name.

    One whose parameter is tied to another part of the model, such as the embedding, is none.
    """
    kinds = set(model._no_split_modules or ())
    named = {name: each for name, each in model.named_modules() if type(each).__name__ in kinds}
    inner = {name for name in named for other in named if name.startswith(f"{other}.")}
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    tied = [each for each in names.values() if len(each) > 1]
    return {
        name: each
        for name, each in named.items()
        if name not in inner
        and not any(
            0 < sum(other.startswith(f"{name}.") for other in each) < len(each) for each in tied
        )
    }


def logits_of_causal_lm(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Logits (B, L, V) of a batch."""
    logits_BLV: Tensor = model(input_ids=batch["tokens"], use_cache=False).logits
    return logits_BLV


def logits_of_separate_documents(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The same where each document of a sample is for itself."""
    return _logits_of_documents(model, batch["tokens"], batch["positions"])


def loss_of_logits(logits_BLV: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of a batch, and how many tokens are predicted."""
    return VocabLoss()(logits_BLV, batch["targets"]), (batch["targets"] != IGNORED).sum()


@torch.no_grad()
def check_documents_separated(model: PreTrainedModel, setting: str) -> None:
    """Check with short documents that the model keeps those of one sample apart.

    It computes them in two samples, and each by itself.

    Args:
        setting: Setting that requires separate documents.

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
    """Return logits of several documents a row.

    Transformers makes the mask from restarting positions; where it does not, this function
    passes one.
    """
    kwargs: dict[str, Tensor] = {}
    if needs_mask(model.config.model_type):
        may_attend_B1LL = document_mask(positions_BL)
        zeros = torch.zeros(may_attend_B1LL.shape, device=positions_BL.device)
        kwargs["attention_mask"] = zeros.masked_fill(~may_attend_B1LL, _MASKED)
    logits_BLV: Tensor = model(
        input_ids=tokens_BL, position_ids=positions_BL, use_cache=False, **kwargs
    ).logits
    return logits_BLV


# The user's function makes the model of ``model.module`` on every rank. It is checked and sharded.
#
# Its random numbers are drawn from a new seed for each micro-batch, by the position of its first
# sample. So a resume draws the same numbers as the run would have, whichever rank computes the
# micro-batch.


def build_custom(
    recipe: Recipe,
    mesh: Mesh,
    *,
    vocab_size: int,
    device: torch.device,
    control: dist.ProcessGroup,
    folder: Path | None = None,
    tokenizer_dir: Path | None = None,
) -> CustomComputation:
    """Make, check and shard the model. All ranks call it together.

    Args:
        control: A gloo group of all ranks.
        folder: Of a model that transformers makes (``custom_model.py``).
        tokenizer_dir: Folder of the tokenizer, for such a model.

    Raises:
        RequestError: There is no such function, or what it returns cannot be trained.
        RecipeError: Settings that do not fit the model; all of them.
    """
    place = str(recipe.model.module)
    # Every rank calls the user's function, and all of them must draw the same weights.
    torch.manual_seed(recipe.run.seed)
    errors: list[Problem] = []
    outputs: Outputs | None = None
    loss: Loss | None
    if folder is None:
        model, loss, outputs = _build_module(recipe, vocab_size=vocab_size)
        blocks, errors = blocks_named(model, recipe.model.blocks, setting="model.blocks")
    else:
        place = str(folder)
        opened = open_causal_lm(recipe, folder, vocab_size=vocab_size, tokenizer_dir=tokenizer_dir)
        model, loss, blocks = opened, loss_of_logits, blocks_of_transformer(opened)
        outputs = logits_of_causal_lm
        if not recipe.data.attends_across:
            is_whole = recipe.data.pack == "whole"
            setting = "data.pack=whole" if is_whole else "data.attend_across_documents=false"
            check_documents_separated(opened, setting)
            outputs = logits_of_separate_documents
    norms = shard_custom(
        model, blocks, recipe, mesh, device=device, control=control, errors=errors,
        place=place if folder is not None else f"model.module={place}",
    )  # fmt: skip
    reads = _Reads(recipe.run.seed, device)
    said_by = f"the loss of {place}"
    return CustomComputation(
        model, mesh, loss, loss_name=said_by, outputs=outputs, norms=norms, reads=reads
    )


def shard_custom(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    recipe: Recipe,
    mesh: Mesh,
    *,
    device: torch.device,
    control: dist.ProcessGroup,
    place: str,
    errors: Sequence[Problem] = (),
) -> BatchNorms | None:
    """Check a model that lies in host memory, and shard it on its device.

    Args:
        blocks: Modules that are sharded and recomputed by themselves, by full name.
        control: A gloo group of all ranks.
        place: What messages call the model.
        errors: What is known to be wrong already.

    Returns:
        Its batch normalisations; None: it has none.

    Raises:
        RequestError: It has parameters that cannot be split, or ranks have different weights.
        RecipeError: Settings that do not fit the model; all of them.
    """
    if not is_replicated(model, mesh, recipe):
        reject_scalars(model, or_whole="parallel.strategy=NO_SHARD in fp32")
    found = [*errors, *module_errors(model, blocks, tp=1, setting="model.blocks")]
    if found:
        raise RecipeError(found, place)
    # Before sharding: a rank sees only its own part afterwards, and no difference would show.
    check_weights_equal(model, control)
    model.float()  # master weights
    # On the host, so that frozen weights reach the device in their narrow format.
    freeze(model, recipe.model.frozen, storage_dtype=DTYPES[recipe.precision.compute])
    model.to(device)
    remedy = REMEDY.format("parallel.zero=2")
    return parallelize_custom(model, mesh, recipe=recipe, blocks=blocks, words={}, remedy=remedy)


class _Reads:
    """Reader of the fields of a micro-batch for a loss function of the user's own."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device

    def __call__(self, batch: MicroBatch) -> tuple[dict[str, Tensor], bool]:
        """Its fields on the device, without padding, and whether it counts."""
        first = int(batch.samples_B[0])  # in host memory
        torch.manual_seed(key_of(self._seed, "module", first) % 2**63)
        return dict(batch.cut().to(self._device).fields), not batch.is_padding


def _build_module(
    recipe: Recipe, *, vocab_size: int
) -> tuple[nn.Module, Loss | None, Outputs | None]:
    """Return the model of the user's function, its loss, and how to get its outputs alone."""
    import_path, task = str(recipe.model.module), recipe.task
    build = load_own("model.module", import_path, MODEL)
    answer = build(vocab_size=vocab_size, seq_len=int(recipe.data.seq_len))
    if isinstance(answer, nn.Module) and task.loss is not None:
        return answer, None, _outputs
    is_pair = isinstance(answer, tuple) and len(answer) == 2
    if not is_pair or not isinstance(answer[0], nn.Module) or not callable(answer[1]):
        raise RequestError(
            f"model.module={import_path} returned {_describe_result(answer)}. It must return two "
            "things: an "
            "nn.Module, and a function of (model, batch) that returns the sum of the losses of a "
            "batch and how many they are; or the nn.Module alone, with task.loss."
        )
    if task.loss is not None or task.metrics:
        setting = "task.metrics" if task.loss is None else "task.loss"
        raise RequestError(
            f"model.module={import_path} returned a model and its loss, and {setting} gets the "
            "outputs of a model, which only that loss sees. Return the nn.Module alone, which is "
            "called as model(batch), and name its loss: task.loss=package.module:function."
        )
    model, loss = answer
    return model, loss, None


def _outputs(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(batch)


def _describe_result(answer: Any) -> str:
    if isinstance(answer, tuple):
        return f"({', '.join(type(each).__name__ for each in answer)})"
    return f"a {type(answer).__name__}"
