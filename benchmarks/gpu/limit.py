"""Cells around the limit of a device's memory, the last of them out of it on purpose.

What the plan calls a fit, tight and too much meets the real allocator: each line has the plan's
bytes, torch's peak and what the driver shows. Nothing is halved: being out of memory is an answer.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu.cells import Cell, Load, Place, tensor_bytes

LOAD = Load(preset="llama-1b", seq_len=4096, sequences=1)
AT_MOST = {"fits": 0.85, "tight": 0.97}
"""Name -> the share of the memory that the plan's tensors may take: the most samples that do."""
OVER = 1.05
"""The fewest samples that need more than so much."""
_MOST_SAMPLES = 4096


def limit_cells(place: Place, load: Load = LOAD) -> Iterator[Cell]:
    """One cell for each name of ``AT_MOST``, and one that is over; one micro-batch a step."""
    for name, share in AT_MOST.items():
        samples = _first_over(place, load, share) - 1
        if samples:  # a model may be too large for one
            yield _cell(load, samples, name)
    yield _cell(load, _first_over(place, load, OVER), "over")


def _first_over(place: Place, load: Load, share: float) -> int:
    """Bisection: memory grows with the samples."""
    fits, over = 0, _MOST_SAMPLES
    while over - fits > 1:
        middle = (fits + over) // 2
        if tensor_bytes(_cell(load, middle, ""), place) <= share * place.memory_bytes:
            fits = middle
        else:
            over = middle
    return over


def _cell(load: Load, samples: int, name: str) -> Cell:
    return Cell(
        load=replace(load, sequences=samples), contender="shardyard", recompute="none",
        micro_batch=samples, variant=name, halves=False,
    )  # fmt: skip
