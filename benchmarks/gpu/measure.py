"""One cell after another: write its run folder, run it, halve what does not fit, count tokens."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.beside import over_predicted, predicted, shares
from benchmarks.gpu.cells import REFERENCE, Cell, Place, recipe
from benchmarks.gpu.equal_losses import FIRST
from benchmarks.gpu.job import Job
from benchmarks.gpu.processes import run_by_turns, run_job
from benchmarks.gpu.turns import compared
from shardyard.config.model.source import read_shape
from shardyard.config.resolve import resolve
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.rules.custom_module import require_shape
from shardyard.errors import ShardyardError
from shardyard.hardware.catalogue import accelerator_named
from shardyard.hardware.machine import Machine
from shardyard.io.files import write_json
from shardyard.planner.calibration import DeviceCeilings
from shardyard.planner.kernels import flops_per_token
from shardyard.planner.phases import plan
from shardyard.rundir.attempt_files import write_resolved
from shardyard.rundir.layout import RunDir

GIB = 2**30


def prepare_data(cell: Cell, place: Place) -> DatasetMetadata:
    """Prepare the text once for all cells; a finished one is found again."""
    from shardyard.data.prepare import prepare

    return prepare(recipe(cell, place), model_dir=None, progress=lambda *_: None)


def conventions(machine: Machine) -> dict[str, Any]:
    """What the numbers of a result mean; the peak is None where the device is not known."""
    accelerator = accelerator_named(machine.name)
    return {
        "tokens_per_s_per_device": "tokens of a step / median seconds of a step / devices",
        "mfu_full": "6 N + 12 L d s FLOP a token, attention over all pairs (planner/kernels.py)",
        "mfu_causal": "6 N + 6 L d s FLOP a token, only pairs that a causal mask leaves",
        "peak_flops_per_s": accelerator and accelerator.peak_flops_per_s("bf16"),
        "peak_source": accelerator and f"{accelerator.name}, bf16 dense: {accelerator.source}",
        "peak_gib": "allocated by torch while training, largest rank; building is left out",
        "precision": "bf16 compute, fp32 master weights, gradients and optimizer state",
    }


@dataclass(kw_only=True)
class Session:
    """What all cells of one call share."""

    machine: Machine
    place: Place
    data: DatasetMetadata
    scratch: Path
    steps: int
    warm_up: int
    compiled: Path | None = None
    """Folder of compiled code that processes share."""
    profile: bool = False
    ceilings: DeviceCeilings | None = None
    """What this device reached on the pieces of a step."""
    run: Callable[[Job, int], dict[str, Any]] = run_job
    run_turns: Callable[[Sequence[Job]], list[dict[str, Any] | None]] = run_by_turns
    _tries: int = field(default=0, init=False)

    def measure(self, cell: Cell, *, seconds: float, least_s: float) -> Iterator[dict[str, Any]]:
        """One line for each try: the micro-batch is halved while the cell is out of memory."""
        until = time.time() + seconds
        if cell.contender == "trainer" and find_spec("accelerate") is None:
            yield {**self._head(cell), "status": "not installed", "message": "needs accelerate"}
            return
        while True:
            if time.time() + least_s > until:
                yield {**self._head(cell), "status": "not run", "message": "no time was left"}
                return
            line = self._try(cell, until)
            yield line
            if line["status"] != "out of memory" or cell.micro_batch == 1 or not cell.halves:
                return
            cell = cell.with_half_micro_batch()

    def by_turns(self, cells: Sequence[Cell], *, turns: int, until: float) -> list[dict[str, Any]]:
        """One line for each cell: all in one process on one device, in turns (``by_turns.py``)."""
        failed: dict[int, str] = {}
        jobs: list[tuple[int, Job]] = []
        for turn in range(turns):
            order = list(enumerate(cells))
            for number, cell in order if turn % 2 == 0 else reversed(order):
                if number not in failed:
                    try:
                        job, _, _ = self._job(cell, until)
                        jobs.append((number, job))
                    except ShardyardError as error:
                        failed[number] = str(error)
        answers = self.run_turns([job for _, job in jobs]) if jobs else []
        of_cells: list[list[dict[str, Any] | None]] = [[] for _ in cells]
        for (number, _), answer in zip(jobs, answers, strict=True):
            of_cells[number].append(answer)
        for number, why in failed.items():
            of_cells[number] = [{"status": "failed", "message": why}] * turns
        lines = compared(of_cells)
        return [{**self._head(cell), **line} for cell, line in zip(cells, lines, strict=True)]

    def _job(self, cell: Cell, until: float) -> tuple[Job, Resolved, dict[str, Any]]:
        """One try of a cell in a run folder of its own; what it resolves to, and what is predicted.

        Raises:
            ShardyardError: This device cannot do it.
        """
        self._tries += 1
        run_dir = RunDir(self.scratch / f"try-{self._tries}")
        resolved, said = self._write_run(cell, run_dir)
        is_reference = cell.variant == REFERENCE
        steps = max(1, FIRST - self.warm_up) if is_reference else self.steps
        job = Job(
            cell=cell, run_dir=str(run_dir.path), device=self.place.device, steps=steps,
            warm_up=self.warm_up, stop_at=until, profile=self.profile and not is_reference,
            compiled=None if self.compiled is None else str(self.compiled),
        )  # fmt: skip
        return job, resolved, said

    def _try(self, cell: Cell, until: float) -> dict[str, Any]:
        try:
            job, resolved, said = self._job(cell, until)
        except ShardyardError as error:  # this device cannot do it; the next cell may be able to
            return {**self._head(cell), "status": "failed", "message": str(error)}
        answer = self.run(job, self.place.devices)
        head = {**self._head(cell), "predicted": said}
        if answer["status"] != "ok":
            return {**head, **answer}
        line = {**head, **answer, **self._rates(cell, resolved, answer)}
        return {**line, "over_predicted": over_predicted(line)}

    def _head(self, cell: Cell) -> dict[str, Any]:
        return {
            "model": cell.load.preset,
            "blocks": cell.load.blocks,
            "variant": cell.variant,
            "settings": list(cell.settings),
            "contender": cell.contender,
            "recompute": cell.recompute,
            "compile": cell.compile or "model.compile=true" in cell.settings,
            "seq_len": cell.load.seq_len,
            "sequences_per_step_per_device": cell.load.sequences,
            "micro_batch": cell.micro_batch,
        }

    def _rates(self, cell: Cell, resolved: Resolved, answer: dict[str, Any]) -> dict[str, Any]:
        tokens = cell.load.sequences * cell.load.seq_len  # of one device
        step_s = statistics.median(answer["step_times_s"])
        rate = tokens / step_s
        flops = flops_per_token(require_shape(resolved.shape), cell.load.seq_len)
        accelerator = accelerator_named(self.machine.name)
        peak = accelerator and accelerator.peak_flops_per_s("bf16")
        return {
            "median_step_s": step_s,
            "tokens_per_s_per_device": rate,
            "tokens_per_s_by_wall": tokens * len(answer["step_times_s"]) / answer["wall_s"],
            "tflops_per_device_full": rate * flops["full"] / 1e12,
            "mfu_full": rate * flops["full"] / peak if peak else None,
            "mfu_causal": rate * flops["causal"] / peak if peak else None,
            **self._shares(cell, flops, answer),
            "peak_gib": max(rank["allocated_bytes"] for rank in answer["peak"]) / GIB,
        }

    def _shares(
        self, cell: Cell, flops: dict[str, float], answer: dict[str, Any]
    ) -> dict[str, Any]:
        if "causes" not in answer:
            return {}
        tokens = cell.load.sequences * cell.load.seq_len
        found = shares(
            answer["causes"], flops, tokens, recompute=cell.recompute, ceilings=self.ceilings
        )
        return {"share_of_ceiling": found}

    def _write_run(self, cell: Cell, run_dir: RunDir) -> tuple[Resolved, dict[str, Any]]:
        asked = recipe(cell, self.place)
        shape = cell.load.shape_of(read_shape(asked.model, None, self.data.vocab_size))
        resolved = resolve(asked, shape=shape, machine=self.machine, data=self.data)
        prediction = plan(
            resolved,
            world_size=self.place.devices,
            devices_per_node=self.place.devices,
            machine=self.machine,
        )
        run_dir.attempt(0).mkdir(parents=True)
        content = prediction.to_json()
        write_json(run_dir.plan(0), content)
        write_resolved(run_dir.resolved(0), resolved)
        return resolved, predicted(content)
