"""The supervisor of a local job: sessions of nodes that are small scripts here."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardyard.errors import StorageError
from shardyard.launchers.local_job import JobFile, Supervisor, job_exit_code
from shardyard.rundir.contracts import HOSTS_VARIABLE, Hosts

VERDICTS = [
    # codes of the nodes, asked to stop?, the job's
    ([0, 0], False, 0),
    ([0, 0], True, 0),
    ([143, 143], True, 143),
    ([143, 130], True, 143),
    ([2, 2], False, 2),
    ([1, 143], False, 1),
    ([143, 1], False, 1),
    ([143, -9], False, 1),
    ([137, 143], False, 1),
    ([143, 143], False, 143),
    ([-9, -9], True, 1),
    ([143, -9], True, 143),
    ([0, 2], False, 2),
]


@pytest.mark.parametrize(("codes", "is_stopped", "code"), VERDICTS)
def test_one_exit_code_comes_of_many(codes: list[int], is_stopped: bool, code: int) -> None:
    assert job_exit_code(codes, is_stopped=is_stopped) == code


def supervise(folder: Path, script: str, **options: Any) -> tuple[int, dict[str, Any]]:
    """Run nodes that are ``script``; `rank`, `session` and `folder` are known to it."""
    head = (
        "import sys, os, time, signal\n"
        "rank = int(sys.argv[sys.argv.index('--node-rank') + 1])\n"
        "session = int(sys.argv[sys.argv.index('--session') + 1].rpartition('.')[2])\n"
        f"folder = {str(folder)!r}\n"
    )
    settings: dict[str, Any] = {
        "program": [sys.executable, "-c", head + script], "run_dir": str(folder), "nodes": 2,
        "fewest_nodes": 2, "devices_per_node": 1, "env": {"GREETING": "hello"}, "max_restarts": 1,
        "drain_timeout_s": 1.0, "time_limit_s": None,
    }  # fmt: skip
    code = Supervisor(folder, JobFile(**(settings | options))).run()
    return code, json.loads((folder / "status.json").read_text())


@pytest.mark.heavy
def test_nodes_get_their_place_and_the_recipes_variables(tmp_path: Path) -> None:
    code, status = supervise(tmp_path, "print(rank, os.environ['GREETING'], sys.argv[1:])")
    assert (code, status["exit_code"], status["restarts"]) == (0, 0, 0)
    first, second = ((tmp_path / f"node-{rank}.log").read_text() for rank in range(2))
    assert first.startswith("0 hello") and second.startswith("1 hello")
    words = first[first.index("[") :].strip().strip("[]").replace("'", "").split(", ")
    assert words[:4] == ["--node-rank", "0", "--nodes", "2"]
    assert words[4] == "--rendezvous" and words[5].startswith("127.0.0.1:")


@pytest.mark.heavy
def test_a_drill_puts_nodes_on_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(enter=[[], ["env", "HOST=other"]], address="10.0.0.1")
    monkeypatch.setenv(HOSTS_VARIABLE, hosts.to_text())
    code, _ = supervise(tmp_path, "print(os.environ.get('HOST'), sys.argv)")
    assert code == 0
    first, second = ((tmp_path / f"node-{rank}.log").read_text() for rank in range(2))
    assert first.startswith("None") and second.startswith("other")
    assert "'10.0.0.1:" in first and "'10.0.0.1:" in second


@pytest.mark.heavy
def test_a_folder_that_vanishes_is_not_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "job-0"
    folder.mkdir()
    job = JobFile(
        program=[sys.executable, "-c", f"import os, shutil; shutil.rmtree({str(folder)!r}, True)\n"
                 "os._exit(1)"],
        run_dir=str(tmp_path), nodes=1, fewest_nodes=1, devices_per_node=1, env={},
        max_restarts=1, drain_timeout_s=1.0, time_limit_s=None,
    )  # fmt: skip
    assert Supervisor(folder, job).run() == 1
    assert not folder.exists()


@pytest.mark.heavy
def test_a_folder_that_vanishes_while_it_is_written_ends_no_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "job-0"
    folder.mkdir()

    def vanish(path: Path, _content: object) -> None:
        shutil.rmtree(path.parent)
        raise StorageError(f"{path} cannot be written")

    monkeypatch.setattr("shardyard.launchers.local_job.write_json", vanish)
    job = JobFile(
        program=[sys.executable, "-c", ""], run_dir=str(tmp_path), nodes=1, fewest_nodes=1,
        devices_per_node=1, env={}, max_restarts=0, drain_timeout_s=1.0, time_limit_s=None,
    )  # fmt: skip
    assert Supervisor(folder, job).run() == 0
    assert not folder.exists()


@pytest.mark.heavy
def test_a_lost_node_begins_a_new_session(tmp_path: Path) -> None:
    script = "session or rank and os.kill(os.getpid(), 9)\nprint('session', session)"
    code, status = supervise(tmp_path, script)
    assert (code, status["restarts"]) == (0, 1)
    assert "session 1" in (tmp_path / "node-1.log").read_text()


@pytest.mark.heavy
def test_an_elastic_run_goes_on_without_a_lost_node(tmp_path: Path) -> None:
    script = "rank and os.kill(os.getpid(), 9)\ntime.sleep(2)"
    code, status = supervise(tmp_path, script, fewest_nodes=1)
    assert (code, status["restarts"], status["reason"]) == (0, 0, "")
    assert [node["exit_code"] for node in status["nodes"]] == [0, -9]


@pytest.mark.heavy
def test_nodes_that_are_enough_are_not_stopped_as_another_lost_them(tmp_path: Path) -> None:
    script = "sys.exit(75) if rank else time.sleep(2)"
    code, status = supervise(tmp_path, script, fewest_nodes=1)
    assert (code, status["restarts"], status["reason"]) == (0, 0, "")
    code, status = supervise(tmp_path, "sys.exit(0 if session else 75)", fewest_nodes=1)
    assert (code, status["restarts"]) == (0, 1)  # all have lost each other: all start again


@pytest.mark.heavy
def test_without_node_0_no_run_begins(tmp_path: Path) -> None:
    script = "rank or session or os.kill(os.getpid(), 9)\nsession or time.sleep(60)"
    code, status = supervise(tmp_path, script, fewest_nodes=1)
    assert (code, status["restarts"]) == (0, 1)


BEGIN = (
    "import json, pathlib\n"
    "name = sys.argv[sys.argv.index('--session') + 1]\n"
    "word = pathlib.Path(folder, 'sessions', name + '.json')\n"
    "word.parent.mkdir(exist_ok=True); word.write_text(json.dumps({'begins': True}))\n"
)
"""What node 0 does before it is lost."""


@pytest.mark.heavy
def test_a_run_that_has_begun_goes_on_without_node_0(tmp_path: Path) -> None:
    script = f"{BEGIN}rank or os.kill(os.getpid(), 9)\ntime.sleep(2)"
    code, status = supervise(tmp_path, script, fewest_nodes=1)
    assert (code, status["restarts"]) == (0, 0)
    assert [node["exit_code"] for node in status["nodes"]] == [-9, 0]


@pytest.mark.heavy
def test_nodes_that_could_not_go_on_without_the_lost_one_begin_a_new_session(
    tmp_path: Path,
) -> None:
    script = f"{BEGIN}session or rank or os.kill(os.getpid(), 9)\nsys.exit(0 if session else 75)"
    code, status = supervise(tmp_path, script, fewest_nodes=1)
    assert (code, status["restarts"]) == (0, 1)


@pytest.mark.heavy
def test_a_lost_agent_counts_as_a_lost_node(tmp_path: Path) -> None:
    code, status = supervise(tmp_path, "sys.exit(0 if session or rank else 137)")
    assert (code, status["restarts"]) == (0, 1)


@pytest.mark.heavy
def test_nodes_that_are_lost_again_and_again_are_told(tmp_path: Path) -> None:
    code, status = supervise(tmp_path, "os.kill(os.getpid(), 9) if rank else time.sleep(60)")
    assert code == 1
    assert status["reason"] == "node 1 was lost, after 1 restarts"
    assert status["nodes"][0]["exit_code"] == -15  # it was asked to stop


@pytest.mark.heavy
def test_a_failure_is_not_tried_again(tmp_path: Path) -> None:
    code, status = supervise(tmp_path, "sys.exit(2)")
    assert (code, status["restarts"]) == (2, 0)


@pytest.mark.heavy
def test_the_time_limit_drains(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGTERM, lambda *_: os._exit(143)); time.sleep(60)"
    started_s = time.monotonic()
    code, status = supervise(tmp_path, script, time_limit_s=2.0)
    assert (code, status["reason"]) == (143, "its time limit was over")
    assert time.monotonic() - started_s < 30
