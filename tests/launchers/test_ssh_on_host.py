"""What runs on a host by ssh: answers to the launcher, and the process that keeps a node."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import shardyard
from shardyard.config.ssh_hosts import parse_host
from shardyard.errors import RequestError
from shardyard.io.polling import wait_for
from shardyard.launchers.ssh import on_host
from shardyard.launchers.ssh.client import SshClient, SshResult
from shardyard.launchers.ssh.node_job import read_state

CHECK: dict[str, Any] = {"version": shardyard.__version__, "device": "cpu", "port": None}


def test_a_host_says_what_it_sees(tmp_path: Path) -> None:
    (tmp_path / "probe").write_text("abc")
    asked = {**CHECK, "run_dir": str(tmp_path), "probe": str(tmp_path / "probe")}
    answer = on_host.check(asked)
    assert answer["version"] == shardyard.__version__ and answer["seen"] == "abc"
    assert answer["writable"] and answer["others"] == [] and "devices" not in answer
    answer = on_host.check({**asked, "run_dir": f"{tmp_path}/no", "probe": f"{tmp_path}/no/probe"})
    assert "seen" not in answer and not answer["writable"]
    assert set(on_host.check({**asked, "version": "0.0.1"})) == {"version", "host"}


def test_a_host_names_a_free_port_or_none(tmp_path: Path) -> None:
    asked = {**CHECK, "run_dir": str(tmp_path), "probe": str(tmp_path / "probe")}
    assert on_host.check({**asked, "port": "auto"})["port"] in range(20000, 30000)
    with socket.create_server(("", 0)) as server:
        taken = server.getsockname()[1]
        assert on_host.check({**asked, "port": taken})["port"] is None
    assert on_host.check({**asked, "port": taken})["port"] == taken


def test_hosts_meet_at_the_first_or_say_why_not() -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    asked = {"port": port, "others": 1, "nonce": "abcd", "address": "127.0.0.1", "connect_s": 5.0}
    came: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: came.append(on_host.listen(asked)))
    thread.start()
    assert on_host.connect(asked) == {}
    thread.join()
    assert came == [{"came": 1}]
    assert on_host.connect({**asked, "connect_s": 0.1}) == {"error": "Connection refused"}


@pytest.mark.parametrize(
    ("files", "number", "ends"),
    [
        ({}, 1000, False),
        ({"etc/systemd/logind.conf": "#KillUserProcesses=yes\n"}, 1000, False),
        ({"etc/systemd/logind.conf": "[Login]\nKillUserProcesses=yes\n"}, 1000, True),
        ({"etc/systemd/logind.conf": "KillUserProcesses=yes\n"}, 0, False),
        ({"etc/systemd/logind.conf": "KillUserProcesses=yes\n",
          "etc/systemd/logind.conf.d/a.conf": "KillUserProcesses = no\n"}, 1000, False),
        ({"etc/systemd/logind.conf": "KillUserProcesses=yes\n",
          "var/lib/systemd/linger/me": ""}, 1000, False),
    ],
)  # fmt: skip
def test_a_host_that_ends_processes_at_logout_is_known(
    tmp_path: Path, files: dict[str, str], number: int, ends: bool
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert on_host.ends_at_logout(tmp_path, "me", number) is ends


def job_in(folder: Path, **options: Any) -> None:
    content: dict[str, Any] = {
        "module": "http.server", "words": [], "nodes": 1, "hosts": ["gpu1"],
        "rendezvous": "127.0.0.1:1", "session": "s", "env": {}, "drain_timeout_s": 5.0,
        "time_limit_s": None, "is_side": True, "outlives_nodes": False,
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps({**content, **options}))


def start(folder: Path, **secrets: str) -> dict[str, Any]:
    return on_host.start({"folder": str(folder), "rank": 0, "secrets": secrets})


def wait(condition: Callable[[], bool]) -> None:
    assert wait_for(condition, every_s=0.05, within_s=30.0)


def ended(folder: Path) -> dict[str, Any]:
    wait(lambda: read_state(folder, 0).get("exit_code") is not None)
    return read_state(folder, 0)


@pytest.mark.heavy
def test_the_end_of_a_node_and_its_words_are_kept(tmp_path: Path) -> None:
    job_in(tmp_path)
    start(tmp_path)
    assert ended(tmp_path)["exit_code"] == 2
    assert "invalid int value" in (tmp_path / "node-0.log").read_text()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("options", "reason"),
    [({"time_limit_s": 0.5}, "its time limit was over"), ({}, "it was cancelled")],
)
def test_a_node_ends_at_its_limit_and_by_the_file_of_a_cancel(
    tmp_path: Path, options: dict[str, float], reason: str
) -> None:
    (tmp_path / "waits.py").write_text("import time; time.sleep(60)")
    job_in(tmp_path, module="waits", env={"PYTHONPATH": str(tmp_path)}, **options)
    start(tmp_path)
    if not options:
        (tmp_path / "stop").touch()
    state = ended(tmp_path)
    assert (state["exit_code"], state["reason"]) == (143, reason)


@pytest.mark.heavy
def test_a_node_ends_when_another_host_is_lost(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import time; time.sleep(60)")
    two = {"nodes": 2, "hosts": ["gpu1", "gpu2"], "lost_after_s": 1.0}
    job_in(tmp_path, module="waits", env={"PYTHONPATH": str(tmp_path)}, **two)
    start(tmp_path)
    state = ended(tmp_path)
    assert state["reason"] == "gpu2 was lost: it sent no heartbeat for 1 s"
    assert (tmp_path / "node-0.beat").exists()


@pytest.mark.heavy
def test_a_job_is_started_found_and_ended_on_its_host(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, subprocess, time\n"
        f"open({str(tmp_path / 'secret')!r}, 'w').write(os.environ['TOKEN'])\n"
        "subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    job_in(tmp_path, module="waits", env={"PYTHONPATH": str(tmp_path)})
    asked = {"folder": str(tmp_path), "rank": 0, "kill": False}
    pid = start(tmp_path, TOKEN="t")["pid"]
    assert start(tmp_path)["pid"] == pid  # not twice
    assert on_host.state(asked)["alive"]
    listed = [job for job in on_host.jobs({})["jobs"] if job["folder"] == str(tmp_path)]
    assert listed == [{"folder": str(tmp_path), "session": "s", "is_side": True, "pid": pid}]
    wait(lambda: (tmp_path / "secret").exists())
    assert on_host.stop(asked) == {"found": True}
    wait(lambda: not on_host.state(asked)["alive"])
    assert on_host.state(asked)["written"]["exit_code"] == 143
    assert on_host.stop(asked) == {"found": False}
    assert not started_in(tmp_path), "a process of the node is left"


def started_in(folder: Path) -> list[str]:
    """Processes with the environment of the job in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if f"PYTHONPATH={folder}".encode() in (entry / "environ").read_bytes():
                    found.append(entry.name)
    return found


@pytest.mark.heavy
def test_a_job_whose_folder_is_out_of_reach_is_not_started(tmp_path: Path) -> None:
    answer = on_host.start({"folder": str(tmp_path / "no"), "rank": 0, "secrets": {}})
    assert "No such file or directory" in answer["error"]


@pytest.mark.heavy
def test_a_question_is_answered_past_the_words_of_a_login_shell(tmp_path: Path) -> None:
    """The whole way but ssh: the host's command in a shell that talks."""

    def shell(argv: Sequence[str], text: str, _timeout_s: float) -> SshResult:
        done = subprocess.run(
            ["sh", "-c", f"echo welcome; {argv[-1]}"], input=text, capture_output=True, text=True
        )
        return SshResult(exit_code=done.returncode, out=done.stdout, err=done.stderr)

    host = parse_host("gpu1")
    assert host is not None
    odd = tmp_path / "a b'c"
    odd.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    odd.chmod(0o755)
    assert isinstance(SshClient(python=str(odd), shell=shell).ask(host, "jobs")["jobs"], list)
    with pytest.raises(RequestError, match="has no Python at /no/python"):
        SshClient(python="/no/python", shell=shell).ask(host, "jobs")
