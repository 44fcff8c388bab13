"""`prepare --on` on this machine and on a real Slurm, killed in the middle and repeated."""

import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardyard.data.work_units import SCRATCH
from shardyard.launchers.ledger import Ledger
from shardyard.rundir.layout import RunDir
from tests.e2e.shardyard import Place, make_place
from tests.launchers.local_runs import tree
from tests.launchers.slurm_cluster import slurm_cluster

pytestmark = pytest.mark.slow

RECIPE = """\
model: {preset: llama-tiny}
data: {source: ./text, vocab_size: 512, workers: 1, eval_fraction: 0.1}
run: {name: tiny, steps: 24}
optim: {global_batch: 8, micro_batch: 1}
cluster: {device: cpu, devices: 1}
launch: {side: {cpus: 1, memory_gib: 2}}
"""
_PATHS = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("src", "."))
_PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A folder of its own: its runs are counted."""
    folder = tmp_path_factory.mktemp("prepare-on")
    (folder / "tiny.yaml").write_text(RECIPE)
    (folder / "text").mkdir()
    sources = sorted((Path(__file__).parents[2] / "src" / "shardyard").rglob("*.py"))
    text = "\n\n".join(source.read_text() for source in sources)
    for number in range(4):  # a piece of the work is 1 MiB
        (folder / "text" / f"{number}.txt").write_text(f"{number}\n{text}")
    with make_place(folder) as made:
        yield made


@pytest.fixture(scope="module", params=["local", "slurm"])
def on(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, ...]]:
    """Options and settings of a launcher."""
    env = f"launch.env={{PYTHONPATH: '{_PATHS}', OMP_NUM_THREADS: '1'}}"
    if request.param == "local":
        yield ("--on", "local", env)
        return
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = cluster.env["SLURM_CONF"]
        yield ("--on", "slurm", env)
        os.environ.pop("SLURM_CONF")
        if before is not None:
            os.environ["SLURM_CONF"] = before


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of all files of a prepared data set."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def finished_pieces(data: Path) -> dict[Path, int]:
    """Shards of pieces that are whole -> when they were written; before the end, by the records."""
    records = [*data.glob(f"*/{SCRATCH}/*.json")]
    shards = [each for record in records for each in record.parents[1].glob(f"*-{record.stem}.bin")]
    return {path: path.stat().st_mtime_ns for path in shards}


def nodes_of(run_dir: RunDir) -> list[int]:
    """Processes that are the node of a side job of this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            is_node = words[2:4] == [b"-m", b"shardyard.node.side_job"]
            if is_node and os.fsencode(run_dir.path) in words:
                found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited for {what}"
        time.sleep(0.02)


@dataclass
class Scene:
    """One data set, prepared by a command that is killed."""

    place: Place
    words: tuple[str, ...]
    data: Path

    def begin(self) -> tuple[RunDir, dict[Path, int]]:
        """Start the command, kill it in the middle of the work; what is whole by then."""
        runs, before = self.place.folder / "runs", self.folders()
        with self.place.start(*self.words) as running:
            wait_for(lambda: len(finished_pieces(self.data)) >= 3, "three finished pieces")
            running.send(signal.SIGKILL)
            running.process.wait()
        (folder,) = self.folders() - before
        return RunDir(runs / folder), finished_pieces(self.data)

    def folders(self) -> set[str]:
        runs = self.place.folder / "runs"
        return {each.name for each in runs.iterdir()} if runs.is_dir() else set()

    def kill_node(self, run_dir: RunDir) -> None:
        """As a machine that loses its power."""
        (node,) = nodes_of(run_dir)
        for pid in tree(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in self.place.files_left():  # whoever would have removed it is dead
            if (self.place.scratch / name).is_dir():
                shutil.rmtree(self.place.scratch / name, ignore_errors=True)


@pytest.fixture
def scene(place: Place, on: tuple[str, ...], request: pytest.FixtureRequest) -> Scene:
    data = place.folder / f"{request.node.originalname}-{on[1]}"
    words = ("prepare", "tiny.yaml", *on, f"data.dir={data}", "--yes", "--json")
    return Scene(place, words, data)


@pytest.fixture(scope="module")
def expected(place: Place) -> dict[str, str]:
    """What `prepare` makes on this machine, undisturbed."""
    answer = place.run("prepare", "tiny.yaml", "--json")
    assert answer.code == 0, answer.err
    return digests(Path(answer.json["dir"]))


def test_a_killed_command_follows_the_side_job_that_it_left(
    scene: Scene, expected: dict[str, str]
) -> None:
    run_dir, _ = scene.begin()
    before = scene.folders()
    again = scene.place.run(*scene.words)
    assert again.code == 0, again.err
    assert len(Ledger(run_dir.ledger).side_jobs()) == 1
    assert scene.folders() == before and again.json["run_id"] == run_dir.run_id
    assert digests(Path(again.json["data"]["dir"])) == expected


def test_a_killed_node_is_submitted_again_and_does_nothing_twice(
    scene: Scene, expected: dict[str, str]
) -> None:
    run_dir, _ = scene.begin()
    scene.kill_node(run_dir)
    whole = finished_pieces(scene.data)
    assert len(whole) < sum(name.endswith(".bin") for name in expected), "it was in the middle"
    again = scene.place.run(*scene.words)
    assert again.code == 0, again.err
    assert "another is submitted" in again.err
    assert len(Ledger(run_dir.ledger).side_jobs()) == 2
    assert digests(Path(again.json["data"]["dir"])) == expected
    kept = {path: path.stat().st_mtime_ns for path in whole}
    assert kept == whole, "what was whole is not written again"


def test_the_data_is_ready_for_launch_and_nothing_is_left_after_teardown(
    scene: Scene, expected: dict[str, str]
) -> None:
    done = scene.place.run(*scene.words)
    assert done.code == 0, done.err
    assert digests(Path(done.json["data"]["dir"])) == expected
    words = [word for word in scene.words[1:] if word != "--yes"]
    ready = scene.place.run("launch", *words, "--dry-run")
    assert ready.code == 0, ready.err
    tokens = done.json["data"]["train_tokens"]
    assert f"data: ready, {tokens:,} tokens, prepared by {done.json['run_id']}" in ready.err
    said = scene.place.run("logs", done.json["run_id"])
    assert "turning text into tokens" in said.out and "@shardyard" not in said.out
    status = scene.place.run("status", done.json["run_id"], "--json")
    assert (status.json["state"], status.json["exit_code"]) == ("succeeded", 0)
    gone = scene.place.run("teardown", done.json["run_id"], "--yes")
    assert gone.code == 0 and "all objects of run" in gone.out


def test_cancel_ends_it_and_the_same_command_goes_on(
    scene: Scene, expected: dict[str, str]
) -> None:
    with scene.place.start(*scene.words) as running:
        wait_for(lambda: len(finished_pieces(scene.data)) >= 1, "a finished piece")
        (run_id,) = [each for each in scene.folders() if nodes_of(scene.place.run_dir(each))]
        cancelled = scene.place.run("cancel", run_id)
        assert cancelled.code == 0, cancelled.err
        ended = running.wait()
    assert ended.code == 143 and "ended before it was done" in ended.err
    again = scene.place.run(*scene.words)
    assert again.code == 0, again.err
    assert digests(Path(again.json["data"]["dir"])) == expected
