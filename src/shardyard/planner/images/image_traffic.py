"""Bytes a rank sends in a step on images, over the data axes; as ``planner/traffic.py``."""

from shardyard.planner.images.image_step import ImageStep
from shardyard.planner.memory import Term


def image_traffic(step: ImageStep) -> tuple[Term, ...]:
    """What each rank sends, by collective."""
    layout, formats, passes = step.layout, step.formats, step.micro_batches
    shards, copies = layout.dp_shard, layout.dp_replicate
    found = []
    if shards > 1:
        blocks = sum(part.parameters for part in step.parts if part.name)
        times, gathered, sums = "once a step", float(step.parameters), 1
        if layout.zero == 3:
            times = f"blocks 2 x {passes} micro-batches, the rest once each"
            gathered = passes * (step.parameters + float(blocks))
        if layout.zero > 1:
            sums = passes
        part, each = (shards - 1) / shards, f"{formats.reduce_bytes:g} bytes each"
        found += [
            Term(
                name="all-gather", bytes=round(part * gathered * formats.compute_bytes),
                reason=f"parameters in {formats.compute} over {shards} ranks, {times}",
            ),
            Term(
                name="reduce-scatter",
                bytes=round(part * sums * step.parameters * formats.reduce_bytes),
                reason=f"gradients, {each}, over {shards} ranks, {sums} x",
            ),
        ]  # fmt: skip
    if copies > 1:
        nbytes = 2 * (copies - 1) / copies * step.parameters / shards * formats.reduce_bytes
        found.append(
            Term(
                name="all-reduce", bytes=round(nbytes),
                reason=f"gradients, {formats.reduce_bytes:g} bytes each, over {copies} copies, "
                "once",
            )
        )  # fmt: skip
    return tuple(found)
