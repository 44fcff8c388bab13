"""Images a second of our own loop beside a plain one, in one process and by turns.

    PYTHONPATH=src python -m benchmarks.gpu.images --presets resnet50 efficientnet-b7

Both read JPEGs from memory (a folder on /dev/shm) and decode them on threads or workers. Ours is
``Loop.step`` with all it does; the plain one is what a good engineer writes: DataLoader with
workers, pinned batches, channels-last, bf16 autocast, torch.compile, fused SGD. Rounds of a few
steps alternate (plain, ours, ours, plain, ...), so that clocks and heat fall on both alike. Both
begin with random weights and draw pictures in an order of their own, so losses are not compared.
Networks are those of transformers: torchvision may not be there.
"""

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu.clocks import Clocks
from benchmarks.record import about, result_file
from shardyard.config.model.source import network_or_none
from shardyard.config.resolve import resolve
from shardyard.config.schema.recipe import Recipe
from shardyard.data.images.prepare import prepare_images
from shardyard.hardware.machine import Machine, probe
from shardyard.io.files import write_json
from shardyard.models.images import build_network
from shardyard.parallel.device import (
    available_device,
    process_group_backend,
    select_device,
    synchronize,
)
from shardyard.planner.phases import plan
from shardyard.rundir.attempt_files import write_resolved
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up

LR, MOMENTUM = 1e-3, 0.9
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What each does in one step, and how often."""

    preset: str
    size: int
    batch: int
    pictures: int = 2048
    classes: int = 16
    steps: int = 10
    """Of one round."""
    rounds: int = 6
    workers: int = 8
    compiles: bool = True


WORKS = {
    "resnet50": Work(preset="resnet50", size=224, batch=256),
    "efficientnet-b7": Work(preset="efficientnet-b7", size=600, batch=16, pictures=256),
}
REHEARSAL = {"resnet18": Work(
    preset="resnet18", size=32, batch=4, pictures=24, classes=4, steps=1, rounds=2, workers=0,
    compiles=False,
)}  # fmt: skip
"""Small enough for a CPU; its numbers mean nothing."""


def main() -> int:
    """Measure network by network; the file is written anew after each."""
    args = _arguments()
    machine = probe()
    device = torch.device("cpu") if args.rehearse else select_device(available_device(), 0)
    dist.init_process_group(
        process_group_backend(device.type), store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0, world_size=1,
        device_id=None if device.type == "cpu" else device,
    )  # fmt: skip
    works = REHEARSAL if args.rehearse else {name: WORKS[name] for name in args.presets}
    path = result_file(f"images-{time.strftime('%H%M%S', time.gmtime())}", machine, args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {**about(machine), "is_rehearsal": args.rehearse, "cells": []}
    memory = Path("/dev/shm")
    for work in works.values():
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
            try:
                line = measure(work, machine, device, Path(scratch))
            except torch.OutOfMemoryError as error:
                message = str(error).split(". ")[0]
                line = {**asdict(work), "status": "out of memory", "message": message}
        content["cells"].append(line)
        write_json(path, content)
        print({key: line.get(key) for key in ("preset", "status", "images_per_s")}, file=sys.stderr)
    print(f"raw results: {path}", file=sys.stderr)
    return 0 if any(line["status"] == "ok" for line in content["cells"]) else 1


def measure(work: Work, machine: Machine, device: torch.device, folder: Path) -> dict[str, Any]:
    """Images a second of both, and each round's."""
    pictures = write_pictures(folder / "pictures", work)
    run_dir = _write_run(work, machine, device, folder)
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run_dir, 0, hooks, local_rank=0)
    network = training.resolved.network
    assert network is not None
    step = plain_loop(build_network(network), pictures, work, device)
    loops: dict[str, Callable[[], Any]] = {"plain": step, "shardyard": Loop(training).step}
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for run in loops.values():  # compiles, and chooses convolutions
        for _ in range(3):
            run()
    with Clocks(0 if device.type == "cpu" else 1) as clocks:
        for number in range(work.rounds):
            for name in list(loops) if number % 2 == 0 else list(reversed(loops)):
                rates[name].append(work.batch * work.steps / _seconds(loops[name], work, device))
        seen = clocks.take()
    training.close()
    ratios = [ours / plain for ours, plain in zip(*reversed(rates.values()), strict=True)]
    return {
        **asdict(work),
        "status": "ok",
        "images_per_s": {name: median(found) for name, found in rates.items()},
        "rounds_images_per_s": rates,
        "median_of_round_ratios": median(ratios),
        "clocks": seen,
    }


def _seconds(step: Callable[[], Any], work: Work, device: torch.device) -> float:
    synchronize(device)
    began = time.monotonic()
    for _ in range(work.steps):
        step()
    synchronize(device)
    return time.monotonic() - began


def write_pictures(folder: Path, work: Work) -> list[tuple[bytes, int]]:
    """JPEGs in a folder for each class; returns the same with their labels."""
    draw = np.random.default_rng(0)
    found = []
    for number in range(work.pictures):
        label = number % work.classes
        place = folder / f"{label:03d}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)  # noise alone is no photograph
        picture = Image.fromarray(coarse).resize((work.size, work.size))
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=90)
        (place / f"{number:05d}.jpg").write_bytes(file.getvalue())
        found.append((file.getvalue(), label))
    return found


def _write_run(work: Work, machine: Machine, device: torch.device, folder: Path) -> RunDir:
    recipe = Recipe.model_validate({
        "run": {"steps": 10**6},
        "task": {"name": "image_classification"},
        "model": {
            "preset": work.preset, "weights": "random", "batch_norm": "micro_batch",
            "compile": work.compiles,
        },
        "data": {
            "source": str(folder / "pictures"), "dir": str(folder / "prepared"),
            "eval_fraction": 0.0, "images": {"size": work.size},
        },
        "optim": {
            "name": "sgd", "lr": LR, "momentum": MOMENTUM, "nesterov": False, "weight_decay": 0.0,
            "schedule": "constant", "warmup_steps": 0, "grad_clip": None,
            "global_batch": work.batch, "micro_batch": work.batch,
        },
        "precision": {"compute": "bf16"},
        "checkpoint": {"every": 10**6},
        "cluster": {"device": device.type, "devices": 1},
    })  # fmt: skip
    facts = prepare_images(recipe, model_dir=None, progress=lambda *_: None)
    resolved = resolve(
        recipe, shape=None, network=network_or_none(recipe, None), machine=machine, data=facts,
        model_dir=None,
    )  # fmt: skip
    run_dir = RunDir(folder / "run")
    run_dir.attempt(0).mkdir(parents=True)
    prediction = plan(resolved, world_size=1, devices_per_node=1, machine=machine)
    write_json(run_dir.plan(0), prediction.to_json())
    write_resolved(run_dir.resolved(0), resolved)
    return run_dir


# --- the plain loop -------------------------------------------------------------------------------


class Jpegs(Dataset[tuple[Tensor, int]]):
    """Decoded, turned at random and scaled in the worker; pixels stay bytes."""

    def __init__(self, pictures: list[tuple[bytes, int]], size: int) -> None:
        self._pictures = pictures
        self._size = size

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        content, label = self._pictures[index]
        picture = Image.open(io.BytesIO(content)).convert("RGB").resize((self._size, self._size))
        pixels_HWC = torch.from_numpy(np.array(picture))
        if torch.rand(()) < 0.5:
            pixels_HWC = pixels_HWC.flip(1)
        return pixels_HWC, label


def plain_loop(
    model: nn.Module, pictures: list[tuple[bytes, int]], work: Work, device: torch.device
) -> Callable[[], Tensor]:
    """One step of a loop by hand; returns its loss, still on the device."""
    model.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    if work.compiles:
        model.compile()
    update = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=True)
    batches = _batches(pictures, work, device)
    mean_C11, std_C11 = (
        torch.tensor(values, device=device).view(3, 1, 1) for values in (_MEAN, _STD)
    )

    def step() -> Tensor:
        pixels_BHWC, labels_B = (each.to(device, non_blocking=True) for each in next(batches))
        pixels_BCHW = (pixels_BHWC.permute(0, 3, 1, 2).float() / 255 - mean_C11) / std_C11
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(pixel_values=pixels_BCHW).logits, labels_B)
        loss.backward()  # type: ignore[no-untyped-call]
        update.step()
        update.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _batches(
    pictures: list[tuple[bytes, int]], work: Work, device: torch.device
) -> Iterator[list[Tensor]]:
    loader = DataLoader(
        Jpegs(pictures, work.size),
        batch_size=work.batch,
        shuffle=True,
        drop_last=True,
        num_workers=work.workers,
        pin_memory=device.type != "cpu",
        persistent_workers=work.workers > 0,
    )
    while True:
        yield from loader


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--presets", nargs="+", choices=[*WORKS], default=[*WORKS])
    add("--out", type=Path, default=Path(__file__).parents[1] / "results")
    add("--rehearse", action="store_true", help="tiny, on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
