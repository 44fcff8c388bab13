"""How tokens attend, as a recipe says it: by which kernel, and whether a mask says who sees whom.

Where tokens see but a part of those before them, as documents are kept apart or a model has a
window, torch's attention takes a mask of (L, L), which no flash kernel does. On a CUDA device flash
attention is told where documents begin instead (``models/attention.py``): no mask is made, and what
is masked is not computed.
"""

from collections.abc import Iterable

from shardyard.config.schema.recipe import Recipe
from shardyard.errors import Problem
from shardyard.families.shape import ModelShape

_WIDEST = 256
_WIDTH_MULTIPLE = 8
"""Widths of a head that flash attention takes (FlashAttention 2's README; what torch pads in its
own attention it does not pad here)."""


def needs_mask(recipe: Recipe, shape: ModelShape) -> bool:
    """Whether torch's attention is given a mask; the length of samples is known.

    Of tokens on both sides always: padding is not to be seen.
    """
    return not attends_by_length(recipe, shape) and not _sees_all_earlier(recipe, shape)


def attends_by_length(recipe: Recipe, shape: ModelShape) -> bool:
    """Whether flash attention is told where documents begin, instead of a mask."""
    asked = recipe.model.attention in ("flash", "fa3")
    return asked and not _sees_all_earlier(recipe, shape) and _why_no_lengths(recipe, shape) is None


def best_attention(recipe: Recipe, shape: ModelShape) -> tuple[str, str]:
    """What ``model.attention: auto`` stands for, and why; device and lengths are known."""
    if not _sees_all_earlier(recipe, shape) and _why_no_lengths(recipe, shape) is None:
        return "flash", "told where documents and windows begin, it needs no mask"
    return "sdpa", "torch chooses by device, format, sizes and mask"


def attention_problems(recipe: Recipe, shape: ModelShape | None) -> Iterable[Problem]:
    """What torch's kernels cannot do, of the one that is named."""
    asked, device = recipe.model.attention, recipe.cluster.device
    if asked in ("auto", "sdpa"):
        return
    wrong = []
    if device == "cpu" and asked != "flash":
        wrong.append("runs on NVIDIA devices alone, and cluster.device=cpu")
    if device not in ("auto", "cpu") and recipe.precision.compute == "fp32":
        wrong.append("takes numbers of 16 bits, and precision.compute=fp32")
    if recipe.parallel.cp > 1:
        wrong.append(f"is not asked where parallel.cp={recipe.parallel.cp} splits samples")
    if shape is not None and shape.attn_logit_softcapping is not None:
        wrong.append(f"bends no scores, as a {shape.model_type} does")
    masked = None if shape is None or wrong or device in ("auto", "cpu") else _mask(recipe, shape)
    if shape is not None and masked and asked in ("flash", "fa3"):
        why = _why_no_lengths(recipe, shape)
        if why is not None:
            wrong.append(f"takes no mask, and {masked} is one: {why}")
    for text in wrong:
        yield Problem("model.attention", f"={asked} {text}. Use model.attention=auto.")


def _sees_all_earlier(recipe: Recipe, shape: ModelShape) -> bool:
    return _mask(recipe, shape) is None


def _mask(recipe: Recipe, shape: ModelShape) -> str | None:
    """What keeps a token from seeing all before it; None: nothing that is known yet."""
    seq_len = recipe.data.seq_len
    if not shape.is_causal:
        return "padding that is not to be seen"
    if not recipe.data.attends_across:
        return "data.attend_across_documents=false"
    if seq_len != "auto" and shape.sees_a_part_of(seq_len):
        return f"a window of {shape.sliding_window} tokens"
    return None


def _why_no_lengths(recipe: Recipe, shape: ModelShape) -> str | None:
    """Why flash attention cannot be told where documents begin; None: it can."""
    width = shape.head_width
    if recipe.cluster.device != "cuda":
        return "only a CUDA device's kernel is told where documents begin"
    if not shape.is_causal:
        return "documents are told apart where tokens see earlier ones alone"
    if recipe.parallel.cp > 1:
        return f"parallel.cp={recipe.parallel.cp} splits samples"
    if recipe.precision.compute in ("fp32", "auto"):
        return "it takes numbers of 16 bits"
    if shape.attn_logit_softcapping is not None:
        return "it bends no scores"
    if width > _WIDEST or width % _WIDTH_MULTIPLE:
        return f"it takes heads of a multiple of {_WIDTH_MULTIPLE} up to {_WIDEST}, not {width}"
    return None
