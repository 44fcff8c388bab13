"""Exports and fetches of runs whose files only their nodes see, killed in the middle and repeated.

The training is one of this machine, in the folder that is the volume. Its job, and the side jobs,
stand in a small API server that the official client speaks to; pods are processes.
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardyard.config.load import dump_recipe
from shardyard.config.rules.check import load_checked_recipe
from shardyard.io.digests import find_damage, read_digests
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes.launcher import KubernetesLauncher
from shardyard.launchers.ledger import Ledger
from shardyard.rundir.layout import RunDir
from tests.launchers.kubernetes.api_server import ApiServer, running_server
from tests.launchers.kubernetes.job_controller import JobController, job_controller

pytest.importorskip("kubernetes", reason="the Kubernetes client is an extra")
pytestmark = pytest.mark.slow

_PATIENCE_S = 1200.0
RECIPE = """\
model: {preset: llama-tiny}
data: {source: SOURCE, dir: DATA, vocab_size: 300, seq_len: 16, workers: 1}
run: {steps: 4}
optim: {global_batch: 2, micro_batch: 1}
cluster: {device: cpu, devices: 1}
checkpoint: {every: 2}
task: {eval_every_steps: null}
"""


@dataclass
class Site:
    """A finished far run, its volume, and the command line that asks for it."""

    folder: Path
    server: ApiServer
    kubeconfig: Path
    controller: JobController

    @property
    def there(self) -> RunDir:
        return RunDir(self.folder / "volume" / "far")

    @property
    def here(self) -> RunDir:
        return RunDir(self.folder / "runs" / "far")

    def start(self, *words: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "shardyard", *words], cwd=self.folder, env=environ,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def run(self, *words: str, code: int = 0) -> str:
        process = self.start(*words)
        out, err = process.communicate(timeout=_PATIENCE_S)
        assert process.returncode == code, (out, err)
        return out + err

    def kill_when(self, process: subprocess.Popen[str], is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + _PATIENCE_S
        while not is_so():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    def lives(self, kind: str) -> bool:
        return bool(self.controller.live(kind))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on what pods see as their volume."""
    folder = tmp_path_factory.mktemp("far")
    volume = folder / "volume"
    volume.mkdir()
    (volume / "text").mkdir()
    source = Path(__file__).read_text()
    for number in range(20):
        (volume / "text" / f"{number}.txt").write_text(source[number * 50 :])
    text = RECIPE.replace("SOURCE", f"{volume}/text").replace("DATA", f"{volume}/prepared")
    (folder / "tiny.yaml").write_text(text)
    words = ("train", "tiny.yaml", f"run.dir={volume}", "run.id=far")
    done = subprocess.run(
        [sys.executable, "-m", "shardyard", *words], cwd=folder, capture_output=True, text=True,
        timeout=_PATIENCE_S, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def site(trained: Path) -> Iterator[Site]:
    with running_server(trained) as (server, kubeconfig), job_controller(server, trained) as jobs:
        made = Site(trained, server, kubeconfig, jobs)
        volume = trained / "volume"
        overrides = [
            f"run.dir={volume}", "run.id=far", "launch.image=registry.example/train:1",
            f"launch.volumes=[{{path: {volume}, claim: runs}}]", f"launch.run_dir={volume}",
            "launch.kubernetes.context=test",
        ]  # fmt: skip
        recipe = load_checked_recipe([trained / "tiny.yaml"], overrides)
        made.here.path.mkdir(parents=True)
        made.here.recipe.write_text(dump_recipe(recipe))
        launcher = KubernetesLauncher(kubeconfig=kubeconfig)
        request = LaunchRequest(
            run_id="far", recipe=recipe, recipe_text=dump_recipe(recipe), nodes=1,
            devices_per_node=1, cluster=None, run_dir=f"{volume}/far", nonce="n",
        )  # fmt: skip
        ledger = Ledger(made.here.ledger)
        ledger.record(launcher.submit(launcher.render(request), ledger))
        server.only("jobsets")["status"] = {
            "conditions": [{"type": "Completed", "status": "True", "message": "done"}]
        }
        server.execs.start = lambda _pod, _container, words: [
            sys.executable if words[0] == "python" else words[0], *words[1:]
        ]  # fmt: skip
        yield made


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_an_export_killed_here_and_there_has_the_digests_of_one_made_on_the_folder(
    site: Site,
) -> None:
    direct, brought = site.folder / "direct", site.folder / "brought"
    program = [sys.executable, "-m", "shardyard.checkpoint.export", str(site.there.path)]
    subprocess.run([*program, "--to", str(direct)], check=True, capture_output=True)
    asked = ("export", "far", "--to", str(brought), "--yes")

    first = site.start(*asked)
    site.kill_when(first, lambda: site.lives("export"))  # the command here
    assert site.lives("export"), "the side job continues"
    second = site.start(*asked)
    written = site.there.path / "exports"
    while not written.exists() and site.lives("export"):
        time.sleep(0.01)
    site.controller.kill("export")  # the node there
    second.communicate(timeout=_PATIENCE_S)
    said = site.run(*asked)
    assert "exported step-00000004" in said
    assert digests(brought) == digests(direct)
    complete = read_digests(brought)
    assert find_damage(brought, complete) == []
    assert list(written.iterdir()) == []
    assert not site.lives("fetch") and not site.lives("export")
    assert '"was_there": true' in site.run(*asked, "--json")

    model = AutoModelForCausalLM.from_pretrained(brought)
    assert sum(param.numel() for param in model.parameters()) > 0
    assert AutoTokenizer.from_pretrained(brought) is not None
