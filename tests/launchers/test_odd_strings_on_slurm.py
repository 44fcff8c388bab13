"""Odd strings on a real Slurm: values arrive byte for byte, folders are used as they are called."""

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from shardyard.config.load import load_recipe
from shardyard.config.rules.check import check
from shardyard.errors import RecipeError, ShardyardError
from shardyard.launchers.base import JobState
from shardyard.launchers.ledger import Ledger, Submission
from shardyard.launchers.slurm.launcher import SlurmLauncher
from tests.launchers import slurm_node
from tests.launchers.odd_strings import STRINGS, filled
from tests.launchers.slurm_cluster import SlurmCluster, slurm_cluster
from tests.launchers.slurm_request import slurm_request

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def launcher(cluster: SlurmCluster) -> SlurmLauncher:
    return SlurmLauncher(shell=cluster.shell, program=(slurm_node.__file__,))


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "canary"
    yield path
    assert not path.exists()


def _accepted(setting: str, texts: list[str]) -> list[str]:
    """Those that no check refuses before anything is rendered."""
    found = []
    for text in texts:
        value = {"V": text} if setting == "launch.env" else text
        try:
            check(load_recipe([], ["model.preset=llama-tiny", f"{setting}={json.dumps(value)}"]))
        except RecipeError:
            continue
        found.append(text)
    return found


def _is_over(launcher: SlurmLauncher, job: Submission) -> bool:
    return launcher.status(job).state.is_over


def test_values_of_the_environment_arrive_byte_for_byte(
    launcher: SlurmLauncher, cluster: SlurmCluster, tmp_path: Path, canary: Path
) -> None:
    texts = _accepted("launch.env", [filled(text, canary) for text in STRINGS])
    assert len(texts) >= len(STRINGS) - 2  # all but NUL and half a character
    env = {f"V{number}": text for number, text in enumerate(texts)}
    env["STAND_IN"] = f"digest {' '.join(env)}"
    ledger = Ledger(tmp_path / "run" / "ledger.jsonl")
    request = slurm_request(f"launch.env={json.dumps(env)}", run_dir=ledger.path.parent, nodes=1)
    job = launcher.submit(launcher.render(request), ledger)
    cluster.wait_until(partial(_is_over, launcher, job), "its end")
    said = [line.text for line in launcher.logs(job, node=0, follow=False)]
    assert launcher.status(job).state is JobState.SUCCEEDED, said
    assert said[1:] == [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def test_a_folder_may_be_called_as_anything_that_passes_the_check(
    launcher: SlurmLauncher,
    cluster: SlurmCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # where scripts run, too
    names = [filled(text, Path("canary")) for text in STRINGS if "/" not in text]
    names = [name for name in _accepted("run.dir", names) if name.strip(" .")]
    jobs = []
    for number, name in enumerate(names):
        run_dir = tmp_path / name / f"run-{number}"
        ledger = Ledger(run_dir / "ledger.jsonl")
        try:
            rendered = launcher.render(
                slurm_request("launch.env={STAND_IN: end 0}", run_dir=run_dir, nodes=1)
            )
        except ShardyardError as error:
            assert "run folder=" in str(error) and ("\\" in name or name.count("%") > 1)
            continue
        jobs.append((name, launcher.submit(rendered, ledger)))
    assert len(jobs) >= 25
    for name, job in jobs:
        cluster.wait_until(partial(_is_over, launcher, job), name)
        said = [line.text for line in launcher.logs(job, node=0, follow=False)]
        assert launcher.status(job).state is JobState.SUCCEEDED, (name, said)
        assert said == ["node 0 of 1 began, start 0"], (name, sorted(tmp_path.rglob("*.log")))
    assert not list(tmp_path.rglob("canary*"))


@pytest.mark.parametrize("setting", ["partition", "account", "qos", "constraint"])
def test_what_names_a_part_of_slurm_is_one_word_for_sbatch(
    setting: str, launcher: SlurmLauncher, cluster: SlurmCluster, tmp_path: Path, canary: Path
) -> None:
    texts = _accepted(f"launch.slurm.{setting}", [filled(text, canary) for text in STRINGS])
    assert len(texts) >= 20
    for text in texts:
        word = f"launch.slurm.{setting}={json.dumps(text)}"
        try:
            rendered = launcher.render(slurm_request(word, run_dir=tmp_path / "run", nodes=1))
            launcher.validate(rendered, tmp_path)
        except ShardyardError as error:
            assert not set("\0\x1b\x07") & set(str(error))
    assert cluster.client("squeue", "-h") == ""
