"""Models of transformers of no family here with a head over hidden tokens or labels.

transformers makes the model, its head and its dropout. The task's own code computes losses and
scores, as it does for known families. Shape suffixes: B = samples, L = tokens of a sample, N =
tokens that are predicted, C = labels, V = vocabulary.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from shardyard.config.model.vocabulary import check_tokens, vocabulary_in
from shardyard.config.resolved import Resolved
from shardyard.config.tasks import task_row
from shardyard.data.loader import MicroBatch
from shardyard.errors import RecipeError, RequestError
from shardyard.models.folder_report import loading_errors
from shardyard.models.forward import Inputs
from shardyard.models.random import key_of
from shardyard.parallel.loss import VocabLoss
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.base import task_class
from shardyard.tasks.labels import label_fields_of
from shardyard.tasks.loss_computation import Computation
from shardyard.tasks.masked_lm import mask_token_id
from shardyard.train.custom_model import blocks_of_transformer, shard_custom


def build_with_head(
    resolved: Resolved, mesh: Mesh, *, device: torch.device, control: dist.ProcessGroup
) -> Computation[MicroBatch]:
    """Make, check and shard the model. All ranks call it together.

    Args:
        control: A gloo group of all ranks.

    Raises:
        RequestError: transformers cannot open it with such a head.
        RecipeError: Settings or tokenizer do not fit the model; all problems.
    """
    recipe, folder = resolved.recipe, Path(str(resolved.model_dir))
    torch.manual_seed(recipe.run.seed)  # a new head is drawn, on each rank the same
    model = open_with_head(resolved)
    labelled = task_row(recipe.task.name).labelled
    shard_custom(
        model, blocks_of_transformer(model), recipe, mesh,
        device=device, control=control, place=str(folder),
    )  # fmt: skip
    parts = ParallelModel(
        model=model,
        token_losses=VocabLoss(),
        call=HeadCall(model, per_sample=labelled == "samples", at_predicted=labelled is None),
        before_batch=Seeds(recipe.run.seed),
    )
    return task_class(recipe.task.name).compute(parts, mesh, recipe=recipe, device=device)


def open_with_head(resolved: Resolved) -> PreTrainedModel:
    """The model of a run's folder in fp32 with the task's head, with its weights or random ones.

    A head that the folder lacks is drawn from torch's generator.

    Raises:
        RequestError: transformers cannot open it with such a head, or not without code of its
            own; or its weights are not those of its config.json; or no token hides words.
        RecipeError: The tokenizer is not the model's own.
    """
    recipe, data, folder = resolved.recipe, resolved.data, Path(str(resolved.model_dir))
    row = task_row(recipe.task.name)
    auto_class: Any = getattr(transformers, str(row.auto_class))
    of_labels = row.labelled is not None
    errors: list[str] = []
    transformers.logging.set_verbosity_error()  # it lists the tensors of both heads
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config.update(label_fields_of(resolved))
        if recipe.model.weights == "random":
            model = auto_class.from_config(config, dtype=torch.float32)
        else:
            model, report = auto_class.from_pretrained(
                folder, config=config, dtype=torch.float32, use_safetensors=True,
                local_files_only=True, ignore_mismatched_sizes=True, output_loading_info=True,
            )  # fmt: skip
            prefix = f"{model.base_model_prefix}."
            errors = loading_errors(folder, report, base=prefix if of_labels else None)
    except (ValueError, OSError, ImportError, KeyError) as error:
        why = str(error).splitlines()[0]
        raise RequestError(
            f"transformers cannot open {folder} by {row.auto_class}, which "
            f"task.name={recipe.task.name} needs: {why} Code of the folder's own is not run. Make "
            "sure that this version of transformers knows the model with such a head."
        ) from error
    if errors:
        raise RequestError("\n".join(errors))
    opened: PreTrainedModel = model
    rows = opened.get_input_embeddings().weight.shape[0]
    given = vocabulary_in(Path(data.dir))
    found = check_tokens(recipe, given, rows=rows, size=data.vocab_size, model_dir=folder)
    if found:
        raise RecipeError(found, str(folder))
    if not of_labels:  # a token that hides words needs a row
        file = Path(data.dir) / "tokenizer.json"
        mask_token_id(file, vocab_size=rows, tokenizer_size=data.vocab_size)
    if row.labelled == "samples" and config.pad_token_id is None:
        raise RequestError(
            f"{folder / 'config.json'} has no pad_token_id, by which a "
            f"{type(opened).__name__} finds the end of each text. Add the id of the tokenizer's "
            "padding token, or of a token that no text has."
        )
    return opened


class Seeds:
    """Seeds torch's generator for a micro-batch, by its first sample.

    The model's own dropout draws the same numbers on whichever rank computes the micro-batch.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, batch: MicroBatch) -> None:
        first = int(batch.samples_B[0])  # in host memory
        torch.manual_seed(key_of(self._seed, "module", first) % 2**63)


class HeadCall:
    """Calls a model of transformers by the inputs of a family's model."""

    def __init__(self, model: PreTrainedModel, *, per_sample: bool, at_predicted: bool) -> None:
        """Args:
        per_sample: Whether it returns logits of samples, and not of tokens.
        at_predicted: Whether only the logits of predicted tokens are returned.
        """
        self._per_sample, self._at_predicted = per_sample, at_predicted
        self._pad_id = model.config.pad_token_id
        accepts = inspect.signature(model.forward).parameters
        types = getattr(model.config, "type_vocab_size", 0) or 0
        self._accepts_segments = "token_type_ids" in accepts and types > 1

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Return logits (1, B, C), (B, L, C), or of predicted tokens (1, N, V)."""
        tokens_BL, kwargs = inputs.x, {}
        if inputs.lengths_B is not None:
            places_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
            # A row of padding keeps a token to see: a softmax over none is not a number.
            is_text_BL = places_L < inputs.lengths_B.clamp(min=1)[:, None]
            kwargs["attention_mask"] = is_text_BL.long()
            if self._pad_id is not None:  # some count positions, and find ends, by it
                tokens_BL = torch.where(is_text_BL, tokens_BL, self._pad_id)
        if self._accepts_segments and inputs.segments_BL is not None:
            kwargs["token_type_ids"] = inputs.segments_BL
        logits: Tensor = model(input_ids=tokens_BL, **kwargs).logits
        if self._per_sample:
            return logits[None]
        if self._at_predicted and inputs.predicted_1N is not None:
            return logits.flatten(0, 1)[inputs.predicted_1N[0]][None]
        return logits
