"""The bare FSDP2 loop as a contender."""

from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.bare_loop import BareLoop, sharded_llama
from benchmarks.gpu.cells import LR
from benchmarks.gpu.job import Job
from benchmarks.gpu.pace import Pace
from shardyard.config.rules.custom_module import require_shape
from shardyard.data.shards import TokenShards
from shardyard.models.build import hf_config
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.layout import RunDir


def train(job: Job, device: torch.device, pace: Pace) -> list[float]:
    """Train the job; losses are this rank's."""
    resolved = read_resolved(RunDir(Path(job.run_dir)).resolved(0))
    shards = TokenShards(Path(resolved.data.dir), "train")
    torch.manual_seed(0)  # compiled or not, the same weights
    model = sharded_llama(
        hf_config(require_shape(resolved.shape)),
        device=device,
        compute=torch.bfloat16,
        recompute=job.cell.recompute == "full",
        compiles=job.cell.compile,
        gathers_once=True,
    )
    loop = BareLoop(
        model,
        shards.read(0, shards.num_tokens),
        device=device,
        micro_batch=job.cell.micro_batch,
        micro_batches=job.micro_batches,
        seq_len=job.cell.load.seq_len,
        lr=LR,
        seed=dist.get_rank(),
        gathers_once=True,
    )
    losses = []
    pace.start()
    while not pace.is_done:
        losses.append(loop.step())
        pace.mark()
    return [float(loss) for loss in losses]
