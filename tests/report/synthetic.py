"""Writes a run folder as a real run leaves it: two attempts, a lost worker, a drain, an end.

A simulated clock gives every duration, so that what the report adds up is known beforehand.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.families.presets import PRESETS
from shardyard.hardware.machine import Machine
from shardyard.io.files import write_json
from shardyard.planner.phases import plan
from shardyard.rundir.attempt_files import write_resolved
from shardyard.rundir.layout import RunDir

BEGAN_T = 1_795_000_000.0
STEP_S = 0.62
DATA_WAIT_S = 0.02
SAMPLE = "def <script>alert(1)</script>(self):\n    return `self`.value & 1\n"
LAPTOP = Machine(
    device="cpu", name="Some CPU", count=1, memory_bytes=16 * 2**30, cores=2, hostname="laptop"
)


def resolved_run(*, steps: int = 120, **sections: dict[str, Any]) -> Resolved:
    """What a small run on two CPU processes resolves to."""
    settings: dict[str, dict[str, Any]] = {
        "run": {"name": "quickstart", "steps": steps},
        "model": {"preset": "llama-laptop", "dropout": 0.0},
        "task": {"prompt": "def <script>", "generate_tokens": 32, "eval_every_steps": 20},
        "data": {"seq_len": 256, "workers": 2, "tokenizer": "train"},
        "optim": {
            "global_batch": 16, "micro_batch": 4, "lr": 1e-3, "warmup_steps": 12,
            "decay_steps": steps,
        },
        "parallel": {"strategy": "FULL_SHARD", "zero": 3, "dp_shard": 2, "dp_replicate": 1},
        "precision": {"compute": "fp32", "output": "fp32"},
        "cluster": {"device": "cpu", "devices": 2},
    }  # fmt: skip
    for name, given in sections.items():
        settings[name] = {**settings.get(name, {}), **given}
    return Resolved(
        recipe=Recipe.model_validate(settings),
        reasons={"optim.lr": "by model size <b>", "precision.compute": "a CPU gains little"},
        shape=dataclasses.replace(PRESETS["llama-laptop"].shape, vocab_size=4096),
        data=DatasetMetadata(
            dir="prepared/1234", fingerprint="1234", vocab_size=4096, train_tokens=5_000_000,
            eval_tokens=250_000, train_documents=600, eval_documents=31, unigram_entropy=6.123,
        ),
        steps=steps,
    )  # fmt: skip


@dataclass
class RunWriter:
    """Appends to events.jsonl and metrics.jsonl while its clock moves on."""

    run: RunDir
    resolved: Resolved
    machine: Machine = LAPTOP
    clock_t: float = BEGAN_T
    attempt: int = -1
    generation: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def begin(self) -> None:
        """A new attempt: its three files."""
        self.attempt += 1
        self.generation = -1
        write_resolved(self.run.resolved(self.attempt), self.resolved)
        prediction = plan(self.resolved, world_size=2, devices_per_node=2, machine=self.machine)
        write_json(self.run.plan(self.attempt), prediction.to_json())
        manifest = {
            "shardyard": "0.1.0", "command": ["shardyard", "train", "<b>.yaml"],
            "packages": {"torch": "2.13.0"}, "started_at": self.clock_t,
        }  # fmt: skip
        write_json(self.run.manifest(self.attempt), manifest)
        self.clock_t += 1.5

    def start(self, *, load_step: int | None = None) -> None:
        """A new generation: the processes meet, build the model and load."""
        self.generation += 1
        self.clock_t += 0.4
        workers = [{"rank": rank, "node": "laptop", "pid": 100 + rank} for rank in range(2)]
        if self.generation == 0:
            self.event("attempt_started", workers=workers, world_size=2)
        self.event("rendezvous", seconds=0.4, workers=workers, world_size=2)
        load_s = 0.0 if load_step is None else 0.3
        self.clock_t += 2.2 + load_s
        memory = [
            {
                "rank": rank,
                "parameters_bytes": 4_722_048,
                "optimizer_bytes": 9_444_096,
                "peak_bytes": 390 * 2**20,
            }
            for rank in range(2)
        ]
        self.event("data_ready", seconds=0.01, samples=19_532)
        self.event("model_ready", seconds=0.5, memory_by_rank=memory, parameters=2_361_024)
        if load_step is not None:
            damaged = [{"step": 60, "reasons": ["<i>model.safetensors: 12 bytes short</i>"]}]
            self.event("checkpoint_loaded", step=load_step, seconds=load_s, damaged=damaged)
            self.event("checkpoint_abandoned", step=61, reason="rank 0: model.x holds <i>NaN</i>")

    def steps(self, first: int, last: int) -> None:
        """Steps with an evaluation every 20."""
        for step in range(first, last + 1):
            self.clock_t += STEP_S
            if step == first:
                self.event("first_step", step=step, seconds=STEP_S)
            self.lines.append(self._line(step))
            if step % 20 == 0:
                self.evaluate(step)

    def evaluate(self, step: int) -> None:
        self.clock_t += 0.8
        loss = _loss(step) + 0.05
        scores = {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / 2.4}
        self.event("evaluated", step=step, seconds=0.8, tokens=250_000, **scores)
        self.lines.append({"step": step, "epoch": step * 16 / 19_532, "eval": scores})

    def save(self, step: int, *, wait_s: float = 0.0) -> None:
        """A save that becomes durable ``wait_s`` later, while nothing else happens."""
        self.clock_t += 0.05
        self.event("checkpoint_started", step=step, blocked_s=0.05)
        self.clock_t += wait_s
        self.event("checkpoint_durable", step=step, seconds=0.05 + wait_s, bytes=28_400_000)

    def lose(self, *, after_s: float) -> None:
        self.clock_t += after_s
        self.event(
            "worker_lost", rank=1, node="laptop", pid=101, exit_code=None, signal="SIGKILL",
            cause="killed by SIGKILL: often the kernel's <oom> killer",
        )  # fmt: skip
        self.clock_t += 0.7

    def finish(self, step: int) -> None:
        self.clock_t += 1.1
        (self.run.path / "sample.txt").write_text(SAMPLE)
        self.event(
            "run_finished", step=step, tokens=step * 4096, loss=_loss(step),
            eval={"loss": _loss(step) + 0.05}, sample=SAMPLE, temperature=0.0, seconds=1.1,
            peak_bytes_by_rank=[471 * 2**20, 466 * 2**20],
        )  # fmt: skip

    def end(self, exit_code: int, reason: str) -> None:
        self.clock_t += 0.35
        self.event("attempt_ended", exit_code=exit_code, reason=reason)

    def event(self, kind: str, **fields: Any) -> None:
        head = {"t": self.clock_t, "kind": kind}
        self.events.append(
            {**head, "attempt": self.attempt, "generation": self.generation, **fields}
        )

    def write(self) -> RunDir:
        """Write what was appended so far."""
        self.run.path.mkdir(parents=True, exist_ok=True)
        self.run.recipe.write_text("model: {preset: llama-laptop}\n")
        self.run.events.write_text("".join(json.dumps(event) + "\n" for event in self.events))
        self.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return self.run

    def _line(self, step: int) -> dict[str, Any]:
        rate = 4096 / STEP_S * (1 + 0.03 * math.sin(step / 3))
        return {
            "step": step, "epoch": step * 16 / 19_532, "loss": _loss(step),
            "grad_norm": 0.6 + 2.5 * math.exp(-step / 15) + 0.05 * math.sin(1.7 * step),
            "lr": 1e-3 * min(step / 12, 0.55 + 0.45 * math.cos(math.pi * step / 130)),
            "tokens": step * 4096, "samples": step * 16, "step_time_s": STEP_S,
            "data_wait_s": DATA_WAIT_S, "checkpoint_blocked_s": 0.0, "tokens_per_s": rate,
            "samples_per_s": 16 / STEP_S, "tokens_per_s_per_device": rate / 2, "mfu": None,
            "peak_memory_bytes": 470 * 2**20, "attempt": self.attempt,
            "generation": self.generation, "world_size": 2,
        }  # fmt: skip


def write_whole_run(folder: Path) -> RunDir:
    """120 steps: a worker lost after 45, a drain after 80, resumed and finished."""
    writer = RunWriter(RunDir(folder / "quickstart-20261118-200640-0a1b"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 40)
    writer.save(40)
    writer.steps(41, 45)
    writer.lose(after_s=0.5)
    writer.start(load_step=40)
    writer.steps(41, 80)
    writer.event("draining", node="laptop", signal="SIGTERM")
    writer.save(80, wait_s=0.2)
    writer.end(143, "drained; step-00000080 is durable.")
    writer.clock_t += 600
    writer.begin()
    writer.start(load_step=80)
    writer.steps(81, 120)
    writer.save(120, wait_s=0.25)
    writer.finish(120)
    writer.end(0, "finished")
    run = writer.write()
    (run.checkpoints / "step-00000060.damaged").mkdir(parents=True)
    return run


def _loss(step: int) -> float:
    return 3.2 + 5.1 * math.exp(-step / 28) + 0.06 * math.sin(2.3 * step)
