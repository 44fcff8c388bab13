"""Slurm's words for states, and the lines that hold them as scontrol and sacct 22.05 print them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from shardyard.errors import ShardyardError
from shardyard.launchers.base import JobState
from shardyard.launchers.ledger import Submission
from shardyard.launchers.slurm.clients import ClientResult, NoAnswerError
from shardyard.launchers.slurm.launcher import SlurmLauncher
from shardyard.launchers.slurm.states import (
    STATES,
    JobRecord,
    read_sacct,
    read_scontrol,
    read_squeue,
    read_tagged_jobs,
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
    assert read_sacct("7|CANCELLED by 0|None|0:15|node[1-2]|run|1\n") == {
        "7": JobRecord(
            state="CANCELLED by 0", reason="None", exit_code="0:15", node_list="node[1-2]",
            name="run|1",
        )
    }  # fmt: skip
    assert read_sacct("") == {}


def test_the_lines_of_squeue_are_read_as_that_of_scontrol() -> None:
    queue = (
        "CLUSTER: one\n"
        "12|PENDING|BeginTime|0||1|/runs/it's 100%/launch/slurm.sbatch|\n"
        "13|FAILED|ReqNodeNotAvail, Reserved|36608|n[1-2]|0|/a | b|\n"
        "14|CANCELLED|None|15|n3|0|(null)|\n"
    )
    found = read_squeue(queue)
    assert list(found) == ["12", "13", "14"]
    assert found["12"] == read_scontrol(SCONTROL)
    assert found["13"] == JobRecord(
        state="FAILED", reason="ReqNodeNotAvail,_Reserved", exit_code="143:0",
        node_list="n[1-2]", command="/a | b",
    )  # fmt: skip
    assert found["14"].exit_code == "0:15"


def test_the_run_of_a_tagged_comment_is_its_first_word() -> None:
    line = "7|RUNNING|shardyard-run=one project=search team=nlp|one|/runs/one/launch/slurm.sbatch"
    (job,) = read_tagged_jobs(f"{line}\n8|RUNNING|another's|x|/x\n")
    assert (job.id, job.run_id, job.where) == ("7", "one", "/runs/one")


def test_sacct_prints_exit_code_143_as_15() -> None:
    record = read_sacct("1|FAILED|None|15:0|node1|r\n")["1"]  # as seen from 22.05.8
    assert status_of(record, job_id="1").state is JobState.DRAINED


def test_a_job_that_cancel_ended_before_it_listened_is_drained() -> None:
    status = status_of(_record("FAILED", exit_code="0:12"), job_id="1")
    assert (status.state, status.exit_code) == (JobState.DRAINED, 140)
    assert status.reason == "asked to stop before it had begun"
    assert status_of(_record("FAILED", exit_code="0:9"), job_id="1").state is JobState.FAILED


def test_a_job_whose_time_passed_just_as_it_had_drained_is_drained(tmp_path: Path) -> None:
    said = SCONTROL.replace("PENDING", "TIMEOUT").replace("/runs/it's 100%", str(tmp_path))
    answer = ClientResult(exit_code=0, out=said, err="")
    launcher = SlurmLauncher(shell=lambda _: answer)
    job = Submission(
        launcher="slurm", run_id="r", id="7", name="r", details={"folder": str(tmp_path)}
    )
    log = tmp_path / "logs" / "slurm-7.log"
    log.parent.mkdir()
    log.write_text("shardyard: start 0\nshardyard: the nodes ended with exit code 143\n")
    status = launcher.status(job)
    assert (status.state, status.exit_code) == (JobState.DRAINED, 143)
    assert status.reason.startswith("saved as its time limit passed; was not requeued")
    with log.open("a") as file:
        file.write("shardyard: start 1\n")  # which was killed before it had saved
    assert launcher.status(job).state is JobState.FAILED


@dataclass
class _Queue:
    """Plays the clients: a job of each record, by number, as the one and the other tell of it."""

    folder: Path
    records: dict[str, JobRecord]
    calls: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Client -> what it says instead."""

    def shell(self, argv: Sequence[str]) -> ClientResult:
        self.calls.append(argv[0])
        if argv[0] in self.refused:
            return ClientResult(exit_code=1, out="", err=self.refused[argv[0]])
        told = {"scontrol": self._scontrol, "squeue": self._squeue}.get(argv[0])
        return ClientResult(exit_code=0, out=told(list(argv)) if told else "n1|mixed", err="")

    def _scontrol(self, argv: list[str]) -> str:
        record = self.records[argv[argv.index("job") + 1]]
        return (
            f"JobState={record.state} Reason={record.reason} Restarts={record.restarts} "
            f"ExitCode={record.exit_code} NodeList={record.node_list} "
            f"Command={record.command} WorkDir=/"
        )

    def _squeue(self, argv: list[str]) -> str:
        rows = [
            (number, self.records.get(number)) for number in argv[argv.index("-j") + 1].split(",")
        ]
        return "".join(
            f"{number}|{record.state}|{record.reason}|{_of_wait(record.exit_code)}|"
            f"{record.node_list}|{record.restarts}|{record.command}|\n"
            for number, record in rows
            if record is not None
        )

    def job(self, number: str) -> Submission:
        details = {"folder": str(self.folder), "nodes": "1"}
        return Submission(
            launcher="slurm", run_id=f"r{number}", id=number, name="r", details=details
        )


def _of_wait(exit_code: str) -> int:
    code, _, number = exit_code.partition(":")
    return int(code) << 8 | int(number)


@pytest.fixture
def every(tmp_path: Path) -> _Queue:
    """A job in every state, with each exit code that means something of its own."""
    ours = f"{tmp_path}/launch/slurm.sbatch"
    records = [
        JobRecord(
            state=word, reason=reason, exit_code=code, node_list="n1", restarts=2, command=ours
        )
        for word in STATES
        for reason, code in (("None", "0:0"), ("QOSMaxJobs", "143:0"), ("None", "0:12"))
    ]
    return _Queue(tmp_path, {str(number): record for number, record in enumerate(records, 1)})


def test_every_state_is_at_once_what_it_is_alone(every: _Queue) -> None:
    launcher = SlurmLauncher(shell=every.shell)
    jobs = [every.job(number) for number in every.records]
    alone = [launcher.status(job) for job in jobs]
    assert len({said.state for said in alone}) == len(JobState)
    every.calls.clear()
    assert launcher.statuses(jobs) == alone
    assert every.calls == ["squeue", "sinfo"]


def test_the_error_of_one_job_does_not_hide_the_others(every: _Queue) -> None:
    every.records["1"] = replace(every.records["1"], state="SULKING")
    every.refused = {"sacct": "sacct: error: slurm_persist_conn_open: Connection refused"}
    launcher = SlurmLauncher(shell=every.shell)
    odd, fine, forgotten = launcher.statuses([every.job("1"), every.job("2"), every.job("4000000")])
    assert isinstance(odd, ShardyardError) and "job 1 is 'SULKING'" in str(odd)
    assert fine == launcher.status(every.job("2"))
    assert isinstance(forgotten, NoAnswerError)
    every.refused["sinfo"] = "sinfo: error: Unable to contact slurm controller"
    number = next(key for key, record in every.records.items() if record.state == "RUNNING")
    runs, waits = launcher.statuses([every.job(number), every.job("2")])
    assert isinstance(runs, NoAnswerError) and waits == fine


def test_a_controller_that_is_away_says_nothing_of_any(every: _Queue) -> None:
    every.refused = {"squeue": "slurm_load_jobs error: Unable to contact slurm controller"}
    with pytest.raises(NoAnswerError):
        SlurmLauncher(shell=every.shell).statuses([every.job("1"), every.job("2")])


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
