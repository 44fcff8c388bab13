"""Pipeline stages: where the model is cut, what a stage holds, how much of it is in flight.

Without pipeline parallelism the whole model is one stage, first and last.
"""

from typing import NamedTuple, assert_never

from shardyard.config.layout import Cut, Layout, blocks_by_stage, cut_by_cost, rank_of_stage
from shardyard.families.shape import ModelShape
from shardyard.planner.workload import Techniques, Workload


def cut(shape: ModelShape, stages: int, techniques: Techniques) -> Cut:
    """Stages of equal numbers of blocks; cut by cost, the head takes the place of some blocks."""
    if techniques.balanced_stages:
        return cut_by_cost(shape, stages)
    even = -(-shape.num_hidden_layers // stages)
    return Cut(even, even)


def block_elements(shape: ModelShape, layout: Layout) -> float:
    """Parameters of one block on one rank, before the data axes split them."""
    whole = shape.unsplit_block_parameters
    split = (shape.shared_block_parameters - whole) / layout.tp
    return whole + split + expert_elements(shape, layout)


def expert_elements(shape: ModelShape, layout: Layout) -> float:
    """Return a block's expert parameters: ep deals experts out, tp splits their inner width."""
    return shape.num_experts * shape.expert_parameters / layout.ep / layout.tp


def small_parameters(shape: ModelShape, *, first: bool, last: bool) -> int:
    """Learned positions and token types on the first stage, the norm after all blocks on the last.

    They are on every rank of tp.
    """
    before, after = shape.small_parameters
    return (before if first else 0) + (after if last else 0)


def table_parameters(shape: ModelShape, layout: Layout) -> float:
    """Parameters of the embedding, or of the head, on one rank."""
    return shape.table_parameters / layout.tp


def stage_parameters(shape: ModelShape, layout: Layout, blocks: float) -> float:
    """Parameters of a stage on one rank: its blocks, and embedding or head (both without pp)."""
    tables = 1 if layout.pp > 1 else shape.tables
    return blocks * block_elements(shape, layout) + tables * table_parameters(shape, layout)


def stage_blocks(w: Workload, rank: int) -> int:
    """Blocks of one rank of the pp axis; of the first the most that any but the last has."""
    pp, tech = w.layout.pp, w.techniques
    is_cut_by_number = tech.virtual_stages > 1 or w.trained is not None
    if pp > 1 and is_cut_by_number and tech.balanced_stages:
        return rank_blocks(w, rank)
    first, last = cut(w.shape, pp, tech)
    return last if rank == pp - 1 else first


def rank_blocks(w: Workload, rank: int) -> int:
    """Blocks of one rank of the pp axis, in all its stages, as the training half cuts."""
    return len(_blocks_of(w, rank))


def _blocks_of(w: Workload, rank: int) -> list[int]:
    blocks = blocks_by_stage(w.shape, w.layout.pp * w.techniques.virtual_stages)
    return [number for stage in _stages_of(w, rank) for number in blocks[stage]]


class StageTrained(NamedTuple):
    """Parameters that one rank trains, before the data axes split them."""

    elements: float
    """All parameters."""
    block: float
    """Most of any of its blocks."""
    table: float
    """Parameters of the embedding, or of the head: the larger."""
    unsplit: float
    """Parameters that every rank of tp holds."""
    experts: float
    """Parameters of experts, among all."""
    layers: int
    """Blocks with a backward pass."""
    gathers: int
    """Inputs of these blocks that tp gathers again, for the gradients of matrices."""
    outside: float
    """Parameters outside of blocks, among all."""


def stage_trained(w: Workload, rank: int) -> StageTrained | None:
    """Return the trained parameters of one rank of the pp axis. None: it trains all it holds."""
    trained, layout = w.trained, w.layout
    if trained is None:
        return None
    first, last = has_ends(w, rank)
    numbers = _blocks_of(w, rank)
    blocks = [trained.blocks[number] for number in numbers]
    # A tied table is needed at both ends of a pipeline, and each of the two ranks trains its copy.
    tables = [trained.table] if first or (last and trained.is_tied) else []
    tables += [trained.head] if last else []
    ends = [*tables, *([trained.before] if first else [])]
    ends += [trained.norm, trained.after] if last else []
    return StageTrained(
        elements=sum(each.on_rank(layout) for each in (*blocks, *ends)),
        block=max(each.on_rank(layout) for each in blocks),
        table=max((each.on_rank(layout) for each in tables), default=0.0),
        unsplit=sum(each.whole for each in (*blocks, *ends)),
        experts=sum(each.experts for each in blocks) / layout.ep / layout.tp,
        layers=sum(number >= trained.lowest for number in numbers),
        gathers=sum(trained.gathers[number] for number in numbers),
        outside=sum(each.on_rank(layout) for each in ends),
    )


def has_ends(w: Workload, rank: int) -> tuple[bool, bool]:
    """Whether a rank of the pp axis has the embedding, and whether it has the head."""
    stages = _stages_of(w, rank)
    return 0 in stages, w.layout.pp * w.techniques.virtual_stages - 1 in stages


def _stages_of(w: Workload, rank: int) -> list[int]:
    pp, tech = w.layout.pp, w.techniques
    return [
        stage
        for stage in range(pp * tech.virtual_stages)
        if rank_of_stage(stage, pp=pp, schedule=tech.schedule) == rank
    ]


def in_flight(w: Workload, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, each of the whole stage.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2 (1F1B, interleaved).
    """
    pp, tech, passes = w.layout.pp, w.techniques, w.micro_batches
    if pp == 1:
        return 1
    match tech.schedule:
        # All forward passes come before the first backward pass frees anything.
        case "gpipe":
            return passes
        case "zb-v":  # the first stage of a rank holds many when its second holds few
            return min(passes, pp)
        case "interleaved" if passes >= pp:
            chunks = tech.virtual_stages
            return min(passes, ((pp - stage - 1) * 2 + (chunks - 1) * pp + 1) / chunks)
        # The first gradient comes back once each later stage has passed a micro-batch on.
        case "1f1b" | "zero-bubble" | "interleaved":
            return min(passes, pp - stage)
        case _:
            assert_never(tech.schedule)
