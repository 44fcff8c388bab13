"""Seconds of one transformer block and of the vocabulary, forward and backward, on one rank."""

from dataclasses import dataclass
from typing import assert_never

from shardyard.config.data_choices import predicted_rows
from shardyard.config.layout import Layout, blocks_by_stage
from shardyard.families.family import Product
from shardyard.families.shape import ModelShape
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.calibration import Calibration
from shardyard.planner.collectives import (
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    deduplicated_dispatch_s,
)
from shardyard.planner.kernels import (
    FLASH_BACKWARD,
    MISALIGNED,
    ROW_SCALED,
    UNFUSED_SHARE,
    Rates,
    rates,
)
from shardyard.planner.trainable_parameters import (
    AdapterSize,
    BackwardShares,
    TrainableElements,
    backward_shares,
)
from shardyard.planner.workload import Formats, Techniques

EXPERT_IMBALANCE = 1.1
"""Tokens of the busiest rank's experts against the average. Routers are trained towards 1; the
published runs of Megatron-Bridge force it."""

EXPERT_KERNELS = 60
"""Operators of a router and its dispatch, beside the experts' products: gate and scores, top k and
its map, the losses of balance, counts and their exchange, sorting there and back
(NVIDIA/Megatron-LM, core/transformer/moe: router.py, token_dispatcher.py)."""

TENSOR_SKEW_S = 150e-6
"""Time between the arrivals of a tensor group's ranks at a collective.

A process of its own launches each rank, and the last one counts. vTrain's table
(VIA-Research/vTrain, data/ground_truth_single.csv) has some 0.1 to 0.6 ms a collective
beyond what its bytes take; NVLink on its own would need 0.03.
"""

HOST_S = {"eager": 9e-6, "fused": 20e-6, "compiled": 5e-6}
"""Python's time to launch one operator and record it for the backward pass.

Hand-fused ones are called through wrappers in Python. Megatron-LM's small models in
vTrain's table take 2 to 3 ms a block and pass, for any amount of work. Compiled ones are
called from generated code.
"""

OVERLAP_TENSOR = 0.5
"""Share of a tensor collective that stays when it is cut up and overlaps its product.

Async TP gains 9 % in bf16 and 16 % in fp8 where a quarter is communication
(pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md).
"""

CONTEXT_HIDDEN = 0.5
"""Share of attention behind which the exchange of keys and values can hide."""


CAST_BYTES = {"fp8": 3.0, "fp4": 5.1}
"""Bytes that a cast moves for each element of a product's input: read in 16 bit and written in 8.

fp4 is made twice, by rows and by columns, as its blocks of 16 share a scale along one dimension
(NVIDIA, arXiv:2509.25149, section 3: NVFP4, a random Hadamard transform of what the gradient of a
matrix multiplies)."""

BACKWARD_PRODUCTS = 2
BACKWARD_BYTES = 2.0
"""A backward pass against its forward pass: products (one for each operand), bytes."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one pass of one micro-batch through one block, by what they are spent on."""

    matmul_s: float
    attention_s: float
    elementwise_s: float
    host_s: float
    """Time the host needs to launch it all; counts where it is longer than the device's."""
    tensor_s: float = 0.0
    context_s: float = 0.0
    expert_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Time that the device computes."""
        return self.matmul_s + self.attention_s + self.elementwise_s

    @property
    def network_s(self) -> float:
        """Time that the device waits for its model group."""
        return self.tensor_s + self.context_s + self.expert_s

    @property
    def device_s(self) -> float:
        """Both."""
        return self.compute_s + self.network_s


class BlockTimes:
    """Times of one model on one cluster. Results are kept: a search asks for few distinct ones."""

    def __init__(
        self,
        shape: ModelShape,
        cluster: ClusterHardware,
        *,
        seq_len: int,
        formats: Formats,
        techniques: Techniques,
        trained: TrainableElements | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.shape = shape
        self.cluster = cluster
        self.seq_len = seq_len
        self.formats = formats
        self.techniques = techniques
        self.trained = trained
        # Narrow formats are of the linear products only: attention and the head run in bf16.
        self._is_narrow = formats.compute in CAST_BYTES
        self.rates: Rates = rates(
            cluster.accelerator, "bf16" if self._is_narrow else formats.compute, calibration
        )
        self._linear = (
            rates(cluster.accelerator, formats.compute, calibration)
            if self._is_narrow
            else self.rates
        )
        self._blocks: dict[tuple[int, int, int, int, int], tuple[Pass, Pass]] = {}
        self._heads: dict[tuple[int, int, int], tuple[Pass, Pass]] = {}

    def block(self, layout: Layout, micro_batch: int) -> tuple[Pass, Pass]:
        """Forward and backward of one block; where some are frozen, on average."""
        # What is frozen comes first, so the last stage of a pipeline does most and sets the pace.
        pp = 1 if self.trained is None else layout.pp
        key = (layout.tp, layout.cp, layout.ep, micro_batch, pp)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = self._block(*key)
        return found

    def vocabulary(self, layout: Layout, micro_batch: int) -> tuple[Pass, Pass]:
        """Forward and backward of head and loss; the embedding is a look-up."""
        key = (layout.tp, layout.cp, micro_batch)
        found = self._heads.get(key)
        if found is None:
            found = self._heads[key] = self._vocabulary(*key)
        return found

    # --- products -------------------------------------------------------------------------------

    def _products(self, tp: int, tokens: int) -> list[tuple[int, int, int, int]]:
        """(rows, columns, depth, count) of the products of a block that all tokens visit."""
        return [
            (tokens, *_on_a_rank(product, tp), 1)
            for product in self.shape.products
            if not product.per_expert
        ]

    def _expert_products(self, tp: int, ep: int, tokens: int) -> list[tuple[int, int, int, int]]:
        """The same of the experts of one rank: whole ones with ep, else split like dense ones."""
        shape = self.shape
        if not shape.num_experts:
            return []
        visits = tokens * shape.num_experts_per_tok * EXPERT_IMBALANCE
        if ep > 1:
            rows, split, count = visits * ep / shape.num_experts / tp, 1, shape.num_experts // ep
        else:
            rows, split, count = visits / shape.num_experts, tp, shape.num_experts
        padded = max(64, -(-int(rows) // 64) * 64)  # grouped products pad each expert's rows
        return [
            (padded, *_on_a_rank(product, split), count)
            for product in shape.products
            if product.per_expert
        ]

    def _launches(self, count: int) -> int:
        """Kernels that ``count`` products of one shape are launched as."""
        if self.techniques.kernels != "fused":
            return 1  # torch's grouped product is one kernel
        return count * (2 if self._is_narrow else 1)

    # --- one block ------------------------------------------------------------------------------

    def shares(self, pp: int) -> BackwardShares:
        """Return the shares of the backward passes that the last stage of a pipeline computes."""
        return backward_shares(self.trained, blocks_by_stage(self.shape, pp)[-1])

    def _block(self, tp: int, cp: int, ep: int, micro_batch: int, pp: int) -> tuple[Pass, Pass]:
        shares = self.shares(pp)
        tokens = micro_batch * self.seq_len // cp
        products = self._products(tp, tokens) + self._expert_products(tp, ep, tokens)
        forward_s = sum(self._linear.matmul_s(*product) for product in products)
        # Each gradient is a product of a shape of its own, so tiles and alignment count anew.
        backward_s = sum(
            shares.inputs * self._linear.matmul_s(rows, depth, columns, count)
            + shares.matrices * self._linear.matmul_s(depth, columns, rows, count)
            for rows, columns, depth, count in products
        )
        if self._is_narrow and self.techniques.fp8_rows:
            forward_s, backward_s = forward_s / ROW_SCALED[0], backward_s / ROW_SCALED[0]
        adapter_s, adapter_bytes, adapter_kernels = self._adapters(tp, tokens)
        attention_f, attention_b, attention_kernels = self._attention(tp, cp, micro_batch)
        moved, kernels = self._elementwise(tp, tokens, products)
        moved, kernels = moved + adapter_bytes, kernels + adapter_kernels
        tensor_s, context_s, expert_s = self._network(
            tp, cp, ep, tokens, forward_s=forward_s, attention_s=attention_f
        )
        # tp adds four collectives a pass: a gather and a scatter around attention and the MLP.
        # A norm over split outputs adds up squares.
        sums = 4 + len(self.shape.family.split_norms)
        launched = kernels + attention_kernels + (sums if tp > 1 else 0)
        launched += sum(self._launches(count) for *_, count in products)
        host_s = HOST_S[self.techniques.kernels] * launched
        forward = Pass(
            forward_s + adapter_s, attention_f, self.rates.elementwise_s(moved, kernels), host_s,
            tensor_s, context_s, expert_s,
        )  # fmt: skip
        backward = Pass(
            backward_s + 2 * adapter_s, shares.inputs * attention_b,
            shares.inputs
            * self.rates.elementwise_s(BACKWARD_BYTES * moved, BACKWARD_PRODUCTS * kernels),
            (shares.inputs + shares.matrices) * host_s,
            # cp gathers keys and values once more for the backward pass, then sums their gradients.
            *(shares.inputs * each for each in (tensor_s, 2 * context_s, expert_s)),
        )  # fmt: skip
        return forward, backward

    def _adapters(self, tp: int, tokens: int) -> tuple[float, float, int]:
        """Return the time of a block's adapters.

        It gives seconds of a product in each direction, bytes moved and kernels. The output of B is
        scaled and added to the output of the matrix: five reads and writes, three where kernels are
        fused. A dropped input takes three, and some ten integer operators for its mask.
        """
        adapters = None if self.trained is None else self.trained.adapters
        if adapters is None:
            return 0.0, 0.0, 0
        rank, rates = adapters.rank, self.rates

        def products_s(each: AdapterSize) -> float:
            narrow = rates.matmul_s(tokens, rank, each.inputs // tp)
            return narrow + rates.matmul_s(tokens, each.outputs // tp, rank)

        dropped = 3 if adapters.has_dropout else 0
        added = 5 if self.techniques.kernels == "eager" else 3
        elements = adapters.average(lambda each: added * each.outputs + dropped * each.inputs)
        number = adapters.average(lambda _: 1.0)
        kernels = number * (4 + (14 if adapters.has_dropout else 0))
        moved = tokens / tp * elements * self.formats.compute_bytes
        return adapters.average(products_s), moved, round(kernels)

    def _attention(self, tp: int, cp: int, micro_batch: int) -> tuple[float, float, int]:
        """Seconds forward and backward, and kernels."""
        shape, tech = self.shape, self.techniques
        heads, length = shape.num_attention_heads / tp, self.seq_len
        pairs = micro_batch * heads * length * (length / cp)
        flops = 2.0 * pairs * (shape.head_width + shape.value_width)
        # Flash kernels skip the pairs above the diagonal. Unfused attention computes all and masks.
        if tech.attention != "unfused":
            flops *= 0.5 if shape.is_causal else 1.0
            fused = tech.attention == "fused"
            rate = self.rates.fused_flops_per_s if fused else self.rates.flash_flops_per_s
            # Scores are not kept, so the backward pass computes them again: five products for two.
            work, share = FLASH_BACKWARD
            return flops / rate, work * flops / (share * rate), 2
        rate = self.rates.flops_per_s * UNFUSED_SHARE
        rate *= 1.0 if shape.head_width % 8 == 0 else MISALIGNED
        # Scores are written, masked and normalised in one kernel, dropped out, and read again.
        per_pair = self.formats.compute_bytes * (1 + 2 + 1 + (2.5 if tech.dropout else 0))
        memory_s = pairs * per_pair / self.rates.bytes_per_s
        return flops / rate + memory_s, 2 * flops / rate + 1.7 * memory_s, 8

    def _elementwise(
        self, tp: int, tokens: int, products: list[tuple[int, int, int, int]]
    ) -> tuple[float, int]:
        """Bytes that norms, residuals, rotation, activation and casts move, and their kernels.

        Counted by hand as reads and writes per element of the residual stream, of queries and keys,
        and of the MLP: hand-fused as in Megatron-LM (norm 2, bias + dropout + residual 3, twice
        each), eager with every operator by itself and norms in fp32, compiled with chains fused.
        """
        shape, tech = self.shape, self.techniques
        # Without sequence parallelism every tp rank repeats the norms and residuals of all tokens.
        split = tp if tech.sequence_parallel else 1
        stream = tokens * shape.hidden_size / split
        rotated = tokens * (shape.queries_width + shape.keys_width) / tp
        inner = shape.intermediate_size
        if shape.num_experts:
            width = shape.expert_width
            inner = shape.num_experts_per_tok * width + shape.shared_expert_intermediate_size
        activated = tokens * inner / tp
        gated = 3 if shape.is_gated else 2
        per_stream, per_rotated, per_inner, kernels = {
            "compiled": (8, 2, gated, 12),
            "fused": (8, 3, gated, 22),
            "eager": (30, 10, 5, 45) if shape.is_gated else (16, 4, 4, 28),
        }[tech.kernels]
        elements = per_stream * stream + per_rotated * rotated + per_inner * activated
        per_normed = 12 if tech.kernels == "eager" else 2
        elements += per_normed * tokens * shape.split_norm_width / tp
        kernels += per_normed // 2 * len(shape.family.split_norms)
        moved = elements * self.formats.compute_bytes
        if self._is_narrow:
            casts = sum(rows * depth * count for rows, _, depth, count in products)
            moved += (
                CAST_BYTES[self.formats.compute] * casts * (ROW_SCALED[1] if tech.fp8_rows else 1.0)
            )
        if shape.num_experts:  # tokens are sorted by expert and put back
            dealt = tokens * shape.num_experts_per_tok * shape.hidden_size / tp
            moved += 6 * dealt * self.formats.compute_bytes
            kernels += EXPERT_KERNELS
        return moved, kernels

    def _network(
        self, tp: int, cp: int, ep: int, tokens: int, *, forward_s: float, attention_s: float
    ) -> tuple[float, float, float]:
        """Exposed seconds of a forward pass by axis: tp, cp, ep."""
        cluster, shape = self.cluster, self.shape
        per_node = cluster.reach
        stream_bytes = tokens * shape.hidden_size * self.formats.compute_bytes
        tensor_s = context_s = expert_s = 0.0
        if tp > 1:
            group = Group(size=tp, per_node=min(tp, per_node))
            # A gather and a scatter move as much as one all-reduce, and a block has two such pairs.
            tensor_s = 2 * (all_reduce_s(stream_bytes, group, cluster) + TENSOR_SKEW_S)
            if self.techniques.overlap_tensor:
                tensor_s = max(OVERLAP_TENSOR * tensor_s, tensor_s - forward_s)
        # tp is the fastest axis of the mesh, so its ranks fill a node before cp and ep spread.
        beside = max(1, per_node // tp)
        if cp > 1:
            group = Group(size=cp, per_node=min(cp, beside))
            keys = 2 * tokens * cp * shape.keys_width / tp * self.formats.compute_bytes
            exchange_s = all_gather_s(keys, group, cluster)
            context_s = max(0.0, exchange_s - CONTEXT_HIDDEN * attention_s)
        if ep > 1:
            # Experts may be spread over the ranks of tp as well: then they are neighbours.
            beside = per_node if self.techniques.experts_over_tensor else beside
            group = Group(size=ep, per_node=min(ep, beside))
            visits, tokens_bytes = shape.num_experts_per_tok, stream_bytes / tp
            # Tokens go to the ranks of their experts, and the outputs come back the same way.
            if self.techniques.deduplicated_dispatch:
                expert_s = 2 * deduplicated_dispatch_s(tokens_bytes, visits, group, cluster)
            else:
                expert_s = 2 * all_to_all_s(tokens_bytes * visits, group, cluster)
        return tensor_s, context_s, expert_s

    # --- head and loss --------------------------------------------------------------------------

    def _vocabulary(self, tp: int, cp: int, micro_batch: int) -> tuple[Pass, Pass]:
        shape = self.shape
        tokens = micro_batch * self.seq_len // cp
        if shape.label_head == "samples":
            tokens = micro_batch
        elif not shape.is_causal and shape.label_head is None:
            # Training pads them to whole tiles; tokens are rows, so their number misaligns nothing.
            tokens = predicted_rows(tokens)
        hidden, columns = shape.hidden_size, -(-shape.logits_width // tp // 64) * 64
        forward_s = self.rates.matmul_s(tokens, columns, hidden)
        shares = self.shares(1)
        backward_s = shares.head_input * self.rates.matmul_s(tokens, hidden, columns)
        backward_s += shares.head_matrix * self.rates.matmul_s(hidden, columns, tokens)
        is_fused = self.techniques.loss == "fused" or self.techniques.kernels == "compiled"
        per_logit = 8 if is_fused else 14
        moved = tokens * columns * per_logit
        host_s = 20 * HOST_S[self.techniques.kernels]
        forward = Pass(forward_s, 0.0, self.rates.elementwise_s(moved, 10), host_s)
        backward = Pass(backward_s, 0.0, self.rates.elementwise_s(moved, 10), 2 * host_s)
        return forward, backward


def _on_a_rank(product: Product, tp: int) -> tuple[int, int]:
    """(columns, depth) of a rank's part of a product."""
    columns, depth = sum(product.outputs), product.inputs
    match product.split:
        case "rows":
            return columns // tp, depth
        case "columns":
            return columns, depth // tp
        case None:
            return columns, depth
        case _:
            assert_never(product.split)
