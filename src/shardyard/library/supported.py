"""A transformers model of a family that recipes train, split as a recipe would be.

Shape suffixes: B = samples, L = tokens of a sample.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardyard.config.formulas import compute_on, dropout_of, output_of, seq_len_of
from shardyard.config.rules.model import check_model
from shardyard.config.rules.plan_only import settings_planned_only
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import tasks_of
from shardyard.config.validate import recipe_of
from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.families.config_json import CAUSAL_CLASSES, shape_of_config
from shardyard.families.registry import (
    FAMILIES,
    family_of,
    is_family,
)
from shardyard.families.shape import ModelShape
from shardyard.library.mesh import devices_per_node
from shardyard.models.attention import NAME
from shardyard.models.build import materialize, replace_modules
from shardyard.parallel import apply
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.custom import Loss
from shardyard.tasks.token_losses import LanguageModel

_SECTIONS = {
    "attend_across_documents": "data",
    "compile": "model",
    "compute": "precision",
    "cp_exchange": "parallel",
    "loss_chunk": "memory",
    "output": "precision",
    "prefetch": "parallel",
    "recompute": "memory",
    "reduce": "precision",
    "router_aux_loss": "model",
    "router_z_loss": "model",
    "schedule": "parallel",
    "virtual_stages": "parallel",
}
"""Setting that ``parallelize`` takes -> its section in a recipe."""

_ELSE = {"router_aux_loss": 0.0, "router_z_loss": 0.0}
"""Defaults other than a recipe's: transformers adds these losses only on request."""

_BATCH = ("input_ids", "labels", "position_ids", "attention_mask")
_OF_BOTH_SIDES = ("token_type_ids",)
"""Optional keys of a batch for a model whose tokens see those on both sides."""


def shard_supported(
    model: nn.Module,
    mesh: Mesh,
    *,
    device: torch.device,
    seq_len: int | None,
    options: Mapping[str, Any],
) -> "SupportedModel":
    """Change a model of a known family in place.

    Raises:
        RecipeError: Settings that are wrong, or do not fit the model or the mesh.
        RequestError: The model is of no known family, or has what is not built.
    """
    shape = supported_shape(model)
    assert isinstance(model, PreTrainedModel)
    recipe = request(mesh, options, shape=shape, seq_len=seq_len)
    on_meta = next(model.parameters()).is_meta
    model.float()  # master weights
    model.set_attn_implementation(NAME)
    replace_modules(model, shape)
    family = family_of(shape.model_type)
    parts = apply.parallelize(model, mesh, recipe=recipe, shape=shape, family=family)
    if on_meta:
        materialize(model, device, stages=parts.pipeline.modules if parts.pipeline else ())
    computation = LanguageModel(parts, mesh, device=device)
    return SupportedModel(computation, shape=shape, recipe=recipe, seq_len=seq_len)


def request(
    mesh: Mesh, options: Mapping[str, Any], *, shape: ModelShape | None, seq_len: int | None
) -> Recipe:
    """The recipe that asks for this mesh and these settings, resolved.

    Args:
        shape: Of the model; None: one that is not known.

    Raises:
        RecipeError: Something in it is wrong; all that is.
    """
    unknown = [name for name in options if name not in _SECTIONS]
    if unknown:
        raise RequestError(
            f"parallelize() has no setting {unknown[0]}. It takes seq_len, blocks, plan, and of a "
            f"recipe's settings: {', '.join(_SECTIONS)}."
        )
    layout = mesh.layout
    node = devices_per_node(layout.world_size)
    settings: dict[str, dict[str, Any]] = {
        "cluster": {
            "device": mesh.dense.device_type,
            "devices": node,
            "nodes": layout.world_size // node,
        },
        "parallel": asdict(layout),
        "data": {} if seq_len is None else {"seq_len": seq_len},
    }
    for name, value in {**_ELSE, **options}.items():
        settings.setdefault(_SECTIONS[name], {})[name] = value
    if shape is not None and not shape.is_causal:
        settings["task"] = {"name": tasks_of(is_causal=False)[0]}
    try:
        recipe = _without_auto(recipe_of(settings), shape)
        found = _errors(recipe, shape=shape, seq_len=seq_len, devices_per_node=node)
    except RecipeError as error:
        found = list(error.problems)
    if found:
        raise RecipeError(found, "parallelize()")
    return recipe


def _without_auto(recipe: Recipe, shape: ModelShape | None) -> Recipe:
    """Return the recipe with the settings read here resolved if a script left them open."""
    model, data, precision = recipe.model, recipe.data, recipe.precision
    if precision.compute == "auto":
        compute, _ = compute_on(recipe.cluster.device)
        precision = precision.model_copy(update={"compute": compute})
    if precision.output == "auto" and precision.compute != "auto":
        output, _ = output_of(precision.compute)
        precision = precision.model_copy(update={"output": output})
    if shape is not None:
        model = model.model_copy(update={"dropout": dropout_of(shape)[0]})
    if shape is not None and data.seq_len == "auto":
        data = data.model_copy(update={"seq_len": seq_len_of(shape)[0]})
    return recipe.model_copy(update={"model": model, "data": data, "precision": precision})


def _errors(
    recipe: Recipe, *, shape: ModelShape | None, seq_len: int | None, devices_per_node: int
) -> list[Problem]:
    parallel = recipe.parallel
    found = check_model(recipe, shape, devices_per_node=devices_per_node)
    found += settings_planned_only(recipe)
    if recipe.precision.compute == "fp16":
        text = (
            "=fp16: its loss scale skips steps inside the optimizer, and yours is your own. Use "
            "bf16 or fp32, or train by a recipe."
        )
        found.append(Problem("precision.compute", text))
    of_plans = {"model.compile": recipe.model.compile, "memory.recompute": recipe.memory.recompute}
    for setting in (name for name, value in of_plans.items() if value == "auto"):
        found.append(Problem(setting, "=auto: a recipe's plan chooses it, and a script has none."))
    split = [f"{axis}={getattr(parallel, axis)}" for axis in ("cp", "tp", "pp")]
    split = [axis for axis in split if not axis.endswith("=1")]
    if shape is not None and seq_len is None and split:
        text = (
            f"is not given, and {', '.join(split)} splits samples or hands them on: every rank "
            "must know their length beforehand. Give seq_len, the tokens of every sample."
        )
        found.append(Problem("seq_len", text))
    return found


def supported_shape(model: nn.Module) -> ModelShape:
    """Sizes of a model of a known family.

    Raises:
        RequestError: It is of none.
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if not isinstance(model, PreTrainedModel) or not is_family(model_type):
        raise RequestError(
            f"{name} is of none of the families whose parts are known: "
            f"{', '.join(FAMILIES)}. Say what to shard one by one with blocks=, for "
            'instance blocks="layers", and how tp splits it with plan=.'
        )
    wanted = CAUSAL_CLASSES if family_of(model_type).is_causal else ("ForMaskedLM",)
    if not name.endswith(wanted):
        raise RequestError(
            f"{name}: of {model_type} the model with its head is known, ...{wanted[0]}. Load that "
            "one, or treat this one as a module of your own with blocks= and plan=."
        )
    source = f"the config of {name}"
    shape = shape_of_config(model.config.to_dict(), source, is_random=False)
    if shape.hidden_dropout:
        key = shape.family.config_json.dropout
        raise RequestError(
            f"{source} has {key}={shape.hidden_dropout}; here only 0 is built, as "
            "the other would depend on the layout. Set it in the config."
        )
    return shape


class SupportedModel:
    """Reads batches as transformers' models do: ``input_ids`` and ``labels``, (B, L)."""

    def __init__(
        self,
        computation: LanguageModel,
        *,
        shape: ModelShape,
        recipe: Recipe,
        seq_len: int | None,
    ) -> None:
        self._computation = computation
        self._is_causal = shape.is_causal
        self._attend_across = recipe.data.attends_across
        self._seq_len = seq_len
        self._form: tuple[int, ...] | None = None
        """Micro-batches of the last step, samples in one, tokens of one."""

    @property
    def tied_across_stages(self) -> Collection[str]:
        """Names of parameters that both ends of a pipeline hold."""
        return self._computation.tied_across_stages

    def read(
        self, batches: Sequence[Any], loss: Loss | None
    ) -> tuple[LanguageModel, Sequence[MicroBatch]]:
        """Return the batches as micro-batches of text; rejects batches of another form."""
        if loss is not None:
            raise RequestError(
                f"loss= is for modules of your own; {type(self._computation.model).__name__} has "
                "its loss, cross-entropy of the labels. Leave it out."
            )
        for batch in batches:
            self._check(batch)
        if self._computation.pipeline is not None:
            self._check_form(batches)
        return self._computation, [self._micro_batch(batch) for batch in batches]

    def _check_form(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """The stages of a pipeline hand on tensors of one size, in a schedule that is made once."""
        sizes = {tuple(batch["input_ids"].shape) for batch in batches}
        if len(sizes) > 1:
            raise RequestError(
                f"micro-batches of {len(sizes)} sizes in one step: {sorted(sizes)}. The stages of "
                "a pipeline hand on tensors of one size. Pad with labels of -100."
            )
        form = (len(batches), *sizes.pop())
        if torch.is_grad_enabled():  # an evaluation goes through no schedule
            if self._form not in (None, form):
                raise RequestError(
                    f"a step of (micro-batches, samples, tokens) {form} follows one of "
                    f"{self._form}. The schedule of a pipeline is made once. Give equally many in "
                    "every step."
                )
            self._form = form

    def _check(self, batch: Any) -> None:
        keys = sorted(batch) if isinstance(batch, Mapping) else None
        known = _BATCH if self._is_causal else (*_BATCH, *_OF_BOTH_SIDES)
        if keys is None or not {"input_ids", "labels"} <= {*keys} <= {*known}:
            has = f"the keys {', '.join(keys)}" if keys else f"the type {type(batch).__name__}"
            raise RequestError(
                f"a batch has {has}. It must be a dict of input_ids and labels, with position_ids "
                f"where samples hold several documents{self._padding()}."
            )
        shape = tuple(batch["input_ids"].shape)
        others = [key for key in keys if tuple(batch[key].shape) != shape]
        if len(shape) != 2 or others:
            found = ", ".join(f"{key} {tuple(batch[key].shape)}" for key in keys)
            raise RequestError(f"a batch has {found}. All must be (samples, tokens), alike.")
        if self._seq_len is not None and shape[1] != self._seq_len:
            raise RequestError(
                f"a batch has samples of {shape[1]} tokens; parallelize() was given "
                f"seq_len={self._seq_len}. Pad or cut to that, or give another seq_len."
            )
        mask_BL = batch.get("attention_mask")
        if mask_BL is not None and bool((mask_BL[:, 1:] > mask_BL[:, :-1]).any()):
            raise RequestError(
                "a batch's attention_mask has a 1 behind a 0. Shardyard needs padding on the "
                "right. Pad there; position_ids separate documents of one sample."
            )
        if mask_BL is not None and bool(((mask_BL == 0) & (batch["labels"] != IGNORED)).any()):
            raise RequestError(
                "a batch has labels where its attention_mask is 0. Padding is not predicted: give "
                "it the label -100."
            )
        if "position_ids" in keys and self._attend_across:
            raise RequestError(
                "a batch has position_ids, which say where documents begin, but tokens attend to "
                "earlier documents too. Call parallelize(..., attend_across_documents=False), or "
                "leave position_ids out."
            )

    def _padding(self) -> str:
        """Return the words on padding for messages that describe a batch."""
        if self._is_causal:
            return ", and attention_mask where there is padding"
        return ", attention_mask where there is padding, and token_type_ids where there are pairs"

    def _micro_batch(self, batch: Mapping[str, Tensor]) -> MicroBatch:
        tokens_BL, targets_BL = batch["input_ids"].long(), batch["labels"].long()
        if self._is_causal:  # labels are those of the tokens themselves
            targets_BL = torch.cat(
                [targets_BL[:, 1:], torch.full_like(targets_BL[:, :1], IGNORED)], dim=1
            )
        samples, length = tokens_BL.shape
        lengths_B = _lengths(batch)
        positions_BL = batch.get("position_ids")
        if positions_BL is None:
            positions_BL = torch.arange(length, device=tokens_BL.device).expand(samples, -1)
        rows_B = torch.arange(samples, device=tokens_BL.device)
        fields = {"tokens": tokens_BL, "targets": targets_BL, "positions": positions_BL.long()}
        if "attention_mask" in batch:  # at position 0 a token is a document of its own
            fields["positions"] = fields["positions"] * (batch["attention_mask"] != 0)
        if "token_type_ids" in batch:
            fields["segments"] = batch["token_type_ids"].long()
        return MicroBatch(
            fields=fields, samples_B=rows_B, work=int(lengths_B.sum()), lengths_B=lengths_B
        )


def _lengths(batch: Mapping[str, Tensor]) -> Tensor:
    """Tokens of each sample that are no padding, int64 (B).

    Without an attention_mask: those up to the last one with a label, so a sample without any label
    is padding as a whole.
    """
    if "attention_mask" in batch:
        return (batch["attention_mask"] != 0).sum(dim=1)
    has_label_BL = batch["labels"] != IGNORED
    place_L = torch.arange(1, has_label_BL.shape[1] + 1, device=has_label_BL.device)
    return (place_L * has_label_BL).amax(dim=1)
