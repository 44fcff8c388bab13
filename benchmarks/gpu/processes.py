"""Runs one try of a cell in processes of its own, and says what came of it."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.job import Job

_GRACE_S = 45.0
"""Beyond the job's own deadline: building a model, the warm-up and the last steps take time."""
_POLL_S = 0.2
_TAIL_CHARACTERS = 1500
_CONTEND, _BY_TURNS = "benchmarks.gpu.contend", "benchmarks.gpu.by_turns"
_ROOT = Path(__file__).parents[2]


def run_job(job: Job, devices: int) -> dict[str, Any]:
    """Start one process per device, wait for all, and merge their answers.

    Returns:
        ``status`` (ok, out of memory, failed, timed out) and what belongs to it. For ok: rank 0's
        answer, with ``peak`` of every rank.
    """
    folder = Path(job.run_dir)
    file = job.write()
    logs = [folder / f"rank-{rank}.log" for rank in range(devices)]
    port = _free_port()
    processes = [
        _start(_CONTEND, file, logs[rank], rank=rank, devices=devices, port=port)
        for rank in range(devices)
    ]
    try:
        is_in_time = _wait(job, processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    answers = [_read(job.answer_file(rank)) for rank in range(devices)]
    for answer in answers:
        if answer is not None and answer["status"] != "ok":
            return answer
    if None not in answers:
        whole = [answer for answer in answers if answer is not None]
        return {**whole[0], "peak": [answer["peak"] for answer in whole]}
    failed = next((r for r, process in enumerate(processes) if (process.returncode or 0) > 0), 0)
    tail = logs[failed].read_text(errors="replace")[-_TAIL_CHARACTERS:]
    return {"status": "failed" if is_in_time else "timed out", "rank": failed, "log_tail": tail}


def run_by_turns(jobs: Sequence[Job]) -> list[dict[str, Any] | None]:
    """All jobs in one process on one device; returns the answer of each, None where there is none.

    A failure that is no lack of memory ends the process: it is the answer of the job it came in.
    """
    folder = Path(jobs[0].run_dir)
    file = folder / "turns.json"
    file.write_text(json.dumps([str(job.write()) for job in jobs]))
    log = folder / "turns.log"
    process = _start(_BY_TURNS, file, log, rank=0, devices=1, port=_free_port())
    try:
        process.wait(max(1.0, jobs[-1].stop_at + _GRACE_S - time.time()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    answers = [_read(job.answer_file(0)) for job in jobs]
    if process.returncode > 0 and None in answers:
        tail = log.read_text(errors="replace")[-_TAIL_CHARACTERS:]
        answers[answers.index(None)] = {"status": "failed", "message": tail}
    return answers


def _start(
    module: str, job_file: Path, log: Path, *, rank: int, devices: int, port: int
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(devices),
        "LOCAL_WORLD_SIZE": str(devices),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # offline, and no more devices than asked for: the Trainer takes all that it sees
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": _visible(devices),
        "PYTHONPATH": os.pathsep.join(
            part for part in (str(_ROOT / "src"), str(_ROOT), os.environ.get("PYTHONPATH")) if part
        ),
    }
    command = [sys.executable, "-m", module, str(job_file)]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=_ROOT
        )


def _wait(job: Job, processes: list[subprocess.Popen[bytes]]) -> bool:
    """Until all have ended, one has failed (the others may then wait for it), or time is up."""
    while time.time() < job.stop_at + _GRACE_S:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes) or any(codes):
            return True
        if any((answer := _read(job.answer_file(rank))) is not None and answer["status"] != "ok"
               for rank in range(len(processes))):  # fmt: skip
            return True
        time.sleep(_POLL_S)
    return False


def _visible(devices: int) -> str:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = given.split(",") if given else [str(index) for index in range(devices)]
    return ",".join(found[:devices])


def _read(path: Path) -> dict[str, Any] | None:
    """A rank's answer; None while there is none, or only a part of it."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
