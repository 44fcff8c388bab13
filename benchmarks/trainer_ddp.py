"""A step of ours beside one of Hugging Face Trainer, both replicated over two CPU processes.

Two models: one that predicts the next token, and BERT, each small, with the vocabulary of a real
one. Both contenders live in the same two gloo processes and train the same model on the same
prepared tokens, with AdamW in one kernel, clipping and a constant learning rate. They step in pairs
whose order turns round (T S, S T, T S, ...), a barrier before each step, so that whatever else the
machine does falls on both alike. Of Trainer a step is all from one ``on_step_end`` to the next:
reading the batch, both passes, the sums over processes, the update. Ours is ``Loop.step`` with all
it does. What Trainer does only now and then (logging, saving) is switched off.

    python -m benchmarks.trainer_ddp        (needs accelerate, which Trainer needs)
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu.hf_trainer import Windows
from benchmarks.record import write_result
from benchmarks.step_overhead import StepTimes, interval, rounded
from shardyard.config.rules.custom_module import require_shape
from shardyard.data.shards import TokenShards
from shardyard.io.files import write_json
from shardyard.models.build import hf_config
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import make_run, prepare_corpus

BAR = 0.75
PROCESSES = 2
LR = 1e-3


@dataclass(frozen=True, kw_only=True)
class Work:
    """What both do in one step, per process, and how often."""

    model: dict[str, Any]
    """Its config.json."""
    task: str
    seq_len: int = 256
    micro_batch: int = 4
    micro_batches: int = 1
    warm_up: int = 6
    pairs: int = 80


_WIDTH = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
CASES = {
    "llama": Work(
        model={
            **_WIDTH,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 32000,
            "intermediate_size": 688,
            "tie_word_embeddings": True,
        },
        task="causal_lm",
    ),
    "bert": Work(
        model={
            **_WIDTH,
            "model_type": "bert",
            "architectures": ["BertForMaskedLM"],
            "vocab_size": 30522,
            "intermediate_size": 1024,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        task="masked_lm",
    ),
}


def main() -> int:
    """Measure, print, write the result file; returns 1 if the bar is missed."""
    args = _arguments()
    cases = {}
    for name in args.case or CASES:
        cases[name] = measure(replace(CASES[name], pairs=args.pairs, warm_up=args.warm_up))
        print(f"{name}: {_line(cases[name])}", flush=True)
    is_met = all(case["is_met"] for case in cases.values())
    head = {"bar": BAR, "is_met": is_met, "accelerate": version("accelerate")}
    write_result("trainer-ddp", {**head, "cases": cases}, args.out)
    return 0 if is_met else 1


def measure(work: Work) -> dict[str, Any]:
    """Both contenders of one case: medians, ratios, and the raw times of steps."""
    with tempfile.TemporaryDirectory() as scratch:
        wall_s, cpu_s = _run(Path(scratch), work)
    return {
        "work": {**asdict(work), "processes": PROCESSES, "compute": "fp32", "layout": "NO_SHARD"},
        **summarize(wall_s),
        "cpu_time": summarize(cpu_s),
        "step_times_s": rounded(wall_s),
        "step_cpu_times_s": rounded(cpu_s),
    }


def summarize(times: StepTimes) -> dict[str, Any]:
    """Medians, and the ratio of ours to Trainer's with a 95 % bootstrap interval over pairs."""
    ours, theirs = np.array(times["shardyard"]), np.array(times["trainer"])
    ratio = float(np.median(ours / theirs))
    return {
        "is_met": ratio <= BAR,
        "median_step_s": {name: float(np.median(steps)) for name, steps in times.items()},
        "median_of_pair_ratios": ratio,
        "median_of_pair_ratios_95": list(interval(ours / theirs)),
    }


def _run(scratch: Path, work: Work) -> tuple[StepTimes, StepTimes]:
    """Wall seconds of each step, to the end of the slowest process, and CPU seconds of all."""
    model = scratch / "model"
    model.mkdir()
    write_json(model / "config.json", work.model)
    samples = PROCESSES * work.micro_batch * work.micro_batches
    run_dir = make_run(
        scratch / "run",
        prepare_corpus(scratch),
        {
            "run": {"steps": 10 * (work.warm_up + work.pairs)},  # never its last step
            "model": {"preset": None, "path": str(model), "weights": "random"},
            "task": {"name": work.task},
            "data": {"seq_len": work.seq_len},
            "optim": {
                "lr": LR,
                "schedule": "constant",
                "warmup_steps": 0,
                "weight_decay": 0.1,
                "global_batch": samples,
                "micro_batch": work.micro_batch,
            },
            "parallel": {"strategy": "NO_SHARD"},
            "checkpoint": {"every": 10**6},
            "cluster": {"devices": PROCESSES},
        },
    )
    by_rank = run_on_ranks(_measure, PROCESSES, run_dir, work, timeout_s=3600.0)
    names = by_rank[0][0].keys()
    wall_s = {name: np.max([wall[name] for wall, _ in by_rank], axis=0).tolist() for name in names}
    cpu_s = {name: np.sum([cpu[name] for _, cpu in by_rank], axis=0).tolist() for name in names}
    return wall_s, cpu_s


def _measure(run_dir: RunDir, work: Work) -> tuple[StepTimes, StepTimes]:
    """On one process: Trainer's loop, in whose pauses ours makes its steps."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run_dir, 0, hooks, local_rank=0)
    resolved, loop = training.resolved, Loop(training)
    wall_s: StepTimes = {"shardyard": [], "trainer": []}
    cpu_s: StepTimes = {"shardyard": [], "trainer": []}

    def note(name: str, started: tuple[float, float]) -> None:
        wall_s[name].append(time.perf_counter() - started[0])
        cpu_s[name].append(time.process_time() - started[1])

    class Pairs(TrainerCallback):  # type: ignore[misc]
        """Ours twice behind every other step of Trainer: T S, S T, T S, ..."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started = _start()

        def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
            note("trainer", self.started)
            for _turn in range(2 * (len(wall_s["trainer"]) % 2)):
                started = _start()
                loop.step()
                note("shardyard", started)
            control.should_training_stop = len(wall_s["trainer"]) == work.warm_up + work.pairs
            self.started = _start()

    as_torchrun_would(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    is_bert = work.task == "masked_lm"
    kind = AutoModelForMaskedLM if is_bert else AutoModelForCausalLM
    model = kind.from_config(
        hf_config(require_shape(resolved.shape)), dtype=torch.float32, attn_implementation="sdpa"
    )
    model.config.use_cache = False
    arguments = TrainingArguments(
        output_dir=str(run_dir.path / "trainer"),
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=work.micro_batches,
        max_steps=10**6,  # the callback ends it
        use_cpu=True,
        ddp_backend="gloo",
        optim="adamw_torch_fused",
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        ddp_find_unused_parameters=False,  # as its log advises for such a model
        disable_tqdm=True,
    )
    shards = TokenShards(Path(resolved.data.dir), "train")
    data = (MaskedWindows if is_bert else Windows)(shards, work.seq_len)
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Pairs()]).train()
    training.close()
    return _after(wall_s, work.warm_up), _after(cpu_s, work.warm_up)


class MaskedWindows(Windows):
    """With 15 % of the tokens hidden, as transformers' own collator hides them."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens_L = super().__getitem__(index)["input_ids"]
        is_hidden_L = torch.rand(len(tokens_L)) < 0.15
        return {
            "input_ids": tokens_L.masked_fill(is_hidden_L, 4),
            "labels": tokens_L.masked_fill(~is_hidden_L, -100),
        }


def _after(times: StepTimes, warm_up: int) -> StepTimes:
    return {name: steps[warm_up:] for name, steps in times.items()}


def as_torchrun_would(rank: int, world_size: int) -> None:
    """Trainer looks for its place in the environment; the process group is there already."""
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(world_size)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # nobody connects


def _start() -> tuple[float, float]:
    dist.barrier()
    return time.perf_counter(), time.process_time()


def _line(content: dict[str, Any]) -> str:
    medians, (low, high) = content["median_step_s"], content["median_of_pair_ratios_95"]
    return (
        f"median step: Shardyard {medians['shardyard'] * 1e3:.1f} ms, Trainer "
        f"{medians['trainer'] * 1e3:.1f} ms; median ratio of a pair "
        f"{content['median_of_pair_ratios']:.3f} ({low:.3f} to {high:.3f} at 95 %); bar {BAR}: "
        f"{'met' if content['is_met'] else 'MISSED'}; of CPU seconds "
        f"{content['cpu_time']['median_of_pair_ratios']:.3f}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, help="one of both alone")
    parser.add_argument("--pairs", type=int, default=Work.pairs, help="measured pairs; even")
    parser.add_argument("--warm-up", type=int, default=Work.warm_up, help="pairs before; even")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    if args.pairs % 2 or args.warm_up % 2:
        parser.error("--pairs and --warm-up must be even")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return args


if __name__ == "__main__":
    sys.exit(main())
