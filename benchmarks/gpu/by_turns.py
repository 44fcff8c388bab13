"""Settings of our own against each other in one process, by turns: A B, B A, A B.

    python -m benchmarks.gpu.by_turns TURNS.json      (RANK, WORLD_SIZE, ... as torchrun sets them)

Clocks fall as a device gets warm, and two processes meet it at two temperatures: what differs by a
percent is told here alone. Between two turns the model is gone, and so is what was compiled; torch
finds it again in its cache on disk.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.contend import answer_of
from benchmarks.gpu.job import Job
from shardyard.parallel.device import process_group_backend, select_device


def main() -> None:
    """Answer the jobs in the file that is named, one after the other; never returns."""
    jobs = [Job.read(Path(file)) for file in json.loads(Path(sys.argv[1]).read_text())]
    device = select_device(jobs[0].device, int(os.environ["LOCAL_RANK"]))
    if device.type == "cpu":
        torch.set_num_threads(1)
    dist.init_process_group(
        process_group_backend(jobs[0].device), device_id=None if device.type == "cpu" else device
    )
    for job in jobs:
        if time.time() > job.stop_at:
            break
        answer = answer_of(job, device, time.monotonic())
        job.answer_file(0).write_text(json.dumps(answer))
        torch.compiler.reset()  # else a graph for each turn, of which torch keeps eight
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
