"""Bytes a rank sends in a step over the data axes and cp, for a ring: (n - 1) / n of a tensor."""

from shardyard.plan.memory import Term
from shardyard.plan.workload import Workload


def traffic_terms(workload: Workload) -> tuple[Term, ...]:
    """What sharding sends, per rank and step; how often is the table in ``parallel/data.py``.

    Over cp: keys and values, gathered in both passes, and their gradients, as with
    ``parallel.cp_exchange=keys_values``.

    Left out: the step's one small all-reduce of loss and norm, and evaluation.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 7 (communication of each ZeRO level).
    """
    layout, shape, formats = workload.layout, workload.shape, workload.formats
    passes, shards = workload.micro_batches, layout.dp_shard * layout.cp
    copies = layout.dp_replicate
    zero = 1 if shards == 1 else layout.zero
    table = shape.vocab_size * shape.hidden_size
    # the head (or the tied table) stays whole from forward to backward: one gather, not two
    gathered = (2 * shape.parameters - table) * passes if zero == 3 else shape.parameters
    gathers = f"2 x {passes} micro-batches, the head's once each" if zero == 3 else "once a step"
    sums = 1 if zero == 1 else passes
    part, model = (shards - 1) / shards, layout.tp * layout.pp
    reduce = f"{formats.reduce_bytes:g} bytes each"
    # 3: forward, again in the backward pass (whether or not blocks are recomputed), gradients
    times = 3 * passes * shape.num_hidden_layers / layout.pp
    keys_values = 2 * workload.tokens * shape.num_key_value_heads * shape.head_width / layout.tp
    terms = (
        Term(
            name="all-gather",
            bytes=round(part * gathered * formats.compute_bytes / model),
            reason=f"parameters in {formats.compute} over {shards} ranks, {gathers}",
        ),
        Term(
            name="reduce-scatter",
            bytes=round(part * shape.parameters * formats.reduce_bytes * sums / model),
            reason=f"gradients, {reduce}, over {shards} ranks, {sums} x",
        ),
        Term(
            name="all-reduce",
            bytes=round(
                2 * (copies - 1) / copies * shape.parameters / shards * formats.reduce_bytes / model
            ),
            reason=f"gradient shards, {reduce}, over {copies} copies, once",
        ),
        Term(
            name="keys and values",
            bytes=round((layout.cp - 1) / layout.cp * times * keys_values * formats.compute_bytes),
            reason=f"gathered over {layout.cp} cp ranks in both passes, and their gradients",
        ),
    )
    return tuple(term for term in terms if term.bytes)
