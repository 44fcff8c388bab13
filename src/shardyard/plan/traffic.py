"""Bytes one rank sends in a step, by collective, for a ring: (n - 1) / n of what is moved."""

from shardyard.config.legality import Layout
from shardyard.config.presets import ModelShape
from shardyard.config.schema import Recipe
from shardyard.plan.memory import FORMAT_BYTES, Term, micro_steps


def communication_terms(recipe: Recipe, shape: ModelShape, layout: Layout) -> tuple[Term, ...]:
    """What sharding sends, per rank and step; how often is the table in ``parallel/data.py``.

    Left out: the step's one small all-reduce of loss and norm, and evaluation.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 7 (communication of each ZeRO level).
    """
    passes = micro_steps(recipe, layout)
    shards, copies = layout.dp_shard, layout.dp_replicate
    compute = FORMAT_BYTES[recipe.precision.compute]
    reduce = FORMAT_BYTES[recipe.precision.reduce]
    zero = 1 if shards == 1 else layout.zero
    table = shape.vocab_size * shape.hidden_size
    # the head (or the tied table) stays whole from forward to backward: one gather, not two
    gathered = (2 * shape.parameters - table) * passes if zero == 3 else shape.parameters
    gathers = f"2 x {passes} micro-batches, the head's once each" if zero == 3 else "once a step"
    reductions = 1 if zero == 1 else passes
    part = (shards - 1) / shards
    terms = (
        Term(
            name="all-gather",
            bytes=round(part * gathered * compute),
            reason=f"parameters in {recipe.precision.compute} over {shards} ranks, {gathers}",
        ),
        Term(
            name="reduce-scatter",
            bytes=round(part * shape.parameters * reduce * reductions),
            reason=f"gradients in {recipe.precision.reduce} over {shards} ranks, {reductions} x",
        ),
        Term(
            name="all-reduce",
            bytes=round(2 * (copies - 1) / copies * shape.parameters / shards * reduce),
            reason=f"gradient shards in {recipe.precision.reduce} over {copies} copies, once",
        ),
    )
    return tuple(term for term in terms if term.bytes)
