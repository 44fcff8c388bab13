"""Two nodes that see other files: each in a mount namespace, with a home and a cache of its own.

They train from a stand-in for the hub. What they share is bound to the same place on both; what
they do not share is a folder of each node's, bound there.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardyard.config.model.hub import digest_of
from shardyard.io.digests import read_digests
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from tests.e2e.shardyard import PATIENCE_S, Place, processes_left
from tests.hub import Hub, running_hub, saved_llama
from tests.mounts import needs_root

pytestmark = needs_root

NAME = "acme/llama"
WEIGHTS = "model.safetensors"
RECIPE = """\
model: {hub: acme/llama}
data: {source: DIR/text, seq_len: 32, workers: 1, eval_fraction: 0.1, dir: DIR/prepared}
run: {steps: 3}
optim: {lr: 1e-2, global_batch: 4, micro_batch: 1}
parallel: {strategy: FULL_SHARD}
cluster: {device: cpu, devices: 1, nodes: 2}
"""


@dataclass
class Nodes:
    """Two nodes of one run, and the folders that each has for itself."""

    place: Place
    folder: Path
    hub: Hub
    apart: tuple[str, ...] = ()
    """Folders below ``folder`` that are another one on each node."""

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "runs" / "r")

    def own(self, node: int, name: str) -> Path:
        """What node ``node`` sees at ``folder / name``, seen from here."""
        return self.folder / f"node-{node}" / name

    def train(self) -> list[subprocess.CompletedProcess[str]]:
        """Start both nodes, and wait for both to end."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        nodes = [self._start(node, endpoint) for node in (0, 1)]
        ended = []
        for node in nodes:
            out, err = node.communicate(timeout=PATIENCE_S)
            ended.append(subprocess.CompletedProcess(node.args, node.returncode, out, err))
        return ended

    def _start(self, node: int, endpoint: str) -> subprocess.Popen[str]:
        home = self.own(node, "home")
        home.mkdir(parents=True, exist_ok=True)
        binds = []
        for name in self.apart:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
            self.own(node, name).mkdir(parents=True, exist_ok=True)
            binds.append(f"mount --bind '{self.own(node, name)}' '{self.folder / name}'")
        other = self.own(1 - node, "")
        other.mkdir(parents=True, exist_ok=True)
        hidden = f"mount -t tmpfs tmpfs '{other}'"  # the other node's disk
        program = [
            sys.executable, "-m", "shardyard.node", str(self.folder / "r.yaml"),
            "--run-dir", str(self.run.path), "--place", "given", "--node-rank", str(node),
            "--nodes", "2", "--rendezvous", endpoint, "--session", "s",
        ]  # fmt: skip
        script = " && ".join([*binds, hidden, 'exec "$@"'])
        return subprocess.Popen(
            ["unshare", "-m", "sh", "-c", script, "sh", *program],
            env=self.place.environment({**self.hub.environ(home), "HOME": str(home)}),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_llama(tmp_path_factory.mktemp("saved") / "llama")


@pytest.fixture
def nodes(place: Place, tmp_path: Path, llama: Path) -> Iterator[Nodes]:
    with _nodes(place, tmp_path, llama) as made:
        yield made


@contextmanager
def _nodes(place: Place, folder: Path, llama: Path) -> Iterator[Nodes]:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no mount namespaces here")
    (folder / "text").symlink_to(place.folder / "text")
    (folder / "r.yaml").write_text(RECIPE.replace("DIR", str(folder)))
    with running_hub() as hub:
        hub.add(NAME, llama)
        yield Nodes(place, folder, hub)


def said(ended: list[subprocess.CompletedProcess[str]]) -> str:
    return "\n---\n".join(node.stderr for node in ended)


def test_on_a_shared_volume_each_file_is_fetched_once_and_the_export_is_the_run(
    nodes: Nodes, llama: Path
) -> None:
    ended = nodes.train()
    assert [node.returncode for node in ended] == [0, 0], said(ended)
    files = {path.name for path in llama.iterdir()}
    assert nodes.hub.downloads == {(NAME, name): 1 for name in files}
    assert len(list(read_steps(nodes.run.metrics))) == 3
    resolved = read_resolved(nodes.run.resolved(0))
    assert resolved.model_commit in nodes.hub.repos[NAME].commits
    assert resolved.model_dir is not None
    assert Path(resolved.model_dir).parent == nodes.folder / "runs" / "models"
    assert resolved.model_digest == digest_of(Path(resolved.model_dir))

    to = nodes.folder / "hf"
    done = nodes.place.run("export", str(nodes.run.path), "--to", str(to))
    assert done.code == 0, done.err
    assert "hub" not in read_digests(to).provenance  # of the export, not copied from the store
    model = AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32)
    wanted = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(to)("def f(", return_tensors="pt").input_ids
    with torch.no_grad():
        before = wanted(ids).logits
        wanted.load_state_dict(weights_of(nodes.run.checkpoint(3)))
        assert torch.equal(model(ids).logits, wanted(ids).logits)
        assert not torch.allclose(before, wanted(ids).logits, atol=1e-3)


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The model's weights in a checkpoint of two ranks, by hand: FSDP deals out rows."""
    parts = [load_file(checkpoint / f"rank-{rank:05d}.safetensors") for rank in range(2)]
    return {
        name.removeprefix("model."): torch.cat([part[name] for part in parts if name in part])
        for name in parts[0]
        if name.startswith("model.")
    }


def test_where_nothing_is_shared_but_the_run_every_node_fetches_and_prepares_the_same(
    nodes: Nodes, llama: Path
) -> None:
    nodes.apart = ("runs/models", "prepared")
    ended = nodes.train()
    assert [node.returncode for node in ended] == [0, 0], said(ended)
    files = {path.name for path in llama.iterdir()}
    assert nodes.hub.downloads == {(NAME, name): 2 for name in files}
    stores = [next(nodes.own(node, "runs/models").iterdir()) for node in (0, 1)]
    assert stores[0].name == stores[1].name and digest_of(stores[0]) == digest_of(stores[1])
    prepared = [next(nodes.own(node, "prepared").iterdir()) for node in (0, 1)]
    assert prepared[0].name == prepared[1].name
    manifests = [(folder / "manifest.json").read_bytes() for folder in prepared]
    assert manifests[0] == manifests[1]
    assert "prepares" in ended[1].stderr and "fetching model.hub=acme/llama" in ended[1].stderr


def test_a_node_whose_file_was_altered_is_named_before_the_training_begins(nodes: Nodes) -> None:
    nodes.apart = ("runs/models",)
    script = (
        "import sys; from pathlib import Path\n"
        "from shardyard.config.model.hub import HubRequest, fetch\n"
        "wanted = HubRequest(kind='model.hub', name='acme/llama', revision=None, level='weights')\n"
        "print(fetch(wanted, Path(sys.argv[1]), log=lambda _: None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(nodes.own(1, "runs/models"))],
        env={**os.environ, **nodes.hub.environ(nodes.folder / "elsewhere")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    with (Path(done.stdout.strip()) / WEIGHTS).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    ended = nodes.train()
    assert [node.returncode for node in ended] == [2, 2], said(ended)
    host = socket.gethostname()
    assert f"error: node 1 ({host}): " in ended[0].stderr
    for node in ended:
        assert f"{WEIGHTS} was changed after it was fetched" in node.stderr
    assert not list(nodes.run.path.glob("logs/*")) and not nodes.run.metrics.exists()
    assert not processes_left()
