"""A step of data-parallel training of a convolutional network: seconds, samples a second, memory.

Each operator takes the longer of its arithmetic and its traffic with the device's memory; the host
that launches operators one by one may be slower than both; gradients are summed over ranks in
buckets while the backward pass goes on (DistributedDataParallel), and what outlasts it shows.
Nothing is sharded. ``docs/design/vision-plan.md`` sets it against published rates.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shardyard.errors import RequestError
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.cluster import Cluster
from shardyard.planner.collectives import Group, all_reduce_s
from shardyard.planner.kernels import KERNEL_S, TILES, missing, rates
from shardyard.planner.memory import Term
from shardyard.planner.step_time import TimeTerm
from shardyard.planner.vision_layers import Layer, VisionModel, vision_model
from shardyard.units import format_count

HOST_S = 40e-6
"""Seconds in which the host launches one operator of an eager model, in each direction. ResNet-50
answers one image in 7.12 ms on a V100, and eight in hardly more, with 174 operators
(NVIDIA/DeepLearningExamples, ResNet50 v1.5 for PyTorch, README @3bbe228d, inference in fp32)."""

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
"""Gradients summed at a time (torch.nn.parallel.DistributedDataParallel: bucket_cap_mb, and
_DEFAULT_FIRST_BUCKET_BYTES in torch.distributed)."""

RESERVED_SHARE = 1.05
"""What the caching allocator holds, of what tensors took at most: rough. It rounds blocks to 512
bytes and segments to 2 MiB, and the tensors of a convolutional network come in few sizes."""

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
    # forward: input, output; backward: what has the input's size, what has the output's
    "conv": (1, 1, 2, 2),  # gradient of the input written, input read; gradient read twice
    "depthwise": (1, 1, 2, 2),
    "linear": (1, 1, 2, 2),
    "norm": (2, 1, 3, 2),  # statistics first: each direction reads its operands twice
    "act": (1, 1, 1, 2),
    "pool": (1, 1, 2, 1),
    "squeeze": (1, 1, 4, 1),  # its gradient is spread, then added to that of the scaled branch
    "scale": (1, 1, 6, 0),  # gradients of both factors; that of the smaller is a product, summed
    "add": (2, 1, 3, 0),  # gradients of both branches are added
}
"""How often an operator moves its tensors, as PyTorch's eager kernels do it."""

_TURNED = ((2, 2), (4, 4))
"""Further passes over input and output of a convolution whose tensors are not ``channels_last``:
every operand of its products is read and written once more, in NHWC (NVIDIA, Convolutional Layers
User's Guide, section on tensor layouts)."""

_OPTIMIZER_PASSES = {"sgd": 11, "rmsprop": 21, "adamw": 18}
"""fp32 vectors of all parameters that one update reads and writes, in multi-tensor kernels of one
operation each (``foreach``): with momentum and weight decay."""

_OPTIMIZER_STATES = {"sgd": 1, "rmsprop": 2, "adamw": 2}


@dataclass(frozen=True, kw_only=True)
class VisionWorkload:
    """One training step of a named network with DistributedDataParallel on all devices."""

    model: str
    """A name of ``vision_layers.VISION_MODELS``."""
    device_batch: int
    """Samples of one device in one step."""
    resolution: int | None = None
    """Pixels on a side; None: the one the network is published at."""
    compute: Literal["fp32", "tf32", "fp16", "bf16"] = "fp16"
    """Of operators; parameters, gradients and optimizer stay fp32. ``tf32``: fp32 tensors whose
    products are rounded for the tensor cores."""
    channels_last: bool = True
    """Whether tensors lie as the tensor cores read them (NHWC); else they are turned for them."""
    optimizer: Literal["sgd", "rmsprop", "adamw"] = "sgd"
    loader_samples_per_s: float | None = None
    """Images that the data workers of one device decode; None: they are never waited for."""


@dataclass(frozen=True, kw_only=True)
class VisionEstimate:
    """What is predicted of one step; memory is that of one rank."""

    model: VisionModel
    devices: int
    samples_per_step: int
    time: tuple[TimeTerm, ...]
    memory: tuple[Term, ...]
    capacity_bytes: int

    @property
    def step_s(self) -> float:
        """All terms; none of them overlaps another."""
        return sum(term.seconds for term in self.time)

    @property
    def samples_per_s(self) -> float:
        """Of all devices."""
        return self.samples_per_step / self.step_s

    @property
    def allocated_bytes(self) -> int:
        """Peak of what tensors take."""
        return sum(term.bytes for term in self.memory)

    @property
    def reserved_bytes(self) -> int:
        """What the allocator holds of the device then."""
        return round(RESERVED_SHARE * self.allocated_bytes)

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.reserved_bytes <= self.capacity_bytes

    def epoch_s(self, images: int) -> float:
        """Seconds of one pass over a data set, without evaluation and saves."""
        return math.ceil(images / self.samples_per_step) * self.step_s


def estimate_vision(workload: VisionWorkload, cluster: Cluster) -> VisionEstimate:
    """Predict a step of ``workload`` on all devices of ``cluster``.

    Raises:
        RequestError: The network is not known, or a rate of the accelerator is not.
    """
    model = vision_model(workload.model, resolution=workload.resolution)
    device = _rates(cluster.accelerator, workload.compute)
    return VisionEstimate(
        model=model,
        devices=cluster.devices,
        samples_per_step=workload.device_batch * cluster.devices,
        time=_time_terms(model, workload, cluster, device),
        memory=_memory_terms(model, workload, cluster),
        capacity_bytes=cluster.accelerator.memory_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class _Device:
    """Rates of one device in the compute format."""

    product_flops_per_s: float
    """Of large, well-shaped matrix products."""
    tiles: tuple[tuple[int, int, float], ...]
    """Rows, columns and share of the rate of the tiles that outputs are cut into."""
    plain_flops_per_s: float
    """Without tensor cores, which a filter of one channel cannot use."""
    bytes_per_s: float
    kernel_s: float

    def product_s(self, rows: int, columns: int, depth: int) -> float:
        """Arithmetic of one (rows, depth) x (depth, columns), the output cut into whole tiles.

        A product with too few tiles for the device is cut along its depth too, so they are not
        counted in waves.
        """
        padded = min(
            math.ceil(rows / high) * high * math.ceil(columns / wide) * wide / share
            for high, wide, share in self.tiles
        )
        return 2 * padded * depth / self.product_flops_per_s


def _rates(accelerator: Accelerator, compute: str) -> _Device:
    why_not = missing(accelerator, compute)
    if why_not:
        raise RequestError(
            f"a step on {accelerator.name} in {compute} cannot be timed: {why_not}, and nothing is "
            f"guessed. Use another device or format; rates of {accelerator.name} are known in "
            f"{', '.join(accelerator.achievable) or 'none'} ({accelerator.source})."
        )
    products = rates(accelerator, compute)
    plain = accelerator.achievable_flops_per_s("fp32") or products.flops_per_s
    return _Device(
        product_flops_per_s=products.flops_per_s,
        # without tensor cores a narrow tile costs nothing: its operands come from registers
        tiles=((64, 32, 1.0),) if compute == "fp32" else TILES,
        plain_flops_per_s=plain,
        bytes_per_s=products.bytes_per_s,
        kernel_s=KERNEL_S,
    )


def _format_bytes(workload: VisionWorkload) -> int:
    return 4 if workload.compute in ("fp32", "tf32") else 2


def _moved_bytes(layer: Layer, workload: VisionWorkload, *, backward: bool) -> float:
    """Traffic of one direction with the device's memory."""
    passes = _PASSES[layer.kind]
    into, out = passes[2:] if backward else passes[:2]
    turns = layer.kind == "conv" and workload.compute != "fp32" and not workload.channels_last
    if turns:
        into, out = into + _TURNED[backward][0], out + _TURNED[backward][1]
    size, batch = _format_bytes(workload), workload.device_batch
    moved = batch * (into * layer.input_elements + out * layer.output_elements) * size
    moved += (1 + backward) * layer.parameters * size + 8 * batch * layer.kept_indices
    slower = _DEPTHWISE_SLOWER[workload.compute][backward] if layer.kind == "depthwise" else 1.0
    return slower * moved


def _forward_s(layer: Layer, workload: VisionWorkload, device: _Device) -> float:
    traffic_s = _moved_bytes(layer, workload, backward=False) / device.bytes_per_s
    return max(_product_s(layer, workload.device_batch, device), traffic_s + device.kernel_s)


def _product_s(layer: Layer, batch: int, device: _Device) -> float:
    """Arithmetic of the forward pass."""
    if layer.matrix is None:
        return batch * layer.flops / device.plain_flops_per_s
    rows, columns, depth = layer.matrix
    return device.product_s(batch * rows, columns, layer.area * depth)


def _backward_s(layer: Layer, workload: VisionWorkload, device: _Device) -> float:
    """Gradients of input and weight: one product each, of the forward's size."""
    batch = workload.device_batch
    traffic_s = _moved_bytes(layer, workload, backward=True) / device.bytes_per_s + device.kernel_s
    if layer.matrix is None:
        return max(2 * batch * layer.flops / device.plain_flops_per_s, traffic_s)
    rows, columns, depth = layer.matrix
    input_s = device.product_s(batch * rows, depth, layer.area * columns)
    if layer.is_first:
        input_s = 0.0  # nobody asks for the gradient of an image
    weight_s = device.product_s(columns, layer.area * depth, batch * rows)
    return max(input_s + weight_s, traffic_s)


def _time_terms(
    model: VisionModel, workload: VisionWorkload, cluster: Cluster, device: _Device
) -> tuple[TimeTerm, ...]:
    forward = [_forward_s(layer, workload, device) for layer in model.layers]
    backward = [_backward_s(layer, workload, device) for layer in model.layers]
    host_s = HOST_S * len(model.layers)
    waits = max(0.0, host_s - sum(forward)), max(0.0, host_s - sum(backward))
    # where the host is slower it sets the pace of all operators alike
    paced = [seconds * max(1.0, host_s / sum(backward)) for seconds in backward]
    exposed_s, sent_s = _exposed_all_reduce_s(model.layers, paced, cluster)
    passes = _OPTIMIZER_PASSES[workload.optimizer]
    copies = 4 if cluster.devices > 1 else 0
    update_s = (passes + copies) * 4 * model.parameters / device.bytes_per_s
    terms = [
        *_compute_terms(model.layers, forward, backward),
        TimeTerm(
            name="launches",
            seconds=sum(waits),
            reason=f"{len(model.layers)} operators in each direction, {HOST_S * 1e6:.0f} us each, "
            "where the device is done before the host",
        ),
        TimeTerm(
            name="all-reduce",
            seconds=exposed_s,
            reason=f"what outlasts the backward pass of {sent_s * 1e3:.1f} ms for "
            f"{format_count(4 * model.parameters)}B of fp32 gradients over {cluster.devices} "
            f"devices, {cluster.between.name if cluster.nodes > 1 else cluster.inside.name}",
        ),
        TimeTerm(
            name="optimizer",
            seconds=update_s,
            reason=f"{workload.optimizer}: {passes} passes over {format_count(model.parameters)} "
            f"fp32 parameters, {copies} to fill and empty the buckets",
        ),
    ]
    return (*terms, *_loader_wait(workload, sum(term.seconds for term in terms)))


def _compute_terms(
    layers: Iterable[Layer], forward: list[float], backward: list[float]
) -> list[TimeTerm]:
    """Seconds on the device by the kind of operator."""
    both: dict[str, float] = {}
    for layer, ahead_s, back_s in zip(layers, forward, backward, strict=True):
        both[layer.kind] = both.get(layer.kind, 0.0) + ahead_s + back_s
    groups = {
        "convolutions": (("conv", "linear"), "matrix products, or their traffic"),
        "depthwise": (("depthwise",), "no tensor cores: arithmetic, or traffic at a lower rate"),
        "norms": (("norm",), "traffic: 3 tensors forward, 5 backward"),
        "elementwise": (("act", "pool", "squeeze", "scale", "add"), "traffic"),
    }
    return [
        TimeTerm(name=name, seconds=sum(both.get(kind, 0.0) for kind in kinds), reason=reason)
        for name, (kinds, reason) in groups.items()
        if any(kind in both for kind in kinds)
    ]


def _exposed_all_reduce_s(
    layers: tuple[Layer, ...], backward: list[float], cluster: Cluster
) -> tuple[float, float]:
    """What the sums of buckets outlast the backward pass, and what they take in all."""
    if cluster.devices == 1:
        return 0.0, 0.0
    group = Group(size=cluster.devices, per_node=cluster.devices_per_node)
    now = free = sent = 0.0  # free: when the network has finished the buckets so far
    filled, limit = 0, FIRST_BUCKET_BYTES
    for layer, seconds in zip(reversed(layers), reversed(backward), strict=True):
        now += seconds
        filled += 4 * layer.parameters
        if filled >= limit or (layer is layers[0] and filled):
            bucket_s = all_reduce_s(filled, group, cluster)
            free, sent = max(now, free) + bucket_s, sent + bucket_s
            filled, limit = 0, BUCKET_BYTES
    return free - now, sent


def _loader_wait(workload: VisionWorkload, busy_s: float) -> list[TimeTerm]:
    if workload.loader_samples_per_s is None:
        return []
    needed_s = workload.device_batch / workload.loader_samples_per_s
    reason = f"data workers decode {workload.loader_samples_per_s:,.0f} images/s for each device"
    return [TimeTerm(name="data", seconds=max(0.0, needed_s - busy_s), reason=reason)]


def _memory_terms(
    model: VisionModel, workload: VisionWorkload, cluster: Cluster
) -> tuple[Term, ...]:
    """All terms of one rank's peak, at the end of the forward pass and soon after."""
    size, count = _format_bytes(workload), model.parameters
    states = _OPTIMIZER_STATES[workload.optimizer]
    terms = [
        Term(name="parameters", bytes=4 * count, reason=f"fp32, all {count:,} on every rank"),
        Term(name="gradients", bytes=4 * count, reason="fp32"),
        Term(
            name="optimizer",
            bytes=4 * states * count,
            reason=f"fp32 {workload.optimizer}, {states} each",
        ),
        _activations(model, workload),
        _in_flight(model, workload),
    ]
    if cluster.devices > 1:
        why = "DistributedDataParallel copies gradients into buckets to send them"
        terms.append(Term(name="buckets", bytes=4 * count, reason=why))
    if size < 4:
        why = f"weights in {workload.compute}, kept by autocast until the step ends"
        terms.append(Term(name="16-bit weights", bytes=size * count, reason=why))
    return tuple(terms)


def _activations(model: VisionModel, workload: VisionWorkload) -> Term:
    """Outputs that a backward needs: inputs of convolutions, norms and activations."""
    size, batch = _format_bytes(workload), workload.device_batch
    image = 3 * model.resolution**2
    kept = image + sum(layer.kept_elements for layer in model.layers)
    indices = 8 * sum(layer.kept_indices for layer in model.layers)
    each = size * kept + indices + (4 * image if size < 4 else 0)
    why = f"{batch} samples x {format_count(kept)} elements in {workload.compute}"
    return Term(name="activations", bytes=batch * each, reason=f"{why}: inputs of all operators")


def _in_flight(model: VisionModel, workload: VisionWorkload) -> Term:
    """The largest operator's two gradients, while all else is still held."""
    largest = max(layer.input_elements + layer.output_elements for layer in model.layers)
    nbytes = workload.device_batch * largest * _format_bytes(workload)
    why = "gradients of input and output of the largest operator"
    return Term(name="in flight", bytes=nbytes, reason=why)
