"""The example that starts from the hub's weights, with a tiny model: from weights to weights.

On two nodes of this machine, of a real Slurm and of a cluster whose pods are podman's, through the
command line: prepared, trained, exported and fetched. What is killed in the middle is repeated.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardyard.io.digests import COMPLETE, find_damage, read_digests
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from tests.e2e.shardyard import Answer, Place, make_place
from tests.hub import TOKEN, Hub, running_hub, saved_llama
from tests.launchers.kubernetes.api_server import running_server
from tests.launchers.kubernetes.borrowed_image import IMAGE, add_borrowed_image, with_files
from tests.launchers.kubernetes.pod_cluster import PodCluster
from tests.launchers.kubernetes.pods import VOLUME, running_podman
from tests.launchers.local_runs import tree
from tests.launchers.slurm_cluster import slurm_cluster

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "llama2-7b-finetune.yaml")
NAME, WEIGHTS = "acme/llama", "model.safetensors"
SMALL = (
    f"model.hub={NAME}", "model.preset=llama-tiny", "data.seq_len=32", "run.steps=4",
    "optim.global_batch=4", "task.eval_every_steps=2", "checkpoint.every=2",
    "cluster.instance=null", "cluster.device=cpu",
)  # fmt: skip
"""All that differs from the example, beside where text, token and runs are."""
_PATHS = os.pathsep.join(str(ROOT / name) for name in ("src", "."))
_PATIENCE_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Site:
    """Two nodes somewhere, and the command line that asks for them."""

    place: Place
    hub: Hub
    on: str
    words: tuple[str, ...]
    """Settings that the place needs."""
    environ: dict[str, str]
    volume: Path
    """What all nodes see, from here."""
    endpoint: str
    """The hub, as nodes ask it."""

    def asked(self, verb: str, *words: str) -> tuple[str, ...]:
        return (verb, EXAMPLE, "--on", self.on, "--yes", "--json", *SMALL, *self.words, *words)

    def run(self, *words: str) -> Answer:
        answer = self.place.run(*words, cwd=None, **self.environ)
        assert answer.code == 0, answer.err + answer.out
        return answer

    def kill(self, words: tuple[str, ...], when: Callable[[], bool], *, last: Path) -> None:
        """Kill a verb and the node of its side job as soon as something is so, and before the last.

        Args:
            last: What is there when nothing was in the middle any more; then all beside it is
                removed and the same is tried again, as a fast machine wins now and then.
        """
        for _ in range(5):
            self._kill(words, when)
            if not last.exists():
                return
            shutil.rmtree(last.parent)
        raise AssertionError(f"{words[0]} was over each time it was killed")

    def _kill(self, words: tuple[str, ...], when: Callable[[], bool]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardyard", *words], cwd=self.place.folder,
            env=self.place.environment(self.environ), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        end_s = time.monotonic() + _PATIENCE_S
        while not when():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end_s
            time.sleep(0.002)
        for pid in [pid for root in (process.pid, *side_jobs(self.endpoint)) for pid in tree(root)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()

    @property
    def there(self) -> RunDir:
        """The run's folder as the nodes see it."""
        return RunDir(self.volume / "runs" / "tuned")

    @property
    def here(self) -> str:
        """RUN of the verbs: its folder as the command line has it."""
        runs = self.volume / "runs" if self.on != "kubernetes" else self.place.folder / "here"
        return str(runs / "tuned")


def side_jobs(endpoint: str) -> list[int]:
    """Processes of nodes of side jobs that ask this hub, in containers too."""
    found, mark = [], f"HF_ENDPOINT={endpoint}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            is_node = words[2:4] == [b"-m", b"shardyard.node.side_job"]
            if is_node and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


@contextmanager
def local_nodes(folder: Path) -> Iterator[tuple[str, Path, tuple[str, ...], dict[str, str]]]:
    volume = folder / "shared"
    words = (f"run.dir={volume}/runs", "secrets.HF_TOKEN=env")
    yield "127.0.0.1", volume, (*words, "cluster.devices=2"), {}  # two copies of two shards


@contextmanager
def slurm_nodes(folder: Path) -> Iterator[tuple[str, Path, tuple[str, ...], dict[str, str]]]:
    volume, token = folder / "shared", folder / "hf-token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    (folder / "slurm").mkdir()
    with slurm_cluster(folder / "slurm") as cluster:
        words = (
            f"run.dir={volume}/runs", "launch.time_limit=2h", f"secrets.HF_TOKEN=file:{token}",
            "cluster.devices=1",
        )  # fmt: skip
        yield "127.0.0.1", volume, words, {"SLURM_CONF": cluster.env["SLURM_CONF"]}


@contextmanager
def pods(folder: Path) -> Iterator[tuple[str, Path, tuple[str, ...], dict[str, str]]]:
    with (
        running_podman() as podman,
        running_server(folder) as (server, kubeconfig),
        PodCluster(server, podman, with_files=with_files) as cluster,
    ):
        add_borrowed_image(podman)
        volume = podman.make_volume()
        cluster.add_secret("hf-token", token=TOKEN)
        words = (
            "launch.kubernetes.context=test", "secrets.HF_TOKEN=k8s:hf-token/token",
            f"launch.image={IMAGE}", f"launch.volumes=[{{path: /shared, claim: {VOLUME}}}]",
            "launch.run_dir=/shared/runs", "launch.kubernetes.shared_memory_gib=1",
            f"run.dir={folder}/here", "cluster.devices=1",
        )  # fmt: skip
        yield podman.host, volume, words, {"KUBECONFIG": str(kubeconfig)}


NODES = {"local": local_nodes, "slurm": slurm_nodes, "kubernetes": pods}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("local", marks=pytest.mark.slow),
        "slurm",  # a real one
        pytest.param("kubernetes", marks=pytest.mark.slow),
    ],
)
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        hub = stack.enter_context(running_hub("0.0.0.0"))
        hub.add(NAME, saved_llama(folder / "llama"))
        hub.repos[NAME].is_gated = True  # as Llama's is
        host, volume, words, environ = stack.enter_context(NODES[request.param](folder))
        (volume / "text").mkdir(parents=True)
        for number, source in enumerate(sorted((ROOT / "src").rglob("*.py"))[:40]):
            text = source.read_text() or "# empty\n"
            (volume / "text" / f"{number:03d}.txt").write_text(text)
        port = hub.url.rpartition(":")[2]
        seen = "/shared" if request.param == "kubernetes" else volume
        endpoint = f"http://{host}:{port}"
        env = {"HF_ENDPOINT": endpoint, "OMP_NUM_THREADS": "1", "PYTHONPATH": _PATHS}
        more = (f"data.source={seen}/text", f"launch.env={json.dumps(env)}")
        home = hub.environ(folder / "home", token=TOKEN)
        home["HF_ENDPOINT"] = f"http://127.0.0.1:{port}"
        place = stack.enter_context(make_place(folder))
        yield Site(
            place=place, hub=hub, on=request.param, words=(*words, *more),
            environ={**home, **environ}, volume=volume, endpoint=endpoint,
        )  # fmt: skip


@pytest.fixture(scope="module")
def prepared(site: Site) -> Any:
    """The answer of a `prepare` that was killed as half of the weights were there, and repeated."""
    words, total = site.asked("prepare"), (site.place.folder / "llama" / WEIGHTS).stat().st_size
    site.hub.pause_s = 0.3
    half = lambda: site.hub.sent[NAME, WEIGHTS] >= total // 2  # noqa: E731
    site.kill(words, half, last=site.volume / "runs" / "models" / NAME)
    site.hub.hang_up()
    site.hub.pause_s = 0.0
    assert site.hub.downloads[NAME, WEIGHTS] == 0, "it was in the middle"
    return site.run(*words).json


@pytest.fixture(scope="module")
def trained(site: Site, prepared: Any) -> Answer:  # noqa: ARG001
    """The answer of `launch`, once the run has ended well."""
    launched = site.run(*site.asked("launch", "run.id=tuned"))
    end_s = time.monotonic() + _PATIENCE_S
    while (now := site.run("status", site.here, "--json").json)["state"] != "succeeded":
        assert now["state"] != "failed" and time.monotonic() < end_s, now
        time.sleep(1.0)
    return launched


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_what_was_half_fetched_is_fetched_once_and_two_nodes_train_on_it(
    site: Site, prepared: Any, trained: Answer
) -> None:
    assert "data: ready" in trained.err
    assert len(list(read_steps(site.there.metrics))) == 4
    resolved = read_resolved(site.there.resolved(0))
    for name in ("model_dir", "model_commit", "model_digest"):
        assert getattr(resolved, name) == prepared[name]
    files = {path.name for path in (site.place.folder / "llama").iterdir()}
    assert site.hub.downloads == {(NAME, name): 1 for name in files}


@pytest.mark.usefixtures("trained")
def test_a_killed_export_that_is_repeated_is_the_one_that_nobody_disturbed(site: Site) -> None:
    calm, to = site.place.folder / "calm", site.place.folder / "tuned"
    site.run("export", site.here, "--to", str(calm), "--yes")
    is_shared = site.on != "kubernetes"
    written = to.parent if is_shared else site.there.path / "exports"
    words = ("export", site.here, "--to", str(to), "--yes")
    site.kill(words, lambda: any(written.glob(".*.export.tmp")), last=to / COMPLETE)
    site.run(*words)
    assert digests(to) == digests(calm)
    assert find_damage(to, read_digests(to)) == []
    assert is_shared or not list(written.iterdir())

    model = AutoModelForCausalLM.from_pretrained(to)
    untuned = AutoModelForCausalLM.from_pretrained(site.place.folder / "llama")
    ids = AutoTokenizer.from_pretrained(to)("def f(", return_tensors="pt").input_ids
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits, untuned(ids).logits)


@pytest.mark.usefixtures("trained")
def test_a_killed_fetch_that_is_repeated_brings_all_of_it(site: Site) -> None:
    to = site.place.folder / "fetched"
    words = ("fetch", site.here, "--to", str(to), "--yes")
    brought = RunDir(to)
    begun = lambda: any(path.is_file() for path in to.rglob("*"))  # noqa: E731
    site.kill(words, begun, last=brought.latest)
    site.run(*words)
    assert digests(brought.checkpoint(4)) == digests(site.there.checkpoint(4)) != {}
    assert list(read_steps(brought.metrics)) == list(read_steps(site.there.metrics))
