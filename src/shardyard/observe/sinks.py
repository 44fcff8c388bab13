"""Destinations of metric lines: metrics.jsonl and TensorBoard."""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from shardyard.data.loader import MicroBatch, Samples
from shardyard.rundir.jsonl import LineWriter
from shardyard.rundir.layout import RunDir
from shardyard.rundir.metrics import scalars_of


class Sink(Protocol):
    """Takes every metric line as it is made."""

    def write(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """metrics.jsonl. Node 0 of a launched run prints its lines, marked (node/log_markers.py)."""

    def __init__(self, run_dir: RunDir) -> None:
        self._lines = LineWriter(run_dir.metrics)

    def write(self, line: dict[str, Any]) -> None:
        self._lines.append(line)

    def close(self) -> None:
        self._lines.close()


class TensorBoard:
    """Scalars by step, one curve a metric; evaluations under ``eval/``.

    Args:
        after_step: That training continues from; later points of earlier starts were lost, and
            TensorBoard hides them.
    """

    def __init__(self, run_dir: RunDir, *, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second to import: only when asked

        self._writer: Any = SummaryWriter(str(run_dir.tensorboard), purge_step=after_step + 1)

    def write(self, line: dict[str, Any]) -> None:
        for name, value in scalars_of(line).items():
            self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self._writer.close()


def open_sinks(run_dir: RunDir, *, tensorboard: bool, after_step: int = 0) -> list[Sink]:
    """The sinks of rank 0.

    Args:
        after_step: The step that training continues from.
    """
    sinks: list[Sink] = [MetricsFile(run_dir)]
    if tensorboard:
        sinks.append(TensorBoard(run_dir, after_step=after_step))
    return sinks


# Which samples a rank reads, as marked lines of its log.

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
