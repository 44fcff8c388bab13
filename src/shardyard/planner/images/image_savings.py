"""What a rank would need less of a network for images; as ``planner/memory_savings.py``."""

from collections.abc import Iterator
from dataclasses import replace

from shardyard.planner.images.image_memory import image_memory
from shardyard.planner.images.image_step import ImageStep
from shardyard.planner.memory_savings import Saving, worth_saying


def image_savings(step: ImageStep) -> tuple[Saving, ...]:
    """The settings that save most, largest first; none of them changes what is learnt."""
    now = image_memory(step).allocated_bytes
    found = [
        Saving(setting=setting, bytes=now - image_memory(other).allocated_bytes)
        for setting, other in _others(step)
    ]
    return worth_saying(found, of=now)


def _others(step: ImageStep) -> Iterator[tuple[str, ImageStep]]:
    if step.micro_batch > 1 and not step.has_batch_norm:
        size = step.micro_batch // 2
        yield f"optim.micro_batch={size}", replace(step, micro_batch=size)
    if step.recompute != "full":
        yield "memory.recompute=full", replace(step, recompute="full")
    if step.layout.zero < 3 and step.layout.dp_shard > 1:
        yield "parallel.zero=3", replace(step, layout=replace(step.layout, zero=3))
