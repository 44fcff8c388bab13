"""Bytes a rank sends in a step over each mesh axis, as rings send them.

Of n ranks each sends (n - 1) / n of a tensor to gather it, to sum and scatter it or to
exchange it, and twice that to sum it everywhere. The rank that sends most is reported.
``benchmarks/axis_traffic.py`` counts the bytes that are really sent.

Sources: Rajbhandari et al. 2020, arXiv:1910.02054, section 7 (each ZeRO level); Korthikanti
et al. 2022, arXiv:2205.05198, section 4.2 (tensor with sequence parallelism); Jacobs et al.
2023, arXiv:2309.14509 (exchange of heads); Narayanan et al. 2021, arXiv:2104.04473, section
3.2 (pipeline); Rajbhandari et al. 2022, arXiv:2201.05596 (experts).
"""

from collections.abc import Iterator

from shardyard.planner.memory import Term
from shardyard.planner.stages import (
    block_elements,
    expert_elements,
    has_ends,
    rank_blocks,
    small_parameters,
    stage_trained,
    table_parameters,
)
from shardyard.planner.workload import Workload


def traffic_terms(workload: Workload) -> tuple[Term, ...]:
    """Return what the busiest rank sends in a step, by axis and collective.

    Left out: the step's one small all-reduce of loss and norm, how many tokens go to which
    expert, and evaluation.
    """
    last = workload.layout.pp - 1
    # A stage in the middle has no table, but sends over two borders.
    stages = {0, min(1, last), last}
    return max(
        (stage_traffic(workload, stage) for stage in sorted(stages)),
        key=lambda terms: sum(term.bytes for term in terms),
    )


def stage_traffic(workload: Workload, stage: int) -> tuple[Term, ...]:
    """Return what a rank of one pipeline stage sends in a step."""
    traffic = _Traffic(workload, stage)
    found = (
        *traffic.data(), *traffic.tensor(), *traffic.context(), *traffic.experts(),
        *traffic.pipeline(),
    )  # fmt: skip
    return tuple(term for term in found if term.bytes)


class _Traffic:
    def __init__(self, workload: Workload, stage: int) -> None:
        self.w, self.stage = workload, stage
        self.layout, self.shape = workload.layout, workload.shape
        self.is_first, self.is_last = has_ends(workload, stage)
        self.layers = rank_blocks(workload, stage)
        self.passes = workload.micro_batches
        self.tokens = workload.tokens / self.layout.cp
        """Tokens of a rank in one pass; tp splits them."""
        self.stream_bytes = self.tokens * self.shape.hidden_size * workload.formats.compute_bytes
        """The residual stream of these tokens."""
        self.recompute_share = _recomputed_share(workload)
        self.trained = stage_trained(workload, stage)
        self.backward_layers = self.layers if self.trained is None else self.trained.layers
        """Blocks that pass a gradient on."""

    # --- data axes ------------------------------------------------------------------------------

    def data(self) -> Iterator[Term]:
        """Parameters and gradients, over dp_shard x cp and over dp_replicate."""
        layout, formats = self.layout, self.w.formats
        shards, copies = layout.dp_shard * layout.cp, layout.dp_replicate
        expert_shards = shards // layout.ep
        dealt = self.layers * expert_elements(self.shape, layout)
        dense = self.layers * block_elements(self.shape, layout) - dealt + self._outside()
        if self.trained is not None and self.w.trained is not None and self.w.trained.added:
            # Adapters are not part of the model's shape, and FSDP gathers them with their block.
            dense += self.trained.elements - self.trained.outside
        learnt_dealt = dealt if self.trained is None else self.trained.experts
        learnt = dense if self.trained is None else self.trained.elements - learnt_dealt
        # With one shard there is nothing to gather, and copies are summed once a step.
        zero = 1 if shards == 1 else layout.zero
        if zero == 3:
            times = f"2 x {self.passes} micro-batches, what comes after the blocks once each"
            both = 1 + self.backward_layers / self.layers
            in_blocks = dense - self._outside()
            gathered = (
                self.passes * (both * in_blocks + 2 * self._outside() - self._reused_gathers())
                - (self.passes - 1) * self._frozen_before(),
                self.passes * both * dealt,
            )
        else:
            times, gathered = "once a step", (dense, dealt)
        sums = 1 if zero == 1 else self.passes
        yield Term(
            name="all-gather",
            bytes=round(
                formats.compute_bytes
                * (_part(shards) * gathered[0] + _part(expert_shards) * gathered[1])
            ),
            reason=f"parameters in {formats.compute} over {shards} ranks, {times}",
        )
        summed = _part(shards) * learnt + _part(expert_shards) * learnt_dealt
        each = f"{formats.reduce_bytes:g} bytes each"
        yield Term(
            name="reduce-scatter",
            bytes=round(formats.reduce_bytes * sums * summed),
            reason=f"gradients, {each}, over {shards} ranks, {sums} x",
        )
        held = learnt / shards + learnt_dealt / expert_shards
        yield Term(
            name="all-reduce",
            # An all-reduce is a reduce-scatter and an all-gather: each part is sent twice.
            bytes=round(2 * _part(copies) * held * formats.reduce_bytes),
            reason=f"gradient shards, {each}, over {copies} copies, once",
        )

    def _outside(self) -> float:
        """Parameters of the stage that are in no block."""
        tables = self.is_first + (self.is_last and self.shape.label_head is None)
        # Over a pipeline a tied table exists at both ends, on different ranks.
        if self.layout.pp == 1 and self.shape.tie_word_embeddings:
            tables = 1
        small = small_parameters(self.shape, first=self.is_first, last=self.is_last)
        return tables * table_parameters(self.shape, self.layout) + small

    def _reused_gathers(self) -> float:
        """Return the parameters outside of blocks that stay gathered until the backward pass."""
        if not self.is_last:
            return 0
        if self.shape.tie_word_embeddings:
            return self._outside()
        norm = small_parameters(self.shape, first=False, last=True)
        if self.shape.label_head is not None:
            return norm
        return table_parameters(self.shape, self.layout) + norm

    # --- tensor ---------------------------------------------------------------------------------

    def tensor(self) -> Iterator[Term]:
        """Tokens gathered before matrices and summed after them; gradients of what is not split."""
        tp = self.layout.tp
        # Gathers before attention and MLP, sums after both, their transposes backward. A rank keeps
        # its share of the inputs, so they are gathered once more for gradients of matrices.
        forward, block = 4, 4.0
        gathers = self.layers * len(self.shape.family.gathered)
        if self.trained is not None:
            gathers = self.trained.gathers
        # The last sum of a block is not recomputed, as nothing after it needs it. `selective` keeps
        # the other sum too, except that of fp8 products.
        is_narrow = self.w.formats.compute in ("fp8", "fp4")
        keeps_sums = self.w.recompute == "selective" and not is_narrow
        block += (2 if keeps_sums else 3 + self._recomputed_sums()) * self.recompute_share
        ends = self._ends()
        yield Term(
            name="tokens of tp",
            bytes=round(
                _part(tp)
                * self.passes
                * (
                    (self.layers * forward + self.backward_layers * block + gathers + ends)
                    * self.stream_bytes
                    + self._adapter_bytes()
                )
            ),
            reason=f"gathered and summed over {tp} ranks in both passes",
        )
        # The split loss sums three fp32 numbers a token; logits never leave their rank.
        vocabulary = 3 * 4 * self.tokens * self.passes * self.is_last
        unsplit: float = self.layers * self.shape.unsplit_block_parameters + small_parameters(
            self.shape, first=self.is_first, last=self.is_last
        )
        if self.trained is not None:
            unsplit = self.trained.unsplit
        zero = 1 if self.layout.dp_shard * self.layout.cp == 1 else self.layout.zero
        sums = 1 if zero == 1 else self.passes
        size = self.w.formats.compute_bytes
        numbers = vocabulary + self._squares()
        yield Term(
            name="sums of tp",
            bytes=round(2 * _part(tp) * (numbers + sums * unsplit * size)),
            reason=f"three numbers a token for the loss, gradients of norms; over {tp} ranks",
        )

    def _squares(self) -> float:
        """Return the bytes of the squares that norms over split outputs add up: fp32, one a token.

        So are their gradients, and what is recomputed adds them up again.
        """
        backward = self.backward_layers * (1 + self.recompute_share)
        norms = len(self.shape.family.split_norms)
        return 4 * norms * self.tokens * self.passes * (self.layers + backward)

    def _recomputed_sums(self) -> float:
        """Return the share of blocks whose last sum precedes a norm or an adapter.

        That sum is then recomputed as the input of what follows it.
        """
        if self.shape.family.ends_with_norm:
            return 1.0
        adapters = None if self.w.trained is None else self.w.trained.adapters
        return 0.0 if adapters is None else adapters.at_end

    def _ends(self) -> float:
        """Count the gathers and sums of the residual stream outside of blocks.

        The first stage has the sum after the table and its transpose. The last has the gather
        before the head, its transpose and the one for the gradient of its matrix. A gradient that
        the lowest block with a backward pass need not pass down is subtracted.
        """
        trained = self.w.trained
        if trained is None:
            return 2 * self.is_first + 3 * self.is_last
        is_passed_down = any(trained.table) or any(trained.before)
        passes_nothing = bool(self.backward_layers) and not is_passed_down and self.is_first
        first = self.is_first * (1 + is_passed_down) - passes_nothing
        return first + self.is_last * (1 + trained.passes_head + trained.head_is_trained)

    def _frozen_before(self) -> float:
        """Parameters before the blocks that no backward pass computes with: what it has gathered
        ahead of the first block serves the next forward pass."""
        trained = self.w.trained
        is_apart = self.is_first and not self.shape.tie_word_embeddings
        if trained is None or not is_apart or any(trained.table) or any(trained.before):
            return 0.0
        small = small_parameters(self.shape, first=True, last=False)
        return table_parameters(self.shape, self.layout) + small

    def _adapter_bytes(self) -> float:
        """Return the bytes that tp ranks exchange in one pass between an adapter's two matrices."""
        adapters = None if self.w.trained is None else self.w.trained.adapters
        if adapters is None:
            return 0.0
        exchanges = self.layers * adapters.average(lambda _: 2.0 + self.recompute_share)
        return exchanges * adapters.rank * self.tokens * self.w.formats.compute_bytes

    # --- context --------------------------------------------------------------------------------

    def context(self) -> Iterator[Term]:
        """Yield what attention needs of the tokens of other ranks."""
        cp, shape, size = self.layout.cp, self.shape, self.w.formats.compute_bytes
        heads, kv_heads = (
            number / self.layout.tp
            for number in (shape.num_attention_heads, shape.num_key_value_heads)
        )
        if self.w.techniques.cp_exchange == "heads":
            # q, k, v and the output of a rank's tokens; KV heads repeat until cp divides them.
            exchanged = (2 * heads + 2 * max(kv_heads, cp)) * shape.head_width * self.tokens
            times, what = 2 + self.recompute_share, "tokens against heads, in both passes"
        else:
            # 3: gathered in both passes, and the gradients. A recomputed n-th block gathers once
            # more, while `full` and `selective` leave out one gather of the backward pass.
            extra = self.recompute_share if isinstance(self.w.recompute, int) else 0.0
            exchanged = 2 * kv_heads * shape.head_width * self.w.tokens
            times, what = 3 + extra, "keys and values gathered in both passes, and their gradients"
        moved = self.layers + (times - 1) * self.backward_layers
        yield Term(
            name="attention of cp",
            bytes=round(_part(cp) * self.passes * moved * exchanged * size),
            reason=f"{what}; over {cp} ranks",
        )

    # --- experts --------------------------------------------------------------------------------

    def experts(self) -> Iterator[Term]:
        """Visits on their way to experts of other ranks and back."""
        ep, visits = self.layout.ep, self.shape.num_experts_per_tok
        dealt = visits * self.stream_bytes
        times = 2 * self.layers + (2 + 2 * self.recompute_share) * self.backward_layers
        yield Term(
            name="visits of ep",
            bytes=round(_part(ep) * self.passes * times * dealt),
            reason=f"{visits} experts a token, there and back in both passes, over {ep} ranks, if "
            "all experts are visited alike",
        )

    # --- pipeline -------------------------------------------------------------------------------

    def pipeline(self) -> Iterator[Term]:
        """Hidden states to the next stage, their gradients to the one before."""
        chunks = self.w.techniques.virtual_stages if self.layout.pp > 1 else 1
        is_v = self.w.techniques.schedule == "zb-v"
        borders = 2 * chunks - (1 if self.is_first else 0) - (1 if self.is_last else 0)
        if is_v and self.stage == self.layout.pp - 1:
            borders -= 2  # its two stages follow each other
        yield Term(
            name="hidden states of pp",
            bytes=round(self.passes * borders * self.stream_bytes / self.layout.tp),
            reason=f"{borders} x each of {self.passes} micro-batches, forward and backward",
        )
        is_end = self.is_first != self.is_last
        is_summed = self.trained is None or self.trained.table > 0
        if is_end and self.shape.tie_word_embeddings and is_summed:
            shards = self.layout.dp_shard * self.layout.cp
            table = table_parameters(self.shape, self.layout) / shards
            yield Term(
                name="tied table of pp",
                bytes=round(table * self.w.formats.gradient_bytes),
                reason="its gradient, once a step, to the other end, which has a copy of it",
            )


def _part(ranks: int) -> float:
    return (ranks - 1) / ranks


def _recomputed_share(workload: Workload) -> float:
    """Share of the blocks whose forward pass is made again in the backward pass."""
    if isinstance(workload.recompute, int):
        return 1 / workload.recompute
    return 1.0 if workload.recompute in ("full", "selective") else 0.0
