"""Pipeline stages: where the model is cut, what a stage holds, how much of it is in flight.

Without pipeline parallelism the whole model is one stage, first and last.
"""

from shardyard.config.legality import Layout
from shardyard.config.presets import ModelShape
from shardyard.config.stages import Cut, cut_by_cost
from shardyard.plan.workload import Techniques, Workload


def cut(shape: ModelShape, stages: int, techniques: Techniques) -> Cut:
    """Stages of equal numbers of blocks; cut by cost, the head takes the place of some blocks."""
    if techniques.balanced_stages:
        return cut_by_cost(shape, stages)
    even = -(-shape.num_hidden_layers // stages)
    return Cut(even, even)


def block_elements(shape: ModelShape, layout: Layout) -> float:
    """Parameters of one block on one rank, before the data axes split them."""
    experts = shape.num_experts * shape.expert_parameters
    split = layout.ep if layout.ep > 1 else layout.tp
    return shape.shared_block_parameters / layout.tp + experts / split


def table_parameters(shape: ModelShape, layout: Layout) -> float:
    """Parameters of the embedding, or of the head, on one rank."""
    return shape.vocab_size * shape.hidden_size / layout.tp


def stage_parameters(shape: ModelShape, layout: Layout, blocks: float) -> float:
    """Parameters of a stage on one rank: its blocks, and embedding or head (both without pp)."""
    tables = 1 if layout.pp > 1 or shape.tie_word_embeddings else 2
    return blocks * block_elements(shape, layout) + tables * table_parameters(shape, layout)


def stage_blocks(w: Workload, stage: int) -> int:
    """Blocks of one stage."""
    first, last = cut(w.shape, w.layout.pp, w.techniques)
    return last if stage == w.layout.pp - 1 else first


def in_flight(w: Workload, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, each of the whole stage.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2 (1F1B, interleaved).
    """
    pp, tech, passes = w.layout.pp, w.techniques, w.micro_batches
    if pp == 1:
        return 1
    if tech.schedule == "gpipe":
        return passes
    if tech.schedule == "zb-v":  # the first stage of a rank holds many when its second holds few
        return min(passes, pp)
    if tech.schedule == "interleaved" and passes >= pp:
        chunks = tech.virtual_stages
        return min(passes, ((pp - stage - 1) * 2 + (chunks - 1) * pp + 1) / chunks)
    return min(passes, pp - stage)
