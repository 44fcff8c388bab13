"""Seconds of one training step, term by term: compute, exposed communication, idle time.

A rank's step is its micro-batches, one after the other through its stage of the pipeline.
The exchange of the data axes overlaps them where the framework lets it, and the rest is
exposed. The terms add up to the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from typing import NamedTuple, assert_never

from shardyard.config.layout import Layout
from shardyard.families.shape import ModelShape
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.block_time import BlockTimes, Pass
from shardyard.planner.calibration import Calibration
from shardyard.planner.collectives import (
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
    send_s,
)
from shardyard.planner.offload import moved_for_update, overlapped_transfer_bytes
from shardyard.planner.stages import block_elements, cut, stage_parameters, table_parameters
from shardyard.planner.trainable_parameters import TrainableElements
from shardyard.planner.workload import Formats, Recompute, Techniques, Workload

BUSY = 0.12
"""Slowdown of compute, as a share of the time that collectives overlap it.

Collectives occupy processors and memory (NCCL takes 16 to 24 of the 108 to 132
multiprocessors).
"""

OPTIMIZER_START_S = 1e-3
"""Gradient norm, clip, schedule: some small kernels and one all-reduce."""

NEWTON_SCHULZ_FLOPS = 24
"""FLOP of Muon's five iterations for each element of a matrix and each row of it.

A matrix of m rows and n columns takes 5 x (4 m^2 n + 2 m^3): per element and row 30 where it is
square, 20 where it is very wide; 24 at n = 2.5 m.
"""

SLOWER_PER_DOUBLING = 0.005
"""Share of a step lost with each doubling of the nodes that step together.

The slowest node counts, and more nodes include a slower one. Weak scaling from 1 to 16
nodes: 97.7 % (pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md), 98.4 %
(mosaicml/llm-foundry, MPT-7B).
"""

ZERO_BUBBLE = 1 / 3
"""Bubble of a zero-bubble schedule against 1F1B's: forward, backward for inputs and backward for
weights are equally long (Qi et al. 2023, arXiv:2401.10241)."""


@dataclass(frozen=True, kw_only=True)
class TimeTerm:
    """One summand of a step, and why it is that long."""

    name: str
    seconds: float
    reason: str


class Parts(NamedTuple):
    """Seconds of a step by what they are spent on; they add up to it."""

    matmul_s: float
    attention_s: float
    elementwise_s: float
    vocabulary_s: float
    recompute_s: float
    launch_s: float
    tensor_s: float
    context_s: float
    expert_s: float
    data_s: float
    bubble_s: float
    send_s: float
    optimizer_s: float
    offload_s: float
    wait_s: float
    input_s: float = 0.0

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(self)


NAMES = {
    "matmul_s": ("matrix products", "of the blocks, forward and backward, by shape"),
    "attention_s": ("attention", "scores and their product with the values"),
    "elementwise_s": ("memory-bound", "norms, residuals, activations: what memory passes"),
    "vocabulary_s": ("vocabulary", "head and loss"),
    "recompute_s": ("recompute", "activations computed again in the backward pass"),
    "launch_s": ("launch", "the host launches kernels slower than the device runs them"),
    "tensor_s": ("tensor parallel", "exposed collectives of tp"),
    "context_s": ("context parallel", "exposed exchange of keys and values over cp"),
    "expert_s": ("expert parallel", "tokens dealt to experts over ep, and back"),
    "data_s": ("data parallel", "exposed gathers of parameters and sums of gradients"),
    "bubble_s": ("pipeline bubble", "stages that wait for the first and the last micro-batch"),
    "send_s": ("pipeline sends", "activations from stage to stage"),
    "optimizer_s": ("optimizer", "update of this rank's part"),
    "offload_s": ("offload", "exposed transfers to and from host memory"),
    "wait_s": ("stragglers", "each step waits for the slowest node"),
    "input_s": ("data", "the devices wait for samples that the cores of their nodes prepare"),
}
"""Field of ``Parts`` -> name of its term and what it is."""


class StepModel:
    """Step times of one model on one cluster, for any number of layouts."""

    def __init__(
        self,
        shape: ModelShape,
        cluster: ClusterHardware,
        *,
        seq_len: int,
        formats: Formats,
        techniques: Techniques,
        trained: TrainableElements | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.cluster = cluster
        self.times = BlockTimes(
            shape, cluster, seq_len=seq_len, formats=formats, techniques=techniques,
            trained=trained, calibration=calibration,
        )  # fmt: skip
        parameters = shape.parameters
        self._trained_share = 1.0 if trained is None else trained.parameters / parameters
        """Trained share of all parameters, without a distinction of stages."""
        self._scale = (calibration.step_scale if calibration else None) or 1.0

    def parts(
        self, layout: Layout, *, micro_batch: int, micro_batches: int, recompute: Recompute
    ) -> Parts:
        """Seconds of a step of ``micro_batches`` passes of one data rank."""
        times, tech = self.times, self.times.techniques
        forward, backward = times.block(layout, micro_batch)
        head_f, head_b = times.vocabulary(layout, micro_batch)
        again = _recomputed(recompute, forward, tech, times.shares(layout.pp).inputs)
        work_s = forward.device_s + backward.device_s + again.device_s  # of one block, one pass
        host_s = forward.host_s + backward.host_s + again.host_s
        # Kernels queue up on the device: whichever of host and device is slower sets the pace.
        block_s = max(work_s, host_s)
        head_s = head_f.device_s + head_b.device_s
        first, last = cut(times.shape, layout.pp, tech)
        layers, extra_s = first, 0.0  # of the stage that the others wait for
        # All stages wait for the slowest, and the last one computes the head as well.
        if last * block_s + head_s >= first * block_s:
            layers, extra_s = last, head_s
        launch_s = layers * max(0.0, host_s - work_s)
        others_s = (times.shape.num_hidden_layers - layers) * block_s + head_s - extra_s
        bubble_s = others_s * _bubble_share(tech)
        data_s = self._data_s(
            layout, layers=layers, passes=micro_batches, forward=forward.device_s,
            backward=backward.device_s + again.device_s,
        )  # fmt: skip
        kept_blocks = micro_batches * layers
        found = Parts(
            matmul_s=kept_blocks * (forward.matmul_s + backward.matmul_s),
            attention_s=kept_blocks * (forward.attention_s + backward.attention_s),
            elementwise_s=kept_blocks * (forward.elementwise_s + backward.elementwise_s),
            vocabulary_s=micro_batches * extra_s,
            recompute_s=kept_blocks * again.device_s,
            launch_s=micro_batches * launch_s,
            tensor_s=kept_blocks * (forward.tensor_s + backward.tensor_s),
            context_s=kept_blocks * (forward.context_s + backward.context_s),
            expert_s=kept_blocks * (forward.expert_s + backward.expert_s),
            data_s=data_s,
            bubble_s=bubble_s,
            send_s=self._sends_s(layout, micro_batch=micro_batch, passes=micro_batches),
            optimizer_s=self._optimizer_s(layout, layers),
            offload_s=self._offload_s(
                layout,
                micro_batch=micro_batch,
                passes=micro_batches,
                recompute=recompute,
                work_s=kept_blocks * work_s,
            ),
            wait_s=0.0,
        )
        # The share is of a whole step, so the wait is added after all other terms.
        nodes = max(1.0, layout.world_size / self.cluster.devices_per_node)
        found = found._replace(wait_s=found.step_s * SLOWER_PER_DOUBLING * log2(nodes))
        if self._scale == 1.0:
            return found
        return Parts(*(seconds * self._scale for seconds in found))

    def forward_s(self, layout: Layout, *, micro_batch: int) -> float:
        """Seconds of one forward pass without gradients, through all stages one after the other."""
        forward, _ = self.times.block(layout, micro_batch)
        head, _ = self.times.vocabulary(layout, micro_batch)
        block_s = max(forward.device_s, forward.host_s)
        inner, _ = self._groups(layout)
        if layout.zero == 3 and inner.size > 1:
            formats, tech = self.times.formats, self.times.techniques
            wire = 1.0 if tech.fp8_gather else formats.compute_bytes
            gather_s = all_gather_s(
                block_elements(self.times.shape, layout) * wire, inner, self.cluster
            )
            hides = tech.overlap_data
            block_s = _overlapped(block_s, gather_s) if hides else block_s + gather_s
        # Of the sends of a pass only those forward, and no other pass hides them.
        sends_s = self._sends_s(layout, micro_batch=micro_batch, passes=0) / 2
        seconds = self.times.shape.num_hidden_layers * block_s + head.device_s + sends_s
        nodes = max(1.0, layout.world_size / self.cluster.devices_per_node)
        return seconds * (1 + SLOWER_PER_DOUBLING * log2(nodes)) * self._scale

    # --- data axes ------------------------------------------------------------------------------

    def _data_s(
        self, layout: Layout, *, layers: float, passes: int, forward: float, backward: float
    ) -> float:
        shards = layout.dp_shard * layout.cp
        ranks = shards * layout.dp_replicate
        if ranks == 1:
            return 0.0
        if layout.zero == 3 and shards > 1:
            return self._gathered_s(
                layout, layers=layers, passes=passes, forward=forward, backward=backward
            )
        return self._summed_s(layout, layers=layers, passes=passes, backward=backward)

    def _groups(self, layout: Layout) -> tuple[Group, Group]:
        """Ranks that share one copy, and ranks that hold the same part of different copies."""
        # tp is the fastest axis, so a node holds this many ranks of the data axes.
        beside = max(1, self.cluster.reach // layout.tp)
        shards = layout.dp_shard * layout.cp
        inner = Group(size=shards, per_node=min(shards, beside))
        outer = Group(
            size=layout.dp_replicate,
            per_node=max(1, min(layout.dp_replicate, beside // inner.per_node)),
        )
        return inner, outer

    def _gathered_s(
        self, layout: Layout, *, layers: float, passes: int, forward: float, backward: float
    ) -> float:
        """Return the exposed time of zero 3.

        Each block is gathered twice and its gradient summed, while the next one computes.
        """
        formats, tech, cluster = self.times.formats, self.times.techniques, self.cluster
        inner, outer = self._groups(layout)
        wire = 1.0 if tech.fp8_gather else formats.compute_bytes
        block = block_elements(self.times.shape, layout)
        gather = all_gather_s(block * wire, inner, cluster)
        summed = self._trained_share * block * formats.reduce_bytes
        reduce = reduce_scatter_s(summed, inner, cluster)
        across = all_reduce_s(summed / inner.size, outer, cluster)
        if tech.overlap_data:
            exposed = _overlapped(forward, gather) - forward
            exposed += _overlapped(backward, gather + reduce) - backward
            # Copies are summed in the last micro-batch only, so this part counts once a step.
            sync = _overlapped(backward, gather + reduce + across) - _overlapped(
                backward, gather + reduce
            )
        else:
            exposed, sync = 2 * gather + reduce, across
        table = table_parameters(self.times.shape, layout)
        ends = 0.5 * all_gather_s(table * wire, inner, cluster)
        ends += 0.5 * reduce_scatter_s(table * formats.reduce_bytes, inner, cluster)
        # The very first gather and the very last sum have nothing to hide behind.
        return passes * (layers * exposed + ends / layout.pp) + layers * sync + gather + reduce

    def _summed_s(self, layout: Layout, *, layers: float, passes: int, backward: float) -> float:
        """Zero 1 and 2, and copies: gradients are summed, updated parameters gathered."""
        formats, tech, cluster = self.times.formats, self.times.techniques, self.cluster
        inner, outer = self._groups(layout)
        elements = stage_parameters(self.times.shape, layout, layers)
        summed = self._trained_share * elements * formats.reduce_bytes
        shared = all_reduce_s(summed / inner.size, outer, cluster)
        if inner.size > 1:
            # Zero 2 keeps gradients sharded and reduces every micro-batch; zero 1 reduces once.
            times = passes if layout.zero == 2 else 1
            reduced = reduce_scatter_s(summed, inner, cluster)
            shared += all_gather_s(elements * formats.compute_bytes, inner, cluster)
        else:
            times, reduced = 1, 0.0
        if not tech.overlap_data:
            return shared + times * reduced
        room = layers * backward
        exposed = _overlapped(room, shared + reduced) - room
        return exposed + (times - 1) * (_overlapped(room, reduced) - room)

    # --- pipeline, optimizer, offload -----------------------------------------------------------

    def _sends_s(self, layout: Layout, *, micro_batch: int, passes: int) -> float:
        if layout.pp == 1:
            return 0.0
        times, tech = self.times, self.times.techniques
        tokens = micro_batch * times.seq_len // layout.cp
        nbytes = tokens * times.shape.hidden_size * times.formats.compute_bytes / layout.tp
        stage_ranks = layout.tp * layout.cp * layout.data_ranks
        # pp is the slowest axis: stages are neighbours in one node only if all of them fit there.
        leaves = stage_ranks * layout.pp > self.cluster.reach
        # The activation goes to the next stage, its gradient comes back.
        one = 2 * send_s(nbytes, leaves_node=leaves, cluster=self.cluster)
        if tech.schedule == "interleaved":  # while other chunks of the rank compute
            return one * tech.virtual_stages * (BUSY * passes + layout.pp - 1)
        return one * (passes + layout.pp - 1)

    def _optimizer_s(self, layout: Layout, layers: float) -> float:
        shards = layout.dp_shard * layout.cp
        held = stage_parameters(self.times.shape, layout, layers) / shards
        formats = self.times.formats
        each = formats.update_bytes
        if layout.world_size == 1 and formats.one_pass_bytes is not None:
            each = formats.one_pass_bytes
        moved = self._trained_share * held * each
        seconds = moved / self.times.rates.bytes_per_s + OPTIMIZER_START_S
        if self.times.techniques.orthogonalizes:
            seconds += self._orthogonalized_s(layout, layers)
        return seconds

    def _orthogonalized_s(self, layout: Layout, layers: float) -> float:
        """Return the time in which the ranks that split matrices each iterate on some, whole."""
        times, shards = self.times, layout.dp_shard * layout.cp
        blocks = layers * block_elements(times.shape, layout) / shards
        elements = self._trained_share * blocks
        flops = elements * NEWTON_SCHULZ_FLOPS * times.shape.hidden_size
        inner, _ = self._groups(layout)
        group = Group(size=inner.size * layout.tp, per_node=inner.per_node * layout.tp)
        sent = elements * times.formats.compute_bytes
        return flops / times.rates.flops_per_s + 2 * all_to_all_s(sent, group, self.cluster)

    def _offload_s(
        self, layout: Layout, *, micro_batch: int, passes: int, recompute: Recompute, work_s: float
    ) -> float:
        """Return the time of moves to the host and back that the work of the step does not hide."""
        times, link = self.times, self.cluster.accelerator.host_link_bytes_per_s
        if times.techniques.offload == "none" or link is None:
            return 0.0
        workload = Workload(
            shape=times.shape, layout=layout, seq_len=times.seq_len, micro_batch=micro_batch,
            global_batch=passes * micro_batch * layout.data_ranks, formats=times.formats,
            recompute=recompute, techniques=times.techniques, trained=times.trained,
        )  # fmt: skip
        # Transfers hide behind the compute of the step as a whole: the prefetch is not modelled.
        exposed_s = max(0.0, overlapped_transfer_bytes(workload) / link - work_s)
        return exposed_s + moved_for_update(workload) / link


def step_terms(workload: Workload, parts: Parts) -> tuple[TimeTerm, ...]:
    """Names and reasons for what is not zero, in the order of ``Parts``."""
    passes = f"{workload.micro_batches} micro-batches of {workload.micro_batch}"
    return terms_of(parts, {"matmul_s": f"{NAMES['matmul_s'][1]}; {passes}"})


def terms_of(parts: Parts, reasons: Mapping[str, str]) -> tuple[TimeTerm, ...]:
    """Return the terms like ``step_terms``.

    Args:
        reasons: In place of the usual ones, by field.
    """
    return tuple(
        TimeTerm(name=NAMES[key][0], seconds=seconds, reason=reasons.get(key, NAMES[key][1]))
        for key, seconds in zip(parts._fields, parts, strict=True)
        if seconds > 0
    )


def _recomputed(recompute: Recompute, forward: Pass, techniques: Techniques, share: float) -> Pass:
    """Return what one block recomputes on average; ``share`` of them have a backward pass."""
    if recompute == "none":
        return Pass(0.0, 0.0, 0.0, 0.0)
    if recompute == "attention":
        return Pass(0.0, share * forward.attention_s, 0.0, share * 0.3 * forward.host_s)
    if recompute == "selective":
        redone = (1 - techniques.selective_products) * forward.matmul_s
        # Attention's output is kept: it costs much to compute and little to hold.
        return Pass(share * redone, 0.0, share * forward.elementwise_s, share * forward.host_s)
    share *= 1.0 if recompute == "full" else 1 / recompute
    # Collectives inside the block run again as well.
    return Pass(*(share * getattr(forward, field) for field in Pass.__slots__))


def _bubble_share(techniques: Techniques) -> float:
    """The bubble against 1F1B's, which is one stage's work for each other stage."""
    match techniques.schedule:
        case "interleaved":
            return 1 / techniques.virtual_stages
        case "zero-bubble" | "zb-v":
            return ZERO_BUBBLE
        case "1f1b" | "gpipe":
            return 1.0
        case _:
            assert_never(techniques.schedule)


def _overlapped(compute_s: float, exchange_s: float) -> float:
    """Time of the two side by side."""
    return max(compute_s + BUSY * min(exchange_s, compute_s), exchange_s)
