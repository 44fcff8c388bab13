"""Meaning of Slurm's words for the state of a job, and their parsing."""

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardyard.errors import EXIT_DRAINED, ShardyardError
from shardyard.launchers.base import JobState, JobStatus, SchedulerJob
from shardyard.launchers.slurm.script import COMMENT

# The table has all of slurm.h's enum job_states and its flags, as job_state_string() prints them
# (Slurm 20.11 to 25.05: squeue(1) and sacct(1), JOB STATE CODES).
STATES = {
    "PENDING": JobState.WAITING,
    "CONFIGURING": JobState.WAITING,
    "POWER_UP_NODE": JobState.WAITING,
    "REQUEUED": JobState.WAITING,
    "REQUEUE_FED": JobState.WAITING,
    "REQUEUE_HOLD": JobState.WAITING,
    "RESV_DEL_HOLD": JobState.WAITING,
    "SPECIAL_EXIT": JobState.WAITING,
    "RUNNING": JobState.RUNNING,
    # Some of its processes still end, and may still write.
    "COMPLETING": JobState.RUNNING,
    "EXPEDITING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.RUNNING,
    # STOPPED and SUSPENDED jobs keep their allocation (squeue(1)).
    "STOPPED": JobState.RUNNING,
    "SUSPENDED": JobState.RUNNING,
    "UPDATE_DB": JobState.RUNNING,
    "COMPLETED": JobState.SUCCEEDED,
    "CANCELLED": JobState.CANCELLED,
    "BOOT_FAIL": JobState.FAILED,
    "DEADLINE": JobState.FAILED,
    "FAILED": JobState.FAILED,
    "LAUNCH_FAILED": JobState.FAILED,
    # Final only if the job may not be requeued; one that may is PENDING again.
    "NODE_FAIL": JobState.FAILED,
    "OUT_OF_MEMORY": JobState.FAILED,
    "PREEMPTED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
    "TIMEOUT": JobState.FAILED,
    "REVOKED": JobState.GONE,
}

_CANCELLED_EARLY = f"0:{signal.SIGUSR2.value}"
"""The signal of `cancel` ended the script itself, which had not come to listen to it yet."""

_ENDINGS = {
    "BOOT_FAIL": "a node did not boot",
    "DEADLINE": "its deadline passed before it could run",
    "LAUNCH_FAILED": "a node could not start it",
    "NODE_FAIL": "a node was lost and the job may not be requeued",
    "OUT_OF_MEMORY": "a process was killed for want of memory",
    "PREEMPTED": "another job took its nodes",
    "RECONFIG_FAIL": "a node could not be set up for it",
    "TIMEOUT": (
        "the time limit passed before the run had drained; raise launch.slurm.signal_before_s"
    ),
    "REVOKED": "another cluster of the federation runs it",
}

# Reasons of a waiting job are in squeue(1), JOB REASON CODES. The first pattern that fits counts:
# PartitionTimeLimit must not reach `\w*Limit`.
_WAITS = (
    (r"Resources|Priority|None|Reservation", "waits for free nodes"),
    (r"BeginTime", "was requeued; Slurm lets it start again after a short while"),
    (
        r"PartitionConfig|Partition\w*Limit|BadConstraints|InvalidAccount|InvalidQOS",
        "can never start as it was asked; cancel it and ask for less or for another partition",
    ),
    (r"QOS\w*|Assoc\w*|\w*Limit", "a limit of the account, quality of service or partition"),
    (r"ReqNodeNotAvail\w*|NodeDown|PartitionDown|PartitionInactive", "nodes are down or kept"),
    (r"JobHeldUser|JobHeldAdmin|\w*requeued_held|JobHoldMaxRequeue", "held; `scontrol release`"),
)


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Slurm's record of a job, in its own words."""

    state: str
    """May have a suffix: ``CANCELLED by 1000``."""
    reason: str
    exit_code: str
    """``code:signal``."""
    node_list: str
    restarts: int = 0
    command: str | None = None
    """The script that it runs; None: the accounts were asked, which keep none."""
    name: str = ""
    """Name in the accounts."""


def read_scontrol(text: str) -> JobRecord:
    """Read the line that ``scontrol show job ID -o`` prints."""
    return JobRecord(
        state=_field(text, "JobState"),
        reason=_field(text, "Reason"),
        exit_code=_field(text, "ExitCode"),
        node_list=_field(text, "NodeList"),
        restarts=int(_field(text, "Restarts") or 0),
        command=_command(text),
    )


def _command(text: str) -> str:
    """A path, which may hold blanks; the next field ends it."""
    command, end, _ = text.partition(" Command=")[2].partition(" WorkDir=")
    return command if end else ""


# Without a suffix such as `|`, squeue -O pads and cuts each field at 20 characters.
SQUEUE_FIELDS = "JobID:|,State:|,Reason:|,exit_code:|,NodeList:|,restartcnt:|,Command:|"


def read_squeue(text: str) -> dict[str, JobRecord]:
    """Read what ``squeue -h -O SQUEUE_FIELDS`` prints: a job's number -> what `scontrol` says."""
    found = {}
    for line in text.splitlines():
        # The command comes last, because a path may hold a bar.
        row = line.removesuffix("|").split("|", 6)
        if len(row) < 7:  # of several clusters it names each on a line of its own
            continue
        number, state, reason, ended, node_list, restarts, command = row
        found[number] = JobRecord(
            state=state,
            # scontrol and sacct write the same words with underscores.
            reason=reason.replace(" ", "_"),
            exit_code=f"{int(ended) >> 8}:{int(ended) & 0x7F}",  # as wait(2) has it
            node_list=node_list,
            restarts=int(restarts),
            command=command,
        )
    return found


TAGGED_FIELDS = "%A|%T|%k|%j|%o"


def read_tagged_jobs(text: str) -> Iterator[SchedulerJob]:
    """Read what ``squeue -h -o TAGGED_FIELDS`` prints: those jobs whose comment names a run."""
    for line in text.splitlines():
        number, word, comment, name, command = (*line.split("|", 4), *[""] * 4)[:5]
        if comment.startswith(COMMENT):
            yield SchedulerJob(
                id=number, name=name, run_id=comment.removeprefix(COMMENT).partition(" ")[0],
                state=_state_of(word, job_id=number), where=str(Path(command).parent.parent),
                end=f"scancel {number}",
            )  # fmt: skip


SACCT_FIELDS = "JobIDRaw,State,Reason,ExitCode,NodeList,JobName"


def read_sacct(text: str) -> dict[str, JobRecord]:
    """Read what ``sacct -X -n -P -o SACCT_FIELDS`` prints: a job's number -> what it says."""
    found = {}
    for line in text.splitlines():
        number, state, reason, exit_code, node_list, name = line.split("|", 5)
        if exit_code == f"{EXIT_DRAINED - 128}:0":  # it prints codes above 128 without the 128
            exit_code = f"{EXIT_DRAINED}:0"
        found[number] = JobRecord(
            state=state, reason=reason, exit_code=exit_code, node_list=node_list, name=name
        )
    return found


def status_of(record: JobRecord, *, job_id: str) -> JobStatus:
    """Translate.

    Raises:
        ShardyardError: Slurm used a word that is not known.
    """
    word = record.state.partition(" ")[0].rstrip("+")  # "CANCELLED by 1000"
    state = _state_of(word, job_id=job_id)
    exit_code = _exit_code(record.exit_code) if state.is_over else None
    if word == "FAILED" and (exit_code == EXIT_DRAINED or record.exit_code == _CANCELLED_EARLY):
        state = JobState.DRAINED
    return JobStatus(
        state=state,
        reason=_reason(record, word, state, exit_code),
        exit_code=exit_code,
    )


def _state_of(word: str, *, job_id: str) -> JobState:
    if word not in STATES:
        raise ShardyardError(
            f"Slurm says that job {job_id} is {word!r}, a state that Shardyard does not know. Look "
            "with `scontrol show job` and report the word."
        )
    return STATES[word]


def _reason(record: JobRecord, word: str, state: JobState, exit_code: int | None) -> str:
    said = "" if record.reason in ("", "None") else f" ({record.reason})"
    if state is JobState.WAITING:
        for pattern, words in _WAITS:
            if re.fullmatch(pattern, record.reason.partition(",")[0] or "None"):
                return words + said
        return f"waits{said}"
    if record.exit_code == _CANCELLED_EARLY:
        return "asked to stop before it had begun"
    if state is JobState.DRAINED:
        return "asked to stop; saved, and can be resumed"
    if word in _ENDINGS:
        return _ENDINGS[word]
    if state is JobState.RUNNING:
        again = f", started again {record.restarts} times" if record.restarts else ""
        return f"{word.lower()}{again}".replace("1 times", "once")
    ending = "" if exit_code in (None, 0) else f" with exit code {exit_code}"
    return f"{word.lower()}{ending}"


def _exit_code(text: str) -> int | None:
    """``0:9`` is an end by signal 9, which a shell calls 137."""
    code, _, number = text.partition(":")
    if not code.isdigit():
        return None
    return 128 + int(number) if number.isdigit() and int(number) else int(code)


def _field(text: str, name: str) -> str:
    found = re.search(rf"(?:^|\s){name}=(\S*)", text)
    value = found[1] if found else ""
    return "" if value in ("(null)", "None") and name == "NodeList" else value
