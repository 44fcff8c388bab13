"""Slurm's words for states, and the lines that hold them as scontrol and sacct 22.05 print them."""

import re
from pathlib import Path

import pytest

from shardyard.errors import ShardyardError
from shardyard.launch.base import Job, JobState
from shardyard.launch.slurm.clients import Done
from shardyard.launch.slurm.launcher import SlurmLauncher
from shardyard.launch.slurm.states import (
    STATES,
    JobRecord,
    read_sacct,
    read_scontrol,
    status_of,
)

# squeue(1) and sacct(1) of Slurm 22.05, "JOB STATE CODES", all of both.
MANUAL = [
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "CONFIGURING",
    "COMPLETING",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PENDING",
    "PREEMPTED",
    "RUNNING",
    "RESV_DEL_HOLD",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "REQUEUED",
    "RESIZING",
    "REVOKED",
    "SIGNALING",
    "SPECIAL_EXIT",
    "STAGE_OUT",
    "STOPPED",
    "SUSPENDED",
    "TIMEOUT",
]

SCONTROL = (
    "JobId=12 JobName=run-1 UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1 Nice=0 "
    "Account=(null) QOS=(null) JobState=PENDING Reason=BeginTime Dependency=(null) Requeue=1 "
    "Restarts=1 BatchFlag=2 Reboot=0 ExitCode=0:0 RunTime=00:00:00 TimeLimit=UNLIMITED "
    "Partition=main AllocNode:Sid=vm:100 ReqNodeList=(null) ExcNodeList=(null) NodeList=(null) "
    "NumNodes=2-2 NumCPUs=2 NumTasks=2 OverSubscribe=OK Contiguous=0 Network=(null) "
    "Command=/runs/it's 100%/launch/slurm.sbatch WorkDir=/home/me Power= Comment=a Command=b "
)


def _record(state: str, *, exit_code: str = "0:0", reason: str = "None") -> JobRecord:
    return JobRecord(state=state, reason=reason, exit_code=exit_code, node_list="")


@pytest.mark.parametrize("word", MANUAL)
def test_every_state_of_the_manual_is_known(word: str) -> None:
    assert status_of(_record(word), job_id="1").state is STATES[word]


@pytest.mark.parametrize(
    ("word", "exit_code", "state"),
    [
        ("PENDING", "0:0", JobState.WAITING),
        ("REQUEUED", "0:0", JobState.WAITING),
        ("RUNNING", "0:0", JobState.RUNNING),
        ("COMPLETING", "0:0", JobState.RUNNING),
        ("COMPLETED", "0:0", JobState.SUCCEEDED),
        ("FAILED", "143:0", JobState.DRAINED),
        ("FAILED", "1:0", JobState.FAILED),
        ("CANCELLED", "0:15", JobState.CANCELLED),
        ("CANCELLED by 1000", "0:15", JobState.CANCELLED),
        ("CANCELLED+", "0:0", JobState.CANCELLED),
        ("TIMEOUT", "0:0", JobState.FAILED),
        ("NODE_FAIL", "0:0", JobState.FAILED),
        ("REVOKED", "0:0", JobState.GONE),
    ],
)
def test_a_word_means_a_state(word: str, exit_code: str, state: JobState) -> None:
    assert status_of(_record(word, exit_code=exit_code), job_id="1").state is state


def test_an_unknown_word_is_an_error_that_names_it_and_not_a_guess() -> None:
    with pytest.raises(ShardyardError, match=r"job 7 is 'SULKING', .*`scontrol show job`"):
        status_of(_record("SULKING"), job_id="7")


@pytest.mark.parametrize(
    ("exit_code", "number"), [("0:0", 0), ("2:0", 2), ("0:9", 137), ("", None), ("143:0", 143)]
)
def test_an_exit_code_is_what_a_shell_would_say(exit_code: str, number: int | None) -> None:
    assert status_of(_record("FAILED", exit_code=exit_code), job_id="1").exit_code == number


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "waits for free nodes (Resources)"),
        ("None", "waits for free nodes"),
        ("QOSMaxJobsPerUserLimit", "a limit of the account, quality of service or partition (QOS"),
        ("AssocGrpGRES", "a limit of the account"),
        ("BeginTime", "was requeued"),
        ("PartitionTimeLimit", "can never start as it was asked"),
        ("PartitionConfig", "can never start as it was asked"),
        ("ReqNodeNotAvail, UnavailableNodes:node2", "nodes are down or kept"),
        ("JobHeldAdmin", "held; `scontrol release`"),
        ("Licenses", "waits (Licenses)"),
    ],
)
def test_why_a_job_waits_is_said_in_words(reason: str, words: str) -> None:
    assert status_of(_record("PENDING", reason=reason), job_id="1").reason.startswith(words)


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("TIMEOUT", "raise launch.slurm.signal_before_s"),
        ("NODE_FAIL", "a node was lost"),
        ("OUT_OF_MEMORY", "want of memory"),
        ("FAILED", "failed with exit code 3"),
    ],
)
def test_how_a_job_ended_is_said_in_words(word: str, words: str) -> None:
    assert words in status_of(_record(word, exit_code="3:0"), job_id="1").reason


def test_the_line_of_scontrol_is_read() -> None:
    assert read_scontrol(SCONTROL) == JobRecord(
        state="PENDING", reason="BeginTime", exit_code="0:0", node_list="", restarts=1,
        command="/runs/it's 100%/launch/slurm.sbatch",
    )  # fmt: skip


def test_the_line_of_sacct_is_read() -> None:
    assert read_sacct("CANCELLED by 0|None|0:15|node[1-2]|run|1\n") == JobRecord(
        state="CANCELLED by 0", reason="None", exit_code="0:15", node_list="node[1-2]",
        name="run|1",
    )  # fmt: skip
    assert read_sacct("") is None


def test_sacct_prints_exit_code_143_as_15() -> None:
    record = read_sacct("FAILED|None|15:0|node1|r\n")  # as seen from 22.05.8
    assert record is not None
    assert status_of(record, job_id="1").state is JobState.DRAINED


def test_a_job_that_cancel_ended_before_it_listened_is_drained() -> None:
    status = status_of(_record("FAILED", exit_code="0:12"), job_id="1")
    assert (status.state, status.exit_code) == (JobState.DRAINED, 140)
    assert status.reason == "asked to stop before it had begun"
    assert status_of(_record("FAILED", exit_code="0:9"), job_id="1").state is JobState.FAILED


def test_a_job_whose_time_passed_just_as_it_had_drained_is_drained(tmp_path: Path) -> None:
    said = SCONTROL.replace("PENDING", "TIMEOUT").replace("/runs/it's 100%", str(tmp_path))
    answer = Done(exit_code=0, out=said, err="")
    launcher = SlurmLauncher(shell=lambda _: answer)
    job = Job(launcher="slurm", run_id="r", id="7", name="r", details={"folder": str(tmp_path)})
    log = tmp_path / "logs" / "slurm-7.log"
    log.parent.mkdir()
    log.write_text("shardyard: start 0\nshardyard: the nodes ended with exit code 143\n")
    status = launcher.status(job)
    assert (status.state, status.exit_code) == (JobState.DRAINED, 143)
    assert status.reason.startswith("saved as its time limit passed; was not requeued")
    with log.open("a") as file:
        file.write("shardyard: start 1\n")  # which was killed before it had saved
    assert launcher.status(job).state is JobState.FAILED


def test_the_page_has_every_state_under_what_it_means() -> None:
    page = (Path(__file__).parents[2] / "docs" / "launch-slurm.md").read_text()
    table = page.partition("## States")[2].partition("\n## ")[0]
    shown = {
        word: JobState(row[0])
        for row in re.findall(r"^\| (\w+) \| ([A-Z].*) \|$", table, re.MULTILINE)
        if row[0] != "drained"
        for word in re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", row[1])
        if len(word) > 1
    }
    assert shown == STATES
