"""Legal layouts, and the one that a recipe means: one pure module for every caller.

The recipe check, the planner's search and ``parallel/apply`` ask here, so that they never
disagree.

The source systems' names, and the settings that they mean (N = all data-parallel ranks, G =
devices of a node, or ``parallel.dp_shard`` if given):

========================================  ====  ========  ============
name                                      zero  dp_shard  dp_replicate
========================================  ====  ========  ============
FSDP FULL_SHARD, DeepSpeed ZeRO-3          3     N         1
FSDP SHARD_GRAD_OP, DeepSpeed ZeRO-2       2     N         1
DeepSpeed ZeRO-1                           1     N         1
FSDP HYBRID_SHARD, DeepSpeed ZeRO++ hpZ    3     G         N / G
FSDP NO_SHARD, DDP, DeepSpeed ZeRO-0       1     1         N
FSDP _HYBRID_SHARD_ZERO2                   no preset: zero: 2, dp_shard: G
========================================  ====  ========  ============

The axes multiply to the world size: dp_replicate x dp_shard x cp x tp x pp. ``ep`` takes
its ranks from dp_shard x cp and does not multiply.
"""

import math
from dataclasses import dataclass

from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Parallel
from shardyard.errors import Problem, RecipeError
from shardyard.families.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class _Strategy:
    """A preset: ``zero``, and a degree where the preset fixes it at 1 (None: it takes the rest)."""

    zero: int
    dp_shard: int | None = None
    dp_replicate: int | None = None


_STRATEGIES = {
    "FULL_SHARD": _Strategy(zero=3, dp_replicate=1),
    "SHARD_GRAD_OP": _Strategy(zero=2, dp_replicate=1),
    "HYBRID_SHARD": _Strategy(zero=3),
    "NO_SHARD": _Strategy(zero=1, dp_shard=1),
    "ZERO_1": _Strategy(zero=1, dp_replicate=1),
    "ZERO_2": _Strategy(zero=2, dp_replicate=1),
    "ZERO_3": _Strategy(zero=3, dp_replicate=1),
}


def resolve_layout(
    parallel: Parallel,
    *,
    world_size: int,
    devices_per_node: int,
    shape: ModelShape | None = None,
    seq_len: int | None = None,
) -> tuple[Layout, dict[str, str]]:
    """Replace strategy and every ``auto`` of ``parallel`` by degrees, with a reason for each.

    Returns:
        The layout, and dotted setting -> reason for zero, dp_shard and dp_replicate where the
        recipe left them open.

    Raises:
        RecipeError: The degrees do not fit the world size, or contradict the strategy.
    """
    found = check_layout(
        parallel, world_size=world_size, devices_per_node=devices_per_node, shape=shape,
        seq_len=seq_len,
    )  # fmt: skip
    if found:
        raise RecipeError(found)
    data_ranks = world_size // (parallel.cp * parallel.tp * parallel.pp)
    dp_shard, why_shard = _shard_degree(parallel, data_ranks, devices_per_node=devices_per_node)
    dp_replicate = data_ranks // dp_shard
    zero, why_zero = _zero(parallel, dp_shard * parallel.cp)
    layout = Layout(
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        cp=parallel.cp,
        tp=parallel.tp,
        pp=parallel.pp,
        ep=parallel.ep,
        zero=zero,
    )
    reasons = {
        "parallel.dp_shard": why_shard,
        "parallel.dp_replicate": f"{data_ranks} data-parallel ranks / dp_shard {dp_shard}",
        "parallel.zero": why_zero,
    }
    open_settings = {
        name for name in reasons if getattr(parallel, name.removeprefix("parallel.")) == "auto"
    }
    return layout, {name: why for name, why in reasons.items() if name in open_settings}


def check_layout(
    parallel: Parallel,
    *,
    world_size: int | None,
    devices_per_node: int | None,
    shape: ModelShape | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    micro_batch: int | None = None,
) -> list[Problem]:
    """Return everything that keeps these degrees from being a layout; an empty list means legal.

    Args:
        world_size: All ranks of the run; None: not known yet, so it is not checked.
        devices_per_node: Ranks of one node; tensor parallelism stays inside it. None: as above.
        shape: Checked against tp, pp, ep and the stages of a pipeline where given.
        seq_len: Tokens of a sample; checked against cp where given.
        global_batch: Samples in one step; there must be one for each data-parallel rank.
        micro_batch: Samples in one forward pass; at most the global batch.
    """
    found = check_strategy(parallel)
    found += check_axes(
        cp=parallel.cp, tp=parallel.tp, pp=parallel.pp, ep=parallel.ep, world_size=world_size,
        devices_per_node=devices_per_node, shape=shape, seq_len=seq_len,
        cp_exchange=parallel.cp_exchange,
    )  # fmt: skip
    if world_size is None or devices_per_node is None:
        found += check_batch(1, global_batch=global_batch, micro_batch=micro_batch)
        found += check_stages(
            pp=parallel.pp, schedule=parallel.schedule, virtual_stages=parallel.virtual_stages,
            shape=shape,
        )  # fmt: skip
        return found + check_split_backward(parallel)
    model_ranks = parallel.cp * parallel.tp * parallel.pp
    if world_size % model_ranks:
        given = " x ".join(f"{a}={getattr(parallel, a)}" for a in ("cp", "tp", "pp"))
        text = f"{given} makes {model_ranks}, which does not divide the {world_size} ranks."
        return [*found, Problem("parallel", f"{text} Their product may be {_divisors(world_size)}")]
    data_ranks = world_size // model_ranks
    data_problems = _check_data_axes(parallel, data_ranks)
    found += data_problems
    if not data_problems and not any(problem.path == "parallel.ep" for problem in found):
        dp_shard, _ = _shard_degree(parallel, data_ranks, devices_per_node=devices_per_node)
        found += check_experts(dp_shard=dp_shard, cp=parallel.cp, ep=parallel.ep)
    found += check_batch(data_ranks, global_batch=global_batch, micro_batch=micro_batch)
    micro_batches = None
    if global_batch is not None and micro_batch is not None:
        micro_batches = math.ceil(math.ceil(global_batch / micro_batch) / data_ranks)
    found += check_stages(
        pp=parallel.pp, micro_batches=micro_batches, schedule=parallel.schedule,
        virtual_stages=parallel.virtual_stages, shape=shape,
    )  # fmt: skip
    return found + check_split_backward(parallel)


def requested_zero(parallel: Parallel) -> int | None:
    """The zero level that is given, by itself or by a strategy; None: it is left open."""
    if parallel.zero != "auto":
        return parallel.zero
    return None if parallel.strategy is None else _STRATEGIES[parallel.strategy].zero


def check_strategy(parallel: Parallel) -> list[Problem]:
    """Settings that contradict ``parallel.strategy``; needs no world size."""
    if parallel.strategy is None:
        return []
    strategy = _STRATEGIES[parallel.strategy]
    wanted = {
        "zero": strategy.zero if parallel.strategy != "NO_SHARD" else None,
        "dp_shard": strategy.dp_shard,
        "dp_replicate": strategy.dp_replicate,
    }
    found = []
    for key, must_be in wanted.items():
        given = getattr(parallel, key)
        if must_be is None or given in ("auto", must_be):
            continue
        text = (
            f"={given} contradicts strategy {parallel.strategy}, which means {key}={must_be}. "
            f"Leave {key} out, or leave strategy out and set zero, dp_shard and dp_replicate."
        )
        found.append(Problem(f"parallel.{key}", text))
    return found


def check_batch(
    data_ranks: int, *, global_batch: int | None, micro_batch: int | None
) -> list[Problem]:
    """Find batch sizes that leave a rank without work in every step."""
    found = []
    if global_batch is not None and micro_batch is not None and micro_batch > global_batch:
        text = (
            f"={micro_batch} is more than the {global_batch} samples of a step. "
            f"A step is made of whole micro-batches. Use at most {global_batch}."
        )
        found.append(Problem("optim.micro_batch", text))
    if global_batch is not None and data_ranks > global_batch:
        text = (
            f"={global_batch} is fewer samples than the {data_ranks} data-parallel ranks, so "
            f"{data_ranks - global_batch} of them would never have work. Use at least "
            f"{data_ranks}, or at most {global_batch} ranks (cluster.nodes x cluster.devices)."
        )
        found.append(Problem("optim.global_batch", text))
    return found


def check_axes(
    *,
    cp: int,
    tp: int,
    pp: int,
    ep: int,
    world_size: int | None,
    devices_per_node: int | None,
    shape: ModelShape | None = None,
    seq_len: int | None = None,
    cp_exchange: str = "keys_values",
) -> list[Problem]:
    """Find the model axes that cannot split this model on these nodes.

    Args:
        world_size: None: not known yet.
        devices_per_node: Tensor parallelism stays inside a node. None: not known yet.
        shape: Its heads, blocks and experts are split by tp, pp and ep.
        seq_len: Tokens of a sample, which cp splits.
        cp_exchange: Same as ``parallel.cp_exchange``; ``heads`` are split over cp too.
    """
    found = []
    if devices_per_node is not None and devices_per_node % tp:
        text = (
            f"={tp} does not divide the {devices_per_node} devices of a node. Tensor parallelism "
            f"across nodes would be limited by the network. Use {_divisors(devices_per_node)}"
        )
        found.append(Problem("parallel.tp", text))
    pieces = cp if cp_exchange == "heads" else 2 * cp
    if seq_len is not None and cp > 1 and seq_len % pieces:
        why = "Each rank takes an equal part of every sample."
        if pieces > cp:
            why = (
                "Each rank takes two pieces, one early and one late, to share the work of causal "
                "attention evenly."
            )
        text = (
            f"={cp} needs samples of a multiple of {pieces} tokens, and data.seq_len is {seq_len}. "
            f"{why} Use data.seq_len={-(-seq_len // pieces) * pieces}, or less cp."
        )
        found.append(Problem("parallel.cp", text))
    elif seq_len is not None and seq_len % (cp * tp):
        text = (
            f"={tp} needs samples of a multiple of {cp * tp} tokens (cp x tp), and data.seq_len is "
            f"{seq_len}. Between the matrices each rank holds its share of the tokens. Use "
            f"data.seq_len={-(-seq_len // (cp * tp)) * cp * tp}, or another tp."
        )
        found.append(Problem("parallel.tp", text))
    if shape is not None:
        found += _check_model_splits(shape, tp=tp, pp=pp, ep=ep)
    if shape is not None and cp > 1 and cp_exchange == "heads":
        found += _check_head_exchange(shape.num_attention_heads, cp=cp, tp=tp)
    ranks = ep if world_size is None else world_size // (tp * pp)
    if ep > 1 and ranks % ep:
        text = (
            f"={ep} does not divide the {ranks} ranks (without tp and pp) over which experts are "
            f"spread. Use {_divisors(ranks)}"
        )
        found.append(Problem("parallel.ep", text))
    return found


def check_experts(*, dp_shard: int, cp: int, ep: int) -> list[Problem]:
    """Experts are dealt over the ranks that split one copy of the model, and over no others."""
    if dp_shard * cp % ep == 0:
        return []
    text = (
        f"={ep} does not divide the {dp_shard * cp} ranks (dp_shard x cp) that split one copy of "
        f"the model; experts are dealt over these. Use {_divisors(dp_shard * cp)}"
    )
    return [Problem("parallel.ep", text)]


def _check_model_splits(shape: ModelShape, *, tp: int, pp: int, ep: int) -> list[Problem]:
    """Degrees against the heads, blocks and experts of a model."""
    found = []
    heads = math.gcd(shape.num_attention_heads, shape.num_key_value_heads)
    whole = shape.family.unsplit if tp > 1 else ()
    if whole:
        text = (
            f"={tp}: tensor parallelism does not split {', '.join(whole)} of a "
            f"{shape.model_type}, so a rank would not have the tokens that it needs. Use 1."
        )
        found.append(Problem("parallel.tp", text))
    elif heads % tp:
        text = (
            f"={tp} does not divide the model's {shape.num_attention_heads} heads and "
            f"{shape.num_key_value_heads} key-value heads. A head stays whole on one rank. "
            f"Use {_divisors(heads)}"
        )
        found.append(Problem("parallel.tp", text))
    if pp > shape.num_hidden_layers:
        text = (
            f"={pp} is more stages than the model has blocks. A stage holds at least one. Use at "
            f"most {shape.num_hidden_layers}."
        )
        found.append(Problem("parallel.pp", text))
    if ep > 1 and not shape.num_experts:
        text = f"={ep} but the model has no experts to split. Use 1."
        found.append(Problem("parallel.ep", text))
    elif shape.num_experts % ep:
        text = f"={ep} does not divide {shape.num_experts} experts. "
        found.append(Problem("parallel.ep", f"{text}Use {_divisors(shape.num_experts)}"))
    return found


def _check_head_exchange(heads: int, *, cp: int, tp: int) -> list[Problem]:
    """Too few heads for the ranks that exchange them; those of tp have split them before."""
    if heads % tp or heads // tp % cp == 0:
        return []
    where = f"that a rank has with tp={tp}" if tp > 1 else "of the model"
    text = (
        f"=heads but cp={cp} does not divide the {heads // tp} heads {where}. A head stays whole "
        f"on one rank. Use keys_values, or a cp of {_divisors(heads // tp)}"
    )
    return [Problem("parallel.cp_exchange", text)]


def check_stages(
    *,
    pp: int,
    micro_batches: int | None = None,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    shape: ModelShape | None = None,
) -> list[Problem]:
    """Find what keeps a pipeline from running: its schedule, too few micro-batches or blocks.

    Args:
        micro_batches: Micro-batches of one data-parallel rank in one step, where known.
        virtual_stages: Stages of one rank.
        shape: Its blocks are shared by the stages.
    """
    if pp == 1:
        return []
    found = []
    if virtual_stages not in _VIRTUAL_STAGES[schedule]:
        legal = _VIRTUAL_STAGES[schedule]
        text = (
            f"={virtual_stages} does not go with parallel.schedule={schedule}: that one gives each "
            f"rank {legal[0]}{'' if len(legal) == 1 else ' or more'} stages. Use {legal[0]}, or "
            "another schedule: 1f1b has one stage a rank, interleaved two or more."
        )
        found.append(Problem("parallel.virtual_stages", text))
    if shape is not None and pp <= shape.num_hidden_layers < pp * virtual_stages:
        text = (
            f"={virtual_stages} on each of {pp} ranks makes {pp * virtual_stages} stages, and the "
            f"model has {shape.num_hidden_layers} blocks. A stage holds at least one. Use at most "
            f"{shape.num_hidden_layers // pp}."
        )
        found.append(Problem("parallel.virtual_stages", text))
    if shape is not None and shape.tie_word_embeddings and schedule == "zb-v":
        text = (
            "=zb-v but the model's head is its embedding. With this schedule one rank has both the "
            "first stage and the last, whose copies of it would be two parameters of one name. Use "
            "another schedule, or a model whose head is its own."
        )
        found.append(Problem("parallel.schedule", text))
    if shape is not None and schedule in shape.family.refused_schedules:
        why = shape.family.refused_schedules[schedule]
        text = f"={schedule} with a model of type {shape.model_type}: {why}."
        found.append(Problem("parallel.schedule", text))
    if micro_batches is not None and micro_batches < pp:
        text = (
            f"={pp} stages but {micro_batches} micro-batches a step on each data-parallel rank. "
            "Stages would never all have work. Use a larger optim.global_batch, a smaller "
            f"optim.micro_batch, or at most {micro_batches} stages."
        )
        found.append(Problem("parallel.pp", text))
    return found


_VIRTUAL_STAGES = {
    "gpipe": range(1, 2),
    "1f1b": range(1, 2),
    "interleaved": range(2, 2**16),
    "zero-bubble": range(1, 2**16),
    "zb-v": range(2, 3),
}
"""Stages of one rank that each schedule can have."""

FP8_MULTIPLE = 16
"""Sides of matrices that fp8 kernels multiply."""

SPLIT_BACKWARD = ("zero-bubble", "zb-v")
"""Schedules that compute the gradients of weights later than those of activations."""


def check_split_backward(parallel: Parallel) -> list[Problem]:
    """Zero 3 with a schedule that would silently lose gradients there."""
    if parallel.pp == 1 or parallel.schedule not in SPLIT_BACKWARD:
        return []
    preset = _STRATEGIES.get(parallel.strategy or "")
    by_preset = parallel.zero == "auto" and preset is not None and preset.zero == 3
    if parallel.zero != 3 and not by_preset:
        return []
    name = f"strategy={parallel.strategy}" if by_preset else "zero=3"
    path, _, value = name.partition("=")
    text = (
        f"={value} with parallel.schedule={parallel.schedule} would lose gradients: the gradients "
        "of weights are computed in a pass of their own, when zero 3 has let go of the weights. "
        "Use parallel.zero=1 or 2, or parallel.schedule=1f1b or interleaved."
    )
    return [Problem(f"parallel.{path}", text)]


def _check_data_axes(parallel: Parallel, data_ranks: int) -> list[Problem]:
    """dp_shard and dp_replicate against the ranks that the model axes leave."""
    found = []
    given = {
        key: value
        for key in ("dp_shard", "dp_replicate")
        if (value := getattr(parallel, key)) != "auto"
    }
    for key, value in given.items():
        if data_ranks % value:
            text = (
                f"={value} does not divide the {data_ranks} data-parallel ranks. Every copy of the "
                f"model is held by equally many ranks. Use {_divisors(data_ranks)[:-1]}, or auto."
            )
            found.append(Problem(f"parallel.{key}", text))
    if found:
        return found
    preset = _STRATEGIES.get(parallel.strategy or "", _Strategy(zero=3))
    fixed = {"dp_shard": preset.dp_shard, "dp_replicate": preset.dp_replicate}
    degrees = {key: value for key, value in fixed.items() if value is not None} | given
    if len(degrees) == 2 and math.prod(degrees.values()) != data_ranks:
        named = " x ".join(f"{key} {value}" for key, value in degrees.items())
        text = (
            f"{named} makes {math.prod(degrees.values())} ranks, but there are {data_ranks}. "
            + (f"{parallel.strategy} is one copy over all ranks. " if parallel.strategy else "")
            + "Leave one of the two auto, or use HYBRID_SHARD with only dp_shard."
        )
        found.append(Problem("parallel.dp_shard", text))
    return found


def _shard_degree(parallel: Parallel, data_ranks: int, *, devices_per_node: int) -> tuple[int, str]:
    if parallel.dp_shard != "auto":
        return parallel.dp_shard, "given"
    if parallel.dp_replicate != "auto":
        degree = data_ranks // parallel.dp_replicate
        return degree, f"{data_ranks} data-parallel ranks / dp_replicate {parallel.dp_replicate}"
    if parallel.strategy == "NO_SHARD":
        return 1, "NO_SHARD: every rank holds a full copy"
    if parallel.strategy == "HYBRID_SHARD":
        within_node = max(1, devices_per_node // (parallel.cp * parallel.tp))
        return math.gcd(within_node, data_ranks), "HYBRID_SHARD: one copy per node"
    return data_ranks, f"all {data_ranks} data-parallel ranks split one copy"


def _zero(parallel: Parallel, shards: int) -> tuple[int, str]:
    if parallel.zero != "auto":
        return parallel.zero, "given"
    if parallel.strategy is not None:
        return _STRATEGIES[parallel.strategy].zero, f"strategy {parallel.strategy}"
    if shards == 1:
        return 1, "no state is split: dp_shard is 1"
    if parallel.pp > 1 and parallel.schedule in SPLIT_BACKWARD:
        return 2, f"{parallel.schedule} would lose gradients at 3"
    return 3, "splits parameters too: least memory"


def _divisors(number: int) -> str:
    """``8`` -> ``1, 2, 4 or 8.``"""
    *first, last = [str(n) for n in range(1, number + 1) if number % n == 0]
    return f"{', '.join(first)} or {last}." if first else f"{last}."
