"""Attention kernels: the one that a recipe names, and the one that torch really calls.

Torch chooses among its kernels by device, format, sizes and mask, and does not report its
choice. Shardyard therefore computes one sample of a model's sizes before training, and
looks at the operator.

Shape suffixes: H = heads, K = KV heads, L = tokens, E = head width.
"""

from typing import Any

import torch
from torch.nn.attention import activate_flash_attention_impl

from shardyard.config.formulas import attends_by_length, needs_mask
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RequestError
from shardyard.families.shape import ModelShape
from shardyard.models.attention import (
    Attention,
    attention_by_length,
    document_starts,
    sample_attention,
)
from shardyard.parallel.device import enable_sdpa_kernels
from shardyard.parallel.low_precision import DTYPES
from shardyard.torch_private import KERNELS_OF_ATTENTION, TorchDispatchMode

MOST_TOKENS = 1024
"""Limit of the sample's tokens. A longer one takes more memory and gets the same kernel."""


def choose_attention(kernel: str) -> None:
    """Attend by the kernel that ``model.attention`` names, in this process.

    Raises:
        RequestError: Its package is not installed.
    """
    if kernel == "fa3":
        try:
            activate_flash_attention_impl("FA3")
        except (ImportError, RuntimeError, ValueError) as error:
            raise RequestError(
                f"model.attention=fa3: {error}. Install FlashAttention 3 (its package flash_attn_3 "
                "is built for Hopper devices) in the image, or use model.attention=auto."
            ) from error
    enable_sdpa_kernels({"sdpa": None, "cudnn": ("cudnn",)}.get(kernel, ("flash",)))


def attention_kernel(recipe: Recipe, shape: ModelShape, *, tp: int, device: torch.device) -> str:
    """The kernels by which the blocks of a resolved recipe attend, as "flash" or "cudnn and math".

    Raises:
        RequestError: The one that the recipe names cannot be used for such sizes.
    """
    assert isinstance(recipe.data.seq_len, int) and recipe.precision.compute != "auto"
    if shape.attn_logit_softcapping is not None:
        return "unfused"
    tokens = min(recipe.data.seq_len, MOST_TOKENS)
    windows: set[int | None] = {None}
    if shape.has_window_below(recipe.data.seq_len):
        kinds = set(shape.layer_types or ("sliding_attention",))
        windows = {tokens // 2 if kind == "sliding_attention" else None for kind in kinds}
    found = set()
    for window in windows:
        positions_1L = torch.arange(tokens)[None]
        attention: Attention
        if attends_by_length(recipe, shape):
            attention = attention_by_length(document_starts(positions_1L).to(device), tokens)
        else:
            attention = sample_attention(
                positions_1L.to(device),
                is_causal=shape.is_causal,
                attend_across=recipe.data.attends_across,
                window=window,
            )
        width, dtype = shape.head_width, DTYPES[recipe.precision.compute]
        q_1HLE, k_1KLE, v_1KLE = (
            torch.zeros(
                1, heads // tp, tokens, width, dtype=dtype, device=device, requires_grad=True
            )
            for heads in (shape.num_attention_heads, *[shape.num_key_value_heads] * 2)
        )
        with _Operators() as seen:
            try:
                attention(q_1HLE, k_1KLE, v_1KLE, scale=width**-0.5, window=window)
            except RuntimeError as error:
                raise RequestError(
                    f"model.attention={recipe.model.attention} cannot be used here: "
                    f"{str(error).splitlines()[0]} Heads are {width} wide, of {dtype}, "
                    f"{'with' if needs_mask(recipe, shape) else 'without'} a mask. "
                    "Use model.attention=sdpa."
                ) from error
        named = {KERNELS_OF_ATTENTION[name] for name in seen.names & KERNELS_OF_ATTENTION.keys()}
        found |= named or {"math"}
    return " and ".join(sorted(found))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the operators that are called while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
