"""Which samples a rank reads, as marked lines of its log."""

import json
from collections.abc import Sequence

import numpy as np

from shardyard.data.loader import Samples
from shardyard.data.micro_batch import MicroBatch

SAMPLES_MARK = "@shardyard-samples "
"""Begins a log line that says which samples this rank reads at a step."""


def log_samples(step: int, batches: Sequence[MicroBatch], source: Samples) -> None:
    """Print one marked line: positions in the stream of samples, and the samples there.

    Takes micro-batches as the loader gives them, still in host memory. Padding is left out.
    """
    positions = np.concatenate([batch.samples_B.numpy() for batch in batches])
    positions = positions[positions >= 0]
    samples = source.sample_indices(positions)
    line = {"step": step, "positions": positions.tolist(), "samples": samples.tolist()}
    print(SAMPLES_MARK + json.dumps(line), flush=True)
