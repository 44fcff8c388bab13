"""A row of the table of published runs as a workload on a cluster, or the reason why it is none.

``row_to_case`` goes by rules: it looks at what was run, never at who published it. Its parts are in
``planner_shapes.py`` (the model), ``planner_frameworks.py`` (formats, sharding, techniques) and
``planner_clusters.py`` (devices, networks); here are the layout, the batch and what was measured.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.planner_clusters import accelerator_of, cluster_of
from benchmarks.planner_frameworks import (
    Sharding,
    excluded,
    formats_of,
    frozen_bytes_of,
    has,
    recompute_of,
    sharding_of,
    techniques_of,
    trained_part_of,
    words_of,
)
from benchmarks.planner_shapes import Unknown, shape_of
from benchmarks.planner_table import Row
from shardyard.config.layout import Layout
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.workload import Techniques, Workload

MemoryNumber = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory:
    """A printed peak of one device."""

    bytes: float
    kind: str
    """``mem_kind`` as the table has it."""
    number: MemoryNumber
    """Which of the planner's three numbers it is compared with."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that can be predicted, and what it measured."""

    row: Row
    family: str
    quality: str
    """A, B or C."""
    workload: Workload
    cluster: ClusterHardware
    tokens_per_s_per_device: float | None
    memory: MeasuredMemory | None
    is_oom: bool
    recompute_is_open: bool = False
    """Whether the row does not say what is recomputed: the planner's own choice is then judged."""

    @property
    def group(self) -> tuple[object, ...]:
        """Runs with the same one differ in how the work was laid out, and may be ranked.

        Model (its sizes, not its printed name, which some sources round), sequence length, device
        type and count, and global batch.
        """
        shape, load = self.workload.shape, self.workload
        return (
            self.family, shape.model_type, shape.hidden_size, shape.num_hidden_layers,
            shape.num_attention_heads, shape.intermediate_size, shape.num_experts, load.seq_len,
            self.cluster.accelerator.name, self.cluster.devices, load.global_batch,
        )  # fmt: skip


@dataclass(frozen=True)
class Skipped:
    """A row that is not compared."""

    reason: str


def with_cumulative_features(rows: Sequence[Row]) -> list[Row]:
    """Rows whose task is ``+ Something``, cumulative, with the tasks before them spelled out.

    Ablation tables print one added feature a line; ``+ Compile`` after ``+ Packing`` has both, and
    so has ``LoRA`` at their end.
    """
    answer, before = list[Row](), dict[str, str]()
    for row in rows:
        task = row.raw("task")
        if "cumulative" in row.text("notes"):
            ladder = f"{row.raw('family')} {row.raw('model')} {row.raw('gpu')}"
            if task.startswith("+") or has(task.lower(), r"^q?lora\b"):
                task = f"{before.get(ladder, '')} {task}".strip()
                row = replace(row, cells={**row.cells, "task": task})
            before[ladder] = task
        answer.append(row)
    return answer


def row_to_case(row: Row) -> Case | Skipped:
    """Read one row.

    Returns:
        The case, or why the row cannot be compared; a reason is the same text for all rows that
        share it.
    """
    why = excluded(row)
    if why:
        return Skipped(why)
    rate, memory, is_oom = _rate(row), _memory(row), "oom" in row.text("outcome")
    if not (rate or memory or is_oom):
        return Skipped("nothing measured")
    degrees = _degrees(row)
    if isinstance(degrees, Skipped):
        return degrees
    techniques = techniques_of(row, tp=degrees.tp, pp=degrees.pp)
    batch = _batch(row, degrees, techniques)
    if isinstance(batch, Skipped):
        return batch
    accelerator = accelerator_of(row)
    if isinstance(accelerator, Unknown):
        return Skipped(accelerator.reason)
    cluster = cluster_of(row, accelerator, devices=row.count("num_gpus") or 1)
    shape = shape_of(row, tp=degrees.tp, pp=degrees.pp, seq_len=batch.seq_len)
    recompute = recompute_of(row)
    if isinstance(cluster, Unknown):
        return Skipped(cluster.reason)
    if isinstance(shape, Unknown):
        return Skipped(shape.reason)
    if isinstance(recompute, Unknown):
        return Skipped(recompute.reason)
    if batch.is_guessed and rate and degrees.pp > 1:
        if not (memory or is_oom):
            return Skipped("batch or sequence length not given")
        rate = None  # the bubble is not known; the memory of a full pipeline is
    sharding = sharding_of(row, pp=degrees.pp)
    trained = trained_part_of(row, shape)
    formats = replace(formats_of(row), frozen_bytes=frozen_bytes_of(row, shape))
    workload = Workload(
        shape=shape,
        layout=_layout(degrees, sharding, devices_per_node=cluster.devices_per_node),
        seq_len=batch.seq_len,
        micro_batch=batch.micro_batch,
        global_batch=batch.global_batch,
        formats=formats,
        trained=trained,
        recompute=recompute,
        techniques=techniques,
    )
    if memory and memory.bytes < _least_state_bytes(workload):
        memory = None
        if not (rate or is_oom):
            return Skipped("less memory printed than the states alone take")
    return Case(
        row=row,
        family=row.raw("family") or "unnamed",
        quality=quality if (quality := row.raw("quality").upper()) in ("A", "B") else "C",
        workload=workload,
        cluster=cluster,
        tokens_per_s_per_device=rate,
        memory=memory,
        is_oom=is_oom,
        recompute_is_open=not row.text("act_ckpt") and recompute == "none",
    )


# --- layout


@dataclass(frozen=True, kw_only=True)
class _Degrees:
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int


def _degrees(row: Row) -> _Degrees | Skipped:
    """Degrees whose product is the number of devices; one that is not printed follows.

    An empty cell means 1 unless the row's words speak of that axis; dp takes what remains.
    """
    devices = row.count("num_gpus")
    if not devices:
        return Skipped("number of devices not given")
    words = row.text("sharding", "notes", "framework")
    spoken = {"tp": r"\b(async ?)?tp\b|tensor.?par", "pp": r"\bpp\b|pipeline", "cp": r"\bcp\b"}
    printed = {axis: row.count(axis) for axis in ("dp", "tp", "pp", "cp")}
    open_axes = [axis for axis, word in spoken.items() if not printed[axis] and has(words, word)]
    ep = row.count("ep") or 1
    known = math.prod(value for value in printed.values() if value)
    if len(open_axes) > 1 or (open_axes and not printed["dp"]):
        return Skipped("layout incomplete")
    if (open_axes or not printed["dp"]) and not devices % known:
        printed[open_axes[0] if open_axes else "dp"] = devices // known
    elif printed["dp"] and devices % known == 0 and _lone_gap(printed) and devices != known:
        printed[_lone_gap(printed) or "tp"] = devices // known
    dp, tp, pp, cp = (printed[axis] or 1 for axis in ("dp", "tp", "pp", "cp"))
    if dp * tp * pp * cp * ep == devices and ep > 1:
        dp *= ep  # dp is printed as copies of one expert
    if dp * tp * pp * cp != devices:
        return Skipped("layout does not multiply to the number of devices")
    return _Degrees(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)


def _lone_gap(printed: dict[str, int | None]) -> str | None:
    """The one axis without a degree."""
    gaps = [axis for axis, value in printed.items() if not value]
    return gaps[0] if len(gaps) == 1 else None


def _layout(degrees: _Degrees, sharding: Sharding, *, devices_per_node: int) -> Layout:
    dp = degrees.dp
    if sharding.zero == 0:
        shard = 1
    elif sharding.hybrid:
        shard = math.gcd(max(1, devices_per_node // (degrees.tp * degrees.cp)), dp)
    else:
        shard = dp
    return Layout(
        dp_replicate=dp // shard,
        dp_shard=shard,
        cp=degrees.cp,
        tp=degrees.tp,
        pp=degrees.pp,
        ep=degrees.ep,
        zero=sharding.zero or 1,
    )


# --- batch


@dataclass(frozen=True, kw_only=True)
class _Batch:
    seq_len: int
    micro_batch: int
    global_batch: int
    is_guessed: bool = False
    """Neither the global batch nor the accumulation is printed."""


def _batch(row: Row, degrees: _Degrees, techniques: Techniques) -> _Batch | Skipped:
    """Samples of a pass and of a step; what follows from the others is derived."""
    seq_len, micro = row.count("seq_len"), row.count("micro_batch_size")
    whole, passes = row.count("global_batch_size"), row.count("grad_accum")
    if whole and passes and not micro:
        micro = -(-whole // (degrees.dp * passes))
    micro = micro or _printed_micro_batch(row)
    if not seq_len or not micro:
        return Skipped("batch or sequence length not given")
    if has(row.text("framework"), "torchtitan") and degrees.pp > 1:
        return _torchtitan_batch(
            seq_len, micro, whole, degrees, stages=degrees.pp * techniques.virtual_stages
        )
    # 1F1B holds as many micro-batches as there are stages: enough to fill it, where none is printed
    is_guessed = not whole and not passes
    passes = passes or degrees.pp
    return _Batch(
        seq_len=seq_len,
        micro_batch=min(micro, -(-whole // degrees.dp)) if whole else micro,
        global_batch=whole or micro * passes * degrees.dp,
        is_guessed=is_guessed,
    )


def _torchtitan_batch(
    seq_len: int, local: int, whole: int | None, degrees: _Degrees, *, stages: int
) -> _Batch:
    """torchtitan prints a rank's samples of a step and cuts them into one micro-batch a stage.

    Source: pytorch/torchtitan, parallelisms/pipelining_utils.py, build_pipeline_schedule
    (n_microbatches defaults to the number of all stages).
    """
    return _Batch(
        seq_len=seq_len,
        micro_batch=max(1, local // stages),
        global_batch=whole or local * degrees.dp,
    )


def _printed_micro_batch(row: Row) -> int | None:
    """Some sources print it in words alone: ``micro batch 1``, ``local bs 8``."""
    words = f"{words_of(row)} {row.text('model')}"
    printed = re.search(r"(?:micro|local)[- _]?(?:batch(?: size)?|bs)[ =]*(\d+)", words)
    return int(printed[1]) if printed else None


# --- what was measured


def _least_state_bytes(workload: Workload) -> float:
    """Weights, gradients and optimizer states of one rank, split as far as the layout can.

    A printed peak below it belongs to another run than the row describes.
    """
    layout, formats = workload.layout, workload.formats
    if workload.techniques.offload != "none" or workload.shape.num_experts or workload.trained:
        return 0.0
    shards = layout.dp_shard * layout.cp
    split = {level: shards if layout.zero >= level else 1 for level in (1, 2, 3)}
    each = (
        formats.weight_bytes / split[formats.keeping.splits_weights_from]
        + formats.gradient_bytes / split[2]
        + formats.optimizer_bytes / split[1]
    )
    return each * workload.shape.parameters / (layout.tp * layout.pp)


def _rate(row: Row) -> float | None:
    """Tokens per second and device, printed or from the time of a step."""
    if "oom" in row.text("outcome"):
        return None
    rate = row.quantity("tokens_per_s_per_gpu")
    if rate:
        return rate
    step_s, whole, seq_len = (
        row.quantity("iter_time_s"),
        row.count("global_batch_size"),
        row.count("seq_len"),
    )
    devices = row.count("num_gpus")
    return whole * seq_len / step_s / devices if step_s and whole and seq_len and devices else None


# Frameworks that divide by 2^30 and print "GB": torchtitan/tools/metrics.py, torchtune/training/
# memory.py, Automodel ("mem ... GiB" in its logs), deepspeed/runtime/utils.py (see_memory_usage).
_BINARY = r"torchtitan|torchtune|automodel|deepspeed|nemo"


def _memory(row: Row) -> MeasuredMemory | None:
    """A printed peak: which of three numbers, and in which unit.

    nvidia-smi counts in MiB. Where the words name no number, it is what tensors took.
    """
    printed, kind = row.quantity("mem_gb"), row.raw("mem_kind")
    if not printed:
        return None
    words = kind.lower()
    number: MemoryNumber = "allocated"
    if has(words, r"-smi|driver|device memory"):
        number = "device"
    elif has(words, r"reserved") or (
        has(words + row.text("framework"), r"torchtitan|torchtune") and "alloc" not in words
    ):
        # torchtitan prints max_reserved_gib. torchtune's README does not name its number; its
        # recipes log active, allocated and reserved peaks, and reserved is the one nearest to
        # what a device must have.
        number = "reserved"
    binary = number == "device" or has(words, "gib") or has(row.text("framework"), _BINARY)
    unit = 2**30 if binary else 10**9
    return MeasuredMemory(bytes=printed * unit, kind=kind or "not named", number=number)
