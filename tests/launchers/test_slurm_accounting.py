"""A real Slurm with accounts, limits and a memory: slurmdbd and MariaDB, started by the test."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from shardyard.errors import AccessError, CapacityError, RequestError
from shardyard.launchers.base import JobState, Rendered
from shardyard.launchers.ledger import Ledger, Submission
from shardyard.launchers.slurm.clients import ClientResult
from shardyard.launchers.slurm.launcher import SlurmLauncher
from tests.launchers import slurm_node
from tests.launchers.slurm_cluster import SlurmCluster, slurm_cluster
from tests.launchers.slurm_request import slurm_request

pytestmark = pytest.mark.system

_NOBODY = ("setpriv", "--reuid=65534", "--clear-groups")
_NUMBERS = count(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o755)  # other users read its configuration
        with slurm_cluster(base, accounting=True) as running:
            yield running


@pytest.fixture
def launcher(cluster: SlurmCluster) -> SlurmLauncher:
    return SlurmLauncher(shell=cluster.shell, program=(slurm_node.__file__,))


@pytest.fixture
def render(launcher: SlurmLauncher, tmp_path: Path) -> Callable[..., tuple[Rendered, Ledger]]:
    def rendered(does: str, *overrides: str) -> tuple[Rendered, Ledger]:
        run_dir = tmp_path / f"account-{next(_NUMBERS)}"
        words = [f"launch.env={{STAND_IN: {does}}}", *overrides]
        request = slurm_request(*words, run_dir=run_dir, nodes=1)
        return launcher.render(request), Ledger(run_dir / "ledger.jsonl")

    return rendered


def _is_forgotten(cluster: SlurmCluster, job: Submission) -> bool:
    return cluster.client("scontrol", "show", "job", job.id, check=False) == ""


@pytest.mark.parametrize(
    ("does", "state", "code"),
    [("end 0", JobState.SUCCEEDED, 0), ("end 143", JobState.DRAINED, 143)],
)
def test_what_the_controller_has_forgotten_the_accounts_remember(
    cluster: SlurmCluster,
    launcher: SlurmLauncher,
    render: Callable[..., tuple[Rendered, Ledger]],
    does: str,
    state: JobState,
    code: int,
) -> None:
    job = launcher.submit(*render(does))
    cluster.wait_until(lambda: _is_forgotten(cluster, job), "the controller forgets")
    status = launcher.status(job)
    assert (status.state, status.exit_code) == (state, code)


def test_many_that_the_controller_has_forgotten_are_at_once_what_they_are_alone(
    cluster: SlurmCluster,
    launcher: SlurmLauncher,
    render: Callable[..., tuple[Rendered, Ledger]],
) -> None:
    jobs = [launcher.submit(*render(f"end {code}")) for code in (0, 2, 143)]
    cluster.wait_until(lambda: all(_is_forgotten(cluster, job) for job in jobs), "forgotten")
    alone = [launcher.status(job) for job in jobs]
    assert launcher.statuses(jobs) == alone
    assert [said.exit_code for said in alone] == [0, 2, 143]


def test_a_job_that_neither_knows_is_gone(launcher: SlurmLauncher, tmp_path: Path) -> None:
    details = {"folder": str(tmp_path), "nodes": "1"}
    job = Submission(launcher="slurm", run_id="old", id="4000000", name="old", details=details)
    assert launcher.status(job).state is JobState.GONE


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("launch.slurm.account=nobody", r"Invalid account.* Set launch\.slurm\.account"),
        ("launch.slurm.qos=gold", r"Invalid qos.* Set launch\.slurm\.qos"),
        ("launch.slurm.partition=closed", r"Invalid account or account/partition"),
    ],
)
def test_an_account_that_is_not_ones_own_is_refused(
    launcher: SlurmLauncher,
    render: Callable[..., tuple[Rendered, Ledger]],
    override: str,
    words: str,
) -> None:
    rendered, ledger = render("wait", override)
    with pytest.raises(RequestError, match=words):
        launcher.submit(rendered, ledger)
    assert ledger.live() == []


def test_a_limit_makes_a_job_wait_and_then_refuses_the_next(
    cluster: SlurmCluster,
    launcher: SlurmLauncher,
    render: Callable[..., tuple[Rendered, Ledger]],
) -> None:
    asked = [render("wait", "launch.slurm.qos=one") for _ in range(3)]
    first, second = (launcher.submit(*each) for each in asked[:2])
    try:
        cluster.wait_until(
            lambda: "a limit of the account" in launcher.status(second).reason, "a limit"
        )
        assert launcher.status(second).state is JobState.WAITING
        with pytest.raises(CapacityError, match=r"QOSMaxSubmitJob.*`squeue --me`") as caught:
            launcher.submit(*asked[2])
        assert caught.value.exit_code == 3
        assert asked[2][1].live() == []
    finally:
        for job, (_, ledger) in zip((first, second), asked, strict=False):
            launcher.remove(job, ledger)


def test_the_job_of_another_user_cannot_be_cancelled(
    cluster: SlurmCluster,
    launcher: SlurmLauncher,
    render: Callable[..., tuple[Rendered, Ledger]],
) -> None:
    def shell_of_nobody(argv: Sequence[str]) -> ClientResult:
        return cluster.shell([*_NOBODY, *argv])

    rendered, ledger = render("wait")
    job = launcher.submit(rendered, ledger)
    cluster.wait_until(lambda: cluster.state(job.id) == "RUNNING", "running")
    with pytest.raises(AccessError, match="Ask the administrators") as caught:
        SlurmLauncher(shell=shell_of_nobody).cancel(job)
    assert caught.value.exit_code == 4
    assert launcher.remove(job, ledger).removed == [f"slurm job {job.id} ({job.name})"]
