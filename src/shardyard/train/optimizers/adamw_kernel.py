"""``one_pass.update_plainly`` as one Triton kernel: each number is read once and written once."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements of a program."""

MOVED_BYTES = {
    "grad": (4, 0),
    "weight": (4, 4),
    "average": (4, 4),
    "square": (4, 4),
    "copy": (0, 2),
}
"""Pointer -> bytes of an element that the kernel reads, and writes."""


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
    grad, weight, average, square, copy, scalars, elements,
    new_share, beta2, square_share, eps, HAS_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(scalars + 3) == 0.0:  # nothing is read or written of a step that is skipped
        # int64: offsets in a parameter of more than 2^31 elements do not fit into 32 bits.
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < elements
        g = tl.load(grad + at, mask=inside) / tl.load(scalars + 2)
        m = tl.load(average + at, mask=inside)
        v = tl.load(square + at, mask=inside)
        w = tl.load(weight + at, mask=inside)
        m += new_share * (g - m)
        v = v * beta2 + square_share * g * g
        change = tl.load(scalars) * m / (tl.sqrt(v) / tl.load(scalars + 1) + eps)
        w = w * tl.load(scalars + 4) - change
        tl.store(average + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)
        tl.store(weight + at, w, mask=inside)
        if HAS_COPY:
            tl.store(copy + at, w.to(copy.dtype.element_ty), mask=inside)


_launch: Any = _adamw


def update(
    grad: Tensor,
    weight: Tensor,
    average: Tensor,
    square: Tensor,
    copy: Tensor | None,
    scalars: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update like ``update_plainly``; all are contiguous, and on the device of this process."""
    elements = weight.numel()
    given = weight if copy is None else copy  # never read where there is none
    _launch[(triton.cdiv(elements, BLOCK),)](
        grad, weight, average, square, given, scalars, elements,
        1.0 - betas[0], betas[1], 1.0 - betas[1], eps, HAS_COPY=copy is not None, BLOCK=BLOCK,
    )  # fmt: skip
