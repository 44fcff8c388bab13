"""Rules for ``auto``: one per setting, each with its reason and its source.

A rule gets the recipe as resolved so far and the facts, and returns (value, reason). One that
lacks a fact raises ``NotYetResolved``, whose text says when it will be known. ``config/resolve.py``
runs them; the degrees of the mesh come from ``config/rules/layout.py``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Protocol

from shardyard.config.cluster_choice import chosen_cluster
from shardyard.config.formulas import (
    best_attention,
    compute_on,
    dropout_of,
    logits_of,
    lr_of,
    output_of,
    reason_of_checkpoints,
    reason_of_peer_snapshots,
    reason_of_snapshots,
    seq_len_of,
    step_tokens_of,
    steps_between_snapshots,
    waits_for_logits,
)
from shardyard.config.model_sizes import ModelSizes, Sizes
from shardyard.config.optimizers import optimizer_of
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.rules.layout import SPLIT_BACKWARD
from shardyard.config.rules.model import falls_back_to_eager
from shardyard.config.rules.timeouts import hang_min_s, hang_slow_s, restart_timeout_s
from shardyard.config.run_length import Length, batch_of_whole_steps, samples_of_epochs
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row
from shardyard.config.tokenizer_kinds import TOKENIZER_KINDS
from shardyard.families.images.network import ImageNetwork
from shardyard.families.shape import ModelShape
from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.machine import Machine
from shardyard.units import format_bytes

_MICRO_BATCH_TOKENS = 4096
"""Tokens of one forward pass of a small model: enough to keep a device busy (ours)."""

_ADAPTERS = "adapters: as QLoRA's at 7 B and 13 B (arXiv:2305.14314, table 9)"

_OF_TEXT = "has no settings for images"

_FINE_TUNING = "loaded weights: as in Llama 2's fine-tuning (arXiv:2307.09288, section 3.1)"

_PAIRS = "pairs of answers: the default of TRL's DPOTrainer"
_ADAPTERS_OF_PAIRS = "adapters on pairs of answers: as the documentation of TRL's DPOTrainer"
_REWARD = "reward model: as TRL's example of it (examples/scripts/reward_modeling.py)"


class NotYetResolved(Exception):  # noqa: N818 - not an error: a rule waits for its fact
    """A rule lacks a fact; the text says when it will be known."""


Model = ModelShape | ImageNetwork
Recompute = Literal["none", "selective", "full"] | int


class MemoryFitter(Protocol):
    """The planner's word on what fits a device, with its reason; None: there is no device whose
    memory is known."""

    def micro_batch(
        self, recipe: Recipe, model: Model, sizes: Sequence[int]
    ) -> tuple[int, str] | None:
        """The largest of some micro-batches, smallest first, that fits."""

    def recompute(
        self, recipe: Recipe, model: Model, modes: Sequence[Recompute], *, micro_batch: int
    ) -> tuple[Recompute, str] | None:
        """The first of some modes that fits with something to spare; of none the last."""

    def without_snapshots(self, recipe: Recipe, model: Model) -> str:
        """Why snapshots have no room in host memory; empty: they have, or that is not known."""


@dataclass(frozen=True, kw_only=True)
class ResolveContext:
    """Facts that rules read next to the recipe; None where not known yet."""

    name: str = "run"
    """Name of the recipe's file."""
    shape: ModelShape | None = None
    sizes: ModelSizes | None = None
    """Sizes of a model of no family, by its config.json."""
    network: ImageNetwork | None = None
    model_has_tokenizer: bool | None = False
    """None: its folder has not been opened."""
    machine: Machine | None = None
    """This machine, or one of the cluster's."""
    data: DatasetMetadata | None = None
    previous: Resolved | None = None
    """The attempt that a resume continues."""
    fitting: MemoryFitter | None = None
    """The planner's word (``planner/fit.py``)."""


_MODES: tuple[Recompute, ...] = ("none", "selective", 4, 3, 2, "full")
"""Recompute modes, from the fastest to the one that keeps least."""
_IMAGES = 256
"""Images of a step, at most an eighth of it a forward pass; as ResNet (arXiv:1706.02677)."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A recipe resolved so far, with facts; reading what is missing raises ``NotYetResolved``."""

    recipe: Recipe
    context: ResolveContext

    @property
    def shape(self) -> ModelShape:
        if self.context.shape is None:
            raise NotYetResolved("known once the model's shape is")
        return self.context.shape

    @property
    def sizes(self) -> Sizes:
        """Sizes of a family's shape, or of a model of no family."""
        return self.context.sizes or self.shape

    @property
    def network(self) -> ImageNetwork:
        if self.context.network is None:
            raise NotYetResolved("known once the network is")
        return self.context.network

    @property
    def reads_images(self) -> bool:
        return task_row(self.recipe.task.name).reads == "images"

    @property
    def machine(self) -> Machine:
        if self.context.machine is None:
            raise NotYetResolved("known once training starts on a machine")
        return self.context.machine

    @property
    def cluster(self) -> ClusterHardware | None:
        """Cluster that cluster.instance or cluster.file names; None: this machine."""
        return chosen_cluster(self.recipe.cluster)

    @property
    def seq_len(self) -> int:
        return _require_resolved(self.recipe.data.seq_len, "data.seq_len")

    @property
    def global_batch(self) -> int:
        return _require_resolved(self.recipe.optim.global_batch, "optim.global_batch")

    @property
    def data_ranks(self) -> int:
        parallel = self.recipe.parallel
        if parallel.dp_replicate == "auto" or parallel.dp_shard == "auto":
            raise NotYetResolved("known once the number of devices is")
        return parallel.dp_replicate * parallel.dp_shard

    @property
    def train_samples(self) -> int:
        if self.context.data is None:
            raise NotYetResolved("known once the data is prepared")
        return self.context.data.num_samples("train", self.seq_len)


Rule = Callable[[Draft], tuple[Any, str]]


def steps_of(draft: Draft) -> tuple[int, str]:
    """Optimizer steps of the whole run, at least one, and where they come from.

    Raises:
        NotYetResolved: The length is in another unit whose size in steps is not known yet.
    """
    run = draft.recipe.run
    if run.steps is not None:
        return run.steps, "run.steps"
    if run.samples is not None:
        length = Length(requested=Fraction(run.samples), batch=draft.global_batch)
        return length.steps, length.words(f"{run.samples:,} samples")
    if run.tokens is not None:
        length = Length(requested=Fraction(run.tokens, draft.seq_len), batch=draft.global_batch)
        step_tokens = draft.global_batch * draft.seq_len
        why = f"{run.tokens:,} tokens of {step_tokens:,} a step"
        if length.factor != 1:
            why += f": {length.steps:,} steps train {length.steps * step_tokens:,}"
        return length.steps, why
    asked = samples_of_epochs(run.epochs, draft.train_samples)
    length = Length(requested=asked, batch=draft.global_batch)
    why = f"{run.epochs:g} epochs" if run.epochs else "one epoch, as no length was given"
    return length.steps, length.words(why)


def _name(draft: Draft) -> tuple[str, str]:
    if draft.context.previous is not None:
        return str(draft.context.previous.recipe.run.name), "as the run began"
    letters = (c if c.isascii() and c.isalnum() else "-" for c in draft.context.name.lower())
    words = [word for word in "".join(letters).split("-") if word]
    return "-".join(words)[:40].strip("-") or "run", "the recipe's file name"


def _weights(draft: Draft) -> tuple[str, str]:
    if draft.recipe.model.path is None and draft.recipe.model.hub is None:
        if draft.recipe.model.module is not None:
            return "random", "the function that makes the model gives it its weights"
        return "random", "a preset is a shape without weights"
    return "load", "the model comes with weights"


def _dropout(draft: Draft) -> tuple[float, str]:
    if draft.reads_images:
        return float(draft.network.dropout), "before the head, as the network was published"
    if draft.recipe.model.module is not None:
        return 0.0, "the model of your own drops what it drops"
    return dropout_of(draft.shape)


def _tokenizer(draft: Draft) -> tuple[str, str]:
    if draft.reads_images:
        return "none", _OF_TEXT
    own = draft.recipe.model.path or draft.recipe.model.hub
    if own and draft.context.model_has_tokenizer is None:
        raise NotYetResolved("known once the model's folder is opened")
    if own and draft.context.model_has_tokenizer:
        return own, "the model's own"
    kind = TOKENIZER_KINDS[draft.recipe.data.tokenizer_kind].words
    return "train", f"the model brings none: {kind}, trained on the corpus"


def _device(draft: Draft) -> tuple[str, str]:
    cluster = draft.cluster
    if cluster is not None:
        return cluster.accelerator.device, f"{cluster.name} has {cluster.accelerator.name}"
    machine = draft.machine
    return machine.device, f"the machine has {machine.count} x {machine.name}"


def _devices(draft: Draft) -> tuple[int, str]:
    if draft.recipe.cluster.device == "cpu":
        return 1, "one CPU process uses all cores; more are your choice"
    cluster = draft.cluster
    if cluster is not None:
        return cluster.devices_per_node, f"all of {cluster.name}"
    return draft.machine.count, f"all {draft.machine.name} of the machine"


def _nodes(draft: Draft) -> tuple[int, str]:
    return draft.recipe.cluster.nodes, "cluster.nodes: a fixed size"


def _hang_min_s(draft: Draft) -> tuple[float, str]:
    reason = "above what holds up a usual step; at most half of elastic.collective_timeout_s"
    return hang_min_s(draft.recipe.elastic), reason


def _hang_slow_s(draft: Draft) -> tuple[float, str]:
    reason = "0.8 of elastic.collective_timeout_s: who hangs is named before that"
    return hang_slow_s(draft.recipe.elastic), reason


def _attention(draft: Draft) -> tuple[str, str]:
    recipe = draft.recipe
    if "auto" in (recipe.cluster.device, recipe.precision.compute):
        raise NotYetResolved("known once cluster.device and precision.compute are")
    if draft.reads_images or recipe.model.module is not None or recipe.cluster.device == "cpu":
        return "sdpa", "torch chooses by device, format, sizes and mask"
    _require_resolved(recipe.data.seq_len, "data.seq_len")
    return best_attention(recipe, draft.shape)


def _compile(draft: Draft) -> tuple[bool, str]:
    device, parallel = draft.recipe.cluster.device, draft.recipe.parallel
    if device == "auto":
        raise NotYetResolved("known once cluster.device is")
    if device == "cpu":
        return False, "a CPU gains little, and compiles for minutes"
    if draft.reads_images or draft.recipe.model.module is not None:
        return False, "tried only with language models of known families"
    family = draft.shape.family
    if not family.is_one_graph:
        return False, f"a block of {family.model_type} cannot be compiled as one graph"
    if parallel.tp > 1 or parallel.cp > 1:
        return False, "blocks that ask other ranks cannot be compiled as one graph"
    if parallel.pp > 1 and parallel.schedule in SPLIT_BACKWARD:
        return False, f"parallel.schedule={parallel.schedule} splits backward passes"
    if draft.recipe.precision.reduce == "exact":
        return False, "precision.reduce=exact: compiled blocks may differ from process to process"
    return True, "each block is one graph; the first step takes longer"


def _standby_workers(draft: Draft) -> tuple[bool, str]:
    compiles = draft.recipe.model.compile
    if compiles == "auto":
        raise NotYetResolved("known once model.compile is")
    if not compiles:
        return (
            False,
            "without a compiler it spares parts of a second, and takes memory all the time",
        )
    if draft.recipe.elastic.max_restarts == 0:
        return False, "elastic.max_restarts=0: no restarts"
    return True, "model.compile: a new process takes seconds to get its compiler ready"


def _snapshot_every(draft: Draft) -> tuple[int | str | None, str]:
    fitting = draft.context.fitting
    model = draft.context.network if draft.reads_images else draft.context.shape
    lacking = ""
    if fitting is not None and model is not None and steps_between_snapshots(draft.recipe):
        lacking = fitting.without_snapshots(draft.recipe, model)
    return reason_of_snapshots(draft.recipe, lacking)


def _restart_timeout(draft: Draft) -> tuple[float, str]:
    return restart_timeout_s(draft.recipe.elastic), "ranks lose patience first; nodes come after"


def _compute(draft: Draft) -> tuple[str, str]:
    if draft.recipe.cluster.device == "auto":
        raise NotYetResolved("known once cluster.device is")
    return compute_on(draft.recipe.cluster.device, without_bf16=_device_without_bf16(draft))


def _device_without_bf16(draft: Draft) -> str | None:
    """The accelerator of the recipe's machines, if it computes in no bf16."""
    cluster, machine = draft.cluster, draft.context.machine
    if cluster is not None:
        return None if cluster.accelerator.has_bf16 else cluster.accelerator.name
    return machine.name if machine is not None and not machine.has_bf16 else None


def _output(draft: Draft) -> tuple[str, str]:
    if draft.recipe.precision.compute == "auto":
        raise NotYetResolved("known once precision.compute is")
    return output_of(draft.recipe.precision.compute)


def _image_size(draft: Draft) -> tuple[int, str]:
    if not draft.reads_images:
        raise NotYetResolved("has no settings for text")
    return draft.network.size, "as the network was published with"


def _drop_path(draft: Draft) -> tuple[float, str]:
    if not draft.reads_images:
        raise NotYetResolved("has no settings for text")
    return float(draft.network.drop_path), "as the network was published with"


def _batch_norm_momentum(draft: Draft) -> tuple[float, str]:
    if not draft.reads_images:
        raise NotYetResolved("has no settings for text")
    momentum = draft.network.batch_norm_momentum
    if momentum is None:
        raise NotYetResolved("the network has no batch normalisation")
    return momentum, "as the network was published with"


def _seq_len(draft: Draft) -> tuple[int, str]:
    if draft.reads_images:
        return 1, "a sample is one image"
    sizes = draft.context.sizes
    if sizes is not None and not sizes.has_limit:
        return sizes.max_position_embeddings, "as BLOOM, Falcon and Mamba were trained"
    return seq_len_of(draft.sizes)


def _workers(draft: Draft) -> tuple[int, str]:
    return draft.machine.cores, "the cores of the machine"


_MOST_MODULE_WORKERS = 4
"""Each process has a copy of the dataset, so more of them only on request."""


def _module_workers(draft: Draft) -> tuple[int, str]:
    cores, devices = draft.machine.cores, draft.recipe.cluster.devices
    assert isinstance(devices, int), "the row before this"
    share = cores // devices
    return max(1, min(_MOST_MODULE_WORKERS, share)), f"a rank's share of {cores} cores, at most 4"


def _bos(draft: Draft) -> tuple[bool, str]:
    if draft.reads_images:
        return False, _OF_TEXT
    data, tokenizer = draft.context.data, draft.recipe.data.tokenizer
    if data is None:
        raise NotYetResolved("known once the data is prepared")
    if data.bos_token is not None:
        return (
            True,
            f"the tokenizer puts {data.bos_token} before a text, and so did its model's data",
        )
    if tokenizer == "train":
        return False, "trained here: the end of one document is where the next one begins"
    return False, "the tokenizer puts no token before a text"


def _global_batch(draft: Draft) -> tuple[int, str]:
    cluster, per_device = draft.recipe.cluster, draft.recipe.optim.batch_per_device
    if per_device is not None:
        devices = cluster.nodes * _require_resolved(cluster.devices, "cluster.devices")
        return per_device * devices, f"{per_device:,} for each of {devices:,} devices"
    if draft.reads_images:
        batch, why = _IMAGES, "as ResNet was trained (arXiv:1706.02677)"
    elif draft.recipe.model.weights == "load":
        batch, why = 64, _FINE_TUNING
    else:
        tokens, source = step_tokens_of(draft.sizes.parameters)
        batch, why = max(1, tokens // draft.seq_len), f"{tokens:,} tokens a step: {source}"
    if draft.context.data is not None and 0 < draft.train_samples < batch:
        batch, why = draft.train_samples, "all samples of the data set"
    ranks = 1 if draft.recipe.parallel.dp_shard == "auto" else draft.data_ranks
    samples = None if draft.context.data is None else draft.train_samples
    smaller = batch_of_whole_steps(draft.recipe, batch, ranks=ranks, train_samples=samples)
    if smaller != batch:
        batch, why = smaller, f"{batch} ({why}), made smaller for a length in whole steps"
    if draft.recipe.parallel.dp_shard != "auto" and batch < draft.data_ranks:
        batch, why = draft.data_ranks, "one sample for each data-parallel rank"
    return batch, why


def _recompute(draft: Draft) -> tuple[Recompute, str]:
    recipe, asked = draft.recipe, draft.recipe.optim.micro_batch
    modes: tuple[Recompute, ...] = _MODES
    if recipe.model.module is not None:
        return "none", "no plan knows what a model of your own keeps"
    if draft.reads_images:
        modes = ("none", "full")
    elif recipe.model.compile is True and falls_back_to_eager(
        "full", tp=recipe.parallel.tp, shape=draft.shape
    ):
        return "none", "model.compile=true: what is recomputed would not be compiled"
    elif recipe.precision.compute == "fp8":
        modes = _MODES[1:]  # casts are cheap to make again, and need not be kept
    if (recipe.elastic.min_nodes, recipe.elastic.max_nodes) != (recipe.cluster.nodes,) * 2:
        return "full", "nodes may come and go, and fewer hold more each: least memory"
    if draft.context.fitting is not None:
        found = draft.context.fitting.recompute(
            recipe,
            draft.network if draft.reads_images else draft.shape,
            modes,
            micro_batch=_micro_batches(draft)[0] if asked == "auto" else asked,
        )
        if found:
            return found
    return modes[0], "the memory of no device is known"


def _micro_batch(draft: Draft) -> tuple[int, str]:
    previous, elastic = draft.context.previous, draft.recipe.elastic
    if draft.reads_images and previous is not None:  # norms are over it, and mixing is within it
        before = previous.recipe.optim.micro_batch
        assert isinstance(before, int)  # resolved
        return before, "as the run began"
    sizes = _micro_batches(draft)
    changes_size = (elastic.min_nodes, elastic.max_nodes) != (draft.recipe.cluster.nodes,) * 2
    has_inside = draft.recipe.model.module is None
    if draft.context.fitting is not None and not changes_size and has_inside:
        model = draft.network if draft.reads_images else draft.shape
        if found := draft.context.fitting.micro_batch(draft.recipe, model, sizes):
            return found
    if draft.reads_images:
        most, why = _IMAGES // 8, f"each rank's share of a step, at most {_IMAGES // 8}"
    elif draft.sizes.parameters >= 1e9:
        most, why = 1, "least memory; one sample of a large model fills a device"
    else:
        most = _MICRO_BATCH_TOKENS // draft.seq_len
        why = (
            f"power of two within {_MICRO_BATCH_TOKENS:,} tokens that leaves no rank or stage idle"
        )
    return max(size for size in sizes if size <= max(most, sizes[0])), why


def _micro_batches(draft: Draft) -> list[int]:
    """Return the micro-batches to choose from, smallest first.

    They are powers of two that leave no rank or stage idle. For images, a rank's whole share of a
    step is one too; with norms over the step, it is the only one.
    """
    batch, ranks = draft.global_batch, draft.data_ranks
    if draft.reads_images:
        share = -(-batch // ranks)
        if draft.recipe.model.batch_norm == "step":
            return [share]
        return sorted({share, *(1 << bit for bit in range(share.bit_length()))})
    sizes, least = [1], _samples_per_rank(batch, micro_batch=1, ranks=ranks)
    while (
        samples := _samples_per_rank(batch, micro_batch=2 * sizes[-1], ranks=ranks)
    ) == least and samples >= 2 * sizes[-1] * draft.recipe.parallel.pp:
        sizes.append(2 * sizes[-1])
    return sizes


def _samples_per_rank(global_batch: int, *, micro_batch: int, ranks: int) -> int:
    """Samples one rank computes in a step, weightless ones included."""
    return math.ceil(math.ceil(global_batch / micro_batch) / ranks) * micro_batch


def _loss_chunk(draft: Draft) -> tuple[int | str, str]:
    recipe = draft.recipe
    if draft.reads_images:
        return "none", _OF_TEXT
    if recipe.model.module is not None:
        return "none", "the function of model.module makes its own loss"
    if recipe.task.loss is not None:
        return "none", "task.loss gets all outputs of a batch"
    if task_row(recipe.task.name).labelled is not None:
        return "none", "logits of labels take little"
    if task_row(recipe.task.name).compares_answers:
        return "none", "the loss of a pair is of the sums over both answers"
    if waits_for_logits(recipe.parallel.schedule, pp=recipe.parallel.pp):
        return "none", "with gpipe a gradient of the head would wait for each micro-batch"
    if recipe.precision.compute == "auto":
        raise NotYetResolved("known once precision.compute is")
    micro_batch = _require_resolved(recipe.optim.micro_batch, "optim.micro_batch")
    logits = logits_of(
        draft.shape,
        tokens=micro_batch * draft.seq_len // recipe.parallel.cp,
        tp=recipe.parallel.tp,
        compute_bytes=4 if recipe.precision.compute == "fp32" else 2,
    )
    said = f"logits of {logits.tokens:,} tokens take {format_bytes(logits.whole_bytes)}"
    if logits.chunk is None:
        return "none", f"{said}: chunks would save less than 1 GiB"
    chunked = format_bytes(logits.chunked_bytes)
    return logits.chunk, f"{said}; in chunks, with what these take, {chunked}"


def _lr(draft: Draft) -> tuple[float, str]:
    # whose rate is not known is refused without one; a rate of another optimizer would be a guess
    assert optimizer_of(draft.recipe.optim).knows_lr, draft.recipe.optim.name
    row, has_adapters = task_row(draft.recipe.task.name), draft.recipe.model.lora.rank is not None
    is_trained = draft.recipe.model.weights == "load" or draft.recipe.run.from_ is not None
    if row.compares_answers and is_trained:
        if row.gives_reward:
            return 1e-5, _REWARD
        return (1e-5, _ADAPTERS_OF_PAIRS) if has_adapters else (1e-6, _PAIRS)
    if has_adapters:
        return 2e-4, _ADAPTERS
    if draft.recipe.model.weights == "load":
        return 2e-5, _FINE_TUNING
    return lr_of(draft.sizes)


def _weight_decay(draft: Draft) -> tuple[float, str]:
    row = optimizer_of(draft.recipe.optim)
    return row.weight_decay, row.decay_reason


def _warmup_steps(draft: Draft) -> tuple[int, str]:
    optim = draft.recipe.optim
    if optim.schedule_module is not None:
        return 0, "optim.schedule_module decides all factors"
    if optim.warmup_epochs is not None:
        samples = Fraction(str(optim.warmup_epochs)) * draft.train_samples
        return round(samples / draft.global_batch), f"{optim.warmup_epochs:g} epochs"
    steps, _ = steps_of(draft)
    share = optim.warmup_share
    if share is not None:
        return round(share * steps), f"{share:g} of the run"
    return min(2000, steps // 10), "a tenth of the run, at most 2,000 as in Llama 2"


def _decay_steps(draft: Draft) -> tuple[int, str]:
    steps, _ = steps_of(draft)
    warmup = _require_resolved(draft.recipe.optim.warmup_steps, "optim.warmup_steps")
    if warmup >= steps:
        return warmup + 1, "right after the warm-up, which outlasts the run"
    return steps, "the length of the run"


def _require_resolved(value: int | str, setting: str) -> int:
    if isinstance(value, str):
        raise NotYetResolved(f"known once {setting} is")
    return value


BEFORE_LAYOUT: dict[str, Rule] = {
    "run.name": _name,
    "model.weights": _weights,
    "model.dropout": _dropout,
    "model.drop_path": _drop_path,
    "model.batch_norm_momentum": _batch_norm_momentum,
    "data.tokenizer": _tokenizer,
    "data.bos": _bos,
    "data.seq_len": _seq_len,
    "data.images.size": _image_size,
    "data.workers": _workers,
    "cluster.device": _device,
    "cluster.devices": _devices,
    "data.module_workers": _module_workers,
    "elastic.restart_timeout_s": _restart_timeout,
    "elastic.min_nodes": _nodes,
    "elastic.max_nodes": _nodes,
    "elastic.hang_min_s": _hang_min_s,
    "elastic.hang_slow_s": _hang_slow_s,
    "precision.compute": _compute,
    "precision.output": _output,
    "model.attention": _attention,
    "model.compile": _compile,
    "elastic.parked": _standby_workers,
}
"""Setting -> rule, in the order they run; then the layout is resolved."""

AFTER_LAYOUT: dict[str, Rule] = {
    "optim.global_batch": _global_batch,
    "memory.recompute": _recompute,
    "optim.micro_batch": _micro_batch,
    "memory.loss_chunk": _loss_chunk,
    "optim.lr": _lr,
    "optim.weight_decay": _weight_decay,
    "optim.warmup_steps": _warmup_steps,
    "optim.decay_steps": _decay_steps,
    "checkpoint.every": lambda draft: reason_of_checkpoints(draft.recipe),
    "elastic.snapshot_every": _snapshot_every,
    "elastic.snapshot_neighbour": lambda draft: reason_of_peer_snapshots(draft.recipe),
}
"""Rules that may need the number of data-parallel ranks."""

OPEN_WORDS = {"checkpoint.every": "elastic", "elastic.snapshot_every": "elastic"}
"""Setting -> value that its rule replaces, where that is not ``auto``."""
