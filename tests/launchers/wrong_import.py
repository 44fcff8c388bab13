"""Wrong situations of `shardyard import`, all told before a recipe is written."""

import json
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

from tests.launchers.wrong_situations import Desk, Situations

SITUATIONS = Situations("import")
row = SITUATIONS.row

_SAID = ("model.preset=llama-tiny", "data.source=./text")


_LIKE = Path(__file__).parents[1] / "importers" / "checkpoints" / "deepspeed"


class ImportDesk(Desk):
    """Somebody with files of another tool."""

    def checkpoint(self, *words: str) -> int:
        """Import a checkpoint of a model that is like one that is there."""
        return self.shardyard("import", *words, "--like", str(_LIKE / "like"), "--to", "weights")

    def pickled(self, content: bytes) -> str:
        """A file of torch.save with a pickle of somebody's own."""
        with zipfile.ZipFile(self.folder / "a.pt", "w") as archive:
            archive.writestr("a/data.pkl", content)
        return "a.pt"

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
    says="notes.txt is not a configuration of a known tool",
    do="Known are: PyTorchJob",
)
def _(desk: ImportDesk) -> int:
    (desk.folder / "notes.txt").write_text("buy milk\n")
    return desk.take("notes.txt")


@row("a folder and settings", 2, says="A checkpoint is imported by itself", do="as model.path")
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
    says="zero_optimization.offload_param.device=nvme: offload to NVMe is not supported",
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
    says="start.program=torchrun without srun runs only on the first of 4 nodes",
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
    says="7 processes (a.yaml: num_processes, line 4) are not a whole number for each of 2",
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


@row(
    "a checkpoint that would run something",
    1,
    says="a.pt: it asks for builtins.eval. Only tensors, numbers, strings, lists and dicts are",
    do="save only its state dict",
)
def _(desk: ImportDesk) -> int:
    return desk.checkpoint(desk.pickled(b"cbuiltins\neval\n(V1\ntR."))


@row(
    "a checkpoint without tensors",
    1,
    says="a.pt holds no tensors",
    do="not a checkpoint of a model",
)
def _(desk: ImportDesk) -> int:
    return desk.checkpoint(desk.pickled(pickle.dumps({"step": 3})))


@row(
    "a checkpoint that was cut off",
    1,
    says="a.pt is not a file of torch.save in the format of torch 1.6",
    do="if it was cut off, copy it again",
)
def _(desk: ImportDesk) -> int:
    name = desk.pickled(pickle.dumps({"step": 3}))
    path = desk.folder / name
    path.write_bytes(path.read_bytes()[:-40])
    return desk.checkpoint(name)


@row(
    "a checkpoint without the folder that it is like",
    2,
    says="--like is missing: a Hugging Face folder of the same model",
    do="such as the one that training began with",
)
def _(desk: ImportDesk) -> int:
    return desk.shardyard("import", str(_LIKE / "zero-1"), "--to", "weights")


@row("a checkpoint without a place", 2, says="--to is missing: the folder to write", do="--dry-run")
def _(desk: ImportDesk) -> int:
    return desk.shardyard("import", str(_LIKE / "zero-1"), "--like", str(_LIKE / "like"))


@row(
    "a folder that is no checkpoint",
    2,
    says="notes is not a checkpoint of a known format",
    do="Known are: a file of torch.save (.pt, .bin), a folder of torch.distributed.checkpoint",
)
def _(desk: ImportDesk) -> int:
    (desk.folder / "notes").mkdir()
    return desk.checkpoint("notes")


@row(
    "a checkpoint of which a rank's file is missing",
    1,
    says="has no file of rank 0, but of 1",
    do="Copy the files of all nodes into one folder",
)
def _(desk: ImportDesk) -> int:
    shutil.copytree(_LIKE / "zero-1", desk.folder / "half")
    for path in (desk.folder / "half").glob("*/bf16_zero_pp_rank_0_*"):
        path.unlink()
    return desk.checkpoint("half")


@row(
    "a checkpoint of another model than the folder's",
    1,
    says="holds 236 parameters, and the model of",
    do="Give the folder of this model as --like",
)
def _(desk: ImportDesk) -> int:
    like = json.loads((_LIKE / "like" / "config.json").read_text())
    (desk.folder / "like").mkdir()
    text = json.dumps({**like, "num_hidden_layers": 2})
    (desk.folder / "like" / "config.json").write_text(text)
    words = ("--like", "like", "--to", "weights")
    return desk.shardyard("import", str(_LIKE / "zero-1"), *words)


@row(
    "settings of a checkpoint beside a configuration",
    2,
    says="--dtype is of a checkpoint, and ds.json is a configuration",
    do="--help",
)
def _(desk: ImportDesk) -> int:
    return desk.take(desk.deepspeed(), "--dtype", "float32")
