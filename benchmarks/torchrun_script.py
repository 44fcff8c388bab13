"""The script that plain torchrun starts beside us: `bare_loop.py` that saves and goes on from it.

What a careful user writes after torch's own tutorials: FSDP2, torch.distributed.checkpoint every so
many steps, the newest whole one read at the start. Nothing of shardyard is imported. It notes who
runs and each finished step, for those who kill it (`torchrun_restart.py`).
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Train for ever in the folder that is given; ``asked.json`` there says what."""
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    _note(folder / "workers.jsonl", {"rank": rank, "pid": os.getpid()})  # before it imports torch

    import numpy as np
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig

    from benchmarks.bare_loop import BareLoop, sharded_llama

    asked = json.loads((folder / "asked.json").read_text())
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**asked["model"])
    device = torch.device("cpu")
    model = sharded_llama(config, device=device, compute=torch.float32, recompute=False)
    text = np.frombuffer((folder / "text.bin").read_bytes(), dtype=np.uint8).astype(np.int64)
    loop = BareLoop(
        model, text, device=device, micro_batch=asked["micro_batch"], micro_batches=1,
        seq_len=asked["seq_len"], lr=1e-3, seed=rank,
    )  # fmt: skip
    step = _load(folder, loop)
    while True:
        began_s = time.monotonic()
        loss = float(loop.step())
        step += 1
        if rank == 0:
            line = {"step": step, "loss": loss, "seconds": time.monotonic() - began_s}
            _note(folder / "steps.jsonl", {**line, "pid": os.getpid(), "t": time.time()})
        if step % asked["every"] == 0:
            _save(folder, loop, step)


def _load(folder: Path, loop: Any) -> int:
    """The newest state that was saved; returns its step, or 0."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    newest = folder / "newest"
    if not newest.exists():
        return 0
    step = int(newest.read_text())
    weights, states = get_state_dict(loop.model, loop.optimizer)
    state = {"model": weights, "optimizer": states}
    load(state, checkpoint_id=str(folder / f"step-{step}"))
    set_state_dict(loop.model, loop.optimizer, model_state_dict=weights, optim_state_dict=states)
    return step


def _save(folder: Path, loop: Any, step: int) -> None:
    """Save all ranks' states, and once they are there say so; the one before is removed."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    weights, states = get_state_dict(loop.model, loop.optimizer)
    save({"model": weights, "optimizer": states}, checkpoint_id=str(folder / f"step-{step}"))
    if dist.get_rank() == 0:
        (folder / "newest.part").write_text(str(step))
        (folder / "newest.part").replace(folder / "newest")
        for old in folder.glob("step-*"):
            if old.name != f"step-{step}":
                shutil.rmtree(old, ignore_errors=True)


def _note(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
