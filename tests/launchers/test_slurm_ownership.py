"""What is not the run's own on Slurm is asked about, and not ended: a stand-in for the clients."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.launchers.base import JobState
from shardyard.launchers.ledger import Ledger, Submission
from shardyard.launchers.slurm.clients import ClientResult
from shardyard.launchers.slurm.launcher import SlurmLauncher


@dataclass
class Controller:
    """Answers for one running job, 17, and keeps what it was asked."""

    command: str
    asked: list[list[str]] = field(default_factory=list)
    named: str = ""
    """What squeue prints of jobs of the run's name."""

    def shell(self, argv: Sequence[str]) -> ClientResult:
        self.asked.append(list(argv))
        job = (
            "JobId=17 JobName=r UserId=me(1) JobState=RUNNING Reason=None Restarts=0 ExitCode=0:0 "
            f"NodeList=n0 Command={self.command} WorkDir=/home/me StdErr=/x\n"
        )
        answers = {"scontrol": job, "squeue": self.named}
        return ClientResult(exit_code=0, out=answers.get(argv[0], ""), err="")

    @property
    def ended(self) -> list[list[str]]:
        return [argv for argv in self.asked if argv[0] == "scancel"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("model: {preset: llama-tiny}\n")
    return folder


def forge(run: Path, **changes: str | None) -> None:
    """A ledger as it is after a submission, but for what somebody changed."""
    line = {
        "t": 1.0, "action": "created", "kind": "slurm job", "name": "r", "launcher": "slurm",
        "id": "17", "details": {"folder": str(run), "nodes": "1"}, **changes,
    }  # fmt: skip
    submitted = {**line, "action": "submitted", "kind": "job"}
    (run / "ledger.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(submitted) + "\n")


def steer(run: Path, controller: Controller, *words: str) -> int:
    launchers = {"slurm": SlurmLauncher(shell=controller.shell)}
    return main([words[0], "r", *words[1:], "--runs-dir", str(run.parent)], launchers=launchers)


ENDING = (("cancel",), ("teardown", "--yes", "--force"), ("scale", "3", "--yes"))


@pytest.mark.parametrize("words", [*ENDING, ("status",), ("logs",)])
def test_an_id_that_is_an_option_reaches_no_client(
    run: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    controller = Controller(f"{run}/launch/slurm.sbatch")
    forge(run, id="-uroot")
    assert steer(run, controller, *words) == 1
    said = capsys.readouterr().err
    assert f"{run}/ledger.jsonl line 1" in said and "'-uroot' begins with a hyphen" in said
    assert controller.asked == []


@pytest.mark.parametrize("words", ENDING)
@pytest.mark.parametrize("command", ["/home/colleague/train.sh", "(null)", ""])
def test_the_job_of_another_script_is_not_ended(
    run: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], command: str
) -> None:
    controller = Controller(command)
    forge(run)
    steer(run, controller, *words)
    assert controller.asked != [] and controller.ended == []
    is_told = "not this run's, so kept: slurm job 17" in capsys.readouterr().out.splitlines()
    assert is_told is (words[0] == "teardown")


def test_the_status_of_a_number_that_another_job_has_says_so(run: Path) -> None:
    controller = Controller("/home/colleague/train.sh")
    details = {"folder": str(run), "nodes": "1"}
    job = Submission(launcher="slurm", run_id="r", id="17", name="r", details=details)
    status = SlurmLauncher(shell=controller.shell).status(job)
    assert status.state is JobState.GONE
    assert "number 17 is another job now, which runs /home/colleague/train.sh" in status.reason


def test_the_run_s_own_job_is_ended_and_its_number_is_no_option(run: Path) -> None:
    controller = Controller(f"{run}/launch/slurm.sbatch")
    forge(run)
    assert steer(run, controller, "cancel") == 0
    assert controller.ended == [["scancel", "--batch", "--signal=USR2", "--", "17"]]


def test_an_interrupted_submission_ends_no_other_job_of_its_name(run: Path) -> None:
    ours = f"{run}/launch/slurm.sbatch"
    controller = Controller(ours, named="15 /home/colleague/train.sh\n16 (null)\n")
    ledger = Ledger(run / "ledger.jsonl")
    ledger.intend("slurm job", "r", launcher="slurm", folder=str(run), nodes="1")
    interrupted = Submission(
        launcher="slurm", run_id="r", id="", name="r",
        details={"folder": str(run), "nodes": "1"},
    )  # fmt: skip
    launcher = SlurmLauncher(shell=controller.shell)
    assert launcher.remove(interrupted, ledger).removed == [] and controller.ended == []
    controller.named += f"17 {ours}\n"
    ledger.intend("slurm job", "r", launcher="slurm", folder=str(run), nodes="1")
    assert launcher.remove(interrupted, ledger).removed == ["slurm job 17 (r)"]
    assert controller.ended == [["scancel", "--", "17"]]
