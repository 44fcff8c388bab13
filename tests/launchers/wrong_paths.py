"""Wrong situations of paths: what no node can have, and what a node then finds there."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardyard.config.paths import NodePaths
from shardyard.config.schema.recipe import Recipe
from shardyard.launchers.base import LogLine, mounted_paths
from shardyard.launchers.ledger import Submission
from shardyard.node.side_job import SideWork, function_of
from shardyard.rundir.layout import RunDir
from tests.cli.fake_launcher import AnsweringLauncher
from tests.config.model.test_source import LLAMA
from tests.hub import STRANGER
from tests.launchers.wrong_hub import NAME, HubDesk
from tests.launchers.wrong_situations import Situations

SITUATIONS = Situations("paths, of any launcher")
row = SITUATIONS.row

_NOBODY = 65534


@dataclass
class ProbingLauncher(AnsweringLauncher):
    """A launcher in memory whose side job does its work, on a node that is this process."""

    is_nobody: bool = False

    def node_paths(self, recipe: Recipe) -> NodePaths:
        return mounted_paths(recipe.launch, launcher=self.name)

    def logs(self, job: Submission, *, node: int | None, follow: bool) -> Iterator[LogLine]:
        request = self.submitted[-1]
        assert request.side is not None
        work = SideWork(
            run=RunDir(Path(request.run_dir)),
            recipe=request.recipe,
            arguments={**request.side.arguments, "shares_folder": False},
        )
        with _as_nobody() if self.is_nobody else _as_we_are():
            self.result = function_of("probe")(work)
        yield from super().logs(job, node=node, follow=follow)


class PathsDesk(HubDesk):
    """A laptop, and nodes that see one volume and nothing of it."""

    on = "kubernetes"
    volume = "/shared"
    recipe = (
        "model.preset=llama-tiny", "data.source=/shared/text", "run.steps=10",
        "optim.global_batch=8", "cluster.device=cpu", "cluster.devices=2", "cluster.nodes=2",
        "launch.image=registry.example/shardyard@sha256:0123", "launch.kubernetes.context=test",
        "launch.run_dir=/shared/runs", "launch.volumes=[{path: /shared, claim: shared}]",
    )  # fmt: skip

    probing: ProbingLauncher | None = None

    def outside(self) -> set[str]:
        return set() if self.probing is None else self.probing.created

    def on_slurm(self, *words: str) -> int:
        """Launch where nodes share a file system with this machine."""
        self.on = "slurm"
        return self.launch(*words)

    def probed(self, *words: str, is_nobody: bool = False) -> int:
        """What a node finds on its volume, which is a folder here."""
        volume = self.folder / "volume"
        here = [
            word.replace("/shared", str(volume)).replace("claim: shared", f"host: {volume}")
            for word in self._recipe(list(words))
        ]
        self.probing = ProbingLauncher(is_nobody=is_nobody)
        self.launchers = {"fake": self.probing}
        return self.shardyard("doctor", *here, "--on", "fake", "--probe", "--yes")

    def filled(self) -> Path:
        """The volume, as it ought to be."""
        volume = self.folder / "volume"
        for name in ("text", "model", "runs"):
            (volume / name).mkdir(parents=True)
        (volume / "text" / "a.txt").write_text("a")
        (volume / "model" / "config.json").write_text(json.dumps(LLAMA))
        (volume / "model" / "model.safetensors").write_text("w")
        for folder in (volume, *volume.parents[:4]):
            folder.chmod(folder.stat().st_mode | 0o055)
        return volume

    def config(self, text: str) -> str:
        """A config.json on this machine, by its setting."""
        (self.folder / "config.json").write_text(text)
        return f"model.config={self.folder / 'config.json'}"


@contextmanager
def _as_we_are() -> Iterator[None]:
    yield


@contextmanager
def _as_nobody() -> Iterator[None]:
    """As the user of a pod, who is not root."""
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    os.setegid(_NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


_THERE = "They see /shared (launch.volumes, launch.image_paths)."
_ON_VOLUME = ("model.preset=null", "model.path=/shared/model")


@row(
    "relative path, and nodes share no folder with this machine",
    2,
    says="data.source=./my-text is relative: it would start in the folder of this command, and "
    "nodes of kubernetes share no folder with this machine",
    do=f"{_THERE} Give the whole path on them",
)
def _(desk: PathsDesk) -> int:
    (desk.folder / "my-text").mkdir()
    return desk.launch("data.source=./my-text")


@row(
    "text on no volume of the nodes",
    2,
    says="data.source=/lustre/text is in no folder that nodes of kubernetes see",
    do=f"{_THERE} Mount the volume that holds it: "
    "launch.volumes='[{path: /lustre, claim: NAME}]'",
)
def _(desk: PathsDesk) -> int:
    return desk.launch("data.source=/lustre/text")


@row(
    "model on no volume of the nodes",
    2,
    says="model.path=/models/mine is in no folder that nodes of kubernetes see",
    do="name its folder in launch.image_paths",
)
def _(desk: PathsDesk) -> int:
    return desk.launch("model.path=/models/mine")


@row(
    "prepared data and models of the hub on no volume",
    2,
    says="has 3 problems: model.dir=/models is in no folder that nodes of kubernetes see",
    do=f"data.dir=/prepared is in no folder that nodes of kubernetes see. {_THERE}",
)
def _(desk: PathsDesk) -> int:
    return desk.launch("data.dir=/prepared", "model.dir=/models", f"model.hub={NAME}")


@row(
    "tokenizer of this machine",
    2,
    says="data.tokenizer=tokenizer is relative",
    do="Give the whole path on them",
)
def _(desk: PathsDesk) -> int:
    (desk.folder / "tokenizer").mkdir()
    (desk.folder / "tokenizer" / "tokenizer.json").write_text("{}")
    return desk.launch("data.tokenizer=tokenizer")


@row(
    "nothing at a path that nodes would read on a file system that is shared",
    2,
    says="data.source=/shared/text does not exist on this machine, and the nodes of slurm read the "
    "same files",
    do="Correct the path, or copy the data there",
)
def _(desk: PathsDesk) -> int:
    return desk.on_slurm()


@row(
    "path that is not mounted into a container on Slurm",
    2,
    says="data.source=/shared/text is in no folder that nodes of slurm see. They see /data",
    do="launch.slurm.container_mounts=['/shared:/shared']",
)
def _(desk: PathsDesk) -> int:
    mounts = "launch.slurm.container_mounts=[/shared:/data]"
    return desk.on_slurm("launch.slurm.container_image=image", mounts)


@row(
    "folder of the image that is not an absolute path",
    2,
    says="launch.image_paths=data is not an absolute path",
    do="Give the whole path, as the nodes see it",
)
def _(desk: PathsDesk) -> int:
    return desk.launch("launch.image_paths=[data]")


@row(
    "model on a volume whose shape nobody says, and a limit in dollars",
    2,
    says="launch.max_usd=5, but the price is not known: model.path=/shared/model is on the nodes",
    do="Give model.preset or model.config",
)
def _(desk: PathsDesk) -> int:
    return desk.launch(*_ON_VOLUME, "launch.max_usd=5")


@row(
    "model.config that is not there",
    2,
    says="gone.json does not exist",
    do="A Hugging Face folder has one",
)
def _(desk: PathsDesk) -> int:
    return desk.launch(*_ON_VOLUME, f"model.config={desk.folder / 'gone.json'}")


@row(
    "model.config of a model that is not built",
    2,
    says="model.config: model_type='t5' is not built yet",
    do="use a model of one of these types",
)
def _(desk: PathsDesk) -> int:
    return desk.launch(*_ON_VOLUME, desk.config('{"model_type": "t5"}'))


@row(
    "shape of a model said twice",
    2,
    says="model.config: and model.preset each say what shape the model has",
    do="Keep one of them",
)
def _(desk: PathsDesk) -> int:
    return desk.launch("model.path=/shared/model", desk.config(json.dumps(LLAMA)))


@row(
    "gated model, and no token for pods",
    2,
    says=f"model.hub={NAME} is gated on the Hugging Face hub, and secrets.HF_TOKEN is not set",
    do="kubectl create secret generic hf-token --from-file=token=/dev/stdin --context test "
    "--namespace default and secrets.HF_TOKEN=k8s:hf-token/token",
)
def _(desk: PathsDesk) -> int:
    desk.hub.repos[NAME].is_gated = True
    return desk.launch(f"model.hub={NAME}")


@row(
    "gated model, and no token for nodes of Slurm",
    2,
    says="the nodes of slurm could not fetch it. Accept its terms on its page",
    do="install -m 600 /dev/stdin",
)
def _(desk: PathsDesk) -> int:
    desk.hub.repos[NAME].is_gated = True
    desk.log_in(STRANGER)  # in the environment, which nodes do not get
    return desk.on_slurm(f"model.hub={NAME}", "data.source=python-stdlib")


@row(
    "private model, and no token for containers of AWS Batch",
    2,
    says="is private, or not there at all, on the Hugging Face hub",
    do="aws secretsmanager create-secret --name hf-token --secret-string file:///dev/stdin",
)
def _(desk: PathsDesk) -> int:
    desk.hub.repos[NAME].is_private, desk.on = True, "aws-batch"
    volume = "launch.volumes=[{path: /shared, efs: fs-0123456789abcdef0}]"
    machines = ("cluster.device=auto", "cluster.devices=auto", "cluster.instance=p4d.24xlarge")
    place = ("launch.aws_batch.queue=q", "launch.aws_batch.region=us-east-1", volume)
    return desk.launch(f"model.hub={NAME}", *machines, *place, "optim.global_batch=16")


@row(
    "probe: no volume is mounted",
    1,
    says="no volume is mounted there",
    do="Fix launch.volumes",
)
def _(desk: PathsDesk) -> int:
    return desk.probed()


@row(
    "probe: text is not on the volume",
    1,
    says="volume/other: it does not exist, as user",
    do="Bring it there, give another path",
)
def _(desk: PathsDesk) -> int:
    desk.filled()
    return desk.probed("data.source=/shared/other")


@row(
    "probe: a file of the text is shut to the run's user",
    1,
    says="secret.txt: it may not be read, as user 65534, group 65534",
    do="let its owner open it to this user",
)
def _(desk: PathsDesk) -> int:
    secret = desk.filled() / "text" / "secret.txt"
    secret.write_text("s")
    secret.chmod(0o600)
    return desk.probed(is_nobody=True)


@row(
    "probe: the run's folder belongs to another user",
    1,
    says="user 65534, group 65534 may not write there; it belongs to user 0 and group 0",
    do="chown it to 65534:65534, or open it to one of the groups",
)
def _(desk: PathsDesk) -> int:
    desk.filled()
    return desk.probed(is_nobody=True)


@row(
    "probe: the volume is full",
    1,
    says="it is full",
    do="Free some room, or choose another place with data.dir",
)
def _(desk: PathsDesk) -> int:
    desk.filled()
    (desk.mount("size=64k") / "fill").write_bytes(b"x" * 65536)
    more = f"launch.volumes=[{{path: /shared, host: /a}}, {{path: {desk.store}, host: /b}}]"
    return desk.probed(f"data.dir={desk.store}", more)


@row(
    "probe: the volume is mounted to be read alone",
    1,
    says="it is mounted to be read only",
    do="Mount it writable",
)
def _(desk: PathsDesk) -> int:
    desk.filled()
    desk.mount("ro")
    more = f"launch.volumes=[{{path: /shared, host: /a}}, {{path: {desk.store}, host: /b}}]"
    return desk.probed(f"data.dir={desk.store}/prepared", more)


@row(
    "probe: the folder's config.json is not of the preset",
    1,
    says="config.json is not what model.preset=llama2-7b says of the model",
    do="Give the preset or config.json of this one",
)
def _(desk: PathsDesk) -> int:
    desk.filled()
    return desk.probed("model.preset=llama2-7b", "model.path=/shared/model")


@row(
    "probe: the model's folder has no weights",
    1,
    says="model has no weights to load: no model.safetensors",
    do="or start from random weights with model.weights=random",
)
def _(desk: PathsDesk) -> int:
    (desk.filled() / "model" / "model.safetensors").unlink()
    return desk.probed(*_ON_VOLUME)


@row(
    "probe: no room for the checkpoints",
    1,
    says="10001 checkpoints of",
    do="or lower checkpoint.keep_last",
)
def _(desk: PathsDesk) -> int:
    desk.filled()
    # 12 bytes for each of 405 billion parameters, ten thousand times: 48 PB
    kept = ("checkpoint.keep_last=9999", "model.preset=llama3.1-405b", "data.seq_len=64")
    return desk.probed(*kept)
