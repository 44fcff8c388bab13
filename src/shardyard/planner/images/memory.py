"""Bytes one rank holds at its peak while it trains on images, as a table of terms.

Outputs of operators are largest where the backward pass comes last, and gradients are all there by
then: so the backward pass is gone through block by block, and the fullest moment counts. What a
block keeps is in its table of operators; ``tests/planner/test_images.py`` compares that with what
autograd saves of real networks. Workspaces of convolutions are in no term.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from shardyard.planner.images.step import ImageStep, OperatorGroup
from shardyard.planner.memory import (
    MemoryEstimate,
    Saving,
    Term,
    device_of,
    notable_savings,
    reserved_of,
)
from shardyard.planner.stages import StageTrained
from shardyard.planner.state_memory import (
    gathers_per_block,
    gradients_bytes,
    is_first_pass,
    optimizer_state_bytes,
    parameters_bytes,
    reduce_buffer_bytes,
    shards,
    unreduced_gradient_bytes,
    whole_copy_bytes,
)
from shardyard.units import format_count


class _NetworkParameters(NamedTuple):
    """The network as ``state_memory.py`` asks for it: one stage."""

    layers: int
    block: float
    elements: float
    trained: StageTrained


def image_memory(step: ImageStep) -> MemoryEstimate:
    """All terms of the largest peak, each with its reason."""
    fullest = max(
        ((_terms(step, place), place) for place in range(len(step.parts))),
        key=lambda pair: sum(term.bytes for term in pair[0]),
    )
    terms, place = fullest
    allocated = sum(term.bytes for term in terms)
    name = step.parts[place].name or ("the stem" if place == 0 else "the head")
    return MemoryEstimate(
        terms=terms,
        peak_phase=f"in the backward pass of {name}",
        stage=0,
        allocated_bytes=allocated,
        reserved_bytes=round(reserved_of(allocated)),
        device_bytes=round(
            device_of(allocated, step.layout, has_standby=step.techniques.has_standby)
        ),
    )


def image_optimizer_bytes(step: ImageStep) -> float:
    """Bytes of a rank's part of the optimizer's states, on the device or moved to the host."""
    on_device = replace(step, techniques=replace(step.techniques, offload="none"))
    return optimizer_state_bytes(on_device, _network_parameters(step))


def _network_parameters(step: ImageStep) -> _NetworkParameters:
    blocks = [part for part in step.parts if part.name]
    largest = max((part.parameters for part in blocks), default=0)
    count = step.parameters
    trained = StageTrained(count, largest, 0.0, 0.0, 0.0, len(blocks), 0, 0.0)
    return _NetworkParameters(layers=len(blocks), block=largest, elements=count, trained=trained)


def _terms(step: ImageStep, part_index: int) -> tuple[Term, ...]:
    """While the backward pass is at one part: later ones have gradients, earlier ones wait."""
    held, formats = _network_parameters(step), step.formats
    split = f" over {shards(step)} ranks" if shards(step) > 1 else " on every rank"
    gradients, waiting = gradients_bytes(step, held), unreduced_gradient_bytes(step, held)
    # From the second pass on all gradients exist, whichever block the pass is at.
    if is_first_pass(step):
        gradients *= _share_after(step, part_index)
    gathered = whole_copy_bytes(step, held) + _gathered(step, part_index)
    everything = {
        "parameters": (
            parameters_bytes(step, held),
            f"{formats.weight_bytes:g} bytes each,{split}",
        ),
        "running statistics": (4 * step.buffers, "fp32 means and variances of batch norms"),
        "gradients": (gradients, f"{formats.gradient_bytes:g} bytes each,{split}"),
        "optimizer": (
            optimizer_state_bytes(step, held),
            f"{formats.optimizer_bytes:g} bytes each: {formats.optimizer_reason},{split}",
        ),
        "gathered parameters": (gathered, f"in {formats.compute}, as they are computed with"),
        "unreduced gradients": (
            waiting + reduce_buffer_bytes(step, step.parts[part_index].parameters),
            "on their way to their sum",
        ),
        "activations": (_saved_activations(step, part_index), _saved_reason(step)),
        "in flight": (
            _in_flight(step, step.parts[part_index]),
            "gradients of input and output of the block's largest operator",
        ),
    }
    return tuple(
        Term(name=name, bytes=round(nbytes), reason=reason)
        for name, (nbytes, reason) in everything.items()
        if nbytes
    )


def _gathered(step: ImageStep, part_index: int) -> float:
    """Count the bytes that zero 3 has gathered at this block.

    They are this block, those that the backward pass reaches next, and the parameters outside
    of blocks, which stay whole from the forward pass on.
    """
    if not gathers_per_block(step):
        return 0.0
    ahead = step.parts[max(0, part_index - step.techniques.prefetch) : part_index + 1]
    blocks = sum(part.parameters for part in ahead if part.name)
    outside = sum(part.parameters for part in step.parts if not part.name)
    return step.formats.compute_bytes * (blocks + outside)


def _share_after(step: ImageStep, part_index: int) -> float:
    """Return the share of all parameters whose gradients exist once this part's exist."""
    return sum(part.parameters for part in step.parts[part_index:]) / step.parameters


def _saved_activations(step: ImageStep, part_index: int) -> float:
    """Count the bytes kept by the parts up to this one; this one, if recomputed, is whole again."""
    size, image = step.formats.compute_bytes, 3 * step.size**2
    kept = image * (size + (4 if size < 4 else 0))  # the image itself, and as it came: fp32
    for index, part in enumerate(step.parts[: part_index + 1]):
        whole = _part_bytes(step, part)
        if step.recompute == "none" or not part.name:
            kept += whole
            continue
        before_is_kept = index > 0 and not step.parts[index - 1].name
        entry = 0 if before_is_kept else size * part.operators[0].input_elements
        kept += entry + (whole if index == part_index else 0)
    return step.micro_batch * kept


def _part_bytes(step: ImageStep, part: OperatorGroup) -> float:
    """Outputs that a backward needs, of one image."""
    elements = sum(row.saved_elements for row in part.operators)
    # Max pooling keeps the place of each maximum as a 64-bit index.
    return step.formats.compute_bytes * elements + 8 * sum(
        row.saved_indices for row in part.operators
    )


def _in_flight(step: ImageStep, part: OperatorGroup) -> float:
    largest = max(row.input_elements + row.output_elements for row in part.operators)
    return step.micro_batch * largest * step.formats.compute_bytes


def _saved_reason(step: ImageStep) -> str:
    kept = sum(row.saved_elements for row in step.operators)
    what = "only inputs of blocks" if step.recompute == "full" else "inputs of all operators"
    if step.ignored_recompute:
        what += f" (memory.recompute={step.ignored_recompute} is counted as none)"
    return (
        f"{step.micro_batch:,} images of {step.size} x {step.size}, {what}; a whole network keeps "
        f"{format_count(kept)} elements of one"
    )


# A network for images is split over data axes only, so its traffic has three terms at most.
# ``planner/traffic.py`` names the sources of the formulas.


def image_traffic(step: ImageStep) -> tuple[Term, ...]:
    """Return the bytes that each rank sends, by collective."""
    layout, formats, passes = step.layout, step.formats, step.micro_batches
    shards, copies = layout.dp_shard, layout.dp_replicate
    found = []
    if shards > 1:
        blocks = sum(part.parameters for part in step.parts if part.name)
        times, gathered, sums = "once a step", float(step.parameters), 1
        if layout.zero == 3:
            times = f"blocks 2 x {passes} micro-batches, the rest once each"
            gathered = passes * (step.parameters + float(blocks))
        # Zero 2 and 3 keep gradients sharded, so they reduce after every pass.
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


# These settings save memory and keep the training result, as in ``planner/memory.py``.


def image_savings(step: ImageStep) -> tuple[Saving, ...]:
    """The settings that save most, largest first; none of them changes what is learnt."""
    now = image_memory(step).allocated_bytes
    found = [
        Saving(setting=setting, bytes=now - image_memory(other).allocated_bytes)
        for setting, other in _others(step)
    ]
    return notable_savings(found, of=now)


def _others(step: ImageStep) -> Iterator[tuple[str, ImageStep]]:
    # Batch norms normalise over the micro-batch, so another one changes the training result.
    if step.micro_batch > 1 and not step.has_batch_norm:
        size = step.micro_batch // 2
        yield f"optim.micro_batch={size}", replace(step, micro_batch=size)
    if step.recompute != "full":
        yield "memory.recompute=full", replace(step, recompute="full")
    if step.layout.zero < 3 and step.layout.dp_shard > 1:
        yield "parallel.zero=3", replace(step, layout=replace(step.layout, zero=3))
