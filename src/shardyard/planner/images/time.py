"""Seconds of one training step on images, term by term.

Each operator takes the longer of its arithmetic and its traffic with the device's memory.
The host that launches operators one by one may be slower than both. The exchange of the
data axes overlaps the blocks; its remainder is exposed. Images that the cores of a node
decode too slowly make it wait. ``internals/images-plan.md`` compares it with published
rates.
"""

import math
from dataclasses import dataclass, replace

from shardyard.families.images.operators import Operator
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.calibration import Calibration
from shardyard.planner.collectives import Group, all_gather_s, all_reduce_s, reduce_scatter_s
from shardyard.planner.images.memory import image_memory
from shardyard.planner.images.step import ImageStep, OperatorGroup
from shardyard.planner.kernels import FLASH_BACKWARD, TILES, Rates, check_predictable, rates
from shardyard.planner.memory import Fit, MemoryEstimate, fit
from shardyard.planner.step_time import (
    BUSY,
    OPTIMIZER_START_S,
    SLOWER_PER_DOUBLING,
    Parts,
    TimeTerm,
    terms_of,
)

HOST_S = 40e-6
"""Seconds in which the host launches one operator of an eager model, in each direction. ResNet-50
answers one image in 7.12 ms on a V100, and eight in hardly more, with 174 operators
(NVIDIA/DeepLearningExamples, ResNet50 v1.5 for PyTorch, README @3bbe228d, inference in fp32)."""

_DEPTHWISE_SLOWER = {
    "fp32": (1.0, 8.3),
    "tf32": (1.0, 8.3),
    "fp16": (1.5, 1.8),
    "bf16": (1.5, 1.8),
}
"""Time of a depthwise convolution, forward and backward, of what its traffic takes. A 3x3 on an
A100: 272 us forward and 4.8 ms with backward in fp32, 201 and 684 us in fp16 (pytorch/pytorch issue
18631, 2022-10-20), where fp32 forward is taken to be as fast as memory. bf16: as fp16."""

_PASSES: dict[str, tuple[int, int, int, int]] = {
    # Forward: input, output. Backward: tensors of the input's size, and of the output's.
    "conv": (1, 1, 2, 2),  # gradient of the input written, input read; gradient read twice
    "depthwise": (1, 1, 2, 2),
    "linear": (1, 1, 2, 2),
    "norm": (2, 1, 3, 2),  # statistics first: each direction reads its operands twice
    "act": (1, 1, 1, 2),
    "pool": (1, 1, 2, 1),
    "squeeze": (1, 1, 4, 1),  # its gradient is spread, then added to that of the scaled branch
    "scale": (1, 1, 6, 0),  # gradients of both factors; that of the smaller is a product, summed
    "add": (2, 1, 3, 0),  # gradients of both branches are added
    "attention": (1, 1, 2, 3),  # q, k, v and their gradients; output, its gradient, row sums
}
"""Count of passes of an operator over its tensors, as in PyTorch's eager kernels."""

_TURNED = ((2, 2), (4, 4))
"""Further passes over input and output of a convolution whose tensors are not ``channels_last``:
every operand of its products is read and written once more, in NHWC (NVIDIA, Convolutional Layers
User's Guide, section on tensor layouts)."""

_PRODUCTS = ("conv", "linear")


@dataclass(frozen=True, kw_only=True)
class ImageEstimate:
    """Needs of a step, for one rank and for all."""

    workload: ImageStep
    memory: MemoryEstimate
    fit: Fit
    parts: Parts
    devices: int

    @property
    def step_s(self) -> float:
        """One optimizer step."""
        return self.parts.step_s

    @property
    def terms(self) -> tuple[TimeTerm, ...]:
        """The step, term by term."""
        passes = f"{self.workload.micro_batches} micro-batches of {self.workload.micro_batch}"
        return terms_of(self.parts, {**_REASONS, "matmul_s": f"{_CONVOLUTIONS}; {passes}"})

    @property
    def trained_per_s(self) -> float:
        """Images that all devices take in a second, if they are never made to wait."""
        return self.workload.global_batch / (self.step_s - self.parts.input_s)

    @property
    def samples_per_s(self) -> float:
        """Images of all devices together."""
        return self.workload.global_batch / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """The same: where a plan counts tokens, an image is one."""
        return self.samples_per_s


_CONVOLUTIONS = "convolutions and linear layers, forward and backward, or their traffic"
_REASONS = {
    "elementwise_s": "norms, activations, sums, depthwise convolutions: what memory passes",
    "launch_s": f"the device waits for the host, which starts an operator in {HOST_S * 1e6:.0f} us",
    "data_s": "exposed gathers of parameters and sums of gradients",
    "recompute_s": "blocks computed again in the backward pass",
    "input_s": "the devices wait for images that the cores of their nodes decode",
}


def estimate_images(
    step: ImageStep, cluster: ClusterHardware, calibration: Calibration | None = None
) -> ImageEstimate:
    """Predict a step.

    Raises:
        RequestError: The layout needs another number of devices, or no source gives a rate of the
            device that a time needs.
    """
    ranks = step.layout.world_size
    check_predictable(cluster, ranks=ranks, compute=step.product_format)
    needed = image_memory(step)
    return ImageEstimate(
        workload=step,
        memory=needed,
        fit=fit(needed.device_bytes, cluster.accelerator.memory_bytes),
        parts=image_parts(step, cluster, calibration),
        devices=ranks,
    )


def image_parts(
    step: ImageStep, cluster: ClusterHardware, calibration: Calibration | None = None
) -> Parts:
    """Seconds of a step by what they are spent on."""
    device = _device(cluster.accelerator, step.product_format, calibration)
    timed = [_part_times(part, step, device) for part in step.parts]
    forward, backward = sum(t.forward_s for t in timed), sum(t.backward_s for t in timed)
    again = sum(t.recompute_s for t in timed)
    host_s = HOST_S * len(step.operators)
    # The two directions wait apart: a fast forward pass cannot make up for a slow backward pass.
    launch_s = max(0.0, host_s - forward) + max(0.0, host_s - backward - again)
    passes = step.micro_batches
    moved = step.parameters / _shards(step) * step.formats.update_bytes
    found = Parts(
        matmul_s=passes * sum(t.products_s for t in timed),
        attention_s=passes * sum(t.attention_s for t in timed),
        elementwise_s=passes * sum(t.elementwise_s for t in timed),
        vocabulary_s=0.0,
        recompute_s=passes * again,
        launch_s=passes * launch_s,
        tensor_s=0.0,
        context_s=0.0,
        expert_s=0.0,
        data_s=_data_s(step, timed, cluster, slower=max(1.0, host_s / backward)),
        bubble_s=0.0,
        send_s=0.0,
        optimizer_s=moved / device.rates.bytes_per_s + OPTIMIZER_START_S,
        offload_s=_offload_s(step, cluster),
        wait_s=0.0,
        input_s=0.0,
    )
    nodes = max(1.0, step.layout.world_size / cluster.devices_per_node)
    found = found._replace(wait_s=found.step_s * SLOWER_PER_DOUBLING * math.log2(nodes))
    scale = (calibration.step_scale if calibration else None) or 1.0
    found = Parts(*(seconds * scale for seconds in found))
    if step.decoded_per_s is None:
        return found
    # Workers decode the next step's images meanwhile, so only what outlasts the step is waited for.
    decoding_s = step.global_batch / step.decoded_per_s
    return found._replace(input_s=max(0.0, decoding_s - found.step_s))


def forward_s(step: ImageStep, accelerator: Accelerator) -> float:
    """Return the seconds of one micro-batch's forward pass only, as in an evaluation."""
    device = _device(accelerator, step.product_format, None)
    on_device = sum(_forward_s(row, step, device) for row in step.operators)
    return max(on_device, HOST_S * len(step.operators))


def _offload_s(step: ImageStep, cluster: ClusterHardware) -> float:
    """The optimizer's state on its way from the host and back, both at once."""
    link = cluster.accelerator.host_link_bytes_per_s
    if step.techniques.offload != "optimizer" or link is None:
        return 0.0
    return step.parameters / _shards(step) * step.formats.optimizer_bytes / link


# --- operators ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Device:
    """Rates of one device in the format of the products."""

    rates: Rates
    tiles: tuple[tuple[int, int, float], ...]
    """Rows, columns and share of the rate of the tiles that outputs are cut into."""
    plain_flops_per_s: float
    """Without tensor cores, which a filter of one channel cannot use."""

    def product_s(self, rows: int, columns: int, depth: int) -> float:
        """Arithmetic of one (rows, depth) x (depth, columns), the output cut into whole tiles.

        A product with too few tiles for the device is cut along its depth too, so they are not
        counted in waves.
        """
        padded = min(
            math.ceil(rows / high) * high * math.ceil(columns / wide) * wide / share
            for high, wide, share in self.tiles
        )
        return 2 * padded * depth / self.rates.flops_per_s


def _device(
    accelerator: Accelerator, number_format: str, calibration: Calibration | None
) -> _Device:
    found = rates(accelerator, number_format, calibration)
    return _Device(
        rates=found,
        # Without tensor cores a narrow tile costs nothing: its operands come from registers.
        tiles=((64, 32, 1.0),) if number_format == "fp32" else TILES,
        plain_flops_per_s=accelerator.achievable_flops_per_s("fp32") or found.flops_per_s,
    )


@dataclass(frozen=True, kw_only=True)
class _PartTimes:
    """One pass over a part of the network, both directions where not said otherwise."""

    part: OperatorGroup
    products_s: float
    attention_s: float
    elementwise_s: float
    forward_s: float
    backward_s: float
    recompute_s: float
    """Its forward pass once more, where it is recomputed."""


def _part_times(part: OperatorGroup, step: ImageStep, device: _Device) -> _PartTimes:
    spent = {"products": 0.0, "attention": 0.0, "elementwise": 0.0}
    forward = backward = 0.0
    for row in part.operators:
        ahead, back = _forward_s(row, step, device), _backward_s(row, step, device)
        kind = "products" if row.kind in _PRODUCTS else row.kind
        spent[kind if kind in spent else "elementwise"] += ahead + back
        forward, backward = forward + ahead, backward + back
    is_recomputed = step.recompute == "full" and bool(part.name)
    return _PartTimes(
        part=part,
        products_s=spent["products"],
        attention_s=spent["attention"],
        elementwise_s=spent["elementwise"],
        forward_s=forward,
        backward_s=backward,
        recompute_s=forward if is_recomputed else 0.0,
    )


def _moved_bytes(row: Operator, step: ImageStep, *, backward: bool) -> float:
    """Traffic of one direction with the device's memory."""
    passes = _PASSES[row.kind]
    into, out = passes[2:] if backward else passes[:2]
    if row.kind == "conv" and step.product_format != "fp32" and not step.channels_last:
        into, out = into + _TURNED[backward][0], out + _TURNED[backward][1]
    size, batch = step.formats.compute_bytes, step.micro_batch
    moved = batch * (into * row.input_elements + out * row.output_elements) * size
    moved += (1 + backward) * row.parameters * size + 8 * batch * row.saved_indices
    if row.kind == "depthwise":
        moved *= _DEPTHWISE_SLOWER[step.product_format][backward]
    return moved


def _forward_s(row: Operator, step: ImageStep, device: _Device) -> float:
    traffic_s = _moved_bytes(row, step, backward=False) / device.rates.bytes_per_s
    arithmetic_s = _arithmetic_s(row, step.micro_batch, device)
    return max(arithmetic_s, traffic_s + device.rates.kernel_s)


def _arithmetic_s(row: Operator, batch: int, device: _Device) -> float:
    """Return the arithmetic time of the forward pass."""
    if row.kind == "attention":
        return batch * row.flops / device.rates.flash_flops_per_s
    # A depthwise filter has one channel: no matrix product, so no tensor cores.
    if row.matrix is None:
        return batch * row.flops / device.plain_flops_per_s
    rows, columns, depth = row.matrix
    return device.product_s(batch * rows, columns, row.area * depth)


def _backward_s(row: Operator, step: ImageStep, device: _Device) -> float:
    """Gradients of input and weight: one product each, of the forward's size."""
    batch = step.micro_batch
    traffic_s = _moved_bytes(row, step, backward=True) / device.rates.bytes_per_s
    traffic_s += device.rates.kernel_s
    if row.kind == "attention":
        more, slower = FLASH_BACKWARD
        return max(more / slower * _arithmetic_s(row, batch, device), traffic_s)
    if row.matrix is None:
        return max(2 * batch * row.flops / device.plain_flops_per_s, traffic_s)
    rows, columns, depth = row.matrix
    input_s = device.product_s(batch * rows, depth, row.area * columns)
    if row.is_first:
        input_s = 0.0  # nobody asks for the gradient of an image
    weight_s = device.product_s(columns, row.area * depth, batch * rows)
    return max(input_s + weight_s, traffic_s)


# --- data axes ----------------------------------------------------------------------------------


def _shards(step: ImageStep) -> int:
    return step.layout.dp_shard


def _groups(step: ImageStep, cluster: ClusterHardware) -> tuple[Group, Group]:
    """Ranks that share one copy, and ranks that hold the same part of different copies."""
    inner = Group(size=_shards(step), per_node=min(_shards(step), cluster.reach))
    beside = max(1, cluster.reach // inner.per_node)
    copies = step.layout.dp_replicate
    return inner, Group(size=copies, per_node=max(1, min(copies, beside)))


def _data_s(
    step: ImageStep, timed: list[_PartTimes], cluster: ClusterHardware, *, slower: float
) -> float:
    """Return the time of gathers and sums that computation does not hide.

    Args:
        slower: Factor by which all operators take longer where the host sets the pace.
    """
    if step.layout.data_ranks == 1:
        return 0.0
    passes, zero = step.micro_batches, step.layout.zero
    norms_s = _norm_sums_s(step, cluster) if step.sums_norms else 0.0
    gathers_each = zero == 3 and _shards(step) > 1
    sums_each = zero > 1 and _shards(step) > 1
    last = _exposed_sums_s(step, timed, cluster, slower=slower, gathers=gathers_each)
    exposed = last
    if sums_each and passes > 1:
        # Copies are summed after the last pass only; the passes before reduce within a copy.
        alone = replace(step, layout=replace(step.layout, dp_replicate=1))
        between = _exposed_sums_s(alone, timed, cluster, slower=slower, gathers=gathers_each)
        exposed += (passes - 1) * between
    exposed += passes * norms_s
    if _shards(step) == 1:
        return exposed
    return exposed + (passes if gathers_each else 1) * _exposed_gathers_s(step, timed, cluster)


def _norm_sums_s(step: ImageStep, cluster: ClusterHardware) -> float:
    """Return the time of norm sums in one pass.

    Every batch norm waits for two small sums, one in each direction.
    """
    ranks = step.layout.data_ranks
    group = Group(size=ranks, per_node=min(ranks, cluster.reach))
    # 4 bytes each, as running means and variances are fp32 in every format.
    return sum(
        2 * all_reduce_s(4.0 * row.buffers, group, cluster) for row in step.operators if row.buffers
    )


def _exposed_gathers_s(step: ImageStep, timed: list[_PartTimes], cluster: ClusterHardware) -> float:
    """Return the exposed gathers of one forward pass.

    Each part is gathered while the one before it computes.
    """
    inner, _ = _groups(step, cluster)
    now = free = 0.0
    for each in timed:
        nbytes = each.part.parameters * step.formats.compute_bytes
        free += all_gather_s(nbytes, inner, cluster)
        now = max(now, free) + each.forward_s
    compute_s = sum(each.forward_s for each in timed)
    return now - compute_s + BUSY * min(free, compute_s)


def _exposed_sums_s(
    step: ImageStep,
    timed: list[_PartTimes],
    cluster: ClusterHardware,
    *,
    slower: float,
    gathers: bool,
) -> float:
    """Return the exposed sums of one backward pass.

    Gradients are summed part by part, or by buckets where there are any, one after the other
    while the pass continues.
    """
    inner, outer = _groups(step, cluster)
    now = free = sent = 0.0
    waiting, limit = 0.0, step.techniques.bucket_bytes and _FIRST_BUCKET_BYTES
    for each in reversed(timed):
        now += slower * (each.backward_s + each.recompute_s)
        waiting += each.part.parameters * step.formats.reduce_bytes
        # Without buckets the limit is 0: each part is sent at once. The last part flushes the rest.
        if waiting < limit and each is not timed[0]:
            continue
        took = reduce_scatter_s(waiting, inner, cluster)
        took += all_reduce_s(waiting / inner.size, outer, cluster)
        if gathers:
            nbytes = waiting / step.formats.reduce_bytes * step.formats.compute_bytes
            took += all_gather_s(nbytes, inner, cluster)
        free, sent = max(now, free) + took, sent + took
        waiting, limit = 0.0, step.techniques.bucket_bytes and _BUCKET_BYTES
    return max(0.0, free - now) + BUSY * min(sent, now)


_FIRST_BUCKET_BYTES = 2**20
_BUCKET_BYTES = 25 * 2**20
"""Gradients summed at a time by DistributedDataParallel (torch.nn.parallel: bucket_cap_mb, and
_DEFAULT_FIRST_BUCKET_BYTES in torch.distributed)."""
