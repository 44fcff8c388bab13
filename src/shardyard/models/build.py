"""From a shape to a transformers model without storage, and from there to one with weights."""

import math
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, Literal, assert_never

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from shardyard.errors import RecipeError, RequestError
from shardyard.families.family import Family
from shardyard.families.registry import family_of
from shardyard.families.shape import ModelShape
from shardyard.families.trainable import frozen_pattern_errors, is_frozen
from shardyard.io.files import read_json_object
from shardyard.models.attention import NAME
from shardyard.models.hf import load_adapters, load_weights
from shardyard.models.init import fill_adapters, fill_part, fill_random
from shardyard.models.local_shard import parameter_of
from shardyard.models.moe import SparseMLP
from shardyard.models.new_rows import NewRows
from shardyard.models.submodules import blocks_of, is_tied, part_of
from shardyard.models.unfuse import plain_embedding, split_fused
from shardyard.torch_private import parameter_named


def hf_config(shape: ModelShape) -> Any:
    """The transformers config of a shape."""
    written = shape.family.config_json.written(shape)
    if shape.label_head is not None:
        # ours is model.dropout
        written = {**written, **label_fields(shape), "classifier_dropout": 0.0}
    return AutoConfig.for_model(shape.model_type, **written)


def label_fields(shape: ModelShape) -> dict[str, Any]:
    """Fields of config.json for the labels of a shape; empty for a head over the vocabulary."""
    if shape.label_head is None:
        return {}
    per_sample = shape.label_head == "samples"
    return fields_of_labels(shape.num_labels, shape.label_names, per_sample=per_sample)


def fields_of_labels(num_labels: int, names: Sequence[str], *, per_sample: bool) -> dict[str, Any]:
    """Fields of config.json for labels.

    Args:
        names: Names by number; none: they have none.
        per_sample: Whether each sample has a label, and not each token.
    """
    names = names or [f"LABEL_{number}" for number in range(num_labels)]
    problem = "regression" if num_labels == 1 else "single_label_classification"
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        **({"problem_type": problem} if per_sample else {}),
    }


def build_on_meta(shape: ModelShape) -> PreTrainedModel:
    """The fp32 model of a shape; its parameters have sizes but no storage."""
    config = hf_config(shape)
    config.use_cache = False
    with torch.device("meta"):
        model: PreTrainedModel = _model_class(shape).from_config(
            config, dtype=torch.float32, attn_implementation=NAME
        )
    replace_modules(model, shape)
    return model


def _model_class(shape: ModelShape) -> Any:
    """The class of transformers that makes a model with the shape's head."""
    match shape.label_head:
        case "samples":
            return AutoModelForSequenceClassification
        case "tokens":
            return AutoModelForTokenClassification
        case None if shape.judges_pairs:
            return AutoModelForPreTraining
        case None:
            return AutoModelForCausalLM if shape.is_causal else AutoModelForMaskedLM
        case _:
            assert_never(shape.label_head)


def replace_modules(model: PreTrainedModel, shape: ModelShape) -> None:
    """Put our modules in the place of those that cannot be split as they are, same weights.

    Raises:
        RequestError: Somebody has changed one of them, which would be lost.
    """
    replace_experts(model, shape)
    split_fused(model, shape)
    if shape.family.scales_embedding:
        plain_embedding(model, shape)


def freeze(model: nn.Module, patterns: Sequence[str], *, storage_dtype: torch.dtype) -> None:
    """Freeze in place what ``model.frozen`` names; what is frozen already stays so.

    It is held in the format that it computes in: a master copy would never change.

    Raises:
        RecipeError: A pattern matches no name, or no parameter is left to train.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    # A tied parameter has several names, and a pattern may match any of them.
    found = frozen_pattern_errors(
        patterns, {all_names[0]: all_names for all_names in names.values()}
    )
    if found:
        raise RecipeError(found, "the model")
    for param, all_names in names.items():
        if any(is_frozen(name, patterns) for name in all_names):
            param.requires_grad_(False)
        _cast_frozen(param, storage_dtype)


def freeze_base(
    model: nn.Module, *, storage_dtype: torch.dtype, trained: Container[str] = ()
) -> None:
    """Keep all that there is from being trained, in place: adapters come to it.

    Args:
        trained: Names of parameters that are trained next to the adapters.
    """
    for name, param in model.named_parameters():
        param.requires_grad_(name in trained)
        _cast_frozen(param, storage_dtype)


def _cast_frozen(param: nn.Parameter, storage_dtype: torch.dtype) -> None:
    if not param.requires_grad and param.is_floating_point():
        param.data = param.data.to(storage_dtype)


def replace_experts(model: PreTrainedModel, shape: ModelShape) -> None:
    """Put our mixtures of experts in place of transformers' own, with the same weights.

    Raises:
        RequestError: A mixture is not as transformers builds it.
    """
    family = family_of(shape.model_type)
    if family.sparse is None:
        return
    for name, block in blocks_of(model, family).items():
        original: Any = getattr(block, family.sparse)
        _check_unmodified(original, f"{name}.{family.sparse}")
        with torch.device("meta"):
            ours = SparseMLP(shape)
        # they pack the two matrices of an expert into one; clones, so that it can be freed
        packed = original.experts.gate_up_proj
        gate, up = (
            parameter_of(half.clone(memory_format=torch.contiguous_format), packed)
            for half in packed.detach().chunk(2, dim=1)
        )
        ours.router.weight = original.gate.weight
        ours.experts.gate, ours.experts.up = gate, up
        ours.experts.down = original.experts.down_proj
        ours.train(original.training)
        setattr(block, family.sparse, ours)


def _check_unmodified(original: nn.Module, name: str) -> None:
    """Reject modules that a user has put into transformers' mixture: they would be lost with it."""
    others = [
        f"a {type(module).__name__} at {name}{'.' * bool(path)}{path}"
        for path, module in original.named_modules()
        if not type(module).__module__.startswith("transformers.")
    ]
    known = {"gate.weight", "experts.gate_up_proj", "experts.down_proj"}
    others += [f"{name}.{path}" for path, _ in original.named_parameters() if path not in known]
    if others:
        raise RequestError(
            f"there is {others[0]}, which transformers did not put there. Mixtures of experts are "
            "replaced by ones that can be split, and what a wrapper (LoRA, quantization) adds "
            "would be lost. Merge it into the weights first, or put it on other modules."
        )


def materialize(
    model: PreTrainedModel,
    device: torch.device,
    *,
    stages: Sequence[nn.Module] = (),
    on_host: bool = False,
) -> None:
    """Allocate this rank's part of all parameters, and compute the buffers (rotary tables).

    Args:
        stages: What of the model is sharded by itself, if not the model as a whole; all of it.
        on_host: Parameters lie in host memory, where their sharding pins them; buffers do not.
    """
    ties = _tied(model)
    for root in stages or [model]:  # FSDP pads uneven shards as it sees them get storage
        root.to_empty(device="cpu" if on_host else device)
    for (first, first_name), *others in ties:  # to_empty gives each module a tensor of its own
        for module, name in others:
            setattr(module, name, parameter_named(first, first_name))
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            setattr(module, name, torch.empty_like(buffer, device=device))
        if buffers:
            # to_empty leaves garbage in them; this is transformers' own rule for them
            model._init_weights(module)


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The (module, name) places of each parameter that has more than one."""
    locations: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            locations.setdefault(id(param), []).append((module, name))
    return [found for found in locations.values() if len(found) > 1]


def fill_weights(
    model: PreTrainedModel,
    *,
    folder: Path | None,
    seed: int,
    family: Family | None = None,
    adapters: Path | None = None,
    new_embeddings: Literal["mean", "random"] = "mean",
) -> None:
    """Load weights from a Hugging Face folder, or draw them from the seed if there is none.

    A head of the task's own is drawn if the folder has none of it.

    Args:
        family: The model's; None: that of its type, with a head over the vocabulary.
        adapters: Folder of adapters in PEFT's format; None: they are drawn.
        new_embeddings: Initial rows of tokens that the folder has no row for.
    """
    family = family or family_of(model.config.model_type)
    std = _std_of(family, model.config.num_hidden_layers)
    new_rows = NewRows(new_embeddings, draw=lambda *row: fill_part(*row, seed=seed, std=std))
    with torch.no_grad():
        only = None if folder is None else load_weights(model, folder, family, new_rows)
        of_heads = std if folder is None else _std_in(folder, family)
        fill_random(model, seed=seed, std=of_heads, norm=family.initial_norm, only=only)
        if adapters is None:
            fill_adapters(model, seed=seed)
        else:
            load_adapters(model, adapters)


def _std_of(family: Family, blocks: int) -> Callable[[str], float]:
    """From the name of a random matrix to its standard deviation."""
    sums = family.rowwise if family.begins_smaller_by_depth else ()
    ends = tuple(f".{name}.weight" for name in sums)
    smaller = family.initial_std / math.sqrt(blocks * max(1, len(sums)))
    return lambda name: smaller if name.endswith(ends) else family.initial_std


def _std_in(folder: Path, family: Family) -> Callable[[str], float]:
    """The same of a head that a folder lacks, as its config.json says."""
    config = read_json_object(folder / "config.json")
    std = float(config.get("initializer_range") or family.initial_std)
    return lambda _: std


# A pipeline stage keeps the modules that it computes under their names in the whole model. Names
# decide initial weights, dropout and checkpoints, so a block keeps its number on each stage. A tied
# head needs the embedding, so the last stage has it too.


def keep_blocks(
    model: nn.Module, family: Family, numbers: Sequence[int], *, is_first: bool, is_last: bool
) -> None:
    """Remove from a whole model all blocks but these; what is before the blocks unless first, and
    what is after them unless last."""
    blocks = list(blocks_of(model, family).values())
    here = _ends(model, family, is_first=is_first, is_last=is_last)
    everywhere = _ends(model, family, is_first=True, is_last=True)
    _set_submodule(model, family.blocks, nn.ModuleDict({str(n): blocks[n] for n in numbers}))
    for name in everywhere:
        if name not in here:
            _set_submodule(model, name, None)


def stage_of(
    model: nn.Module, family: Family, numbers: Sequence[int], *, is_first: bool, is_last: bool
) -> nn.Module:
    """A module of one stage whose modules are those of ``model``, shared and equally named."""
    blocks, stage = blocks_of(model, family), nn.Module()
    own = {str(number): blocks[f"{family.blocks}.{number}"] for number in numbers}
    _set_submodule(stage, family.blocks, nn.ModuleDict(own))
    if family.rotary is not None:
        _set_submodule(stage, family.rotary, part_of(model, family.rotary))
    here = _ends(model, family, is_first=is_first, is_last=is_last)
    for name in _ends(model, family, is_first=True, is_last=True):
        _set_submodule(stage, name, part_of(model, name) if name in here else None)
    return stage


def _ends(model: nn.Module, family: Family, *, is_first: bool, is_last: bool) -> list[str]:
    """Names of what comes before the first block and after the last."""
    before = [row.module for row in family.before]
    before += [] if family.embedding_end is None else [family.embedding_end]
    after = [row.module for row in family.after if part_of(model, row) is not None]
    after += [] if family.head_dropout is None else [family.head_dropout]
    if family.end is not None:  # it holds them, and parameters of its own
        outside = [name for name in after if not name.startswith(f"{family.end}.")]
        after = [family.end, *outside]
    table = [family.embedding.module] if is_tied(model, family) else []
    names = [*(before if is_first else []), *([*table, *after] if is_last else [])]
    return list(dict.fromkeys(names))


def _set_submodule(root: nn.Module, name: str, module: nn.Module | None) -> None:
    """Set a module by its full name, which may pass through modules that are not there yet."""
    *parents, child = name.split(".")
    at = root
    for parent in parents:
        if getattr(at, parent, None) is None:
            at.add_module(parent, nn.Module())
        at = at.get_submodule(parent)
    if hasattr(at, child):
        delattr(at, child)
    at.add_module(child, module)
