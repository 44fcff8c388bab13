"""Memory, disk and speed of `shardyard import` on checkpoints of some GiB that the tools wrote.

    python -m benchmarks.imported_checkpoints [--layers 66] [--pairs 5] [--kinds KIND ...]

A Llama of random weights is saved in fp32 by two processes: whole by torch.save, by FSDP2 with
torch.distributed.checkpoint, and by DeepSpeed (ZeRO 2 and 3) where that is installed
(`pip install deepspeed`, with DS_ACCELERATOR=cpu). Each is imported by the command line, process
start included, and by turns the same bytes are copied by `cp`, both from the page cache.

| | bar |
|---|---|
| peak memory of the process | largest tensor and 300 MB |
| most disk that the import takes at any time | 1.02 times the weights |
| bytes a second | half of `cp`'s |

Every tensor of each result is held to the model. Writes one JSON file.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.record import write_result

KINDS = ("torch-save", "fsdp2", "zero-2", "zero-3")
MOST_OVER_BYTES = 300 * 10**6
MOST_DISK, LEAST_SPEED = 1.02, 0.5
_EVERY_S = 0.02
_BETWEEN = """
import resource, subprocess, sys, time
began = time.monotonic()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""A small process starts the import: a peak counts what the starting one held."""


def _model(layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _save(kind: str, folder: Path, layers: int) -> None:
    """One rank of the process that saves."""
    dist.init_process_group("gloo")
    model = _model(layers)
    if dist.get_rank() == 0:
        model.config.save_pretrained(folder / "like")
    if kind == "torch-save":
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "step": 3}, folder / f"{kind}.pt")
    elif kind == "fsdp2":
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        save({"model": get_model_state_dict(model), "step": 3}, checkpoint_id=folder / kind)
    else:
        import deepspeed  # type: ignore[import-not-found,unused-ignore]

        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": int(kind[-1])},
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "bf16": {"enabled": True},
        }
        engine, *_ = deepspeed.initialize(
            model=model, config=settings, model_parameters=model.parameters()
        )
        engine.save_checkpoint(str(folder / kind))
    dist.barrier()
    dist.destroy_process_group()


def _made(kind: str, folder: Path, layers: int) -> Path:
    subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "-m", "benchmarks.imported_checkpoints", "--save", kind, "--in", str(folder),
            "--layers", str(layers),
        ],
        check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return folder / (f"{kind}.pt" if kind == "torch-save" else kind)


def _imported(path: Path, folder: Path) -> tuple[float, int, int]:
    """Seconds, peak bytes of the process, and the most that lay on disk at a time."""
    to = folder / "out" / "to"
    shutil.rmtree(to.parent, ignore_errors=True)
    to.parent.mkdir()
    words = ["import", str(path), "--like", str(folder / "like"), "--to", str(to)]
    most = [0]
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_EVERY_S):
            most[0] = max(most[0], _bytes_below(to.parent))

    looking = threading.Thread(target=look)
    looking.start()
    done = subprocess.run(
        [sys.executable, "-c", _BETWEEN, sys.executable, "-m", "shardyard", *words],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    is_over.set()
    looking.join()
    took, peak_kib = done.stdout.split()
    return float(took), int(peak_kib) * 1024, max(most[0], _bytes_below(to.parent))


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # it has its last name by now
            continue
    return total


def _copied(source: Path, folder: Path) -> float:
    """Seconds in which ``cp`` copies the file."""
    target = folder / "copy"
    target.unlink(missing_ok=True)
    began = time.monotonic()
    subprocess.run(["cp", str(source), str(target)], check=True)
    return time.monotonic() - began


def _differing(folder: Path, layers: int, kind: str) -> list[str]:
    """Tensors that are not those of the model; DeepSpeed rounds to bf16 before it makes masters."""
    wanted = _model(layers).state_dict()
    if kind.startswith("zero"):
        wanted = {name: tensor.bfloat16().float() for name, tensor in wanted.items()}
    wrong = []
    with safe_open(folder / "model.safetensors", "pt") as held:
        if set(held.keys()) != set(wanted):
            wrong.append("names")
        for name in held.keys():  # noqa: SIM118 - it is no mapping
            if not torch.equal(held.get_tensor(name), wanted[name]):
                wrong.append(name)
    return wrong


def measure(kind: str, folder: Path, *, layers: int, pairs: int) -> dict[str, Any]:
    """One kind of checkpoint, imported and copied in turn."""
    path = _made(kind, folder, layers)
    rounds: list[dict[str, float]] = []
    _imported(path, folder)  # everything is in the page cache from here on
    weights = folder / "out" / "to" / "model.safetensors"
    reference = folder / "weights"
    shutil.copyfile(weights, reference)
    differing = _differing(weights.parent, layers, kind)
    size = reference.stat().st_size
    _copied(reference, folder)
    for number in range(pairs):
        steps: list[Callable[[], None]] = []
        found: dict[str, float] = {}

        def take(found: dict[str, float] = found) -> None:
            found["import_s"], found["peak_bytes"], found["disk_bytes"] = _imported(path, folder)

        def copy(found: dict[str, float] = found) -> None:
            found["cp_s"] = _copied(reference, folder)

        steps = [take, copy] if number % 2 == 0 else [copy, take]
        for step in steps:
            step()
        rounds.append(found)
    largest = 32_000 * 1024 * 4
    speed = median(each["cp_s"] / each["import_s"] for each in rounds)
    peak = max(each["peak_bytes"] for each in rounds)
    disk = max(each["disk_bytes"] for each in rounds) / size
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {
        "bytes": size,
        "largest_tensor_bytes": largest,
        "peak_bytes": peak,
        "disk_ratio": round(disk, 4),
        "speed_of_cp": round(speed, 3),
        "differing": differing,
        "is_met": {
            "memory": peak <= largest + MOST_OVER_BYTES,
            "disk": disk <= MOST_DISK,
            "speed": speed >= LEAST_SPEED,
            "equal": not differing,
        },
        "rounds": rounds,
    }


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=66)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--save", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.save:
        _save(args.save, args.folder, args.layers)
        return 0
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="imported-") as scratch:
        for kind in args.kinds:
            if kind.startswith("zero") and find_spec("deepspeed") is None:
                found[kind] = "DeepSpeed is not installed"
                continue
            found[kind] = measure(kind, Path(scratch), layers=args.layers, pairs=args.pairs)
            print(kind, {key: value for key, value in found[kind].items() if key != "rounds"})
    write_result("imported-checkpoints", {"kinds": found}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
