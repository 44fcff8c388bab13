"""Pipeline stages: where the model is cut, what a stage holds, how much of it is in flight.

Without pipeline parallelism the whole model is one stage, first and last.
"""

from functools import cache
from typing import NamedTuple

from shardyard.config.legality import Layout
from shardyard.config.presets import ModelShape
from shardyard.plan.workload import Techniques, Workload


class Cut(NamedTuple):
    """Blocks of the stages: whole ones, so that a stage may have to wait for a longer one."""

    first: int
    """Of every stage but the last; some have one less where the blocks do not divide."""
    last: int
    """Of the stage that also has the head."""


def cut(shape: ModelShape, stages: int, techniques: Techniques) -> Cut:
    """Stages of equal numbers of blocks; cut by cost, the head takes the place of some blocks."""
    blocks = shape.num_hidden_layers
    if not techniques.balanced_stages:
        even = -(-blocks // stages)
        return Cut(even, even)
    return _cut_by_cost(blocks, stages, _head_in_blocks(shape))


@cache
def _cut_by_cost(blocks: int, stages: int, head: float) -> Cut:
    if stages == 1:
        return Cut(blocks, blocks)
    cuts = (
        Cut(first, max(0, blocks - (stages - 1) * first))
        for first in range(blocks // stages, -(-blocks // (stages - 1)) + 1)
    )
    return min(cuts, key=lambda c: (max(c.first, c.last + head), c.first))


def _head_in_blocks(shape: ModelShape) -> float:
    """Work of the head, in that of a block: their parameters in products of a token."""
    head = shape.vocab_size * shape.hidden_size
    return head * shape.num_hidden_layers / (shape.matmul_parameters - head)


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
    if tech.schedule == "interleaved" and passes >= pp:
        chunks = tech.virtual_stages
        return min(passes, ((pp - stage - 1) * 2 + (chunks - 1) * pp + 1) / chunks)
    return min(passes, pp - stage)
