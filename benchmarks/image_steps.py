"""A step of ours on images beside Hugging Face Trainer's (DDP) and beside a bare loop of DDP.

ResNet-18 on two gloo processes of a CPU, SGD with momentum, pictures of 64 pixels. The contenders
live in the same two processes and step in pairs whose order turns round, a barrier before each
step, so that whatever else the machine does falls on both alike. Ours is ``Loop.step`` with all it
does: order, decoding, exact statistics of batch normalisation, metrics. Trainer decodes the same
files, one after the other, as its DataLoader does without workers. The bare loop has its pictures
in memory already, and nothing but both passes and the update.

    python -m benchmarks.image_steps        (needs accelerate, which Trainer needs)
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.record import write_result
from benchmarks.step_overhead import StepTimes, interval, rounded
from benchmarks.trainer_ddp import as_torchrun_would
from shardyard.families.images.registry import IMAGE_PRESETS
from shardyard.models.images import build_network
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up
from tests.distributed.image_runs import make_image_run, write_network
from tests.distributed.ranks import run_on_ranks

BARS = {"trainer": 1.0, "bare": 1.03}
"""Contender -> most that the median ratio of ours to it may be."""
PROCESSES = 2
LR, MOMENTUM = 1e-3, 0.9


@dataclass(frozen=True, kw_only=True)
class Work:
    """What each does in one step, per process, and how often."""

    preset: str = "resnet18"
    size: int = 64
    classes: int = 10
    pictures: int = 640
    micro_batch: int = 16
    warm_up: int = 4
    pairs: int = 40


def main() -> int:
    """Measure, print, write the result file; returns 1 if a bar is missed."""
    args = _arguments()
    work = Work(pairs=args.pairs)
    found = {name: measure(work, name) for name in args.case or BARS}
    for name, case in found.items():
        low, high = case["median_of_pair_ratios_95"]
        print(
            f"beside {name}: median ratio of a pair {case['median_of_pair_ratios']:.3f} ({low:.3f} "
            f"to {high:.3f}); bar {BARS[name]}: {'met' if case['is_met'] else 'MISSED'}"
        )
    is_met = all(case["is_met"] for case in found.values())
    head = {"bars": BARS, "is_met": is_met, "accelerate": version("accelerate")}
    write_result("image-steps", {**head, "cases": found}, args.out)
    return 0 if is_met else 1


def measure(work: Work, beside: str) -> dict[str, Any]:
    """Ours and one contender: medians, ratio, and the raw times of steps."""
    with tempfile.TemporaryDirectory() as scratch:
        times = _run(Path(scratch), work, beside)
    ours, theirs = np.array(times["shardyard"]), np.array(times[beside])
    ratio = float(np.median(ours / theirs))
    return {
        "work": {**asdict(work), "processes": PROCESSES, "compute": "fp32", "layout": "NO_SHARD"},
        "is_met": ratio <= BARS[beside],
        "median_step_s": {name: float(np.median(steps)) for name, steps in times.items()},
        "median_of_pair_ratios": ratio,
        "median_of_pair_ratios_95": list(interval(ours / theirs)),
        "step_times_s": rounded(times),
    }


def _run(scratch: Path, work: Work, beside: str) -> StepTimes:
    """Seconds of each step, to the end of the slowest process."""
    pictures, draw = scratch / "pictures", np.random.default_rng(0)
    for number in range(work.pictures):
        folder = pictures / f"{number % work.classes:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (work.size, work.size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:05d}.png")
    published = dict(IMAGE_PRESETS[work.preset].config)
    network = write_network(scratch / "network", published.pop("model_type"), **published)
    sections: dict[str, Any] = {
        "run": {"steps": 10 * (work.warm_up + work.pairs)},  # never its last step
        "data": {"images": {"size": work.size}, "eval_fraction": 0},
        "optim": {
            "lr": LR, "momentum": MOMENTUM, "nesterov": False, "weight_decay": 0.0,
            "schedule": "constant", "grad_clip": None,
            "global_batch": PROCESSES * work.micro_batch, "micro_batch": work.micro_batch,
        },
        "parallel": {"strategy": "NO_SHARD"},
        "checkpoint": {"every": 10**6},
        "cluster": {"devices": PROCESSES},
    }  # fmt: skip
    run_dir = make_image_run(scratch / "run", pictures, network, sections)
    pair = {"trainer": _with_trainer, "bare": _with_bare_loop}[beside]
    by_rank = run_on_ranks(pair, PROCESSES, run_dir, work, pictures, timeout_s=3600.0)
    return {name: np.max([of[name] for of in by_rank], axis=0).tolist() for name in by_rank[0]}


def _with_bare_loop(run_dir: RunDir, work: Work, pictures: Path) -> StepTimes:
    """On one process: both loops in turn."""
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run_dir, 0, hooks, local_rank=0)
    bare = DistributedDataParallel(_network(training.resolved.network))
    update = torch.optim.SGD(bare.parameters(), lr=LR, momentum=MOMENTUM, fused=True)
    batch = _Pictures(pictures)[0]
    pixels = batch["pixel_values"].expand(work.micro_batch, -1, -1, -1).contiguous()
    labels = torch.zeros(work.micro_batch, dtype=torch.int64)

    def bare_step() -> None:
        loss = F.cross_entropy(bare(pixel_values=pixels).logits, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        update.step()
        update.zero_grad()

    steps: dict[str, Callable[[], Any]] = {"shardyard": Loop(training).step, "bare": bare_step}
    times: StepTimes = {name: [] for name in steps}
    for number in range(work.warm_up + work.pairs):
        for name in list(steps) if number % 2 else list(reversed(steps)):
            started = _start()
            steps[name]()
            times[name].append(time.perf_counter() - started)
    training.close()
    return {name: each[work.warm_up :] for name, each in times.items()}


def _with_trainer(run_dir: RunDir, work: Work, pictures: Path) -> StepTimes:
    """On one process: Trainer's loop, in whose pauses ours makes its steps."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run_dir, 0, hooks, local_rank=0)
    loop = Loop(training)
    times: StepTimes = {"shardyard": [], "trainer": []}

    class Pairs(TrainerCallback):  # type: ignore[misc]
        """Ours twice behind every other step of Trainer: T S, S T, T S, ..."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started = _start()

        def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
            times["trainer"].append(time.perf_counter() - self.started)
            for _turn in range(2 * (len(times["trainer"]) % 2)):
                started = _start()
                loop.step()
                times["shardyard"].append(time.perf_counter() - started)
            control.should_training_stop = len(times["trainer"]) == work.warm_up + work.pairs
            self.started = _start()

    as_torchrun_would(dist.get_rank(), dist.get_world_size())
    model = _network(training.resolved.network)
    arguments = TrainingArguments(
        output_dir=str(run_dir.path / "trainer"),
        per_device_train_batch_size=work.micro_batch,
        max_steps=10**6,  # the callback ends it
        use_cpu=True,
        ddp_backend="gloo",
        optim="sgd",
        optim_args=f"momentum={MOMENTUM}",
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=_Pictures(pictures), callbacks=[Pairs()]
    )
    trainer.train()
    training.close()
    return {name: each[work.warm_up :] for name, each in times.items()}


def _network(network: Any) -> nn.Module:
    torch.manual_seed(0)
    return build_network(network)


class _Pictures(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Files of class folders, decoded when asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = sorted(folder.rglob("*.png"))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        path = self._files[index]
        with Image.open(path) as opened:
            pixels = torch.from_numpy(np.array(opened.convert("RGB")))
        label = torch.tensor(int(path.parent.name))
        return {"pixel_values": pixels.permute(2, 0, 1) / 127.5 - 1.0, "labels": label}


def _start() -> float:
    dist.barrier()
    return time.perf_counter()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=BARS, help="one of both alone")
    parser.add_argument("--pairs", type=int, default=Work.pairs, help="measured pairs; even")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    if args.pairs % 2:
        parser.error("--pairs must be even")
    return args


if __name__ == "__main__":
    sys.exit(main())
