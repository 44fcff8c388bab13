"""Hugging Face Trainer as a contender, set up as its documentation suggests for this work.

bf16 autocast over fp32 weights, fused AdamW, its own gradient checkpointing; FSDP2 where there are
several accelerators. What it does by default (a check of the loss for NaN each step, say) stays.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.gpu.cells import LR
from benchmarks.gpu.equal_losses import FIRST
from benchmarks.gpu.job import Job
from benchmarks.gpu.pace import Pace
from shardyard.config.rules.custom_module import require_shape
from shardyard.data.shards import TokenShards
from shardyard.models.build import hf_config
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.layout import RunDir


class Windows(Dataset[dict[str, Tensor]]):
    """Consecutive windows of the training split; the model shifts the labels itself."""

    def __init__(self, shards: TokenShards, seq_len: int) -> None:
        self._shards = shards
        self._seq_len = seq_len

    def __len__(self) -> int:
        return self._shards.num_tokens // self._seq_len

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self._seq_len
        tokens_L = torch.from_numpy(self._shards.read(start, start + self._seq_len))
        return {"input_ids": tokens_L, "labels": tokens_L}


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Tells the pace of every step, and the Trainer when to stop."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.losses: list[float] = []
        """Of the first steps: each more would make the device wait once more."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._pace.start()

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pace.mark()
        control.should_training_stop = self._pace.is_done
        control.should_log = state.global_step <= FIRST

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


def train(job: Job, device: torch.device, pace: Pace) -> list[float]:
    """Train the job; returns the losses of the first steps."""
    several = int(os.environ["WORLD_SIZE"]) > 1
    if not several:
        _forget_launcher()
    resolved = read_resolved(RunDir(Path(job.run_dir)).resolved(0))
    with device:
        model = AutoModelForCausalLM.from_config(
            hf_config(require_shape(resolved.shape)),
            dtype=torch.float32,
            attn_implementation="sdpa",
        )
    model.config.use_cache = False
    clock = _Clock(pace)
    trainer = Trainer(
        model=model,
        args=_arguments(job, device, several=several),
        train_dataset=Windows(TokenShards(Path(resolved.data.dir), "train"), job.cell.load.seq_len),
        callbacks=[clock],
    )
    trainer.train()
    return clock.losses


def _forget_launcher() -> None:
    """Let it see a plain process: under a launcher, even one process is wrapped in DDP, whose
    buckets would hold a second copy of all gradients."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)


def _arguments(job: Job, device: torch.device, *, several: bool) -> Any:
    return TrainingArguments(
        output_dir=str(Path(job.run_dir) / "trainer"),
        per_device_train_batch_size=job.cell.micro_batch,
        gradient_accumulation_steps=job.micro_batches,
        max_steps=10**6,  # the clock ends it
        bf16=True,
        use_cpu=device.type == "cpu",
        gradient_checkpointing=job.cell.recompute == "full",
        gradient_checkpointing_kwargs={"use_reentrant": False},
        torch_compile=job.cell.compile,
        optim="adamw_torch_fused",
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        fsdp=True if several and device.type != "cpu" else None,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
