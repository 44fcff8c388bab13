"""What the doctor finds out about a Slurm: judged on what sinfo prints, and asked of a real one."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shardyard.doctor.finding import Finding
from shardyard.launchers.base import HasChecks
from shardyard.launchers.slurm.checks import (
    check_folder,
    check_gres,
    choose,
    file_system_of,
    gpus_of,
    read_partitions,
)
from shardyard.launchers.slurm.clients import ClientResult
from shardyard.launchers.slurm.launcher import SlurmLauncher
from tests.launchers.slurm_cluster import SlurmCluster, slurm_cluster
from tests.launchers.slurm_request import slurm_request

# sinfo of Slurm 22.05, format %P|%D|%a|%G
SINFO = """\
batch*|12|up|(null)
gpu|4|up|gpu:a100:8(S:0-1)
gpu|2|up|gpu:h100:4,nvme:1
old|4|inact|gpu:2
"""


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize(
    ("gres", "kind", "number"),
    [
        ("gpu:a100:8(S:0-1)", "a100", 8),
        ("gpu:2", "", 2),
        ("gpu:h100_sxm:4,nvme:1", "h100_sxm", 4),
        ("gpu:a100:1,gpu:1g.10gb:3", "a100", 4),
        ("nvme:1", "", 0),
        ("(null)", "", 0),
    ],
)
def test_devices_are_read_from_generic_resources(gres: str, kind: str, number: int) -> None:
    assert gpus_of(gres) == (kind, number)


@pytest.mark.parametrize(
    ("wanted", "nodes", "verdict", "words"),
    [
        (None, 12, "ok", "batch has 12 nodes, 12 are wanted"),
        ("gpu", 6, "ok", "gpu has 6 nodes, 6 are wanted"),
        ("gpu", 7, "problem", "Lower cluster.nodes, or set another launch.slurm.partition"),
        ("old", 1, "warning", "closed, so that jobs wait"),
        ("gpus", 1, "problem", "partition 'gpus' does not exist; there are batch, gpu, old"),
    ],
)
def test_a_partition_is_judged(wanted: str | None, nodes: int, verdict: str, words: str) -> None:
    _, finding = choose(read_partitions(SINFO), wanted, nodes=nodes)
    assert finding.verdict == verdict
    assert words in f"{finding.what}. {finding.mend}"


def test_a_cluster_without_a_default_partition_says_so() -> None:
    rows = read_partitions(SINFO.replace("*", ""))
    _, finding = choose(rows, None, nodes=1)
    assert finding.verdict == "problem" and "no partition is the default" in finding.what


@pytest.mark.parametrize(
    ("instance", "nodes", "verdict", "words"),
    [
        ("p4d.24xlarge", 4, "ok", "4 nodes with gpu:a100:8"),  # 8 x A100 40GB
        ("p4d.24xlarge", 5, "problem", "4 nodes of gpu have 8 devices or more, 5 are wanted"),
        ("p5.48xlarge", 2, "warning", "has H100 SXM, Slurm calls its own a100"),  # 8 x H100
    ],
)
def test_devices_are_compared_with_the_catalogue(
    instance: str, nodes: int, verdict: str, words: str
) -> None:
    request = slurm_request(f"cluster.instance={instance}", nodes=nodes)
    chosen, _ = choose(read_partitions(SINFO), "gpu", nodes=nodes)
    (finding,) = check_gres(chosen, request)
    assert finding.verdict == verdict and words in finding.what


def test_a_folder_is_judged_by_its_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda / ext4 rw 0 0\n10.0.0.1:/x /shared nfs4 rw 0 0\ns3 /s3 fuse.s3fs rw 0 0\n"
    )
    assert file_system_of(Path("/shared/runs/a"), mounts) == "nfs4"
    assert check_folder(Path("/shared/runs/a"), mounts).verdict == "ok"
    assert check_folder(Path("/s3/runs"), mounts).verdict == "ok"
    local = check_folder(Path("/sharedness/runs"), mounts)
    assert local.verdict == "warning" and "is on ext4, which machines seldom share" in local.what
    assert check_folder(Path("/a"), tmp_path / "none").verdict == "ok"


def test_a_machine_without_slurm_is_one_finding() -> None:
    def missing(_argv: object) -> ClientResult:
        raise FileNotFoundError

    launcher = SlurmLauncher(shell=missing)
    assert isinstance(launcher, HasChecks)
    (finding,) = launcher.checks(slurm_request())
    assert finding.verdict == "problem" and "Run this on a login node" in finding.what


def test_a_secret_that_slurm_would_keep_in_clear_is_a_warning() -> None:
    def answering(argv: Sequence[str]) -> ClientResult:
        out = SINFO if argv[0] == "sinfo" else ""
        return ClientResult(exit_code=0, out=out, err="")

    launcher = SlurmLauncher(shell=answering)
    found = by_name(launcher.checks(slurm_request("secrets={HF_TOKEN: env}")))
    assert found["secrets"].verdict == "warning"
    assert found["secrets"].what.startswith("secrets.HF_TOKEN: kept in env, so sbatch")
    assert "secrets" not in by_name(launcher.checks(slurm_request("secrets={A: 'file:/k'}")))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.mark.system
def test_a_real_slurm_answers_without_a_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    launcher = SlurmLauncher(shell=cluster.shell)
    found = by_name(launcher.checks(slurm_request(run_dir=tmp_path / "r")))
    assert found["Slurm"].verdict == found["partition"].verdict == "ok"
    assert found["request"].verdict == "ok", found["request"]
    gpus = slurm_request("cluster.instance=p4d.24xlarge", run_dir=tmp_path / "r")
    assert by_name(launcher.checks(gpus))["devices"].what == "4 nodes with gpu:a100:8"
    assert cluster.client("squeue", "-h") == ""


@pytest.mark.system
def test_a_real_slurm_says_what_it_would_refuse(cluster: SlurmCluster, tmp_path: Path) -> None:
    launcher = SlurmLauncher(shell=cluster.shell)
    asked = slurm_request("launch.slurm.partition=closed", run_dir=tmp_path / "r")
    request = by_name(launcher.checks(asked))["request"]
    assert request.verdict == "problem"
    asked = slurm_request("launch.slurm.partition=none", run_dir=tmp_path / "r")
    found = by_name(launcher.checks(asked))
    assert found["partition"].verdict == "problem" and "request" not in found
