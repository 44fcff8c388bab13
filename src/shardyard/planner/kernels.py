"""Seconds that one device takes for matrix products, attention and element-wise operators.

Three limits, the slowest of which counts: arithmetic (by the tiles that a product is cut into),
the device's memory, and the host that launches kernels one by one (in ``block_time.py``).

The constants below are all that the time model assumes about kernels. Each says where it comes
from; none belongs to one source of measurements.
"""

from dataclasses import dataclass
from math import ceil

from shardyard.config.data_choices import MASKED_SHARE
from shardyard.errors import RequestError
from shardyard.families.shape import ModelShape
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.calibration import Calibration
from shardyard.planner.trainable_parameters import TrainableElements

SUSTAINED_COOL = 0.90
"""Share of the best measured matrix product that a step's products reach at full clock.

It applies where power does not limit the clock: the best shape is not every shape. A100:
Korthikanti et al. 2022 (arXiv:2205.05198, table 5), 22 B to 1 T parameters;
mosaicml/llm-foundry's A100 tables.
"""

SUSTAINED_HOT = 0.75
"""The same for parts that reach their power limit within seconds (Hopper, Blackwell and their
contemporaries, 0.5 to 1 W a TFLOP/s, against 1.3 W on A100 and 2.4 W on V100): the best product is
timed in a burst, a run is not. H100: the 46 to 49 % MFU at which the best published bf16 runs end
(mosaicml/llm-foundry; NVIDIA/Megatron-LM README)."""

HOT_FLOPS_PER_S = 600e12
"""Peak in bf16 from which a part counts as hot."""

TILES = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.75), (64, 64, 0.55))
"""Tiles of the output that libraries choose from: rows, columns, rate against the largest. Smaller
ones read their operands more often (NVIDIA, Matrix Multiplication Background User's Guide)."""

DEPTH_LOST = 128
"""Filling and draining a tile costs as much as this many more steps along the depth."""

PARTLY_ALIGNED = 0.78
"""Rate where columns or depth are no multiple of 64 elements, that is of 128 bytes (same guide,
section 3.1). BLOOM's prototypes: 94 TFLOP/s at 14,400 wide, 120 at 13,824, on the same nodes in the
same layout with 8 tensor ranks (bigscience-workshop/bigscience, tr11 chronicles)."""

MISALIGNED = 0.12
"""Rate where they are no multiple of 8: narrow loads, on some libraries no tensor cores at all."""

FLASH_SHARE = 0.42
"""FlashAttention's forward pass, of the peak, over head widths 64 to 128 and both masks (Dao et al.
2022, arXiv:2205.14135, and Dao 2023, arXiv:2307.08691: 35 to 70 % on A100)."""

FLASH_LIMIT_FLOPS_PER_S = 270e12
"""It uses the instructions of A100, so newer parts gain little: version 2 reaches 35 % of an H100
at best (Shah et al. 2024, arXiv:2407.08608, section 1)."""

FUSED_SHARE = 0.50
"""Attention written for the part (cuDNN, version 3), of the peak: 75 % at best (same paper)."""

FLASH_BACKWARD = (2.5, 0.8)
"""Its backward pass: FLOP against forward (five products for two), rate against forward."""

UNFUSED_SHARE = 0.5
"""Batched products of unfused attention, of the sustained rate: one small product a head."""

BANDWIDTH = 0.90
"""Share of the datasheet's memory bandwidth that element-wise kernels reach."""

KERNEL_S = 4e-6
"""Start and drain of one kernel on the device."""

ROW_SCALED = (0.75, 2.0)
"""fp8 with a scale a row: rate of products, bytes of casts, against a scale a tensor."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates that one device sustains in one format."""

    flops_per_s: float
    """Rate of large, well-shaped matrix products."""
    flash_flops_per_s: float
    fused_flops_per_s: float
    """Rate of attention's forward pass."""
    bytes_per_s: float
    processors: int
    """Multiprocessors that share out the tiles."""
    kernel_s: float = KERNEL_S
    """Start and drain of one kernel."""

    def matmul_s(self, rows: int, columns: int, depth: int, count: int = 1) -> float:
        """``count`` products (rows, depth) x (depth, columns) in one kernel."""
        # The last wave occupies the device as long as a full one, hence the rounding up.
        waves = min(
            ceil(count * ceil(rows / high) * ceil(columns / wide) / self.processors)
            * (high * wide / share)
            for high, wide, share in TILES
        )
        arithmetic = 2 * waves * self.processors * (depth + DEPTH_LOST)
        # A low bit set in either number is set in their union: one test covers both.
        odd = columns | depth
        if odd % 64:
            arithmetic /= MISALIGNED if odd % 8 else PARTLY_ALIGNED
        moved = 2 * count * (rows * depth + depth * columns + rows * columns)
        return max(arithmetic / self.flops_per_s, moved / self.bytes_per_s) + self.kernel_s

    def elementwise_s(self, nbytes: float, kernels: int) -> float:
        """Operators that read and write ``nbytes`` in so many kernels."""
        return nbytes / self.bytes_per_s + kernels * self.kernel_s


def missing_rate(accelerator: Accelerator, compute: str) -> str | None:
    """Describe the rate that no source gives and that a time needs. None if all are known."""
    if accelerator.peak_flops_per_s(compute) is None:
        return f"the catalogue has no {compute} peak for {accelerator.name}"
    if accelerator.bandwidth_bytes_per_s is None:
        return f"the catalogue has no memory bandwidth for {accelerator.name}"
    if accelerator.achievable_flops_per_s(compute) is None:
        return f"the speed of a {compute} product on {accelerator.name} is not measured"
    return None


def check_predictable(cluster: ClusterHardware, *, ranks: int, compute: str) -> None:
    """Raise where the time of a step cannot be predicted.

    Raises:
        RequestError: The cluster has fewer devices than ranks, or no source gives a rate of the
            device that a time needs.
    """
    if ranks > cluster.devices:
        raise RequestError(
            f"the layout has {ranks} ranks, but {cluster.name} x {cluster.nodes} has "
            f"{cluster.devices} devices. Take more nodes, or smaller degrees."
        )
    if why_not := missing_rate(cluster.accelerator, compute):
        raise RequestError(
            f"{why_not}, so no time can be said. Take an accelerator that `docs/hardware.md` gives "
            "rates for, or measure it and pass the profile as calibration."
        )


def rates(accelerator: Accelerator, compute: str, calibration: Calibration | None = None) -> Rates:
    """Rates of an accelerator in a format: ``missing_rate`` must be None."""
    best = accelerator.achievable_flops_per_s(compute)
    bandwidth = accelerator.bandwidth_bytes_per_s
    peak = accelerator.peak_flops_per_s(compute)
    # The power limit belongs to the part, so its bf16 peak decides in every format.
    half = accelerator.peak_flops_per_s("bf16") or accelerator.peak_flops_per_s("fp16") or peak
    assert best and bandwidth and peak and half
    measured = calibration or Calibration()
    power = accelerator.power_share
    sustained = best * power * (SUSTAINED_HOT if half > HOT_FLOPS_PER_S else SUSTAINED_COOL)
    # A measured rate already contains what power and clock do, so no share is applied to it.
    if measured.matmul_share is not None:
        sustained = peak * measured.matmul_share
    flash = min(FLASH_SHARE * half, FLASH_LIMIT_FLOPS_PER_S) * power
    fused = max(flash, FUSED_SHARE * half * power)
    if measured.attention_flops_per_s is not None:
        flash = fused = measured.attention_flops_per_s  # of the fastest kernel that is there
    return Rates(
        flops_per_s=sustained,
        flash_flops_per_s=flash,
        fused_flops_per_s=fused,
        bytes_per_s=bandwidth * (measured.bandwidth_share or BANDWIDTH),
        processors=accelerator.processors or PROCESSORS,
        kernel_s=measured.kernel_s or KERNEL_S,
    )


PROCESSORS = 128
"""Default where a vendor gives no number: it only rounds the waves of tiles."""


# FLOP per token of a decoder-only transformer are counted in two conventions, forward and backward.
# They are 4 to 13 % apart for the same model, so every figure names its own:
#
# - ``full`` counts attention over all pairs of tokens: 6N + 12 L d s (PaLM, Chowdhery et al. 2022,
#   arXiv:2204.02311, appendix B; torchtitan and llm-foundry print this one);
# - ``causal`` counts only the pairs that a causal mask leaves, half of them: 6N + 6 L d s
#   (Megatron-Bridge's tables).
#
# N = parameters that multiply every token (not the input embedding, which is a look-up), L =
# blocks, d = heads x head width, s = tokens of a sample. Recomputed FLOP never count: these are
# model FLOP.
#
# The forward pass is a third of each. Half of a product's backward pass is the gradient of its
# input, half that of its matrix. A frozen matrix has no gradient, and below the lowest trained
# parameter there is no backward pass. Adapters have all three parts. The head of a masked language
# model multiplies hidden tokens only.


def flops_per_token(
    shape: ModelShape, seq_len: int, trained: TrainableElements | None = None
) -> dict[str, float]:
    """FLOP per token by convention.

    Args:
        trained: What is, where some of the model is frozen.

    Attention is counted over the whole sample even where documents are kept apart: an upper bound
    there, and the number that other tools print.
    """
    layers = shape.num_hidden_layers
    inside = shape.matmul_parameters - shape.head_parameters
    is_masked = not shape.is_causal and shape.label_head is None
    head = shape.head_parameters * (MASKED_SHARE if is_masked else 1.0)
    matmul = 6.0 * (inside + head)
    width = shape.num_attention_heads * (shape.head_width + shape.value_width) / 2
    pairs = layers * width * seq_len
    if trained is not None:
        block = inside / layers
        matmul = 2.0 * (inside + head)
        matmul += 2.0 * (block * (layers - trained.lowest) + head * trained.passes_head)
        matmul += 2.0 * (block * sum(trained.products) + head * trained.head_is_trained)
        matmul += 6.0 * trained.added
        pairs *= (1 + 2 * (layers - trained.lowest) / layers) / 3
    return {"full": matmul + 12 * pairs, "causal": matmul + 6 * pairs}
