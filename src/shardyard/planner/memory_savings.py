"""Savings of a rank's memory under other settings, reported when its memory runs out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from shardyard.config.formulas import LOSS_CHUNK
from shardyard.planner.memory import peak
from shardyard.planner.workload import Workload

_LEAST_SHARE = 0.02
"""Share of the peak below which a saving is not reported."""
_MOST = 3
_MOVED: tuple[Literal["activations", "optimizer"], ...] = ("activations", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One setting with another value, as it is typed, and the bytes that the peak falls by."""

    setting: str
    bytes: int


def savings(workload: Workload, *, on_cpu: bool) -> tuple[Saving, ...]:
    """Return the settings that save most, largest first; none changes the training result.

    Args:
        on_cpu: The device's memory is the host's, so that a move there gains no memory.
    """
    now = peak(workload)[0]
    found = [
        Saving(setting=setting, bytes=round(now - peak(other)[0]))
        for setting, other in _others(workload, on_cpu=on_cpu)
    ]
    return notable_savings(found, of=now)


def notable_savings(candidates: Iterable[Saving], *, of: float) -> tuple[Saving, ...]:
    """The largest, without those that are little of so many bytes."""
    worth = [saving for saving in candidates if saving.bytes > _LEAST_SHARE * of]
    return tuple(sorted(worth, key=lambda saving: -saving.bytes)[:_MOST])


def _others(w: Workload, *, on_cpu: bool) -> Iterator[tuple[str, Workload]]:
    if w.micro_batch > 1:
        size = w.micro_batch // 2
        yield f"optim.micro_batch={size}", replace(w, micro_batch=size)
    if w.recompute != "full":
        yield "memory.recompute=full", replace(w, recompute="full")
    if w.techniques.loss_chunk is None:
        chunked = replace(w.techniques, loss_chunk=LOSS_CHUNK)
        yield f"memory.loss_chunk={LOSS_CHUNK}", replace(w, techniques=chunked)
    if w.layout.zero < 3 and w.layout.dp_shard * w.layout.cp > 1:
        yield "parallel.zero=3", replace(w, layout=replace(w.layout, zero=3))
    if w.techniques.offload == "none" and not on_cpu:
        for what in _MOVED:
            moved = replace(w.techniques, offload=what)
            yield f"memory.offload={what}", replace(w, techniques=moved)
