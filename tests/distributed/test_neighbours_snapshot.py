"""A node is lost with all that was in its memory, and its ranks go on from their neighbour's."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardyard.rundir.jsonl import read_lines, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.run import train
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus
from tests.elastic.agents import answer, session_pids
from tests.elastic.agents import wait_until as wait_up_to

EVERY = 3
"""Steps between snapshots."""

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


def begin(folder: Path, corpus: Corpus, save_every: int, **elastic: Any) -> RunDir:
    nodes = elastic.pop("nodes")
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 100_000},
        "model": {"preset": "llama-tiny", "dropout": 0.1},
        "task": {"eval_every_steps": None},
        "parallel": {"strategy": "FULL_SHARD"},
        "cluster": nodes,
        "checkpoint": {"every": save_every},
        "elastic": elastic,
    }
    return make_run(folder, corpus, sections)


def wait_until(condition: Callable[[], bool]) -> None:
    """For long: agents import all of training, several at a time."""
    wait_up_to(condition, timeout_s=300.0)


@dataclass
class Nodes:
    """Agents of one run, each in a session of its own."""

    run_dir: RunDir
    endpoint: str = ""
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def come(self, rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "shardyard.elastic", str(self.run_dir.path)]
        command += ["--attempt", "0", "--rendezvous", self.endpoint, "--node-rank", str(rank)]
        command += ["--store-moves"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.started.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
            )
        )
        return self.started[-1]

    def lose(self, node: subprocess.Popen[str]) -> None:
        """With all its processes, at once."""
        for pid in session_pids(node.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def steps(self) -> int:
        """The last one that is finished."""
        return max((line["step"] for line in read_steps(self.run_dir.metrics)), default=0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in read_lines(self.run_dir.events) if each["kind"] == kind]

    def end_all(self) -> None:
        for node in self.started:
            self.lose(node)
            node.wait()
            if node.stdout:
                node.stdout.close()


@pytest.fixture
def nodes_of() -> Iterator[Callable[[RunDir], Nodes]]:
    made: list[Nodes] = []

    def make(run_dir: RunDir) -> Nodes:
        made.append(Nodes(run_dir))
        return made[-1]

    yield make
    for nodes in made:
        nodes.end_all()


def _train(run_dir: RunDir, steps: int) -> str:
    """On this rank, for so many steps."""
    calls = 0

    def is_over() -> bool:
        nonlocal calls
        calls += 1
        return calls > steps

    return train(run_dir, 0, Hooks(generation=0, drain_requested=is_over, events=None))


def losses(run_dir: RunDir) -> dict[int, float]:
    """By step; of a step that was done again the last."""
    return {line["step"]: line["loss"] for line in read_steps(run_dir.metrics)}


def weights(run_dir: RunDir, step: int) -> dict[str, bytes]:
    folder = run_dir.checkpoint(step)
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def undisturbed(corpus: Corpus, folder: Path, *, ranks: int, steps: int) -> RunDir:
    """The same training on processes of one node, with a checkpoint of its last step."""
    run_dir = begin(folder, corpus, save_every=steps, nodes={"devices": ranks})
    run_on_ranks(_train, ranks, run_dir, steps)
    return run_dir


def test_a_lost_node_is_replaced_and_nothing_is_read_from_storage(
    corpus: Corpus, tmp_path: Path, nodes_of: Callable[[RunDir], Nodes]
) -> None:
    two = {"devices": 1, "nodes": 2}
    # no checkpoint before the end: what is restored can come from memory alone
    run_dir = begin(tmp_path / "run", corpus, 10**6, nodes=two, snapshot_every=EVERY)
    nodes = nodes_of(run_dir)
    left, lost = nodes.come(0), nodes.come(1)
    wait_until(lambda: nodes.steps() >= 3 * EVERY)
    nodes.lose(lost)
    before = nodes.steps()
    replacement = nodes.come(1)
    wait_until(lambda: bool(nodes.events("snapshot_restored")))
    wait_until(lambda: nodes.steps() > before + EVERY)
    left.terminate()
    assert [answer(node)["exit_code"] for node in (left, replacement)] == [143, 143]

    (restored,) = nodes.events("snapshot_restored")
    assert (restored["source"], restored["taken_in"]) == ("neighbour", 0)
    assert restored["fetched_bytes"] > 0 and before - restored["step"] <= EVERY + 1
    assert not nodes.events("checkpoint_loaded") and len(nodes.events("node_lost")) == 1

    last = nodes.steps()
    alone = undisturbed(corpus, tmp_path / "alone", ranks=2, steps=last)
    assert losses(run_dir) == {step: losses(alone)[step] for step in range(1, last + 1)}
    assert weights(run_dir, last) == weights(alone, last)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2])  # the first one serves the store
def test_those_that_are_left_of_three_go_on_from_the_memory_of_two(
    corpus: Corpus, tmp_path: Path, nodes_of: Callable[[RunDir], Nodes], lost: int
) -> None:
    three = {"devices": 1, "nodes": 3}
    run_dir = begin(tmp_path / "run", corpus, 10**6, nodes=three, min_nodes=2, snapshot_every=EVERY)
    nodes = nodes_of(run_dir)
    three_nodes = [nodes.come(rank) for rank in range(3)]
    left = [node for rank, node in enumerate(three_nodes) if rank != lost]
    wait_until(lambda: nodes.steps() >= 3 * EVERY)
    nodes.lose(three_nodes[lost])
    before = nodes.steps()
    wait_until(lambda: nodes.steps() > before + EVERY)
    left[0].terminate()
    assert [answer(node)["exit_code"] for node in left] == [143, 143]

    (restored,) = nodes.events("snapshot_restored")
    assert restored["source"] == "neighbour" and before - restored["step"] <= EVERY + 1
    assert not nodes.events("checkpoint_loaded")
    alone = undisturbed(corpus, tmp_path / "alone", ranks=3, steps=nodes.steps())
    expected = losses(alone)
    assert all(
        loss
        == (expected[step] if step <= restored["step"] else pytest.approx(expected[step], 1e-3))
        for step, loss in losses(run_dir).items()
    )
