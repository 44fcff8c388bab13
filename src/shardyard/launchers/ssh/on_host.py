"""`python -m shardyard.launchers.ssh.on_host`: answers one question of the launcher on a host.

The question is JSON on stdin, so that no value of a recipe is on a command line. The answer is one
marked line of JSON on stdout: a login shell may print lines of its own before it.
"""

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import shardyard
from shardyard.errors import ShardyardError
from shardyard.hardware.machine import probe
from shardyard.io.files import parse_json
from shardyard.launchers.process_identity import Identity, find_running, process_numbers, runs
from shardyard.launchers.ssh.node_job import MODULE as NODE_JOB
from shardyard.launchers.ssh.node_job import SshJob, children_of, read_state, words_of
from shardyard.own_processes import python_program

MODULE = "shardyard.launchers.ssh.on_host"
MARK = "@shardyard-ssh "
_PORTS = range(20000, 30000)
"""Below the ports that Linux gives to clients."""
_MEET_S = 20.0
_CONNECT_EVERY_S = 0.3
_START_TIMEOUT_S = 60


def check(asked: dict[str, Any]) -> dict[str, Any]:
    """Describe this host: version, devices, whether it sees the run folder, a free port."""
    answer: dict[str, Any] = {"version": shardyard.__version__, "host": socket.gethostname()}
    # Another version may understand none of the other questions.
    if asked["version"] != shardyard.__version__:
        return answer
    folder = Path(asked["run_dir"])
    with suppress(OSError):
        answer["seen"] = Path(asked["probe"]).read_text(encoding="utf-8").strip()
    answer["writable"] = os.access(folder, os.W_OK)
    found = jobs(asked)["jobs"]
    answer["others"] = sorted(job["folder"] for job in found if not job["is_side"])
    answer["ends_at_logout"] = ends_at_logout(Path("/"), getpass.getuser(), os.geteuid())
    answer |= _devices(asked["device"])
    if asked["port"] is not None:
        answer["port"] = _free_port(asked["port"])
    return answer


def _devices(device: str) -> dict[str, Any]:
    """Count the accelerators, unless a run on CPUs makes that needless."""
    if device == "cpu":
        return {}
    try:
        machine = probe()
    except ShardyardError as error:
        return {"devices_error": str(error)}
    is_cpu = machine.device == "cpu"
    return {"device": machine.device, "devices": 0 if is_cpu else machine.count}


def jobs(_asked: dict[str, Any]) -> dict[str, Any]:
    """List this user's jobs by ssh on this host, of any run and launched from anywhere."""
    found = []
    for pid in process_numbers():
        with suppress(OSError, ValueError, IndexError, TypeError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
            if words[-4:-2] == ["-m", NODE_JOB] and runs(pid, words[-4:]):
                job = SshJob.read(Path(words[-2]))
                found.append(
                    {
                        "folder": words[-2],
                        "session": job.session,
                        "is_side": job.is_side,
                        "pid": pid,
                    }
                )
    return {"jobs": found}


def ends_at_logout(root: Path, user: str, number: int) -> bool:
    """Whether systemd-logind ends a user's processes when the last connection closes.

    Source: logind.conf(5): KillUserProcesses, of which root is excluded; loginctl(1): a user who
    lingers has them kept.

    Args:
        root: Folder with ``etc``, ``usr`` and ``var``.
        number: The user's.
    """
    if number == 0 or (root / "var/lib/systemd/linger" / user).exists():
        return False
    files = [root / "etc/systemd/logind.conf"]
    for folder in ("usr/lib", "etc"):
        files += sorted((root / folder / "systemd/logind.conf.d").glob("*.conf"))
    values = ["no"]
    for file in files:
        with suppress(OSError):
            values += re.findall(
                r"^\s*KillUserProcesses\s*=\s*(\w+)", file.read_text(), re.MULTILINE
            )
    return values[-1].lower() in ("yes", "true", "1", "on")


def _free_port(wanted: int | str) -> int | None:
    """Return the port that is wanted, or one of ours; None: it is taken, or all are."""
    start = os.getpid() % len(_PORTS)
    ports = [wanted] if isinstance(wanted, int) else [*_PORTS[start:], *_PORTS[:start]]
    for port in ports:
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
    return None


def listen(asked: dict[str, Any]) -> dict[str, Any]:
    """Wait on a port for the other hosts; how many came."""
    came = 0
    deadline_s = time.monotonic() + _MEET_S
    with socket.create_server(("", asked["port"]), backlog=64) as server:
        while came < asked["others"] and (left_s := deadline_s - time.monotonic()) > 0:
            server.settimeout(left_s)
            with suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(2.0)
                    connection.sendall(asked["nonce"].encode())
                    came += 1
    return {"came": came}


def connect(asked: dict[str, Any]) -> dict[str, Any]:
    """Reach the first host, as the rendezvous will; empty: it was reached."""
    deadline_s, why = time.monotonic() + asked["connect_s"], "it did not answer"
    nonce = asked["nonce"].encode()
    while time.monotonic() < deadline_s:
        try:
            with socket.create_connection((asked["address"], asked["port"]), 5.0) as connection:
                connection.settimeout(5.0)
                if connection.recv(len(nonce), socket.MSG_WAITALL) == nonce:
                    return {}
                why = "another program answers there"
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(_CONNECT_EVERY_S)
    return {"error": why}


def start(asked: dict[str, Any]) -> dict[str, Any]:
    """Start a job's node on this host, detached; one that runs already is left as it is."""
    folder, rank = asked["folder"], asked["rank"]
    if (who := find_running(words_of(folder, rank))) is not None:
        return {"pid": who.pid}
    process = subprocess.Popen(
        [*python_program(NODE_JOB), folder, str(rank)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    signal.alarm(_START_TIMEOUT_S)  # a file system that hangs
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(asked["secrets"]).encode())
        process.stdin.close()
    # It ends when that process moves its stdout to its log.
    with process.stdout:
        said = process.stdout.read().decode(errors="replace").strip()
    signal.alarm(0)
    process.returncode = 0  # it is left to run, and not waited for
    try:
        pid, started, boot = parse_json(said)
    except ValueError:
        return {"error": said.splitlines()[-1] if said else "it printed no reason"}
    return {"pid": Identity(pid, started, boot).pid}


def state(asked: dict[str, Any]) -> dict[str, Any]:
    """Say whether a job's processes run on this host, and what is written of its node."""
    folder, rank = asked["folder"], asked["rank"]
    alive = find_running(words_of(folder, rank)) is not None
    # Read after the look at the process: it writes its last word before it ends.
    return {
        "alive": alive,
        "draining": not alive and bool(_nodes_of(folder, rank)),
        "written": read_state(Path(folder), rank),
    }


def stop(asked: dict[str, Any]) -> dict[str, Any]:
    """Ask a job's processes on this host to drain, or kill them; whether there are any."""
    folder, rank = asked["folder"], asked["rank"]
    who = find_running(words_of(folder, rank))
    first = _nodes_of(folder, rank) if who is None else [who.pid]
    number = signal.SIGKILL if asked["kill"] else signal.SIGTERM
    # Listed before the first dies: orphans would be found under no process of ours.
    for pid in [below for each in first for below in _tree(each)] if asked["kill"] else first:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return {"found": bool(first)}


def _tree(pid: int) -> list[int]:
    """Return a process and all below it, itself first."""
    return [pid, *(each for child in children_of(pid) for each in _tree(child))]


def _nodes_of(folder: str, rank: int) -> list[int]:
    """Return the programs of a job's node on this host, found by their command line."""
    recipe, place = f"{folder}/recipe.yaml", f"--node-rank\0{rank}\0"
    found = []
    for pid in process_numbers():
        with suppress(OSError):
            process = Path(f"/proc/{pid}")
            text = (process / "cmdline").read_bytes().decode(errors="replace")
            is_node = "\0-m\0shardyard.node" in text and f"\0{recipe}\0" in text
            is_ours = is_node and process.stat().st_uid == os.geteuid()
            if is_ours and (place in text or "--node-rank" not in text):
                found.append(pid)
    return found


_QUESTIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "check": check,
    "jobs": jobs,
    "listen": listen,
    "connect": connect,
    "start": start,
    "state": state,
    "stop": stop,
}


def main() -> int:
    """Answer the question on stdin."""
    asked = parse_json(sys.stdin.read())
    answer = _QUESTIONS[asked["question"]](asked)
    print(f"{MARK}{json.dumps(answer)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
