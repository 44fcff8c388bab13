"""What a safetensors file begins with.

Source: the format section of https://github.com/huggingface/safetensors: the length of a header,
the header, which is JSON, and the tensors one behind the other.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4,
    "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Name of a dtype in the header -> bytes of an element."""

_ALIGNMENT_BYTES = 64
"""Tensors begin at a multiple of this, so that a mapped file can be used in place."""


def header(tensors: Mapping[str, tuple[str, Sequence[int]]], about: Mapping[str, str]) -> bytes:
    """What comes before the tensors.

    Args:
        tensors: Dtype and shape of each, in the order in which they follow.
        about: What readers are told beside.
    """
    content: dict[str, Any] = {"__metadata__": dict(about)}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
