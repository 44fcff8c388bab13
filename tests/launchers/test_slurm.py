"""The launcher against a real Slurm of four nodes on this machine; the nodes' program stands in."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from shardyard.control.runs import strays
from shardyard.errors import CapacityError, RequestError, ShardyardError, StorageError
from shardyard.launchers.base import JobState, Removal, Rendered
from shardyard.launchers.ledger import Ledger, Submission
from shardyard.launchers.slurm.clients import ClientResult
from shardyard.launchers.slurm.launcher import SlurmLauncher
from tests.launchers import slurm_node
from tests.launchers.planted import planted_secrets
from tests.launchers.slurm_cluster import SlurmCluster, slurm_cluster
from tests.launchers.slurm_request import CASES, golden_request, slurm_request

pytestmark = pytest.mark.system

_NUMBERS = count(1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def launcher(cluster: SlurmCluster) -> SlurmLauncher:
    return SlurmLauncher(shell=cluster.shell, program=(slurm_node.__file__,))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder whose name no shell and no file name pattern likes."""
    return tmp_path / "it's 100%j" / f"run-{next(_NUMBERS)}"


@pytest.fixture
def ledger(run_dir: Path) -> Ledger:
    return Ledger(run_dir / "ledger.jsonl")


def _rendered(launcher: SlurmLauncher, run_dir: Path, does: str, *overrides: str) -> Rendered:
    words = [f"launch.env={{STAND_IN: {does}}}", *overrides]
    return launcher.render(slurm_request(*words, run_dir=run_dir))


class Waiting:
    """Waits for what a launcher says of a job."""

    def __init__(self, cluster: SlurmCluster, launcher: SlurmLauncher) -> None:
        self.cluster = cluster
        self.launcher = launcher

    def for_state(self, job: Submission, state: JobState) -> None:
        self.cluster.wait_until(
            lambda: self.launcher.status(job).state is state, f"{state}: {self._said(job)}"
        )

    def for_line(self, job: Submission, text: str, count: int = 1) -> None:
        self.cluster.wait_until(lambda: self.lines(job).count(text) >= count, f"{text!r}")

    def lines(self, job: Submission) -> list[str]:
        return [
            f"{line.source}: {line.text}"
            for line in self.launcher.logs(job, node=None, follow=False)
        ]

    def _said(self, job: Submission) -> str:
        return str(self.launcher.status(job))


@pytest.fixture
def wait(cluster: SlurmCluster, launcher: SlurmLauncher) -> Waiting:
    return Waiting(cluster, launcher)


def test_a_job_runs_on_its_nodes_and_ends(
    launcher: SlurmLauncher, run_dir: Path, ledger: Ledger, wait: Waiting
) -> None:
    job = launcher.submit(_rendered(launcher, run_dir, "end 0"), ledger)
    followed = [
        f"{line.source}: {line.text}" for line in launcher.logs(job, node=None, follow=True)
    ]
    status = launcher.status(job)
    assert (status.state, status.exit_code) == (JobState.SUCCEEDED, 0)
    assert {
        "node 0: node 0 of 2 began, start 0",
        "node 1: node 1 of 2 began, start 0",
        "job: shardyard: the nodes ended with exit code 0",
    } <= set(followed)
    assert sorted(followed) == sorted(wait.lines(job))
    only = [line.text for line in launcher.logs(job, node=1, follow=False)]
    assert only == ["node 1 of 2 began, start 0"]


def test_the_ledger_holds_what_was_submitted_until_it_is_removed(
    launcher: SlurmLauncher, run_dir: Path, ledger: Ledger
) -> None:
    job = launcher.submit(_rendered(launcher, run_dir, "wait"), ledger)
    (entry,) = ledger.live()
    assert (entry.kind, entry.name, entry.id) == ("slurm job", run_dir.name, job.id)
    assert launcher.remove(job, ledger).removed == [f"slurm job {job.id} ({run_dir.name})"]
    assert ledger.live() == []
    assert launcher.remove(job, ledger).removed == []


def test_a_failed_job_has_the_exit_code_of_its_nodes(
    launcher: SlurmLauncher, run_dir: Path, ledger: Ledger
) -> None:
    job = launcher.submit(_rendered(launcher, run_dir, "end 2"), ledger)
    list(launcher.logs(job, node=None, follow=True))
    status = launcher.status(job)
    assert (status.state, status.exit_code) == (JobState.FAILED, 2)
    assert status.reason == "failed with exit code 2"


def test_a_run_that_can_do_without_a_node_ends_as_those_say_that_are_left(
    launcher: SlurmLauncher, run_dir: Path, ledger: Ledger, wait: Waiting
) -> None:
    """Not as the lost one did, and not so soon after it as a drain may take."""
    words = ("elastic.drain_timeout_s=1", "elastic.min_nodes=1")
    job = launcher.submit(_rendered(launcher, run_dir, "outlive", *words), ledger)
    wait.for_state(job, JobState.SUCCEEDED)
    assert "node 1: went on" in wait.lines(job)


def test_a_run_that_needs_all_of_its_nodes_ends_with_the_first_that_is_lost(
    launcher: SlurmLauncher, run_dir: Path, ledger: Ledger, wait: Waiting
) -> None:
    words = ("elastic.drain_timeout_s=1",)
    job = launcher.submit(_rendered(launcher, run_dir, "outlive", *words), ledger)
    wait.for_state(job, JobState.FAILED)
    assert "node 1: went on" not in wait.lines(job)


def test_a_cancelled_run_drains_and_says_so(
    launcher: SlurmLauncher, run_dir: Path, ledger: Ledger, wait: Waiting
) -> None:
    job = launcher.submit(_rendered(launcher, run_dir, "wait"), ledger)
    wait.for_line(job, "node 0: node 0 of 2 began, start 0")
    status = launcher.status(job)
    assert status.state is JobState.RUNNING
    assert [state for _, state in status.nodes] == ["mixed", "mixed"]
    launcher.cancel(job)
    launcher.cancel(job)  # asking again does no harm
    wait.for_state(job, JobState.DRAINED)
    assert launcher.status(job).exit_code == 143
    assert wait.lines(job).count("node 0: saved") == 1
    launcher.cancel(job)  # nor does asking what is over


def test_a_cancel_that_comes_before_the_job_listens_is_not_lost(
    cluster: SlurmCluster,
    launcher: SlurmLauncher,
    run_dir: Path,
    ledger: Ledger,
    wait: Waiting,
) -> None:
    job = launcher.submit(_rendered(launcher, run_dir, "wait"), ledger)
    cluster.wait_until(lambda: cluster.state(job.id) == "RUNNING", "running")
    launcher.cancel(job)
    wait.for_state(job, JobState.DRAINED)


def test_a_waiting_job_is_cancelled_at_once(
    cluster: SlurmCluster, launcher: SlurmLauncher, run_dir: Path, ledger: Ledger
) -> None:
    blocker = cluster.client(
        "sbatch", "--parsable", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 300"
    )
    try:
        job = launcher.submit(_rendered(launcher, run_dir, "wait"), ledger)
        status = launcher.status(job)
        assert status.state is JobState.WAITING
        assert status.reason.startswith("waits for free nodes")
        launcher.cancel(job)
        assert launcher.status(job).state is JobState.CANCELLED
    finally:
        cluster.client("scancel", blocker.strip())


def test_scancel_by_hand_drains_too(
    cluster: SlurmCluster,
    launcher: SlurmLauncher,
    run_dir: Path,
    ledger: Ledger,
    wait: Waiting,
) -> None:
    job = launcher.submit(_rendered(launcher, run_dir, "wait"), ledger)
    wait.for_line(job, "node 0: node 0 of 2 began, start 0")
    cluster.client("scancel", job.id)
    wait.for_state(job, JobState.CANCELLED)
    assert (run_dir / "checkpoints" / "latest").read_text() == "step-00000001\n"


def _warn(cluster: SlurmCluster, job: Submission, wait: Waiting, times: int = 1) -> None:
    """What Slurm does before the time limit: --signal=B:USR1.

    Sent until it is heard: on a machine far above its cores Slurm has lost one to a script that it
    had just started.
    """

    def is_heard() -> bool:
        cluster.client("scancel", "--batch", "--signal=USR1", job.id)
        end_s = time.monotonic() + 15
        while time.monotonic() < end_s:
            if wait.lines(job).count("job: shardyard: draining: time limit") >= times:
                return True
            time.sleep(0.2)
        return False

    cluster.wait_until(is_heard, "the warning is heard")


def test_at_the_time_limit_a_run_is_saved_requeued_and_started_again(
    cluster: SlurmCluster,
    launcher: SlurmLauncher,
    run_dir: Path,
    ledger: Ledger,
    wait: Waiting,
) -> None:
    job = launcher.submit(_rendered(launcher, run_dir, "wait"), ledger)
    for start in (0, 1):
        wait.for_line(job, f"node 1: node 1 of 2 began, start {start}")
        _warn(cluster, job, wait, start + 1)
        wait.for_state(job, JobState.WAITING)
        saved = f"step-0000000{start + 1}"
        assert (run_dir / "checkpoints" / "latest").read_text() == f"{saved}\n"
        last = f"job: shardyard: requeued at the time limit, to go on from {saved}"
        assert last in wait.lines(job)
        cluster.wait_until(lambda: "was requeued" in launcher.status(job).reason, "its reason")
        if start == 0:
            cluster.wait_until(lambda: cluster.state(job.id) == "PENDING", "pending")
            cluster.start_now(job.id)
    launcher.remove(job, ledger)


@pytest.mark.slow
def test_slurm_itself_warns_before_the_limit(
    cluster: SlurmCluster,
    launcher: SlurmLauncher,
    run_dir: Path,
    ledger: Ledger,
    wait: Waiting,
) -> None:
    job = launcher.submit(_rendered(launcher, run_dir, "wait"), ledger)
    wait.for_line(job, "node 1: node 1 of 2 began, start 0")
    # A limit of a minute, warned of two minutes before: at once. Slurm looks twice a minute.
    cluster.client("scontrol", "update", f"JobId={job.id}", "TimeLimit=1")
    wait.for_state(job, JobState.WAITING)
    assert "job: shardyard: draining: time limit" in wait.lines(job)
    assert (run_dir / "checkpoints" / "latest").read_text() == "step-00000001\n"
    launcher.remove(job, ledger)


def test_a_run_that_saves_nothing_is_not_requeued_for_ever(
    cluster: SlurmCluster,
    launcher: SlurmLauncher,
    run_dir: Path,
    ledger: Ledger,
    wait: Waiting,
) -> None:
    job = launcher.submit(_rendered(launcher, run_dir, "wait-unsaved"), ledger)
    wait.for_line(job, "node 0: node 0 of 2 began, start 0")
    _warn(cluster, job, wait)
    wait.for_state(job, JobState.DRAINED)
    assert any("not requeued: no checkpoint was written" in line for line in wait.lines(job))
    assert any("Raise launch.time_limit" in line for line in wait.lines(job))


def test_a_run_that_may_not_be_requeued_ends_drained_at_the_time_limit(
    cluster: SlurmCluster,
    launcher: SlurmLauncher,
    run_dir: Path,
    ledger: Ledger,
    wait: Waiting,
) -> None:
    rendered = _rendered(launcher, run_dir, "wait", "launch.slurm.requeue=false")
    job = launcher.submit(rendered, ledger)
    wait.for_line(job, "node 0: node 0 of 2 began, start 0")
    _warn(cluster, job, wait)
    wait.for_state(job, JobState.DRAINED)


def test_a_second_job_of_a_run_is_refused_while_the_first_lives(
    launcher: SlurmLauncher, run_dir: Path, ledger: Ledger
) -> None:
    rendered = _rendered(launcher, run_dir, "wait")
    job = launcher.submit(rendered, ledger)
    with pytest.raises(RequestError, match=f"has Slurm job {job.id} already.*`shardyard cancel"):
        launcher.submit(rendered, ledger)
    launcher.remove(job, ledger)
    again = launcher.submit(rendered, ledger)
    assert again.id != job.id
    launcher.remove(again, ledger)


def test_an_interrupted_submission_is_found_by_its_name(
    cluster: SlurmCluster, launcher: SlurmLauncher, run_dir: Path, ledger: Ledger
) -> None:
    rendered = _rendered(launcher, run_dir, "wait")
    job = launcher.submit(rendered, ledger)
    lines = ledger.path.read_text().splitlines()
    ledger.path.write_text(lines[0] + "\n")  # killed between sbatch and its answer
    with pytest.raises(RequestError, match=f"has Slurm job {job.id} already"):
        launcher.submit(rendered, ledger)
    assert launcher.remove(job, ledger).removed == [f"slurm job {job.id} ({run_dir.name})"]
    cluster.wait_until(lambda: launcher.status(job).state.is_over, "cancelled")


def test_what_a_forged_ledger_names_lives_on(
    cluster: SlurmCluster, launcher: SlurmLauncher, run_dir: Path, ledger: Ledger
) -> None:
    """Once `cancel` ran `scancel -uroot`, and a tear-down ended any job of the run's name."""
    name = run_dir.name
    victim = cluster.client(
        "sbatch", "--parsable", f"--job-name={name}", f"--chdir={run_dir.parents[1]}",
        "--wrap", "sleep 300",
    ).strip()  # fmt: skip
    try:
        details = {"folder": str(run_dir), "nodes": "1"}
        for forged in ("-uroot", f"{victim} -uroot"):
            ledger.record(
                Submission(launcher="slurm", run_id=name, id=forged, name=name, details=details)
            )
            with pytest.raises(StorageError, match=r"ledger\.jsonl line 1"):
                ledger.jobs()
            ledger.path.unlink()
        ledger.intend("slurm job", name, launcher="slurm", **details)  # interrupted
        of_victim = Submission(launcher="slurm", run_id=name, id=victim, name=name, details=details)
        launcher.cancel(of_victim)
        assert launcher.remove(of_victim, ledger).removed == []
        ledger.confirm(ledger.intend("slurm job", name, launcher="slurm", **details), victim)
        foreign = [f"slurm job {victim}"]
        assert launcher.remove(of_victim, ledger) == Removal(not_owned=foreign)
        assert "number " + victim + " is another job now" in launcher.status(of_victim).reason
        assert cluster.state(victim) in ("PENDING", "RUNNING")
    finally:
        cluster.client("scancel", victim)


def test_a_submission_without_an_answer_stays_in_the_ledger(
    cluster: SlurmCluster, launcher: SlurmLauncher, run_dir: Path, ledger: Ledger
) -> None:
    def silent(argv: Sequence[str]) -> ClientResult:
        if argv[0] == "sbatch":
            raise subprocess.TimeoutExpired(argv, 60.0)
        return cluster.shell(argv)

    rendered = _rendered(launcher, run_dir, "wait")
    with pytest.raises(CapacityError, match="`sbatch` gave no answer"):
        SlurmLauncher(shell=silent).submit(rendered, ledger)
    assert [(entry.name, entry.is_confirmed) for entry in ledger.live()] == [(run_dir.name, False)]
    job = launcher.submit(rendered, ledger)  # none of that name is there, so it is sent again
    assert [(entry.id, entry.is_confirmed) for entry in ledger.live()] == [(job.id, True)]
    launcher.remove(job, ledger)


def test_a_job_that_slurm_has_forgotten_is_gone(launcher: SlurmLauncher, run_dir: Path) -> None:
    job = Submission(
        launcher="slurm",
        run_id="old",
        id="4000000",
        name="old",
        details={"folder": str(run_dir), "nodes": "2"},
    )
    status = launcher.status(job)
    assert (status.state, status.reason) == (JobState.GONE, "Slurm knows it no more")
    launcher.cancel(job)
    assert list(launcher.logs(job, node=None, follow=True)) == []


@pytest.mark.parametrize(
    ("exit_code", "state"),
    [
        (0, JobState.SUCCEEDED),
        (1, JobState.FAILED),
        (137, JobState.FAILED),
        (143, JobState.DRAINED),
    ],
)
def test_a_job_that_slurm_has_forgotten_ended_as_its_log_says(
    exit_code: int, state: JobState, launcher: SlurmLauncher, run_dir: Path
) -> None:
    (run_dir / "logs").mkdir(parents=True)
    text = "shardyard: the nodes ended with exit code "
    (run_dir / "logs" / "slurm-4000000.log").write_text(
        f"shardyard: start 0\n{text}75\nshardyard: start 1\n{text}{exit_code}\n"
    )
    details = {"folder": str(run_dir), "nodes": "2"}
    job = Submission(launcher="slurm", run_id="old", id="4000000", name="old", details=details)
    status = launcher.status(job)
    assert (status.state, status.exit_code) == (state, exit_code)
    said = f"its nodes ended with exit code {exit_code}"
    assert status.reason == f"says its log: {said}; Slurm knows it no more"


def test_a_job_whose_folder_was_moved_away_is_found_by_its_comment(
    launcher: SlurmLauncher, run_dir: Path, ledger: Ledger, tmp_path: Path
) -> None:
    job = launcher.submit(_rendered(launcher, run_dir, "wait"), ledger)
    recipe = slurm_request().recipe
    try:
        moved = tmp_path / "elsewhere"
        run_dir.rename(moved)
        (found,) = [each for each in launcher.find(recipe) if each.id == job.id]
        assert (found.run_id, found.where) == (run_dir.name, str(run_dir))
        assert not found.state.is_over and found.end == f"scancel {job.id}"
        assert job.id in [each.id for each in strays(launcher, [], tmp_path / "runs")]
        moved.rename(run_dir)
        assert job.id not in [each.id for each in strays(launcher, [], run_dir.parent)]
    finally:
        launcher.remove(job, ledger)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["launch.slurm.partition=h2OO"], "invalid partition specified: h2OO.* `sinfo -s`"),
        (["launch.slurm.constraint=slow"], "Invalid feature specification.*`sinfo -o '%P %f'"),
        (
            ["launch.slurm.partition=short", "launch.time_limit=1h"],
            "time limit.* `sinfo -o '%P %l'",
        ),
        (["launch.slurm.partition=short", "cluster.nodes=3", "cluster.device=cpu"], "fewer nodes"),
        (["cluster.instance=p3.2xlarge", "launch.slurm.constraint=slow"], "Invalid feature"),
        (["launch.slurm.options={gres: 'nosuch:1'}"], "set launch.slurm.request_gpus=false"),
        (["launch.slurm.options={nodelist: 'nowhere[1-2]'}"], "Name nodes of `sinfo -N`"),
        (["launch.slurm.options={reservation: nosuch}"], "`scontrol show reservation`"),
        (["launch.slurm.options={licenses: 'nosuch:1'}"], "Fix that option in launch.slurm"),
    ],
)
def test_what_slurm_can_never_run_is_refused_with_what_to_change(
    launcher: SlurmLauncher, run_dir: Path, ledger: Ledger, overrides: list[str], words: str
) -> None:
    nodes = 3 if "cluster.nodes=3" in overrides else 2
    request = slurm_request(*overrides, run_dir=run_dir, nodes=nodes)
    with pytest.raises(RequestError, match=words):
        launcher.submit(launcher.render(request), ledger)
    assert ledger.live() == []


def test_more_devices_than_a_node_has_are_refused(
    launcher: SlurmLauncher, run_dir: Path, ledger: Ledger
) -> None:
    request = slurm_request("cluster.device=cuda", devices=16, run_dir=run_dir)
    with pytest.raises(RequestError, match="No node of the partition has what was asked"):
        launcher.submit(launcher.render(request), ledger)


def test_variables_of_the_shell_outrank_no_setting(
    cluster: SlurmCluster, run_dir: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = {
        "SBATCH_PARTITION": "short", "SBATCH_TIMELIMIT": "1", "SBATCH_ARRAY_INX": "0-1",
        "SBATCH_OUTPUT": "/dev/null", "SLURM_MEM_PER_NODE": "100", "SLURM_MEM_PER_CPU": "50",
        "SLURM_TIME_FORMAT": "%s", "SQUEUE_FORMAT": "%j",
    }  # fmt: skip
    for name, value in {**foreign, "SLURM_CONF": cluster.env["SLURM_CONF"]}.items():
        monkeypatch.setenv(name, value)
    launcher = SlurmLauncher(program=(slurm_node.__file__,))  # with the clients as they are run
    own = ("launch.slurm.partition=main", "launch.time_limit=30min")
    rendered = _rendered(launcher, run_dir, "end 0", *own)
    (warning,) = rendered.warnings
    assert "SBATCH_PARTITION=short" in warning and "launch.time_limit=1" in warning
    job = launcher.submit(rendered, ledger)
    text = cluster.client("scontrol", "show", "job", job.id, "-o")
    told = dict(word.partition("=")[::2] for word in text.split() if "=" in word)
    assert (told["Partition"], told["TimeLimit"]) == ("main", "00:30:00")
    assert "ArrayJobId" not in told and "/dev/null" not in told["StdOut"]
    cluster.wait_until(lambda: launcher.status(job).state.is_over, "the end")
    assert launcher.status(job).state is JobState.SUCCEEDED


def test_variables_of_a_login_shell_on_a_node_end_no_job(
    launcher: SlurmLauncher, run_dir: Path, ledger: Ledger, wait: Waiting
) -> None:
    rendered = _rendered(launcher, run_dir, "end 0")
    login = (
        "export SLURM_MEM_PER_NODE=100 SLURM_MEM_PER_CPU=50 SRUN_CPU_BIND=x SLURM_TIMELIMIT=x "
        "SLURM_CLUSTERS=far SLURM_HINT=x SLURM_THREADS_PER_CORE=x SLURM_PROFILE=x SLURM_GRES=x:x"
    )
    files = {
        name: content.replace("set -euo pipefail", f"{login}\nset -euo pipefail")
        for name, content in rendered.files.items()
    }
    job = launcher.submit(replace(rendered, files=files), ledger)
    wait.for_state(job, JobState.SUCCEEDED)


def test_train_as_several_tasks_of_srun_is_rejected(cluster: SlurmCluster, tmp_path: Path) -> None:
    train = [sys.executable, "-m", "shardyard", "train", "model.preset=llama-tiny"]
    words = ["srun", "--ntasks=2", "--nodes=1", f"--chdir={tmp_path}", *train]
    done = cluster.shell(words)
    assert done.exit_code == 2
    assert done.err.count("srun starts `shardyard train` 2 times (SLURM_STEP_NUM_TASKS=2") == 2
    assert not list(tmp_path.iterdir())


def test_a_secret_reaches_the_nodes_and_nothing_else(
    cluster: SlurmCluster, run_dir: Path, ledger: Ledger, tmp_path: Path
) -> None:
    planted = planted_secrets(tmp_path, kinds=("env", "env:OTHER_NAME"))
    mine = replace(cluster, env={**cluster.env, **planted.environ})
    launcher = SlurmLauncher(
        shell=mine.shell, program=(slurm_node.__file__,), environ=planted.environ
    )
    name = next(iter(planted.environ))
    rendered = _rendered(
        launcher, run_dir, f"digest {name}", f"secrets={json.dumps(planted.secrets)}"
    )
    job = launcher.submit(rendered, ledger)
    lines = list(launcher.logs(job, node=1, follow=True))
    digest = hashlib.sha256(planted.environ[name].encode()).hexdigest()
    assert digest in [line.text for line in lines]
    assert planted.leaks(rendered.text, run_dir, str(job), str(launcher.status(job))) == []


def test_a_secret_that_is_not_in_the_environment_is_missed_before_the_job_waits(
    cluster: SlurmCluster, run_dir: Path, ledger: Ledger
) -> None:
    launcher = SlurmLauncher(shell=cluster.shell, environ={})
    request = slurm_request("secrets={HF_TOKEN: env, KEY: 'env:MY_KEY'}", run_dir=run_dir)
    with pytest.raises(RequestError, match=r"has no HF_TOKEN, MY_KEY, .*export HF_TOKEN=\.\.\."):
        launcher.submit(launcher.render(request), ledger)
    assert ledger.live() == []


def test_a_secret_that_a_job_cannot_read_is_refused(launcher: SlurmLauncher) -> None:
    with pytest.raises(RequestError, match="jobs of slurm cannot read HF_TOKEN from k8s"):
        launcher.render(slurm_request("secrets={HF_TOKEN: 'k8s:hf/token'}"))


@pytest.mark.parametrize("name", CASES)
def test_slurm_would_take_every_golden_script(
    launcher: SlurmLauncher, tmp_path: Path, name: str
) -> None:
    answer = launcher.validate(SlurmLauncher().render(golden_request(name)), tmp_path)
    assert "to start at" in answer
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_slurm_would_not_take_is_said_before_it_is_submitted(
    launcher: SlurmLauncher, run_dir: Path, tmp_path: Path
) -> None:
    request = slurm_request("launch.slurm.partition=h2OO", run_dir=run_dir)
    with pytest.raises(RequestError, match=r"Set launch\.slurm\.partition"):
        launcher.validate(launcher.render(request), tmp_path)


@pytest.mark.slow
def test_a_lost_node_puts_the_job_back_and_it_starts_on_others(
    cluster: SlurmCluster,
    launcher: SlurmLauncher,
    run_dir: Path,
    ledger: Ledger,
    wait: Waiting,
) -> None:
    job = launcher.submit(_rendered(launcher, run_dir, "wait"), ledger)
    wait.for_line(job, "node 1: node 1 of 2 began, start 0")
    lost = sorted(name for name, _ in launcher.status(job).nodes)[1]
    cluster.kill_node(lost)
    try:
        wait.for_state(job, JobState.WAITING)
        cluster.wait_until(lambda: cluster.state(job.id) == "PENDING", "pending")
        cluster.start_now(job.id)
        wait.for_line(job, "node 1: node 1 of 2 began, start 1")
        status = launcher.status(job)
        assert status.reason == "running, started again once"
        assert lost not in dict(status.nodes)
    finally:
        launcher.remove(job, ledger)
        cluster.start_node(lost)
        cluster.wait_until(
            lambda: "down" not in cluster.client("sinfo", "-h", "-N", "-n", lost, "-o", "%T"),
            "the node is back",
        )


@pytest.mark.slow
def test_while_the_controller_is_away_nothing_is_guessed(
    cluster: SlurmCluster, launcher: SlurmLauncher, run_dir: Path, ledger: Ledger
) -> None:
    job = launcher.submit(_rendered(launcher, run_dir, "wait"), ledger)
    controller = cluster.daemons["slurmctld"]
    controller.send_signal(signal.SIGTERM)
    controller.wait()
    try:
        with pytest.raises(ShardyardError, match="controller does not answer") as caught:
            launcher.status(job)
        assert caught.value.exit_code == 3
    finally:
        cluster.start_controller()
        launcher.remove(job, ledger)
