"""Public configurations under their own framework and as imported recipes: the same losses?

Each case is one of `tests/importers/configs/cases`, cut to a tiny Llama in fp32 on two gloo
processes and 20 steps. The cut file is read by the framework that it is for (DeepSpeed's engine,
the Trainer with and without DeepSpeed, `accelerate launch`, torchtitan, a shell that runs the
script or what a PyTorchJob's operator starts), and by
`shardyard import`, whose recipe `shardyard train` runs. Both begin with the same weights, and the
framework reads the samples of each step in the order that the recipe gives. Bar: every loss within
1e-5.

    DS_BUILD_OPS=0 pip install -c constraints.txt deepspeed accelerate torchtitan
    pip install --no-deps triton  # torchtitan asks for it, and runs nothing of it here
    python -m benchmarks.imported_behaviour [--case NAME ...]
"""

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import yaml

from benchmarks.record import write_result
from shardyard.data.order import sample_indices
from shardyard.data.shards import TokenShards
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from tests.distributed.runs import prepare_corpus
from tests.importers.configs.test_public import as_toml

BAR = 1e-5
_FRAMEWORKS = ("deepspeed", "accelerate", "transformers", "torchtitan")
STEPS = 20
SEQ_LEN = 32
ROOT = Path(__file__).parents[1]
PUBLIC = ROOT / "tests" / "importers" / "configs" / "cases"
OFF = ("bf16", "fp16", "tf32")
ARGUMENTS = {
    "max_steps": STEPS, "use_cpu": True, "ddp_backend": "gloo", "save_strategy": "no",
    "logging_steps": 1, "report_to": "none", "output_dir": "out", "disable_tqdm": True,
}  # fmt: skip
"""What is cut or told of all Trainer arguments, in both."""
DROPPED = (
    "num_train_epochs", "eval_strategy", "eval_steps", "save_steps", "max_seq_length", "cutoff_len",
    "model_name_or_path", "model_revision", "push_to_hub",
)  # fmt: skip
"""Arguments that are left out of both."""
ADAMW = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}
"""The script's own optimizer, where no file says one: told to the import by settings."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One public file, and how it is cut."""

    kind: str
    """The stem of the file in ``PUBLIC``."""
    public: str
    """Its ``from``."""
    runs: str
    """What of ``imported_framework`` runs it."""
    cut: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> value; None: the key is left out."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of a DeepSpeed file that the Trainer reads: its arguments."""
    text: Sequence[tuple[str, str]] = ()
    """Of a script: pattern -> replacement."""
    words: Sequence[str] = ()
    """Settings for the import."""
    without: Sequence[str] = ()
    shards: int = 0
    """Of accelerate: the version of FSDP."""
    accumulation: int = 1


_LIKE_ALPACA = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-4,
    "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "weight_decay": 0.1, "adam_beta2": 0.95,
}  # fmt: skip
_OWN = tuple(f"optim.{name}={json.dumps(value)}" for name, value in ADAMW.items())
_LOOP = (*_OWN, "optim.schedule=constant", "optim.warmup_steps=0")
_FSDP = {"mixed_precision": "no", "num_processes": 2, "use_cpu": True}
_SCRIPT = (
    (r"\s*\\\n\s*", " "),  # one line
    (r"--nproc_per_node[ =]\d+", "--nproc_per_node=2"),
    (r"\s--(bf16|tf32|fp16)( True)?(?=\s)", ""),
    (r"(fastchat/train/train.py|train/train_hf.py|-m train_multipacking)",
     "-m benchmarks.imported_framework trainer"),
    (r"--per_device_train_batch_size \d+", "--per_device_train_batch_size 2"),
    (r"--gradient_accumulation_steps \d+", "--gradient_accumulation_steps 2"),
    (r"--(evaluation_strategy|eval_steps|save_strategy|save_steps|save_total_limit) \S+", ""),
    (r"--num_train_epochs \S+",
     f"--max_steps {STEPS} --use_cpu --ddp_backend gloo --report_to none --save_strategy no "
     "--disable_tqdm True"),
    (r"--(output_dir|model_max_length|block_size|model_name_or_path|data_path|train_file) \S+", ""),
    (r"--(torch_dtype|dataloader_num_workers|dataloader_prefetch_factor) \S+", ""),
    (r"--torch_compile", ""),
)  # fmt: skip
CASES = {
    "deepspeed engine, ZeRO 2, Adam, WarmupLR": Case(
        kind="deepspeed", public="microsoft/DeepSpeedExamples cifar/ds_config.json",
        runs="deepspeed",
        cut={"train_batch_size": 4, "fp16": None, "zero_optimization.cpu_offload": None,
             "scheduler.params.warmup_num_steps": 1, "optimizer.params.torch_adam": True},
    ),
    "deepspeed engine, ZeRO 3": Case(
        kind="deepspeed",
        public="microsoft/DeepSpeedExamples autotuning/hf/dsconfigs/ds_config_fp16_z3.json",
        runs="deepspeed",
        cut={"fp16": None, "train_micro_batch_size_per_gpu": 2,
             "zero_allow_untested_optimizer": True}, words=_OWN,
    ),
    "Trainer, deepspeed ZeRO 1, its optimizer and schedule": Case(
        kind="deepspeed", public="winglian/axolotl deepspeed/zero1.json", runs="trainer",
        cut={"fp16": None, "bf16": None, "optimizer.params.torch_adam": True,
             "scheduler.params.warmup_type": "linear"},
        arguments={**_LIKE_ALPACA, "warmup_ratio": None, "warmup_steps": 4,
                   "gradient_accumulation_steps": 1, "lr_scheduler_type": "linear"},
    ),
    "Trainer, deepspeed ZeRO 2": Case(
        kind="deepspeed", public="hiyouga/LLaMA-Factory examples/deepspeed/ds_z2_config.json",
        runs="trainer", cut={"fp16": None, "bf16": None}, arguments=_LIKE_ALPACA,
    ),
    "Trainer, deepspeed ZeRO 3": Case(
        kind="deepspeed", public="lm-sys/FastChat playground/deepspeed_config_s3.json",
        runs="trainer",
        cut={"fp16": None, "zero_optimization.offload_optimizer": None,
             "zero_optimization.offload_param": None, "zero_allow_untested_optimizer": True},
        arguments=_LIKE_ALPACA,
    ),
    "accelerate, FSDP 1": Case(
        kind="accelerate",
        public="huggingface/alignment-handbook recipes/accelerate_configs/fsdp.yaml",
        runs="accelerate", words=_LOOP, shards=1,
        # both refuse to run without accelerators
        cut={**_FSDP, "fsdp_config.fsdp_sync_module_states": False,
             "fsdp_config.fsdp_cpu_ram_efficient_loading": False},
    ),
    "accelerate, FSDP 2": Case(
        kind="accelerate", public="huggingface/trl examples/accelerate_configs/fsdp2.yaml",
        runs="accelerate", cut=_FSDP, words=_LOOP, shards=2,
    ),
    "accelerate, copies": Case(
        kind="accelerate",
        public="huggingface/alignment-handbook recipes/accelerate_configs/multi_gpu.yaml",
        runs="accelerate", cut=_FSDP, words=_LOOP,
    ),
    "accelerate, deepspeed ZeRO 2": Case(
        kind="accelerate",
        public="huggingface/trl examples/accelerate_configs/deepspeed_zero2.yaml",
        runs="accelerate", cut={"num_processes": 2, "gpu_ids": "all"}, words=_LOOP,
    ),
    "Trainer, cosine, warm-up a share": Case(
        kind="trainer",
        public="huggingface/alignment-handbook recipes/zephyr-7b-beta/sft/config_full.yaml",
        runs="trainer", cut={"per_device_train_batch_size": 2}, without=["dataset_num_proc"],
    ),
    "Trainer, accumulation": Case(
        kind="trainer",
        public="hiyouga/LLaMA-Factory examples/extras/adam_mini/qwen2_full_sft.yaml",
        runs="trainer", words=["optim.name=adamw"],
        without=["stage", "finetuning_type", "use_adam_mini", "template", "max_samples",
                 "overwrite_cache", "plot_loss", "val_size"],
    ),
    "script, linear, weight decay": Case(
        kind="scripts", public="mesolitica/malaya-speech session/llama3-tts/300M.sh",
        runs="script", text=[*_SCRIPT, (r"--warmup_steps \d+", "--warmup_steps 5")],
    ),
    "PyTorchJob, master and worker": Case(
        kind="kubeflow", public="kubeflow/training-operator examples/pytorch/simple.yaml",
        runs="pytorchjob", words=_LOOP,
        cut={f"spec.pytorchReplicaSpecs.{each}.template.spec.containers.0.command":
             ["python", "-m", "benchmarks.imported_framework", "loop"]
             for each in ("Master", "Worker")},
    ),
    "torchtitan, FSDP, linear": Case(
        kind="torchtitan", public="pytorch/torchtitan tests/integration_tests/base_config.toml",
        runs="torchtitan",
        cut={"job.print_args": None, "quantize": None, "training.steps": STEPS,
             "training.seq_len": SEQ_LEN, "training.local_batch_size": 2,
             "training.mixed_precision_param": "float32",
             # a warm-up is one step off, and a rate that stays first is refused: both are said
             "lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": None},
    ),
    "script, fsdp": Case(
        kind="scripts", public="lm-sys/FastChat scripts/train_vicuna_7b.sh", runs="script",
        text=_SCRIPT,
    ),
}  # fmt: skip


def main() -> int:
    """Run both sides of each case, print, write the result file; returns 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, help="one of them alone")
    parser.add_argument("--at-once", type=int, default=2, help="cases that run side by side")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imported-") as scratch:
        laid = lay_out(Path(scratch))
        names = sorted(args.case or CASES, key=lambda name: CASES[name].kind == "deepspeed")
        places = {name: Path(scratch) / f"case-{n}" for n, name in enumerate(names)}
        with ThreadPoolExecutor(args.at_once) as pool:
            measured = {name: pool.submit(_told, name, place, laid)
                        for name, place in places.items()}  # fmt: skip
        found = {name: future.result() for name, future in measured.items()}
    is_met = all(case["is_met"] for case in found.values())
    versions = {each: version(each) for each in _FRAMEWORKS}
    work = {"steps": STEPS, "seq_len": SEQ_LEN, "processes": 2, "compute": "fp32"}
    head = {"bar": BAR, "is_met": is_met, "frameworks": versions, "work": work}
    write_result("imported-behaviour", {**head, "cases": found}, args.out)
    return 0 if is_met else 1


def _without_places(text: str, folder: Path) -> str:
    """Where the case lay, and this checkout, by names that are the same everywhere."""
    for place, name in ((folder, "CASE"), (folder.parent, "SCRATCH"), (ROOT, "REPOSITORY"),
                        (Path(sys.base_prefix), "PYTHON"), (Path.home(), "HOME")):  # fmt: skip
        text = text.replace(str(place), name)
    return text


_ONE_BUILD = Lock()
"""DeepSpeed compiles an operator at its start, and waits for another that does."""


def _told(name: str, folder: Path, laid: Mapping[str, str]) -> dict[str, Any]:
    """One case, told as soon as it is there; what failed is a result too."""
    is_deepspeed = CASES[name].kind == "deepspeed"
    try:
        with _ONE_BUILD if is_deepspeed else nullcontext():
            found = measure(CASES[name], folder, laid)
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-12:]
        found = {"is_met": False, "failed": _without_places("\n".join(last), folder)}
    print(f"{name}: {found.get('largest_difference')}, {found.get('ran_as')}", flush=True)
    if "failed" in found:
        print(found["failed"], file=sys.stderr)
    return found


def lay_out(folder: Path) -> dict[str, str]:
    """Prepared text and saved weights, for all cases."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    corpus = prepare_corpus(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder / "model")
    return {"source": corpus.source, "prepared": corpus.prepared, "model": str(folder / "model")}


def measure(case: Case, folder: Path, laid: Mapping[str, str]) -> dict[str, Any]:
    """Losses of both, and their largest difference."""
    folder.mkdir()
    files = write_files(case, folder)
    recipe = import_recipe(case, files, folder, laid)
    programs = Path(sys.executable).parent
    env = {
        **os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT),
        "PATH": f"{programs}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "",
        "TORCH_EXTENSIONS_DIR": str(folder.parent / "extensions"), "IMPORTED_CASE": str(folder),
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    train = [sys.executable, "-m", "shardyard", "train", str(recipe), "run.id=imported"]
    _run(train, env, folder)
    run_dir = RunDir(folder / "runs" / "imported")
    write_batches(run_dir, folder)
    settings = read_resolved(run_dir.resolved(0)).recipe
    accumulation = int(settings.optim.global_batch) // int(settings.optim.micro_batch) // 2
    about = {
        "model": laid["model"], "shards": case.shards, "adamw": ADAMW, "steps": STEPS,
        "micro_batch": settings.optim.micro_batch, "accumulation": accumulation,
        "grad_clip": settings.optim.grad_clip,
    }  # fmt: skip
    (folder / "case.json").write_text(json.dumps(about))
    _run(command(case, files), env, folder)
    theirs = json.loads((folder / "losses.json").read_text())
    ours = [line["loss"] for line in read_steps(run_dir.metrics)]
    largest = max(abs(a - b) for a, b in zip(ours, theirs["losses"], strict=True))
    return {
        "public": case.public, "ran_as": theirs["ran_as"],
        "recipe": _without_places(recipe.read_text(), folder),
        "is_met": largest <= BAR and len(ours) == STEPS, "largest_difference": largest,
        "fall": ours[0] - ours[-1], "ours": ours, "theirs": theirs["losses"],
    }  # fmt: skip


def write_files(case: Case, folder: Path) -> list[Path]:
    """The public file, cut; and the Trainer's arguments beside a DeepSpeed file."""
    public = next(
        each for each in yaml.safe_load((PUBLIC / f"{case.kind}.yaml").read_text())
        if each["from"] == case.public
    )  # fmt: skip
    if case.kind == "scripts":
        text = public["text"]
        for pattern, replacement in case.text:
            text = re.sub(pattern, replacement, text)
        (folder / "job.sh").write_text(text)
        return [folder / "job.sh"]
    content = public["content"]
    for name, value in case.cut.items():
        _put(content, name.split("."), value)
    if case.kind == "torchtitan":
        (folder / "source.toml").write_text(as_toml(content))
        return [folder / "source.toml"]
    if case.kind == "trainer":
        content = {name: value for name, value in content.items() if name not in OFF}
        content = {name: value for name, value in content.items() if name not in DROPPED}
        content |= ARGUMENTS
    name = "source.yaml" if case.kind in ("accelerate", "kubeflow") else "source.json"
    (folder / name).write_text(json.dumps(content, indent=1))
    if not case.arguments:
        return [folder / name]
    arguments = {**ARGUMENTS, **case.arguments, "deepspeed": "source.json"}
    for each in ("use_cpu", "ddp_backend"):  # DeepSpeed's own accelerator says it
        del arguments[each]
    arguments = {each: value for each, value in arguments.items() if value is not None}
    (folder / "arguments.json").write_text(json.dumps(arguments, indent=1))
    return [folder / name, folder / "arguments.json"]


def _put(content: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        inner: Any = content[int(key)] if isinstance(content, list) else content.setdefault(key, {})
        content = inner
    if value is None:
        content.pop(path[-1], None)
    else:
        content[path[-1]] = value


def import_recipe(case: Case, files: Sequence[Path], folder: Path, laid: Mapping[str, str]) -> Path:
    """What `shardyard import` makes of the files, and of sizes and places."""
    recipe = folder / "recipe.yaml"
    words = [
        f"model.path={laid['model']}", f"data.source={laid['source']}",
        f"data.dir={laid['prepared']}", "data.tokenizer=train", "data.vocab_size=512",
        "data.eval_fraction=0.005", "data.workers=1",
        f"data.seq_len={SEQ_LEN}", f"run.dir={folder / 'runs'}", f"run.steps={STEPS}",
        "cluster.device=cpu", "cluster.devices=2", "cluster.nodes=1", "precision.compute=fp32",
        f"checkpoint.every={STEPS}",
    ]  # fmt: skip
    without = [word for key in case.without for word in ("--without", key)]
    program = [sys.executable, "-m", "shardyard", "import"]
    _run([*program, *map(str, files), *words, *case.words, *without, "--to", str(recipe)],
         dict(os.environ), folder)  # fmt: skip
    return recipe


def write_batches(run_dir: RunDir, folder: Path) -> None:
    """The tokens of all steps in the order of the run, each row with the token after it."""
    resolved = read_resolved(run_dir.resolved(0))
    shards = TokenShards(Path(resolved.data.dir), "train")
    count = -(-(shards.num_tokens - 1) // SEQ_LEN)
    positions = np.arange(STEPS * int(resolved.recipe.optim.global_batch))
    indices = sample_indices(positions, count, seed=resolved.recipe.run.seed)
    assert count - 1 not in indices, "the last sample is not full"
    rows = [shards.read(each * SEQ_LEN, each * SEQ_LEN + SEQ_LEN + 1) for each in indices.tolist()]
    np.save(folder / "batches.npy", np.stack(rows).astype(np.int64))


def command(case: Case, files: Sequence[Path]) -> list[str]:
    """What starts the framework with its file."""
    program = ["-m", "benchmarks.imported_framework", case.runs]
    torchrun = ["torchrun", "--standalone", "--nproc_per_node=2"]
    match case.runs:
        case "script":
            return ["bash", str(files[0])]
        case "accelerate":
            launch = ["accelerate", "launch", "--config_file", str(files[0])]
            return [*launch, "--main_process_port", "0", *program]
        case "pytorchjob":
            return ["bash", "-c", _as_the_operator(files[0])]
        case "deepspeed" | "torchtitan":
            return [*torchrun, *program, str(files[0])]
    return [*torchrun, *program, "--config", str(files[-1])]


def _as_the_operator(file: Path) -> str:
    """A shell that starts each replica of a PyTorchJob with the environment of its operator."""
    replicas = json.loads(file.read_text())["spec"]["pytorchReplicaSpecs"].values()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    commands = [each["template"]["spec"]["containers"][0]["command"]
                for each in replicas for _ in range(each["replicas"])]  # fmt: skip
    shared = f"WORLD_SIZE={len(commands)} MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    started = [f"RANK={n} {shared} {shlex.join(words)} & pids+=($!)"
               for n, words in enumerate(commands)]  # fmt: skip
    return "\n".join(
        ["pids=()", *started, 'for pid in "${pids[@]}"; do wait "$pid" || exit 1; done']
    )


def _run(command_: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
    subprocess.run(
        command_, env=dict(env), cwd=folder, check=True, timeout=900, text=True, capture_output=True
    )


if __name__ == "__main__":
    sys.exit(main())
