"""A real run on a real Slurm: the losses of `train`, whatever happens to its job and nodes."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.config.load import dump_recipe
from shardyard.config.paths import make_paths_absolute
from shardyard.config.rules.check import load_checked_recipe
from shardyard.launchers.base import JobState, LaunchRequest
from shardyard.launchers.ledger import Ledger, Submission
from shardyard.launchers.slurm.launcher import SlurmLauncher
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir
from tests.e2e.shardyard import Place, events, make_place, wait_for, wait_for_step
from tests.launchers.slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = pytest.mark.slow

STEPS = 240
RECIPE = f"""\
model: {{preset: llama-tiny}}
data: {{source: TEXT, vocab_size: 512, seq_len: 32, workers: 1, eval_fraction: 0.1}}
run: {{steps: {STEPS}}}
optim: {{lr: 1e-3, global_batch: 4, micro_batch: 1}}
parallel: {{strategy: FULL_SHARD}}
cluster: {{device: cpu, devices: 2}}
checkpoint: {{every: 40}}
"""

_PATHS = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("src", "."))
TWO_NODES = (
    "cluster.nodes=2",
    "cluster.devices=1",
    f"launch.env={{PYTHONPATH: '{_PATHS}', OMP_NUM_THREADS: '1'}}",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A folder that this machine and the nodes share: a recipe, some text, the runs."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "text").mkdir()
    sources = sorted((Path(__file__).parents[2] / "src" / "shardyard").rglob("*.py"))
    for number, source in enumerate(sources[:40]):
        (folder / "text" / f"{number:03d}.txt").write_text(source.read_text() or "# empty\n")
    recipe = RECIPE.replace("TEXT", str(folder / "text"))
    (folder / "tiny.yaml").write_text(recipe.replace("workers", f"dir: {folder}/prepared, workers"))
    with make_place(folder) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def expected_of_four(place: Place) -> dict[int, float]:
    """Loss of each step of the same run by `train` with four processes."""
    answer = place.run("train", "tiny.yaml", "run.id=base-4", "cluster.devices=4")
    assert answer.code == 0, answer.err
    return _losses(place.run_dir("base-4"))


@pytest.fixture(scope="module")
def expected(place: Place) -> dict[int, float]:
    """Loss of each step of the same run by `train`: two processes here, nobody disturbs them."""
    answer = place.run("train", "tiny.yaml", "run.id=base")
    assert answer.code == 0, answer.err
    return _losses(place.run_dir("base"))


@pytest.fixture(autouse=True)
def _no_job_left(cluster: SlurmCluster) -> Iterator[None]:
    yield
    cluster.client("scancel", "--user=root")


class SlurmRun:
    """One run on two nodes of a process each."""

    def __init__(
        self,
        place: Place,
        cluster: SlurmCluster,
        run_id: str,
        *,
        nodes: int = 2,
        steps: int = STEPS,
        settings: tuple[str, ...] = (),
    ) -> None:
        self.place = place
        self.steps = steps
        self.settings = settings
        self.cluster = cluster
        self.run_dir = place.run_dir(run_id)
        self.launcher = SlurmLauncher(shell=cluster.shell)
        self.job = self.submit(nodes)

    def submit(self, nodes: int = 2) -> Submission:
        words = [f"run.id={self.run_dir.run_id}", *TWO_NODES, f"cluster.nodes={nodes}"]
        words += [f"run.steps={self.steps}", *self.settings]
        recipe = make_paths_absolute(load_checked_recipe([self.place.folder / "tiny.yaml"], words))
        request = LaunchRequest(
            run_id=self.run_dir.run_id,
            recipe=recipe,
            recipe_text=dump_recipe(recipe),
            nodes=nodes,
            devices_per_node=1,
            cluster=None,
            run_dir=str(self.run_dir.path),
        )
        ledger = Ledger(self.run_dir.path / "ledger.jsonl")
        return self.launcher.submit(self.launcher.render(request), ledger)

    def wait_for(self, state: JobState) -> None:
        def is_there() -> bool:
            now = self.launcher.status(self.job).state
            assert now is state or not now.is_over, f"{now}\n{self.said()}"
            return now is state

        wait_for(is_there)

    def start_again_now(self) -> None:
        self.wait_for(JobState.WAITING)
        wait_for(lambda: self.cluster.state(self.job.id) == "PENDING")
        self.cluster.start_now(self.job.id)

    def said(self) -> str:
        lines = self.launcher.logs(self.job, node=None, follow=False)
        return "\n".join(f"{line.source}: {line.text}" for line in lines)

    def begins(self) -> list[int]:
        """The step that each attempt went on from; 0: from the beginning."""
        loaded = {
            event["attempt"]: event["step"] for event in events(self.run_dir, "checkpoint_loaded")
        }
        return [loaded.get(number, 0) for number in self.run_dir.attempts()]


def _losses(run_dir: RunDir) -> dict[int, float]:
    """Of each step; where work was lost and done again its last line stands."""
    return {line["step"]: line["loss"] for line in read_lines(run_dir.metrics) if "loss" in line}


def test_a_run_on_two_nodes_has_the_losses_of_one_here(
    place: Place, cluster: SlurmCluster, expected: dict[int, float]
) -> None:
    run = SlurmRun(place, cluster, "two-nodes")
    run.wait_for(JobState.SUCCEEDED)
    assert _losses(run.run_dir) == expected
    assert len(expected) == STEPS
    assert len(list((run.run_dir.path / "logs").glob("slurm-*-node-?.log"))) == 2


def test_a_run_on_four_nodes_has_the_losses_of_four_processes_here(
    place: Place, cluster: SlurmCluster, expected_of_four: dict[int, float]
) -> None:
    run = SlurmRun(place, cluster, "four-nodes", nodes=4)
    run.wait_for(JobState.SUCCEEDED)
    assert _losses(run.run_dir) == expected_of_four
    assert len(expected_of_four) == STEPS


def test_a_node_that_dies_costs_no_more_than_the_steps_since_the_last_checkpoint(
    place: Place, cluster: SlurmCluster, expected: dict[int, float]
) -> None:
    run = SlurmRun(place, cluster, "lost-node")
    wait_for_step(run.run_dir, 60)
    lost = sorted(name for name, _ in run.launcher.status(run.job).nodes)[1]
    cluster.kill_node(lost)
    try:
        run.start_again_now()
        run.wait_for(JobState.SUCCEEDED)
    finally:
        cluster.start_node(lost)
    begins = run.begins()
    assert begins[0] == 0
    assert begins[1] >= 40
    assert begins[1] % 40 == 0
    assert _losses(run.run_dir) == expected


def test_the_program_of_node_0_is_killed_and_another_node_does_its_part(
    place: Place, cluster: SlurmCluster, expected: dict[int, float]
) -> None:
    run = SlurmRun(
        place, cluster, "beheaded", settings=("elastic.min_nodes=1", "checkpoint.every=10")
    )
    wait_for_step(run.run_dir, 30)
    name = sorted(name for name, _ in run.launcher.status(run.job).nodes)[0]
    cluster.kill_task(name, "shardyard.node")
    run.wait_for(JobState.SUCCEEDED)  # the same start of the job
    assert run.run_dir.attempts() == [0]
    assert [event["world_size"] for event in events(run.run_dir, "rendezvous")] == [2, 1]
    assert [event["node_rank"] for event in events(run.run_dir, "node_lost")] == [0]
    (moved,) = events(run.run_dir, "store_moved")
    assert moved["node_rank"] == 1
    assert moved["endpoint"].startswith("127.0.0.2:")  # its name in the job's list of nodes
    # Sums are made in another order: equal up to rounding.
    assert _losses(run.run_dir) == pytest.approx(expected, rel=1e-5)


def test_a_daemon_that_stops_for_good_costs_no_step(place: Place, cluster: SlurmCluster) -> None:
    steps = 3 * STEPS  # Slurm gives a node up after 30 to 60 s, and must do so within the run
    answer = place.run("train", "tiny.yaml", "run.id=base-long", f"run.steps={steps}")
    assert answer.code == 0, answer.err
    run = SlurmRun(place, cluster, "daemon-stopped", steps=steps)
    wait_for_step(run.run_dir, 60)
    lost = sorted(name for name, _ in run.launcher.status(run.job).nodes)[1]
    cluster.stop_daemon(lost)  # its tasks live on, until Slurm gives the node up
    try:
        run.start_again_now()
        run.wait_for(JobState.SUCCEEDED)
    finally:
        cluster.start_node(lost)
    made = [line["step"] for line in read_lines(run.run_dir.metrics) if "loss" in line]
    assert made == list(range(1, steps + 1)), "none lost, none twice"
    assert _losses(run.run_dir) == _losses(place.run_dir("base-long"))


def test_a_daemon_that_is_started_again_in_time_costs_nothing(
    place: Place, cluster: SlurmCluster, expected: dict[int, float]
) -> None:
    run = SlurmRun(place, cluster, "daemon-restarted")
    wait_for_step(run.run_dir, 10)
    name = sorted(name for name, _ in run.launcher.status(run.job).nodes)[1]
    cluster.stop_daemon(name)
    cluster.start_node(name)
    run.wait_for(JobState.SUCCEEDED)
    assert run.begins() == [0]
    assert _losses(run.run_dir) == expected


def test_a_run_that_is_requeued_by_hand_goes_on_exactly(
    place: Place, cluster: SlurmCluster, expected: dict[int, float]
) -> None:
    run = SlurmRun(place, cluster, "requeued")
    wait_for_step(run.run_dir, 60)
    cluster.client("scontrol", "requeue", run.job.id)
    run.start_again_now()
    run.wait_for(JobState.SUCCEEDED)
    first, again = run.begins()
    assert (first, again >= 40) == (0, True)
    assert _losses(run.run_dir) == expected


def test_at_the_time_limit_the_run_is_saved_and_goes_on_exactly(
    place: Place, cluster: SlurmCluster, expected: dict[int, float]
) -> None:
    run = SlurmRun(place, cluster, "time-limit")
    wait_for_step(run.run_dir, 10)
    # What Slurm does at --signal=B:USR1@N; test_slurm.py waits for it to do so by itself.
    cluster.client("scancel", "--batch", "--signal=USR1", run.job.id)
    run.wait_for(JobState.WAITING)
    saved = run.run_dir.checkpoint_steps()[-1]
    last_step = max(line["step"] for line in read_lines(run.run_dir.metrics))
    assert saved == last_step < STEPS
    run.start_again_now()
    run.wait_for(JobState.SUCCEEDED)
    assert run.begins() == [0, saved]
    assert _losses(run.run_dir) == expected


def test_a_cancelled_run_is_saved_and_another_job_goes_on_exactly(
    place: Place, cluster: SlurmCluster, expected: dict[int, float]
) -> None:
    run = SlurmRun(place, cluster, "cancelled")
    wait_for_step(run.run_dir, 10)
    run.launcher.cancel(run.job)
    run.wait_for(JobState.DRAINED)
    saved = run.run_dir.checkpoint_steps()[-1]
    assert 10 <= saved < STEPS
    first, run.job = run.job, run.submit()
    assert run.job.id != first.id
    run.wait_for(JobState.SUCCEEDED)
    assert run.begins() == [0, saved]
    assert _losses(run.run_dir) == expected


def test_scale_adds_and_removes_a_node(
    place: Place, cluster: SlurmCluster, expected: dict[int, float]
) -> None:
    conf = cluster.env["SLURM_CONF"]
    words = ("run.id=scaled", *TWO_NODES)
    launched = place.run("launch", "tiny.yaml", "--on", "slurm", "--yes", *words, SLURM_CONF=conf)
    assert launched.code == 0, launched.err
    run_dir = place.run_dir("scaled")
    for nodes, at in ((3, 20), (2, 120)):
        wait_for_step(run_dir, at)
        answer = place.run("scale", "scaled", str(nodes), "--yes", SLURM_CONF=conf)
        assert answer.code == 0, answer.err
        assert f"is over (drained): submitting the run with {nodes} nodes" in answer.err
    watched = place.run("watch", "scaled", SLURM_CONF=conf)
    assert watched.code == 0, watched.err
    lines = [line for line in read_lines(run_dir.metrics) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "none lost, none twice"
    worlds = [line["world_size"] for line in lines]
    assert [size for at, size in enumerate(worlds) if at == 0 or worlds[at - 1] != size] == [
        2,
        3,
        2,
    ]
    losses, before = _losses(run_dir), worlds.index(3)
    assert list(losses.values())[:before] == list(expected.values())[:before]
    # Sums are made in another order: equal up to rounding.
    assert losses == pytest.approx(expected, rel=1e-5)


def test_scancel_by_hand_saves_within_the_seconds_that_slurm_gives(
    place: Place, cluster: SlurmCluster
) -> None:
    run = SlurmRun(place, cluster, "by-hand")
    wait_for_step(run.run_dir, 10)
    cluster.client("scancel", run.job.id)
    run.wait_for(JobState.CANCELLED)
    last_step = max(line["step"] for line in read_lines(run.run_dir.metrics))
    assert run.run_dir.checkpoint_steps()[-1] == last_step


def test_the_command_line_launches_follows_and_tells(
    place: Place, cluster: SlurmCluster, expected: dict[int, float]
) -> None:
    conf = cluster.env["SLURM_CONF"]
    launched = place.run(
        "launch", "tiny.yaml", "--on", "slurm", "--yes", "run.id=verbs", *TWO_NODES, SLURM_CONF=conf
    )
    assert launched.code == 0, launched.err
    followed = place.run("logs", "verbs", "--all", "--follow", SLURM_CONF=conf)
    assert followed.code == 0, followed.err
    assert "job | shardyard: the nodes ended with exit code 0" in followed.out
    assert _losses(place.run_dir("verbs")) == expected
    status = place.run("status", "verbs", "--json", SLURM_CONF=conf)
    assert status.code == 0, status.err
    assert "succeeded" in status.out
    removed = place.run("teardown", "verbs", "--yes", SLURM_CONF=conf)
    assert removed.code == 0, removed.err
