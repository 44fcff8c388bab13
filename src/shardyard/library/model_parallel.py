"""Use of tp, cp, ep and pp in an unchanged script, for known families of transformers.

The script's ranks read samples of their own, as under DistributedDataParallel. Ranks that
split the model or its samples first gather what they have read; together they compute all
of it, each rank its part. So the global batch is the same in every layout, and the script
need not know it.

Shape suffixes: B = samples, L = tokens of a sample, l = those that this rank computes,
V = vocabulary, v = this rank's part of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from shardyard.config.schema.recipe import Recipe
from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.errors import RequestError
from shardyard.families.family import Family
from shardyard.families.file_tensors import file_tensors
from shardyard.families.registry import FAMILIES, family_of, is_family
from shardyard.families.shape import ModelShape
from shardyard.library.model_group import JoinedBatch, ModelGroup
from shardyard.library.supported import request, supported_shape
from shardyard.models.attention import NAME
from shardyard.models.build import replace_modules
from shardyard.models.forward import ForwardPass
from shardyard.parallel import apply
from shardyard.parallel.fsdp import reshard
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.token_losses import LanguageModel

_IGNORED_ARGUMENTS = ("use_cache", "return_dict", "cache_position")
"""Arguments of a forward call that change neither logits nor loss."""


def shard_supported_script(
    model: nn.Module, mesh: Mesh, *, device: torch.device
) -> tuple["ScriptModel", dict[str, tuple[str, ...]]]:
    """Change a model in place; its script calls it, and ``loss.backward()``, as before.

    Returns:
        What computes its batches, and for each parameter that the script knew the names of those
        that hold it now.

    Raises:
        RecipeError: The model does not fit the mesh.
    """
    shape = supported_shape(model)
    assert isinstance(model, PreTrainedModel)
    recompute = any(getattr(each, "gradient_checkpointing", False) for each in model.modules())
    recipe = _recipe(mesh, shape, recompute="full" if recompute else "none")
    if recompute:  # ours takes its place
        disable = getattr(model, "activation_checkpointing_disable", None)  # transformers 5.23
        (disable or model.gradient_checkpointing_disable)()
    before = dict(model.named_parameters())
    model.set_attn_implementation(NAME)
    replace_modules(model, shape)
    family = family_of(shape.model_type)
    names = _names_now(before, model, family)
    parts = apply.parallelize(model, mesh, recipe=recipe, shape=shape, family=family)
    script = ScriptModel(parts, mesh, recipe=recipe, shape=shape, device=device)
    model.forward = script
    if parts.pipeline is None:
        model.register_forward_hook(apply.reshard_without_gradients)
    if hasattr(model, "generate"):
        together = partial(generate_together, model.generate)
        model.generate = together if parts.pipeline is None else _reject_generate
    return script, names


def generate_together(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call transformers' ``generate``; ranks continue until the last has its text.

    No keys and values are cached: a forward pass over split samples keeps none.
    """
    if kwargs.get("use_cache"):
        raise RequestError(
            "generate(use_cache=True): ranks that split the model keep no keys and values from "
            "token to token. Leave it out; or generate by a model of one process, from "
            "shardyard.export(model, folder)."
        )
    return generate(*args, **{**kwargs, "use_cache": False, "synced_gpus": True})


def _reject_generate(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RequestError(
        "generate() of a model that pp cuts into stages: its logits are only on the last stage. "
        "Call shardyard.export(model, folder), and generate by a model of one process from there."
    )


def check_splittable(model: nn.Module) -> None:
    """Check a model before any process meets another.

    Raises:
        RequestError: It is of no known family, or asks for what only transformers computes.
    """
    name = type(model).__name__
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model, PreTrainedModel) or not is_family(model_type):
        raise RequestError(
            "wrap() splits transformers' models of known families by tp, cp, ep and pp "
            f"({', '.join(FAMILIES)}), and {name} is not one of them. Give only degrees of the "
            "data axes (SHARDYARD_PARALLEL=dp_shard=N); or say what tp splits, wrap(..., "
            'plan={"layers.*.up": "columns", "layers.*.down": "rows"}), or which '
            'experts ep deals out, wrap(..., experts="layers.*.experts").'
        )
    supported_shape(model)
    other = next((p.dtype for p in model.parameters() if p.dtype != torch.float32), None)
    if other is not None:
        raise RequestError(
            f"this {name} has weights in {other}. Ranks that split a model keep them in fp32. Call "
            "model.float() before the optimizer is made."
        )
    if getattr(model.config, "output_router_logits", False):
        raise RequestError(
            f"the config of this {name} has output_router_logits=True: its loss would hold the "
            "routers' balance, which ranks that split experts do not add. Set it to False, or use "
            "shardyard.parallelize(..., router_aux_loss=...)."
        )


def _recipe(mesh: Mesh, shape: ModelShape, *, recompute: str) -> Recipe:
    """Return the recipe of this mesh; its samples are the shortest that can be split."""
    options: dict[str, Any] = {"compute": "fp32", "recompute": recompute}
    return request(mesh, options, shape=shape, seq_len=_multiple(mesh))


def _multiple(mesh: Mesh) -> int:
    """Return the number that must divide the tokens of a sample."""
    layout = mesh.layout
    return layout.tp * (2 * layout.cp if layout.cp > 1 else 1)


def _names_now(
    before: Mapping[str, nn.Parameter], model: nn.Module, family: Family
) -> dict[str, tuple[str, ...]]:
    """Map names before to names now: fused matrices and packed experts are split."""
    now = dict(model.named_parameters())
    same = {param: name for name, param in now.items()}
    fused = file_tensors({name: param.shape for name, param in now.items()}, family)
    new_names: dict[str, tuple[str, ...]] = {}
    for name, param in before.items():
        if param in same:
            new_names[name] = (same[param],)
        elif name in fused:
            new_names[name] = tuple(piece.parameter for piece in fused[name])
        else:
            experts = name.removesuffix("gate_up_proj")
            new_names[name] = (f"{experts}gate", f"{experts}up")
    return new_names


@dataclass
class CausalOutput(ModelOutput):  # type: ignore[misc]
    """Loss and logits, as transformers' models return them."""

    loss: Tensor | None = None
    logits: Tensor | None = None


@dataclass
class LossOutput(ModelOutput):  # type: ignore[misc]
    """The loss, without other outputs."""

    loss: Tensor

    @property
    def logits(self) -> Tensor:
        """Not there.

        Raises:
            RequestError: Always.
        """
        raise RequestError(
            "this forward pass was given labels, so ranks made the loss of their own parts of the "
            "logits and did not send them around. Leave labels out to get logits, or evaluate "
            "inside torch.no_grad()."
        )


class ScriptModel:
    """A model's forward method: called by the script as transformers' own."""

    def __init__(
        self, parts: ParallelModel, mesh: Mesh, *, recipe: Recipe, shape: ModelShape,
        device: torch.device,
    ) -> None:  # fmt: skip
        passes: list[Any] = [stage.forward for stage in parts.roots]
        self._forward_passes: list[ForwardPass] = passes
        self._scale = parts.token_losses.scale
        self._computation = LanguageModel(parts, mesh, device=device)
        self._mesh = mesh
        self._recipe = recipe
        self._shape = shape
        self._device = device
        self._group = ModelGroup(mesh, multiple=_multiple(mesh))
        self._form: tuple[int, bool] | None = None
        """Tokens of a sample, and whether documents are kept apart, of the last forward pass."""
        self._of_schedule: tuple[int, int] | None = None
        """Rows and tokens for which the schedule of a pipeline was made."""

    @property
    def tied_across_stages(self) -> Sequence[str]:
        """Names of parameters that both ends of a pipeline hold."""
        return tuple(self._computation.tied_across_stages)

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        logits_to_keep: int = 0,
        **others: Any,
    ) -> ModelOutput:
        """Compute loss and logits as transformers' models do. All ranks call it together.

        Raises:
            RequestError: The call asks for what only transformers' own forward computes.
        """
        input_ids = _checked(input_ids, others)
        given = {
            "input_ids": input_ids, "labels": labels, "attention_mask": attention_mask,
            "position_ids": position_ids, "token_type_ids": token_type_ids,
        }  # fmt: skip
        batch = {
            name: each.long().expand(len(input_ids), -1)  # positions may be those of all rows
            for name, each in given.items()
            if each is not None
        }
        if self._computation.pipeline is not None:
            return self._evaluated(batch)
        joined, micro_batch, inputs = self._joined(batch)
        logits_Blv: Tensor = self._forward_passes[0](*inputs)
        if labels is None:
            return CausalOutput(logits=self._own(logits_Blv, joined, logits_to_keep))
        loss = self._loss(logits_Blv, micro_batch)
        if torch.is_grad_enabled():
            return LossOutput(loss=loss)
        return CausalOutput(loss=loss, logits=self._own(logits_Blv, joined, logits_to_keep))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _joined(self, batch: Mapping[str, Tensor]) -> tuple[JoinedBatch, MicroBatch, Sequence[Any]]:
        """The rows of all ranks, and what this rank's forward pass takes of them."""
        joined = self._group.join(batch, device=self._device)
        micro_batch = self._micro_batch(joined)
        return joined, micro_batch, self._computation.inputs(micro_batch)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _loss(self, logits_Blv: Tensor, micro_batch: MicroBatch) -> Tensor:
        loss_sum = self._computation.losses(logits_Blv, self._computation.targets(micro_batch))
        return self._group.mean_loss(loss_sum, _divisor(micro_batch))

    def _evaluated(self, batch: Mapping[str, Tensor]) -> ModelOutput:
        """The loss of a pipeline's forward pass."""
        if "labels" not in batch or torch.is_grad_enabled():
            raise RequestError(
                "the model is called, and pp cuts it into stages: the schedule of the pipeline "
                "makes forward and backward passes in turn. Write loss = "
                "shardyard.forward_backward(model, batch) in place of loss = model(**batch).loss "
                "and loss.backward(). In torch.no_grad() model(**batch).loss is the loss; logits "
                "are only on the last stage."
            )
        micro_batch = self._micro_batch(self._group.join(batch, device=self._device))
        loss_sum = self._computation.loss_sum(micro_batch)
        reshard(self._computation.roots)
        return LossOutput(loss=self._group.mean_loss(loss_sum, _divisor(micro_batch)))

    def through_pipeline(
        self, batch: Mapping[str, Tensor], params: Mapping[str, nn.Parameter]
    ) -> Tensor:
        """Forward and backward passes of the batches of all ranks, a micro-batch each of pp.

        Returns:
            The mean loss of what the ranks read that hold one copy of the model.
        """
        pipeline, layout = self._computation.pipeline, self._mesh.layout
        assert pipeline is not None
        at_least = self._of_schedule or (0, 0)
        joined = self._group.join(batch, device=self._device, at_least=at_least)
        rows, tokens = joined.fields["input_ids"].shape
        form = (rows // (layout.pp * layout.cp * layout.tp), tokens)
        if self._of_schedule not in (None, form):
            raise RequestError(
                f"a batch of {form} (samples of a rank, tokens) follows one of {at_least}. The "
                "schedule of a pipeline is made once, for the first. Pad all to the longest, with "
                "labels of -100, or give the largest batch first."
            )
        self._of_schedule = form
        micro_batch = self._micro_batch(joined)
        divisor = _divisor(micro_batch).clamp(min=1)
        self._scale.factor = (1.0 / (divisor * layout.data_ranks)).float()
        earlier = {name: params[name].grad for name in self.tied_across_stages if name in params}
        for name in earlier:  # both ends add up what is there after the passes
            params[name].grad = None
        micro_batches = _cut(micro_batch, layout.pp)
        total = pipeline.accumulate(
            [self._computation.inputs(each) for each in micro_batches],
            [self._computation.targets(each) for each in micro_batches],
            self._computation.losses,
        )
        for name, grad in earlier.items():
            now = params[name].grad
            if grad is not None and now is not None:
                params[name].grad = now + grad
        return self._group.mean_loss(total, divisor).float()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _own(self, logits_Blv: Tensor, joined: JoinedBatch, keep: int) -> Tensor:
        tokens_l = self._computation.tokens_l
        own = self._group.own_logits(
            logits_Blv, joined, tokens_l, vocabulary=self._shape.vocab_size
        )
        return own[:, -keep:] if keep else own

    def _micro_batch(self, joined: JoinedBatch) -> MicroBatch:
        """The same samples as a recipe's task reads them."""
        tokens_BL = joined.fields["input_ids"]
        samples, length = tokens_BL.shape
        positions_BL, apart = self._positions(joined)
        self._set_sample_form(length, separate_documents=apart)
        fields_BL = {"tokens": tokens_BL, "positions": positions_BL}
        targets_BL = joined.fields.get("labels")
        if targets_BL is not None and self._shape.is_causal:
            nothing_B1 = torch.full_like(targets_BL[:, :1], IGNORED)
            targets_BL = torch.cat([targets_BL[:, 1:], nothing_B1], dim=1)
        if targets_BL is not None:
            fields_BL["targets"] = targets_BL
        if "token_type_ids" in joined.fields:
            fields_BL["segments"] = joined.fields["token_type_ids"]
        rows_B = torch.arange(samples, device=self._device)
        return MicroBatch(fields=fields_BL, samples_B=rows_B, work=samples * length)

    def _positions(self, joined: JoinedBatch) -> tuple[Tensor, bool]:
        """Positions, 0 where a token attends to none before it; whether others than the first."""
        mask_BL, given_BL = joined.fields.get("attention_mask"), joined.fields.get("position_ids")
        length = joined.fields["input_ids"].shape[1]
        place_L = torch.arange(length, device=self._device)
        if given_BL is None and mask_BL is None:
            return place_L.expand(joined.fields["input_ids"].shape), not self._shape.is_causal
        if mask_BL is None:
            assert given_BL is not None
            return given_BL, True
        is_left_padded = bool((mask_BL[:, 1:] > mask_BL[:, :-1]).any())
        if is_left_padded and given_BL is None and self._shape.family.positions:
            raise RequestError(
                "a batch's attention_mask has a 1 behind a 0, and this model learns positions: "
                "with padding on the left they would not be those of the text. Pad on the right, "
                "or give position_ids."
            )
        count_BL = mask_BL.cumsum(dim=1) - 1 if given_BL is None else given_BL
        return (count_BL * mask_BL).clamp(min=0), True

    def _set_sample_form(self, length: int, *, separate_documents: bool) -> None:
        if self._form == (length, separate_documents):
            return
        self._form = (length, separate_documents)
        data = self._recipe.data.model_copy(
            update={"seq_len": length, "attend_across_documents": not separate_documents}
        )
        recipe = self._recipe.model_copy(update={"data": data})
        self._computation.tokens_l = apply.set_sample_form(
            self._forward_passes, self._mesh, recipe=recipe, shape=self._shape
        )


def _divisor(micro_batch: MicroBatch) -> Tensor:
    return (micro_batch["targets"] != IGNORED).sum()


def _cut(micro_batch: MicroBatch, pieces: int) -> list[MicroBatch]:
    fields = {name: each.chunk(pieces) for name, each in micro_batch.fields.items()}
    rows = micro_batch.samples_B.chunk(pieces)
    return [
        MicroBatch(
            fields={name: each[index] for name, each in fields.items()},
            samples_B=rows[index],
            work=micro_batch.work // pieces,
        )
        for index in range(pieces)
    ]


def _checked(input_ids: Tensor | None, others: Mapping[str, Any]) -> Tensor:
    if input_ids is None or input_ids.dim() != 2:
        found = "no input_ids" if input_ids is None else f"input_ids of {tuple(input_ids.shape)}"
        raise RequestError(f"the model is called with {found}. Give input_ids, (samples, tokens).")
    asked = [
        f"{name}={value!r}" if isinstance(value, bool | int | str) else name
        for name, value in others.items()
        if name not in _IGNORED_ARGUMENTS and value is not None and value is not False
    ]
    if asked:
        raise RequestError(
            f"the model is called with {', '.join(asked)}. Split by tp, cp, ep or pp it takes "
            "input_ids, labels, attention_mask, position_ids and token_type_ids. Leave the rest "
            "out, or train on the data axes: SHARDYARD_PARALLEL=dp_shard=N."
        )
    return input_ids
