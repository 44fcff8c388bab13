"""Formulas that several parts share: intervals, copies, logits, batches, masks, model defaults.

Model defaults are values of ``auto`` by a model's sizes and a kind of device, each with its
reason: the same in a recipe (``config/auto.py``) and in a script (``library/supported.py``).

The interval of saves loses the least time: their cost against what a failure loses.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, assert_never

from shardyard.config.data_choices import MASKED_SHARE
from shardyard.config.layout import Layout
from shardyard.config.model_sizes import Sizes
from shardyard.config.schema.base import Auto
from shardyard.config.schema.recipe import Optim, Recipe
from shardyard.errors import Problem
from shardyard.families.shape import ModelShape

ELASTIC_MTBF_S = 86_400.0
"""Most time between losses on which an elastic run chooses its intervals. Assumed, once a day: its
nodes come and go for more reasons than the failures that were published (reclaims, other jobs)."""


def young_interval_s(*, blocking_s: float, mtbf_s: float) -> float:
    """Interval between saves that loses the least time, to first order.

    Source: Young 1974, doi:10.1145/361147.361115.
    """
    return math.sqrt(2 * blocking_s * mtbf_s)


def daly_interval_s(*, blocking_s: float, mtbf_s: float) -> float:
    """Compute the interval as ``young_interval_s``, of a higher order.

    It is training time, without the save itself.

    Args:
        blocking_s: Seconds that training waits for a save, without an asynchronous one's write.

    Source: Daly 2006, doi:10.1016/j.future.2004.11.016.
    """
    if blocking_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = blocking_s / (2 * mtbf_s)
    young_s = young_interval_s(blocking_s=blocking_s, mtbf_s=mtbf_s)
    return young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocking_s


def best_every(*, step_s: float, blocked_s: float, counts_s: float, mtbf_s: float) -> int:
    """Whole steps between two saves, or two snapshots, that lose the least time.

    Rounding the best time to whole steps stays the optimum to first order, also where step times
    vary (hal-02514107).

    Args:
        counts_s: From the copy until it counts: the next comes no earlier.
    """
    wanted_s = daly_interval_s(blocking_s=blocked_s, mtbf_s=mtbf_s)
    return max(1, math.ceil(counts_s / step_s), round(wanted_s / step_s))


# Where one rank trains without sharding, in a copy of its weights: one rule for all who ask.
#
# The training half does it (``parallel/low_precision.py``), the planner predicts it.

TRIED_ON = ("cpu",)
"""Kinds of devices on which it has run.

On others it waits for its measurement (``benchmarks/gpu``, variants ``copies``): an unmeasured
device does not get it by default.
"""


def holds_compute_copies(recipe: Recipe, layout: Layout, *, anywhere: bool = False) -> bool:
    """Whether a resolved recipe is trained so; a model must also be one that can be.

    Everything else is sharded over its one rank as it would be over more: fp16, fp8 with a scale a
    row (both products of a weight then want other numbers), gradients that are summed in another
    format than fp32, adapters, frozen weights, and what is moved to the host.

    Args:
        anywhere: Also on devices on which it has not run: to try it.
    """
    return layout.world_size == 1 and allows_compute_copies(recipe, anywhere=anywhere)


def allows_compute_copies(recipe: Recipe, *, anywhere: bool = False) -> bool:
    """Check whether a recipe may train in weight copies, in any layout."""
    precision, model = recipe.precision, recipe.model
    return (
        (anywhere or recipe.cluster.device in TRIED_ON)
        and (
            precision.compute == "bf16"
            or (precision.compute == "fp8" and precision.fp8_scaling == "tensorwise")
        )
        and precision.reduce == "fp32"
        and recipe.memory.offload == "none"
        and model.lora.rank is None
        and not model.frozen
    )


# How many tokens' logits exist at once where ``memory.loss_chunk`` is auto: one rule, for a recipe
# and for the layouts that the planner tries.

LOSS_CHUNK = 2048
"""Tokens of a chunk."""
_WORTH_BYTES = 2**30


class Logits(NamedTuple):
    """Memory of a micro-batch's logits on one rank."""

    tokens: int
    whole_bytes: int
    """All at once."""
    chunked_bytes: int
    """Bytes in chunks, with what these take in addition."""

    @property
    def chunk(self) -> int | None:
        """Tokens at once; None: all."""
        saved_bytes = self.whole_bytes - self.chunked_bytes
        return None if saved_bytes < _WORTH_BYTES else LOSS_CHUNK


def logits_of(shape: ModelShape, *, tokens: int, tp: int, compute_bytes: float) -> Logits:
    """The logits of a micro-batch.

    Args:
        tokens: Of the micro-batch on one rank of cp.
        compute_bytes: Of a number in the computing format.
    """
    entries = shape.logits_width // tp
    if not shape.is_causal:
        tokens = round(MASKED_SHARE * tokens)
    per_logit = 4 + (4 if compute_bytes == 4 else 2)  # and an fp32 copy
    # the head's gradient in fp32, and the buffer that the head was gathered in
    beside = 6 * entries * shape.hidden_size
    return Logits(tokens, tokens * entries * per_logit, LOSS_CHUNK * entries * per_logit + beside)


def waits_for_logits(schedule: str, *, pp: int) -> bool:
    """Whether a gradient of the head would wait for each micro-batch."""
    return pp > 1 and schedule == "gpipe"


# The samples of a step, and the learning rate that goes with them.
#
# Either the global batch is held (``optim.global_batch``), or the batch of a device is
# (``optim.batch_per_device``): then the step grows and shrinks with the devices. A run's length,
# its warm-up and its decay are counted in steps of the batch that it began with, which
# ``optim.global_batch`` keeps: in samples, so that a change of size moves none of them.


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch on so many devices."""

    samples: int
    """Samples of a step now."""
    first: int
    """Samples of a step when the run began."""
    lr_factor: float
    """Factor of the schedule's learning rate."""

    @staticmethod
    def of(optim: Optim, *, devices: int) -> "Batch":
        """By resolved settings."""
        samples, first = step_samples(optim, devices=devices), first_batch(optim)
        ratio = samples / (optim.lr_batch or first)
        match optim.lr_scaling:
            case "none":
                factor = 1.0
            case "linear":  # Goyal et al. 2017, arXiv:1706.02677
                factor = ratio
            case "sqrt":  # Krizhevsky 2014, arXiv:1404.5997
                factor = math.sqrt(ratio)
            case _:
                assert_never(optim.lr_scaling)
        return Batch(samples=samples, first=first, lr_factor=factor)


def step_samples(optim: Optim, *, devices: int) -> int:
    """Samples of one step on so many devices, by resolved settings."""
    if optim.batch_per_device is not None:
        return optim.batch_per_device * devices
    return first_batch(optim)


def first_batch(optim: Optim) -> int:
    """Samples of a step when the run began, by resolved settings."""
    assert isinstance(optim.global_batch, int)
    return optim.global_batch


def steps_on(optim: Optim, steps: int, *, devices: int) -> int:
    """Return the steps on so many devices that train ``steps`` of the first batch."""
    return -(-steps * first_batch(optim) // step_samples(optim, devices=devices))


def batch_or_none(optim: Optim, *, devices: int | None) -> int | None:
    """Samples of one step as far as the settings say it; None: not yet.

    Args:
        devices: All that train; None: not known yet.
    """
    if optim.batch_per_device is not None:
        return None if devices is None else optim.batch_per_device * devices
    return None if optim.global_batch == "auto" else optim.global_batch


# Which runs take snapshots, and how many copies in host memory these keep, under which labels.

STEPS_OF_A_FIXED_SIZE = 500
"""Between checkpoints of a run that keeps its number of nodes."""

SLOTS = 3
"""Snapshot slots of one rank.

A save may hold one for long while it writes its files, and the other two take turns. A worker
that is killed in the middle of a copy then leaves the snapshot before.
"""

SLOTS_FOR_NEIGHBOUR = 2
"""For each rank of the node before: one that is whole, while the next one comes."""

SENT = "snapshot_sent"
"""Label of the memory that says how far a node's neighbour has its snapshots."""
ELSEWHERE = "snapshot_elsewhere"
"""Label of the memory that says what agents of other nodes hold."""


def is_elastic(recipe: Recipe) -> bool:
    """Whether the run may change its number of nodes."""
    fixed, elastic = recipe.cluster.nodes, recipe.elastic
    least = fixed if elastic.min_nodes == "auto" else elastic.min_nodes
    most = fixed if elastic.max_nodes == "auto" else elastic.max_nodes
    return least < most


def steps_between_snapshots(recipe: Recipe) -> int | Auto | None:
    """Return steps between snapshots: the recipe's, else auto if elastic, None for a fixed size."""
    every = recipe.elastic.snapshot_every
    if every == "elastic":
        return "auto" if is_elastic(recipe) else None
    return every


def steps_between_checkpoints(recipe: Recipe) -> int | Auto:
    """The same of checkpoints."""
    every = recipe.checkpoint.every
    if every == "elastic":
        return "auto" if is_elastic(recipe) else STEPS_OF_A_FIXED_SIZE
    return every


def reason_of_snapshots(recipe: Recipe, shortage: str) -> tuple[int | str | None, str]:
    """Return steps between snapshots where the size of the run decides, and the reason.

    Args:
        shortage: Resource that a node has too little of for them; empty: none.
    """
    every = steps_between_snapshots(recipe)
    if every is None:
        return None, f"{_size(recipe)}: a fixed size"
    if shortage:
        return None, f"{shortage}: checkpoints only"
    return every, f"{_size(recipe)}: the others continue from memory when a node is lost"


def reason_of_checkpoints(recipe: Recipe) -> tuple[int | str, str]:
    """The same of checkpoints."""
    every = steps_between_checkpoints(recipe)
    if every == "auto":
        return every, f"{_size(recipe)}: by time, as far apart as loses the least (Daly)"
    return every, f"{_size(recipe)}: a fixed size"


def reason_of_peer_snapshots(recipe: Recipe) -> tuple[bool, str]:
    """Whether a node keeps the snapshots of the one before, where the recipe leaves it open."""
    if recipe.elastic.snapshot_every is None:
        return False, "elastic.snapshot_every=null: without snapshots"
    if recipe.elastic.max_nodes == 1:
        return False, "one node has no neighbour"
    return True, "a lost node takes its own memory with it"


def _size(recipe: Recipe) -> str:
    return f"min_nodes={recipe.elastic.min_nodes}, max_nodes={recipe.elastic.max_nodes}"


def snapshots_enabled(recipe: Recipe) -> bool:
    """Whether the run takes any, as far as the recipe says."""
    return steps_between_snapshots(recipe) is not None


def slot_labels(local_rank: int) -> list[str]:
    """Return the label of each slot's memory of a rank on its node."""
    return [f"snapshot_{local_rank}_{slot}" for slot in range(SLOTS)]


def peer_labels(local_rank: int) -> list[str]:
    """The same of slots for a rank of the node before, by its local number there."""
    return [f"snapshot_neighbour_{local_rank}_{slot}" for slot in range(SLOTS_FOR_NEIGHBOUR)]


def snapshot_labels(recipe: Recipe) -> list[str]:
    """List all memory labels that an agent owns for snapshots on its node; empty without them."""
    elastic, devices = recipe.elastic, recipe.cluster.devices
    if not snapshots_enabled(recipe):
        return []
    assert isinstance(devices, int)
    own = [label for local in range(devices) for label in slot_labels(local)]
    if elastic.snapshot_neighbour is not True:
        return own
    kept = [label for local in range(devices) for label in peer_labels(local)]
    return [*own, *kept, SENT, ELSEWHERE]


def copies(recipe: Recipe) -> int:
    """Count the copies of a rank's state in host memory, with those kept for another node."""
    if not snapshots_enabled(recipe):
        return 0
    return SLOTS + (SLOTS_FOR_NEIGHBOUR if recipe.elastic.snapshot_neighbour is True else 0)


# How tokens attend, as a recipe says it: by which kernel, and whether a mask says who sees whom.
#
# Where tokens see but a part of those before them, as documents are kept apart or a model has a
# window, torch's attention takes a mask of (L, L), which no flash kernel does. On a CUDA device
# flash attention is told where documents begin instead (``models/attention.py``): no mask is made,
# and what is masked is not computed.

_WIDEST = 256
_WIDTH_MULTIPLE = 8
"""Widths of a head that flash attention takes (FlashAttention 2's README; what torch pads in its
own attention it does not pad here)."""


def needs_mask(recipe: Recipe, shape: ModelShape) -> bool:
    """Whether torch's attention is given a mask; the length of samples is known.

    Of tokens on both sides always: padding is not to be seen.
    """
    return not attends_by_length(recipe, shape) and not _is_fully_causal(recipe, shape)


def attends_by_length(recipe: Recipe, shape: ModelShape) -> bool:
    """Check whether flash attention gets the beginnings of documents, instead of a mask."""
    asked = recipe.model.attention in ("flash", "fa3")
    return (
        asked
        and not _is_fully_causal(recipe, shape)
        and _varlen_unsupported_reason(recipe, shape) is None
    )


def best_attention(recipe: Recipe, shape: ModelShape) -> tuple[str, str]:
    """Resolve ``model.attention: auto``, with the reason; device and lengths are known."""
    if not _is_fully_causal(recipe, shape) and _varlen_unsupported_reason(recipe, shape) is None:
        return "flash", "it receives the bounds of documents and windows, so it needs no mask"
    return "sdpa", "torch chooses by device, format, sizes and mask"


def check_attention(recipe: Recipe, shape: ModelShape | None) -> Iterable[Problem]:
    """Find what the named kernel of torch cannot do."""
    asked, device = recipe.model.attention, recipe.cluster.device
    if asked in ("auto", "sdpa"):
        return
    wrong = []
    if device == "cpu" and asked != "flash":
        wrong.append("runs only on NVIDIA devices, and cluster.device=cpu")
    if device not in ("auto", "cpu") and recipe.precision.compute == "fp32":
        wrong.append("takes numbers of 16 bits, and precision.compute=fp32")
    if recipe.parallel.cp > 1:
        wrong.append(f"is not asked where parallel.cp={recipe.parallel.cp} splits samples")
    if shape is not None and shape.attn_logit_softcapping is not None:
        wrong.append(f"bends no scores, as a {shape.model_type} does")
    masked = None if shape is None or wrong or device in ("auto", "cpu") else _mask(recipe, shape)
    if shape is not None and masked and asked in ("flash", "fa3"):
        why = _varlen_unsupported_reason(recipe, shape)
        if why is not None:
            wrong.append(f"takes no mask, and {masked} is one: {why}")
    for text in wrong:
        yield Problem("model.attention", f"={asked} {text}. Use model.attention=auto.")


def _is_fully_causal(recipe: Recipe, shape: ModelShape) -> bool:
    return _mask(recipe, shape) is None


def _mask(recipe: Recipe, shape: ModelShape) -> str | None:
    """Say what hides earlier tokens from a token; None: there is no known reason yet."""
    seq_len = recipe.data.seq_len
    if not shape.is_causal:
        return "padding that is not to be seen"
    if not recipe.data.attends_across:
        return "data.attend_across_documents=false"
    if seq_len != "auto" and shape.has_window_below(seq_len):
        return f"a window of {shape.sliding_window} tokens"
    return None


def _varlen_unsupported_reason(recipe: Recipe, shape: ModelShape) -> str | None:
    """Say why flash attention cannot get the beginnings of documents; None: it can."""
    width = shape.head_width
    if recipe.cluster.device != "cuda":
        return "only a CUDA device's kernel takes the bounds of documents"
    if not shape.is_causal:
        return "documents are separated only where tokens see earlier ones"
    if recipe.parallel.cp > 1:
        return f"parallel.cp={recipe.parallel.cp} splits samples"
    if recipe.precision.compute in ("fp32", "auto"):
        return "it takes numbers of 16 bits"
    if shape.attn_logit_softcapping is not None:
        return "it bends no scores"
    if width > _WIDEST or width % _WIDTH_MULTIPLE:
        return f"it takes heads of a multiple of {_WIDTH_MULTIPLE} up to {_WIDEST}, not {width}"
    return None


CONTEXT_LIMIT_TOKENS = 4096
"""Longest sample that ``data.seq_len: auto`` chooses: attention's cost grows with its square."""


def seq_len_of(shape: Sizes) -> tuple[int, str]:
    """``data.seq_len``."""
    context = shape.max_position_embeddings
    if context > CONTEXT_LIMIT_TOKENS:
        return CONTEXT_LIMIT_TOKENS, f"auto goes no further; the model's context is {context:,}"
    return context, "the model's context length"


def step_tokens_of(parameters: int) -> tuple[int, str]:
    """Tokens of one step by model size, with the source."""
    if parameters < 20e6:
        return 2**14, "small models learn fastest from small steps (ours)"
    if parameters < 1e9:
        return 2**19, "GPT-3 below 1 B (arXiv:2005.14165, table 2.1)"
    if parameters < 5e9:
        return 2**20, "GPT-3 at 1.3 B and 2.7 B (arXiv:2005.14165, table 2.1)"
    return 2**22, "Llama 2 (arXiv:2307.09288, section 2.2)"


def lr_of(shape: Sizes) -> tuple[float, str]:
    """``optim.lr`` of Adam for new weights."""
    if shape.parameters > 20e9:
        return 1.5e-4, "Llama 2 at 34 B and 70 B (arXiv:2307.09288, table 1)"
    if shape.parameters >= 1e9:
        return 3e-4, "Llama 2 at 7 B and 13 B (arXiv:2307.09288, table 1)"
    # Kaplan et al. fit Adam's best rate over the parameters without embeddings.
    rate = 0.003239 - 0.0001395 * math.log(shape.num_hidden_layers * shape.block_parameters)
    return float(f"{rate:.1e}"), "by model size (Kaplan et al., arXiv:2001.08361, eq. D.1)"


def dropout_of(shape: ModelShape) -> tuple[float, str]:
    """``model.dropout``."""
    own, key = shape.hidden_dropout, shape.family.config_json.dropout
    return own, f"{key} of the model's config.json" if own else "the usual value"


def compute_on(device: str, *, without_bf16: str | None = None) -> tuple[str, str]:
    """``precision.compute``.

    Args:
        device: Kind of device.
        without_bf16: Name of the device if it computes in no bf16.
    """
    if device == "cpu":
        return "fp32", "a CPU gains little from 16 bits"
    if without_bf16 is not None:
        return "fp16", f"{without_bf16} has no bf16; the loss is scaled"
    return "bf16", "the accelerator's fast format, without loss scaling"


def output_of(compute: Literal["fp32", "bf16", "fp16", "fp8"]) -> tuple[str, str]:
    """``precision.output``."""
    if compute == "fp16":
        return "fp32", "losses are summed outside of the model, and fp16 ends at 65,504"
    return ("bf16" if compute == "fp8" else compute), "as precision.compute"
