"""From a step's result to its line in metrics.jsonl and TensorBoard: numbers, rates and MFU."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardyard.data.loader import MicroBatch, Samples
from shardyard.errors import RequestError
from shardyard.io.files import read_json
from shardyard.rundir.jsonl import ROUTER_KEYS, LineWriter
from shardyard.rundir.layout import RunDir
from shardyard.rundir.metrics import scalars_of


@dataclass(frozen=True, kw_only=True)
class FlopBudget:
    """Prediction of `plan` for one token and one device; the base of MFU."""

    flops_per_token: float
    """Forward and backward, attention counted in full: 6 N + 12 L d s (arXiv:2204.02311, B)."""
    peak_flops_per_s: float | None
    """Peak of one device. None if the device is not in the catalogue: then there is no MFU."""

    def mfu(self, tokens_per_s_per_device: float) -> float | None:
        """Model FLOP utilisation, 0 to 1."""
        if self.peak_flops_per_s is None:
            return None
        return tokens_per_s_per_device * self.flops_per_token / self.peak_flops_per_s


def read_flop_budget(plan: Path, phase: int = 0) -> FlopBudget:
    """Read attempts/<n>/plan.json, so that prediction and measurement share one number.

    Args:
        phase: Of the run, from 0: its samples may be longer than those of others.

    Raises:
        RequestError: The file is missing or is no plan.
    """
    try:
        content = read_json(plan)
        phases = content.get("phases") or ()
        content = phases[phase] if phases else content
        return FlopBudget(
            flops_per_token=content["flops_per_token"]["full"],
            peak_flops_per_s=content["peak_flops_per_s"],
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RequestError(
            f"{plan} cannot be read ({error}). It is written at the start of an attempt; resume "
            "the run to make a new attempt."
        ) from error


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Wall time of one step, by part; seconds."""

    step_time_s: float
    """From the end of the step before to the end of this one, without checkpoint and evaluation."""
    data_wait_s: float
    """Wait for micro-batches, within the step time."""
    checkpoint_blocked_s: float
    """Training stood still for a checkpoint after this step; not in the step time."""


class MetricLines:
    """Makes the lines of one generation of an attempt; without a budget there is no MFU."""

    def __init__(
        self,
        budget: FlopBudget | None,
        *,
        attempt: int,
        generation: int,
        world_size: int,
        phase: int | None = None,
    ) -> None:
        """Args:
        phase: Counted from 1; None: the run has none.
        """
        self._budget = budget
        self.attempt = attempt
        self._phase = phase
        self._context = {"attempt": attempt, "generation": generation, "world_size": world_size}

    def step(
        self,
        *,
        step: int,
        epoch: float,
        loss: float,
        grad_norm: float,
        loss_scale: float | None,
        lr: float,
        tokens: int,
        targets: int,
        samples: int,
        step_tokens: int,
        step_samples: int,
        times: StepTimes,
        peak_memory_bytes: int,
        counted: Mapping[str, float],
    ) -> dict[str, Any]:
        """Return the line of one step; ``tokens`` and ``samples`` count from the run's beginning.

        Args:
            targets: Number of predictions in this step: the divisor of its loss.
            step_tokens: Tokens through the model in this step without padding; rates and MFU count
                these, as in the plan.
            counted: Counts of modules next to the loss, by name; of routers ``ROUTER_KEYS``.
        """
        tokens_per_s = step_tokens / times.step_time_s
        per_device = tokens_per_s / self._context["world_size"]
        return {
            "step": step,
            "epoch": round(epoch, 6),
            "loss": loss,
            "grad_norm": grad_norm,
            "loss_scale": loss_scale,
            "lr": lr,
            "tokens": tokens,
            "targets": targets,
            "samples": samples,
            "step_time_s": times.step_time_s,
            "data_wait_s": times.data_wait_s,
            "checkpoint_blocked_s": times.checkpoint_blocked_s,
            "tokens_per_s": tokens_per_s,
            "samples_per_s": step_samples / times.step_time_s,
            "tokens_per_s_per_device": per_device,
            "mfu": None if self._budget is None else self._budget.mfu(per_device),
            "peak_memory_bytes": peak_memory_bytes,
            **dict.fromkeys(ROUTER_KEYS),
            **counted,
            **self._context,
            "phase": self._phase,
        }


class Sink(Protocol):
    """Takes every metric line and generated text as it is made."""

    def write(self, line: dict[str, Any]) -> None: ...

    def write_texts(self, step: int, texts: Sequence[Mapping[str, str]]) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """metrics.jsonl. Node 0 of a launched run prints its lines, marked (node/log_markers.py).

    Generated texts go to samples.jsonl, which is made for the first of them.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._lines = LineWriter(run_dir.metrics)
        self._samples = run_dir.samples

    def write(self, line: dict[str, Any]) -> None:
        self._lines.append(line)

    def write_texts(self, step: int, texts: Sequence[Mapping[str, str]]) -> None:
        """Append a line for each text."""
        lines = LineWriter(self._samples)
        for each in texts:
            lines.append({"step": step, **each})
        lines.close()

    def close(self) -> None:
        self._lines.close()


class TensorBoard:
    """Scalars by step, one curve a metric; evaluations under ``eval/``, texts under ``generated/``.

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

    def write_texts(self, step: int, texts: Sequence[Mapping[str, str]]) -> None:
        """Show each prompt's text by step; TensorBoard renders Markdown, so it is indented."""
        for number, each in enumerate(texts):
            whole = "".join(f"    {line}\n" for line in each["text"].splitlines())
            self._writer.add_text(f"generated/{number}", f"{each['prompt']}\n\n{whole}", step)

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
