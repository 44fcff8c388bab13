"""Number formats of a sharded model: fp32 master weights, a compute and a reduction format."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardyard.config.schema.recipe import Precision

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""Of parameters as gathered and of activations; fp8 is the format of products alone."""


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """FSDP's policy for resolved settings (no ``auto`` left)."""
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[precision.compute],
        # exact: FSDP sums nothing (parallel/exact_gradients.py)
        reduce_dtype=torch.float32 if precision.reduce == "exact" else DTYPES[precision.reduce],
        output_dtype=DTYPES[precision.output],
    )
