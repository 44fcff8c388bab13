"""Wrong situations of `shardyard import`, all told before a recipe is written."""

import json
from typing import Any

from tests.launchers.wrong_situations import Desk, Situations

SITUATIONS = Situations("import")
row = SITUATIONS.row

_SAID = ("model.preset=llama-tiny", "data.source=./text")


class ImportDesk(Desk):
    """Somebody with files of another tool."""

    def take(self, *words: str, said: tuple[str, ...] = _SAID) -> int:
        """Import files that were written, with model and data."""
        return self.shardyard("import", *words, *said)

    def script(self, *lines: str) -> str:
        """A batch script."""
        (self.folder / "job.sh").write_text("\n".join(["#!/bin/bash", *lines, ""]))
        return "job.sh"

    def deepspeed(self, **content: Any) -> str:
        """A file of DeepSpeed."""
        (self.folder / "ds.json").write_text(json.dumps({"train_batch_size": 8, **content}))
        return "ds.json"


@row(
    "a file of a kind that is not known",
    2,
    says="notes.txt is no configuration that is known by what is in it",
    do="Known are: PyTorchJob",
)
def _(desk: ImportDesk) -> int:
    (desk.folder / "notes.txt").write_text("buy milk\n")
    return desk.take("notes.txt")


@row("a folder", 2, says="'.' is a directory", do="--help")
def _(desk: ImportDesk) -> int:
    return desk.take(".")


@row(
    "a key that this version does not know",
    2,
    says="ds.json, line 1: zero_optimization.warp: is unknown to this version of Shardyard",
    do="--without zero_optimization.warp",
)
def _(desk: ImportDesk) -> int:
    return desk.take(desk.deepspeed(zero_optimization={"stage": 2, "warp": 9}))


@row(
    "files that contradict each other",
    2,
    says="parallel.zero: the files contradict each other: 2 (ds.json: zero_optimization.stage",
    do="or give parallel.zero=...",
)
def _(desk: ImportDesk) -> int:
    text = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
    (desk.folder / "a.yaml").write_text(f"{text}deepspeed_config: {{zero_stage: 3}}\n")
    return desk.take(desk.deepspeed(zero_optimization={"stage": 2}), "a.yaml")


@row(
    "a file that another one names",
    2,
    says="arguments.deepspeed=conf/ds.json was not given, and says more of the job",
    do="Give it too: `shardyard import job.sh .../ds.json`",
)
def _(desk: ImportDesk) -> int:
    line = "torchrun --nproc_per_node=8 t.py --deepspeed conf/ds.json --num_train_epochs 1"
    return desk.take(desk.script(line))


@row(
    "auto of DeepSpeed without the Trainer's arguments",
    2,
    says="gradient_clipping=auto is filled in by the Trainer from its arguments",
    do="optim.grad_clip=...",
)
def _(desk: ImportDesk) -> int:
    return desk.take(desk.deepspeed(gradient_clipping="auto"))


@row(
    "parameters on NVMe",
    2,
    says="zero_optimization.offload_param.device=nvme: nothing is kept on NVMe here",
    do="memory.offload=params",
)
def _(desk: ImportDesk) -> int:
    part = {"stage": 3, "offload_param": {"device": "nvme"}}
    return desk.take(desk.deepspeed(zero_optimization=part))


@row(
    "a torchrun in each of several tasks of a node",
    2,
    says="sbatch.ntasks-per-node=8, and srun starts torchrun in each task: 8 of them on each node",
    do="Ask for 1 task a node, or say what is meant with cluster.devices=N",
)
def _(desk: ImportDesk) -> int:
    line = "srun torchrun --nproc_per_node=8 train.py"
    return desk.take(desk.script("#SBATCH -N 2", "#SBATCH --ntasks-per-node=8", line))


@row(
    "a torchrun on the first of several nodes",
    2,
    says="start.program=torchrun without srun runs on the first of 4 nodes alone",
    do="cluster.nodes=N",
)
def _(desk: ImportDesk) -> int:
    return desk.take(desk.script("#SBATCH --nodes=4", "torchrun --nproc_per_node=8 train.py"))


@row(
    "an array of jobs",
    2,
    says="sbatch.array=0-7: each element of an array is a job of its own",
    do="`shardyard study`",
)
def _(desk: ImportDesk) -> int:
    return desk.take(desk.script("#SBATCH --array=0-7", "torchrun --nproc_per_node=8 train.py"))


@row(
    "a job of different parts",
    2,
    says="sbatch.hetjob: a job of different parts has no counterpart",
    do="import the part that trains",
)
def _(desk: ImportDesk) -> int:
    return desk.take(
        desk.script("#SBATCH -N 1", "#SBATCH hetjob", "srun torchrun --nproc_per_node=8 train.py")
    )


@row(
    "a directive that nobody knows",
    2,
    says="job.sh, line 2: sbatch.frobnicate: is unknown to this version",
    do="--without sbatch.frobnicate",
)
def _(desk: ImportDesk) -> int:
    return desk.take(desk.script("#SBATCH --frobnicate=3", "torchrun --nproc_per_node=8 t.py"))


@row(
    "a number of nodes that is left to Slurm",
    2,
    says="sbatch.nodes=2-4 leaves the number to Slurm",
    do="Give cluster.nodes=N",
)
def _(desk: ImportDesk) -> int:
    return desk.take(desk.script("#SBATCH -N 2-4", "srun torchrun --nproc_per_node=8 t.py"))


@row(
    "a variable that the script does not set",
    2,
    says="torchrun.nproc_per_node='$GPUS' holds what only a shell would know",
    do="give cluster.devices=... on the command line",
)
def _(desk: ImportDesk) -> int:
    return desk.take(desk.script("torchrun --nproc_per_node=$GPUS train.py"))


@row(
    "a secret in the environment",
    2,
    says="environment.HF_TOKEN: may be a secret, which a recipe never holds",
    do="secrets.HF_TOKEN=env",
)
def _(desk: ImportDesk) -> int:
    return desk.take(desk.script("export HF_TOKEN=abc", "torchrun --nproc_per_node=8 train.py"))


@row(
    "files that say neither model nor data",
    2,
    says="model: is not said by the files",
    do="Give data.source=FILES",
)
def _(desk: ImportDesk) -> int:
    return desk.take(desk.deepspeed(), said=())


@row(
    "a batch that its parts do not make",
    2,
    says="optim.global_batch=8 is not a multiple of 3",
    do="or give optim.global_batch=... and optim.micro_batch=...",
)
def _(desk: ImportDesk) -> int:
    return desk.take(desk.deepspeed(train_micro_batch_size_per_gpu=3))


@row(
    "processes that the machines do not share evenly",
    2,
    says="7 processes (a.yaml: num_processes, line 4) are no whole number for each of 2",
    do="Give cluster.nodes=... and cluster.devices=...",
)
def _(desk: ImportDesk) -> int:
    lines = ["distributed_type: MULTI_GPU", "mixed_precision: bf16", "num_machines: 2"]
    (desk.folder / "a.yaml").write_text("\n".join([*lines, "num_processes: 7", ""]))
    return desk.take("a.yaml")


@row("a recipe that is there", 2, says="recipe.yaml exists already", do="with --force")
def _(desk: ImportDesk) -> int:
    (desk.folder / "recipe.yaml").write_text("mine: 1\n")
    code = desk.take(desk.deepspeed(), "--to", "recipe.yaml")
    assert (desk.folder / "recipe.yaml").read_text() == "mine: 1\n"
    return code


@row(
    "a key to leave out that no file has",
    2,
    says="--without zero.warp: no file has that key",
    do="`shardyard import --json` prints it",
)
def _(desk: ImportDesk) -> int:
    return desk.take(desk.deepspeed(), "--without", "zero.warp")


@row(
    "a script of ours without its recipe",
    2,
    says="job.sh was rendered from a recipe and names it without holding it",
    do="Use that file itself: it is the recipe",
)
def _(desk: ImportDesk) -> int:
    line = "node=(python -m shardyard.node /elsewhere/launch/recipe.yaml --place slurm)"
    return desk.take(desk.script("#SBATCH --comment=shardyard-run=first", line))
