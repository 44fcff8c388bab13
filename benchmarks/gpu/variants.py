"""Cells of our own trainer with settings against each other: precision, memory, compile.

All variants of a model have one micro-batch, so that what differs is the setting.
"""

from collections.abc import Iterator, Sequence

from benchmarks.gpu.cells import Cell, Load

_FP8 = "precision.compute=fp8"
_ROWS = "precision.fp8_scaling=rowwise"
_COMPILE = "model.compile=true"
_OFFLOAD = "memory.offload=activations"

VARIANTS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "compile": (_COMPILE,),
    "copies-compile": (_COMPILE,),
    "fp8-compile": (_FP8, _COMPILE),
    "fp8-copies-compile": (_FP8, _COMPILE),
    "fp8-rows-compile": (_FP8, _ROWS, _COMPILE),
    "offload": (_OFFLOAD,),
    "recompute-full": ("memory.recompute=full",),
    "recompute-selective": ("memory.recompute=selective",),
    "offload-selective": (_OFFLOAD, "memory.recompute=selective"),
    "offload-compile": (_OFFLOAD, _COMPILE),
    "offload-depth-3": (_OFFLOAD, "memory.offload_depth=3"),
    "fp8": (_FP8,),
    "fp8-rows": (_FP8, _ROWS),
    "bf16-states": ("precision.optimizer_states=bf16",),
    "copies": (),
}
"""Name -> overrides of the recipe; the most telling first, as time may run out."""

COPIES = ("copies", "copies-compile", "fp8-copies-compile")
"""Variants in which one device computes in copies of its weights and does not shard over itself:
what that is worth, beside those of the same settings (``parallel/low_precision.py``)."""

TURNS: dict[str, tuple[str, ...]] = {
    "usual": (),
    "selective": ("memory.recompute=selective",),
    "cudnn": ("model.attention=cudnn",),
    "flash": ("model.attention=flash",),
    "documents-apart": ("data.attend_across_documents=false", "model.attention=flash"),
    "documents-masked": ("data.attend_across_documents=false", "model.attention=sdpa"),
    "copies": (),
}
"""What differs by little: compared by turns in one process, all of them compiled."""

LOADS = {
    "llama3-8b": Load(preset="llama3-8b", blocks=8, seq_len=4096, sequences=2),
    "mixtral-8x7b": Load(preset="mixtral-8x7b", blocks=2, seq_len=4096, sequences=2),
}
"""Real widths at a depth whose states fit one device of 80 GB."""


def turn_cells(load: Load, names: Sequence[str], *, compile: bool) -> list[Cell]:
    """Cells of one load, in micro-batches of one sample."""
    return [
        Cell(
            load=load, contender="shardyard", recompute="none", micro_batch=1, compile=compile,
            variant=name, settings=TURNS[name],
        )
        for name in names
    ]  # fmt: skip


def variant_cells(loads: Sequence[Load], names: Sequence[str]) -> Iterator[Cell]:
    """Every variant of every model, variant by variant."""
    for name in names:
        for load in loads:
            yield Cell(
                load=load, contender="shardyard", recompute="none", micro_batch=load.sequences,
                variant=name, settings=VARIANTS[name],
            )  # fmt: skip
