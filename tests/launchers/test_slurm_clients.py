"""What a refusal of Slurm means: which error, which exit code, which next step.

The words are those of Slurm's slurm_errno.c and its clients; test_slurm.py and
test_slurm_accounting.py see most of them from a real one. The usual ones are in wrong_slurm.py.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardyard.errors import RequestError, ShardyardError
from shardyard.launchers.slurm.clients import (
    ClientResult,
    NoAnswerError,
    UnknownJobError,
    ask,
    run_client,
)

FAILED = "sbatch: error: Batch job submission failed: "


def _shell(said: str) -> ClientResult:
    return ClientResult(exit_code=1, out="", err=said)


@pytest.mark.parametrize(
    ("said", "exit_code", "step"),
    [
        (FAILED + "Invalid qos specification", 2, "launch.slurm.qos"),
        ("sbatch: error: Invalid --time specification", 2, "launch.time_limit"),
        ("sbatch: error: Memory specification can not be satisfied", 2, "sinfo"),
        (FAILED + "Invalid feature specification", 2, "launch.slurm.constraint"),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", 3, "squeue --me"),
        ("sbatch: error: AssocMaxJobsLimit", 3, "squeue --me"),
        (FAILED + "Requested nodes are busy", 3, "Try again later"),
        (FAILED + "Slurm temporarily unable to accept job", 3, "Try again later"),
        ("squeue: error: Zero Bytes were transmitted or received", 3, "`scontrol ping`"),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", 3, "`scontrol ping`"),
        ("scancel: error: Kill job error on job id 7: Access/permission denied", 4, "permission"),
        ("sbatch: error: If munged is up, restart with --num-threads=10", 4, "administrators"),
    ],
)
def test_a_refusal_says_what_to_do_and_has_the_exit_code_for_it(
    said: str, exit_code: int, step: str
) -> None:
    with pytest.raises(ShardyardError) as caught:
        ask(lambda _: _shell(said), ["sbatch"])
    assert caught.value.exit_code == exit_code
    assert step in str(caught.value)
    assert said.split(": ")[-1].split(" (")[0] in str(caught.value)


def test_a_job_that_is_not_there_is_told_apart() -> None:
    with pytest.raises(UnknownJobError):
        ask(lambda _: _shell("slurm_load_jobs error: Invalid job id specified"), ["scontrol"])


@pytest.mark.heavy
def test_a_machine_without_slurm_is_named() -> None:
    with pytest.raises(RequestError, match=r"no-such-sbatch is not installed here.*login node"):
        ask(run_client, ["no-such-sbatch", "--version"])


def test_a_client_that_never_ends_leaves_open_what_happened() -> None:
    def shell(argv: Sequence[str]) -> ClientResult:
        raise subprocess.TimeoutExpired(argv, 60.0)

    with pytest.raises(NoAnswerError, match="`sbatch` gave no answer for 60 s") as caught:
        ask(shell, ["sbatch"])
    assert caught.value.exit_code == 3


@pytest.mark.heavy
def test_a_client_is_run_with_its_words_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "it's $HOME"
    assert ask(run_client, ["printf", "%s", str(file)]) == str(file)
