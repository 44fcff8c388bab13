"""Joins Megatron's folders of one file a rank, by the layout that its documents describe.

Source: Megatron-LM's ``docs`` on checkpoints and the conversion tools next to them
(tools/checkpoint, core 0.8 to 0.14). No checkpoint that Megatron wrote has been read here: the
tested ones were cut by this description.

| matrix | split by tensor parallelism | note |
|---|---|---|
| query_key_value | by groups of heads | in each group its queries, then its key, then its value |
| dense_h_to_4h, linear_fc1 | by rows | of each rank its gate, then what is gated |
| dense, linear_proj; dense_4h_to_h, linear_fc2 | by columns | |
| word_embeddings, output_layer | by rows | rows behind the vocabulary are padding |
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardyard.errors import CheckpointError, RequestError
from shardyard.families.shape import ModelShape
from shardyard.importers.checkpoints.megatron_args import differences
from shardyard.importers.checkpoints.pickles import PickledObject, leaves_of, load
from shardyard.importers.checkpoints.reference_model import ReferenceModel
from shardyard.importers.checkpoints.tensors import SourceCheckpoint, TensorView, concatenate

LATEST = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_WITHOUT_ARGS = (
    "it has no `args`, so the meaning of its weights is not certain: compare its outputs"
)

_OF_BLOCK = {
    "self_attention.query_key_value": "qkv", "self_attention.linear_qkv": "qkv",
    "self_attention.dense": "o", "self_attention.linear_proj": "o",
    "mlp.dense_h_to_4h": "gate_up", "mlp.linear_fc1": "gate_up",
    "mlp.dense_4h_to_h": "down", "mlp.linear_fc2": "down",
    "self_attention.q_layernorm": "query norm", "self_attention.k_layernorm": "key norm",
    "input_layernorm": "first norm", "input_norm": "first norm",
    "post_attention_layernorm": "second norm", "post_attention_norm": "second norm",
    "pre_mlp_layernorm": "second norm",
}  # fmt: skip
_LAYER = re.compile(r"(?:.*\.)?(?:encoder|decoder|transformer)\.layers\.(\d+)\.(.+)\.(weight|bias)")
_WITH_NORM = {
    "self_attention.linear_qkv.layer_norm_weight": "first norm",
    "mlp.linear_fc1.layer_norm_weight": "second norm",
}
_ENDS = {
    "embedding.word_embeddings.weight": "table",
    "final_layernorm.weight": "last norm",
    "final_norm.weight": "last norm",
    "output_layer.weight": "head",
    "word_embeddings_for_head.weight": "head",
}
_NORMS = {
    "first norm": "input_layernorm",
    "second norm": "post_attention_layernorm",
    "query norm": "self_attn.q_norm",
    "key norm": "self_attn.k_norm",
}
_WRITTEN = {
    *_NORMS.values(),
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
}
"""Modules of a block under which tensors come out."""

_OLDEST_VERSION = 2.0
"""Oldest known ``checkpoint_version``; before it, query_key_value's rows had another order.

Source: ``fix_query_key_value_ordering`` in megatron/training/checkpointing.py.
"""

Parts = Mapping[str, Sequence[TensorView]]
"""Role of a matrix, in the words above -> its part on each rank of tensor parallelism."""


def find(folder: Path) -> Path | None:
    """The folder of one iteration: this one, or the newest that is named; None: no such folder."""
    if any(_RANK.fullmatch(path.name) for path in folder.glob("mp_rank_*")):
        return folder
    named = folder / LATEST
    word = named.read_text(errors="replace").strip() if named.is_file() else ""
    below = folder / f"iter_{int(word):07d}" if word.isdecimal() and len(word) < 12 else None
    return below if below is not None and any(below.glob("mp_rank_*")) else None


def read(folder: Path, like: ReferenceModel, *, without: tuple[str, ...] = ()) -> SourceCheckpoint:
    """Return the content of the folder, under Hugging Face's names.

    Args:
        without: Arguments of the checkpoint, or patterns of their names, to ignore.

    Raises:
        CheckpointError: It is damaged, incomplete, or its arguments say that its weights mean
            something else than those of the model.
        RequestError: The model is of a kind whose layout is not known.
        OSError: A file cannot be read.
    """
    shape = _check_shape(like)
    ranks = _ranks(folder)
    tensor_ranks = sorted({rank for rank, _ in ranks})
    stages = sorted({stage for _, stage in ranks})
    first: dict[str, Any] = {}
    tensors: dict[str, TensorView] = {}
    blocks_before = 0
    for stage in stages:
        contents = [_content(ranks, rank, stage) for rank in tensor_ranks]
        if not first:
            first = contents[0]
            has_args = _check_args(first, shape, folder, like, without)
        split = [_words_of(content, folder) for content in contents]
        blocks = 1 + max((number for number, _ in split[0] if number is not None), default=-1)
        for number in (None, *range(blocks)):
            parts = {
                word: [each[number, word] for each in split]
                for place, word in split[0]
                if place == number
            }
            place = None if number is None else number + blocks_before
            tensors |= _whole(parts, place, shape)
        blocks_before += blocks
    iteration = first.get("iteration")
    return SourceCheckpoint(
        format=f"Megatron, {len(tensor_ranks)} x {len(stages)} (tensor x pipeline)",
        path=folder,
        tensors=tensors,
        step=iteration if type(iteration) is int else None,
        other_state=tuple(
            key for key in ("optimizer", "opt_param_scheduler", "rng_state") if key in first
        ),
        notes=(
            "put together by Megatron's documented layout: compare a few outputs with yours",
            *(() if has_args else (_WITHOUT_ARGS,)),
        ),
    )


def _check_shape(like: ReferenceModel) -> ModelShape:
    shape = like.shape
    is_known = shape is not None and all(
        (row.in_files or row.module) in _WRITTEN and row.fused is None for row in shape.family.block
    )
    if shape is None or not is_known or not shape.is_causal or shape.num_experts:
        raise RequestError(
            f"Megatron's layout is known here for decoders with a gate and without experts, and "
            f"{like.folder} is of model type {like.config.get('model_type')!r}. Convert it with "
            "Megatron's own tools, and use the folder that they write."
        )
    return shape


def _ranks(folder: Path) -> dict[tuple[int, int], Path]:
    """Rank of tensor parallelism and stage -> file; none may be missing."""
    found = {}
    for path in folder.glob("mp_rank_*"):
        matched = _RANK.fullmatch(path.name)
        file = next((path / name for name in _FILES if (path / name).is_file()), None)
        if matched and file is not None:
            found[int(matched[1]), int(matched[2] or 0)] = file
    across = 1 + max((rank for rank, _ in found), default=-1)
    along = 1 + max((stage for _, stage in found), default=-1)
    missing = {(rank, stage) for rank in range(across) for stage in range(along)} - set(found)
    if missing or not found:
        named = ", ".join(f"mp_rank_{rank:02d}_{stage:03d}" for rank, stage in sorted(missing)[:5])
        raise CheckpointError(
            f"{folder} lacks {named or 'its files'}. Copy the folders of all ranks; a checkpoint "
            "of Megatron's dist_checkpointing has none, and is converted by its own tools first."
        )
    return found


def _content(ranks: Mapping[tuple[int, int], Path], rank: int, stage: int) -> dict[str, Any]:
    content = load(ranks[rank, stage])
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise CheckpointError(
            f"{ranks[rank, stage]} holds no `model`: interleaved stages (model0, model1) are not "
            "read. Save with --num-layers-per-virtual-pipeline-stage left out."
        )
    return content


def _check_args(
    content: Mapping[str, Any],
    shape: ModelShape,
    folder: Path,
    like: ReferenceModel,
    without: tuple[str, ...],
) -> bool:
    """Whether the checkpoint says what its weights mean.

    Raises:
        CheckpointError: They mean something else than those of the model, or that is not known.
    """
    version = content.get("checkpoint_version", _OLDEST_VERSION)
    if not isinstance(version, int | float) or version < _OLDEST_VERSION:
        raise CheckpointError(
            f"{folder} has checkpoint_version={version!r}, whose query_key_value has another order "
            "of rows. Load and save it once with a newer Megatron."
        )
    args = content.get("args")
    values = args.state if isinstance(args, PickledObject) else args
    if not isinstance(values, dict):
        return False
    wrong, unknown = differences(values, shape, without=without)
    lines = []
    if wrong:
        lines.append(
            f"The model of {like.folder} has no such weights: {', '.join(wrong)}. Give --like a "
            "folder of the same model, or convert it with Megatron's own tools (tools/checkpoint)."
        )
    if unknown:
        names = " ".join(f"--without {each.partition('=')[0]}" for each in unknown)
        lines.append(
            f"It is not known what these arguments change: {', '.join(unknown)}. For those that "
            f"change no output: {names}"
        )
    if lines:
        raise CheckpointError("\n".join([f"{folder} cannot be imported as it is.", *lines]))
    return True


def _words_of(content: Mapping[str, Any], folder: Path) -> dict[tuple[int | None, str], TensorView]:
    """Number of the block in its stage, None outside of one, and what it is -> its part."""
    parts: dict[tuple[int | None, str], TensorView] = {}
    for name, value in leaves_of(content["model"]):
        if not isinstance(value, TensorView):
            continue
        place, word = _word(name)
        if word is None:
            if name.endswith((".inv_freq", "_extra_state")):
                continue
            raise CheckpointError(
                f"{folder}: {name} has no place in the layout that is known here."
            )
        parts[place, word] = value
    return parts


def _word(name: str) -> tuple[int | None, str | None]:
    end = next((word for ending, word in _ENDS.items() if name.endswith(ending)), None)
    layer = _LAYER.fullmatch(name)
    if layer is not None and layer[2] in _OF_BLOCK:
        word = _OF_BLOCK[layer[2]]
        return int(layer[1]), word if layer[3] == "weight" else f"{word} bias"
    beside = re.fullmatch(r"(?:.*\.)?layers\.(\d+)\.(.+)", name)
    if beside is not None and beside[2] in _WITH_NORM:
        return int(beside[1]), _WITH_NORM[beside[2]]
    return None, end


def _whole(parts: Parts, block: int | None, shape: ModelShape) -> dict[str, TensorView]:
    """Tensors of a block, or of what is in none, under Hugging Face's names."""
    tensors: dict[str, TensorView] = {}
    for word, split in parts.items():
        if block is None:
            tensors |= dict(_of_ends(word, split, shape))
        else:
            before = f"model.layers.{block}."
            tensors |= {before + name: each for name, each in _of_block(word, split, shape)}
    return tensors


def _of_ends(
    word: str, split: Sequence[TensorView], shape: ModelShape
) -> Iterator[tuple[str, TensorView]]:
    if word == "last norm":
        yield "model.norm.weight", split[0]
        return
    name = {"table": "model.embed_tokens.weight", "head": "lm_head.weight"}[word]
    left, kept = shape.vocab_size, []
    for part in split:
        kept.append(part.rows(0, min(left, part.shape[0])))
        left -= kept[-1].shape[0]
    yield name, concatenate([part for part in kept if part.elements])


def _of_block(
    word: str, split: Sequence[TensorView], shape: ModelShape
) -> Iterator[tuple[str, TensorView]]:
    kind = word.removesuffix(" bias")
    end = "weight" if kind == word else "bias"
    if kind == "qkv":
        yield from _queries_keys_values(split, shape, end)
    elif kind == "gate_up":
        halves = [part.shape[0] // 2 for part in split]
        both = list(zip(split, halves, strict=True))
        yield f"mlp.gate_proj.{end}", concatenate([part.rows(0, half) for part, half in both])
        yield f"mlp.up_proj.{end}", concatenate([part.rows(half, 2 * half) for part, half in both])
    elif kind in ("o", "down"):
        name = {"o": "self_attn.o_proj", "down": "mlp.down_proj"}[kind]
        yield f"{name}.{end}", concatenate(split, dim=1) if end == "weight" else split[0]
    else:
        name = _NORMS[kind]
        yield f"{name}.{end}", split[0]


def _queries_keys_values(
    split: Sequence[TensorView], shape: ModelShape, end: str
) -> Iterator[tuple[str, TensorView]]:
    head = shape.head_width
    queries = head * (shape.num_attention_heads // shape.num_key_value_heads)
    group = queries + 2 * head
    if any(part.shape[0] % group for part in split):
        raise CheckpointError(
            f"query_key_value has {split[0].shape[0]} rows on a rank, no multiple of the {group} "
            "of a group of heads: the model of --like has other heads, or ranks cut groups."
        )
    starts = [(part, first) for part in split for first in range(0, part.shape[0], group)]
    for name, begin, size in (("q", 0, queries), ("k", queries, head), ("v", queries + head, head)):
        rows = [part.rows(first + begin, first + begin + size) for part, first in starts]
        yield f"self_attn.{name}_proj.{end}", concatenate(rows)
