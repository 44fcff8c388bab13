"""The agent with real processes: normal ends, losses, drains, and nothing left behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.elastic.__main__ import may_wait
from shardyard.elastic.agent import AttemptResult
from shardyard.errors import LostNodeError
from shardyard.network_interface import loopback_interface
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease, is_locked
from tests.elastic.agents import Agents, answer, parent_of, session_pids, wait_until
from tests.mounts import mounted, needs_root


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with tempfile.TemporaryDirectory() as scratch:  # tmp_path is too long for a socket
        started = Agents(RunDir(tmp_path / "run-1"), Path(scratch))
        yield started
        started.end_all()


def assert_nothing_left(agents: Agents, process: subprocess.Popen[str]) -> None:
    wait_until(lambda: not session_pids(process.pid), timeout_s=20.0)
    wait_until(lambda: not list(agents.scratch.iterdir()), timeout_s=10.0)


@pytest.mark.heavy
def test_an_agent_waits_for_no_part_of_torch_that_only_its_workers_use() -> None:
    """They doubled the seconds of its start, on every node and at every replacement."""
    slow = {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy"}
    modules = "shardyard.elastic.agent, shardyard.elastic.peer_snapshots, shardyard.elastic.worker"
    look = (
        f"import sys, {modules}; print(sorted({slow} & {{*sys.modules}}), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "True"]


@pytest.mark.heavy
def test_an_agent_takes_its_lease_before_torch_is_imported() -> None:
    """Its first events, and its signals, need none of it."""
    look = "import sys, shardyard.elastic.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


@pytest.mark.heavy
def test_a_normal_run_finishes_with_events_and_logs(agents: Agents) -> None:
    agents.prepare()
    process = agents.start("finish")
    assert answer(process) == {
        "outcome": "finished",
        "exit_code": 0,
        "message": "finished",
        "drain_left_s": None,
        "page": "",
    }
    assert_nothing_left(agents, process)
    (started,) = agents.events("attempt_started")
    assert [worker["rank"] for worker in started["workers"]] == [0, 1]
    assert started["world_size"] == 2 and "--attempt 1" in started["command"]
    assert agents.events("rendezvous")[0]["seconds"] >= 0
    assert agents.events("attempt_ended")[0]["exit_code"] == 0
    for rank in range(2):
        assert agents.run.log(1, rank).read_text() == "generation 0 sum 1 of 2\n"
    assert not list(agents.run.attempt(1).glob("failure-*"))


@pytest.mark.heavy
def test_secrets_reach_workers_and_no_other_process_that_the_agent_starts(agents: Agents) -> None:
    """The fork server, its trackers and the telemetry do not start with them."""
    agents.prepare(secrets={"OF_THE_RECIPE": "env"})
    agent = agents.start("tell_secrets", HF_TOKEN="not-for-all-1", OF_THE_RECIPE="not-for-all-2")
    assert answer(agent)["exit_code"] == 0
    logs = [agents.run.log(1, rank).read_text() for rank in range(2)]
    assert logs == ["not-for-all-1 not-for-all-2\n"] * 2


@pytest.mark.heavy
def test_an_agent_that_waits_for_another_node_says_so_in_its_log(agents: Agents) -> None:
    agents.prepare(devices=1, nodes=2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = ("--rendezvous", f"127.0.0.1:{free.getsockname()[1]}")
    log = agents.run.attempt(1) / "agent-0.log"
    first = agents.start("finish", *place)
    wait_until(lambda: log.is_file() and "other nodes at 127.0.0.1:" in log.read_text())
    second = agents.start("finish", *place, "--node-rank", "1")
    assert [answer(first)["exit_code"], answer(second)["exit_code"]] == [0, 0]
    assert ": 1 of 2 came. It gives up at " in log.read_text()


@pytest.mark.heavy
def test_workers_of_one_machine_talk_on_its_loopback_interface(agents: Agents) -> None:
    agents.prepare()
    assert answer(agents.start("tell_network"))["exit_code"] == 0
    lo = loopback_interface()
    own_store = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    told = f"GLOO_SOCKET_IFNAME={lo} NCCL_SOCKET_IFNAME=={lo} {own_store}\n"
    assert [agents.run.log(1, rank).read_text() for rank in range(2)] == [told, told]


@pytest.mark.parametrize(
    ("outcome", "exit_code", "drain_left_s", "may"),
    [
        ("finished", 0, None, True),
        ("failed", 1, None, True),
        ("drained", 143, None, False),
        ("failed", 143, -1.0, False),
        ("failed", LostNodeError.exit_code, None, False),
    ],
)
def test_only_an_end_that_nobody_waits_for_waits_for_a_scrape(
    outcome: str, exit_code: int, drain_left_s: float | None, *, may: bool
) -> None:
    assert may_wait(AttemptResult(outcome, exit_code, "", drain_left_s)) is may


@pytest.mark.heavy
def test_a_killed_worker_is_named_and_the_group_restarts(agents: Agents) -> None:
    agents.prepare()
    process = agents.start("train_two_generations")
    agents.wait_for_training()
    victim = agents.events("attempt_started")[0]["workers"][1]
    os.kill(victim["pid"], signal.SIGKILL)
    assert answer(process)["outcome"] == "finished"
    (lost,) = agents.events("worker_lost")
    assert (lost["rank"], lost["pid"], lost["signal"]) == (1, victim["pid"], "SIGKILL")
    assert lost["node"] == socket.gethostname() and lost["exit_code"] is None
    assert "out-of-memory killer" in lost["cause"] and "dmesg" in lost["cause"]
    assert [event["generation"] for event in agents.events("rendezvous")] == [0, 1]
    assert "generation 1 sum 1 of 2" in agents.run.log(1, 0).read_text()
    assert_nothing_left(agents, process)


@pytest.mark.system
def test_a_worker_leaves_without_searching_all_modules_for_garbage(agents: Agents) -> None:
    agents.prepare(devices=1)
    assert answer(agents.start("count_frozen"))["outcome"] == "finished"
    assert int(agents.run.log(1, 0).read_text()) > 50_000  # torch alone


@pytest.mark.system
def test_a_killed_fork_server_is_told_as_such_and_the_group_restarts(agents: Agents) -> None:
    agents.prepare()
    process = agents.start("train_two_generations")
    agents.wait_for_training()
    server = parent_of(agents.events("attempt_started")[0]["workers"][0]["pid"])
    os.kill(server, signal.SIGKILL)
    assert answer(process)["outcome"] == "finished"
    lost = agents.events("worker_lost")
    assert [each["rank"] for each in lost] == [0, 1]
    for each in lost:
        assert f"fork server of its node, process {server}, was killed by SIGKILL" in each["cause"]
        assert "out-of-memory killer" in each["cause"]
    assert_nothing_left(agents, process)


@pytest.mark.system
@needs_root
def test_a_full_shared_memory_is_named_with_how_to_give_more(
    agents: Agents, tmp_path: Path
) -> None:
    agents.prepare()
    with mounted(tmp_path / "shm", "size=16k") as small:
        process = agents.start("finish", shared_memory=small)
        end = answer(process)
    assert (end["outcome"], end["exit_code"]) == ("failed", 1)
    assert end["message"].startswith("/dev/shm is full. ")
    assert "--shm-size=8g" in end["message"] and "medium: Memory" in end["message"]
    assert_nothing_left(agents, process)


@pytest.mark.system
@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_run_folder_that_vanishes_ends_the_run_in_seconds(agents: Agents, how: str) -> None:
    agents.prepare()
    process = agents.start("never_drain")
    agents.wait_for_training()
    moved = agents.run.path.with_name("moved")
    agents.run.path.rename(moved)
    if how == "removed":
        shutil.rmtree(moved)
    since_s = time.monotonic()
    end = answer(process)
    assert time.monotonic() - since_s < 15.0
    assert (end["outcome"], end["exit_code"]) == ("failed", 1)
    assert end["message"].startswith(f"{agents.run.path} is not there any more: it was removed")
    assert f"`shardyard resume {agents.run.path}`" in end["message"]
    assert not agents.run.path.exists()
    assert_nothing_left(agents, process)


@pytest.mark.system
def test_the_same_failure_twice_ends_the_run_whatever_restarts_are_left(agents: Agents) -> None:
    agents.prepare(max_restarts=3)
    process = agents.start("crash_on_rank_1")
    end = answer(process)
    assert (end["outcome"], end["exit_code"]) == ("failed", 1)
    message = end["message"]
    assert f"rank 1 on {socket.gethostname()} was lost (ZeroDivisionError: no such n" in message
    assert "twice after step 0, and the run did not come beyond it in between: another" in message
    assert str(agents.run.log(1, 1)) in message
    assert f"`shardyard resume {agents.run.path}`" in message
    lost = agents.events("worker_lost")
    assert [(each["step"], each["durable_step"]) for each in lost] == [(0, None)] * 2
    assert "Traceback" in agents.run.log(1, 1).read_text()
    assert_nothing_left(agents, process)


@pytest.mark.system
def test_a_spent_restart_budget_says_so(agents: Agents) -> None:
    agents.prepare(max_restarts=1)
    end = answer(agents.start("crash_in_other_words"))
    assert (end["outcome"], end["exit_code"]) == ("failed", 1)
    assert (
        "was lost (ZeroDivisionError: b) and the 1 restarts within an hour that "
        "elastic.max_restarts allows are used up; no checkpoint became durable" in end["message"]
    )
    assert len(agents.events("worker_lost")) == 2


@pytest.mark.system
def test_a_rank_that_sleeps_in_its_compute_is_named_until_it_is_well(agents: Agents) -> None:
    agents.prepare(devices=1, nodes=2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = [
        agents.start("straggle", "--rendezvous", endpoint, "--node-rank", str(rank))
        for rank in range(2)
    ]
    wait_until(lambda: bool(agents.events("straggler")), timeout_s=120.0)
    (agents.run.path / "well").touch()
    wait_until(lambda: len(agents.events("straggler")) > 1, timeout_s=120.0)
    nodes[0].terminate()
    assert [answer(node)["outcome"] for node in nodes] == ["drained", "drained"]
    named, well = agents.events("straggler")
    assert (named["rank"], named["node"], named["is_over"]) == (1, socket.gethostname(), False)
    assert named["factor"] > 1.5 and named["compute_s"] > 0.15 and named["step"] > 20
    assert (well["rank"], well["is_over"]) == (1, True) and well["factor"] < 1.25


@pytest.mark.system
def test_a_rank_that_is_stopped_in_pulses_is_a_straggler_and_no_hang(agents: Agents) -> None:
    agents.prepare()
    agents.start("step_for_ever")
    agents.wait_for_training()
    pid = agents.events("attempt_started")[0]["workers"][1]["pid"]
    until_s = time.monotonic() + 180.0
    while not agents.events("straggler"):
        assert time.monotonic() < until_s, "it was never named"
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.4)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.2)
    (named,) = agents.events("straggler")
    assert (named["rank"], named["is_over"], named["what"]) == (1, False, "stopped")
    assert 0.4 < named["stopped_share"] < 0.9 and named["factor"] > 1.6
    assert not agents.events("worker_hung") and not agents.events("worker_lost")


@pytest.mark.system
def test_a_rank_whose_native_code_gives_up_at_the_loss_of_another_is_not_named(
    agents: Agents,
) -> None:
    agents.prepare(devices=1, nodes=2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = [
        agents.start("abort_at_lost_contact", "--rendezvous", endpoint, "--node-rank", str(rank))
        for rank in range(2)
    ]
    agents.wait_for_training()
    workers = agents.events("attempt_started")[0]["workers"]
    os.kill(next(each["pid"] for each in workers if each["rank"] == 1), signal.SIGKILL)
    assert [answer(node)["outcome"] for node in nodes] == ["finished", "finished"]
    (lost,) = agents.events("worker_lost")
    assert (lost["rank"], lost["signal"]) == (1, "SIGKILL")


@pytest.mark.heavy
def test_an_error_that_no_restart_cures_ends_the_attempt_at_once(agents: Agents) -> None:
    agents.prepare(max_restarts=3)
    process = agents.start("bad_data_on_rank_1")
    end = answer(process)
    assert (end["outcome"], end["exit_code"]) == ("failed", 1)
    assert end["message"] == "shard-3.bin is damaged. Run `shardyard prepare` again."
    assert len(agents.events("rendezvous")) == 1
    began, ended = agents.events("attempt_started")[0]["t"], agents.events("attempt_ended")[0]["t"]
    assert ended - began < 10
    assert "Traceback" not in agents.run.log(1, 1).read_text()
    assert_nothing_left(agents, process)


@pytest.mark.heavy
def test_an_interface_that_is_not_there_ends_the_attempt_before_it_starts(agents: Agents) -> None:
    agents.prepare()
    ended = answer(agents.start("finish", GLOO_SOCKET_IFNAME="eth9"))
    assert ended["exit_code"] == 2 and ended["outcome"] == "failed"
    assert "GLOO_SOCKET_IFNAME=eth9: interface 'eth9' does not exist" in ended["message"]
    assert not agents.events("worker_lost")


@pytest.mark.heavy
def test_an_interface_that_is_lost_before_the_workers_meet_costs_no_restart(agents: Agents) -> None:
    """As gloo says it: "ifa != nullptr. Unable to find address for: eth9"."""
    agents.prepare()
    ended = answer(agents.start("finish", TEST_INTERFACE="eth9"))
    assert "GLOO_SOCKET_IFNAME=eth9: interface 'eth9' does not exist" in ended["message"]
    assert ended["exit_code"] == 2
    (lost,) = agents.events("worker_lost")
    assert len(agents.events("rendezvous")) == 1 and "ifa" not in lost["cause"]
    assert not agents.events("node_left_out")


@pytest.mark.heavy
def test_contact_lost_in_a_save_costs_a_restart_and_not_the_run(agents: Agents) -> None:
    agents.prepare(devices=1, max_restarts=1)
    process = agents.start("lose_contact_then_finish")
    assert answer(process)["outcome"] == "finished"
    (lost,) = agents.events("worker_lost")
    assert lost["cause"] == "step 3 was not saved: the ranks lost contact."
    assert_nothing_left(agents, process)


@pytest.mark.system
@needs_root
def test_last_words_are_written_before_they_are_told_to_a_full_disk(
    agents: Agents, tmp_path: Path
) -> None:
    with mounted(tmp_path / "run-2", "size=1m") as disk:
        agents.run = RunDir(disk)
        agents.prepare(devices=1)
        end = answer(agents.start("bad_data_on_a_full_disk"))
        assert end["message"] == "shard-3.bin is damaged. Run `shardyard prepare` again."
        assert len(agents.events("rendezvous")) == 1


@pytest.mark.system
@needs_root
@pytest.mark.parametrize(
    ("body", "file"), [("talk_to_a_full_disk", "rank-0.log, "), ("write_to_a_full_disk", "")]
)
def test_a_full_disk_is_named_whatever_is_written_there_and_no_restart_is_tried(
    agents: Agents, tmp_path: Path, body: str, file: str
) -> None:
    with mounted(tmp_path / "run-2", "size=1m") as disk:
        agents.run = RunDir(disk)
        agents.prepare(devices=1)
        end = answer(agents.start(body))
        assert f"{file}cannot be written: No space left on device. Free some" in end["message"]
        assert len(agents.events("rendezvous")) == 1


@pytest.mark.system
def test_a_worker_that_just_leaves_is_lost_too(agents: Agents) -> None:
    agents.prepare(max_restarts=0)
    end = answer(agents.start("leave_early"))
    assert "rank 1" in end["message"] and "exit code 0 and without a message" in end["message"]
    assert "elastic.max_restarts allows no restart" in end["message"]


@pytest.mark.system
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_drains(agents: Agents, number: signal.Signals, exit_code: int) -> None:
    agents.prepare()
    agents.run.checkpoint(7).mkdir(parents=True)
    agents.run.latest.write_text("step-00000007\n")
    process = agents.start("train_until_drained")
    agents.wait_for_training()
    process.send_signal(number)
    end = answer(process)
    assert (end["outcome"], end["exit_code"]) == ("drained", exit_code)
    assert "step-00000007 is durable" in end["message"]
    assert agents.events("draining")[0]["signal"] == number.name
    assert not agents.events("worker_lost")
    assert_nothing_left(agents, process)


@pytest.mark.system
def test_a_drain_that_takes_too_long_is_cut_off_and_says_so(agents: Agents) -> None:
    agents.prepare(drain_timeout_s=0.5)
    process = agents.start("never_drain")
    agents.wait_for_training()
    process.terminate()
    end = answer(process)
    assert (end["outcome"], end["exit_code"]) == ("failed", 143)
    assert "killed before they had saved their last step" in end["message"]
    assert "the 0.5 s of elastic.drain_timeout_s were over" in end["message"]
    assert "No checkpoint is durable yet." in end["message"]
    assert end["message"].endswith("begins again at step 0.")
    assert not agents.events("worker_lost")
    assert_nothing_left(agents, process)


@pytest.mark.system
def test_a_second_signal_does_not_wait(agents: Agents) -> None:
    agents.prepare()
    process = agents.start("never_drain")
    agents.wait_for_training()
    process.send_signal(signal.SIGINT)
    wait_until(lambda: bool(agents.events("draining")))
    wait_until(lambda: process.send_signal(signal.SIGINT) or process.poll() is not None)  # type: ignore[func-returns-value]
    end = answer(process)
    assert end["exit_code"] == 130 and "a second signal came" in end["message"]


@pytest.mark.system
def test_of_several_signals_of_a_scheduler_only_the_first_counts(agents: Agents) -> None:
    agents.prepare()
    process = agents.start("drain_slowly", "--asked-once")
    agents.wait_for_training()
    process.terminate()
    wait_until(lambda: bool(agents.events("draining")))
    time.sleep(1.0)  # later than what counts as one wish
    process.terminate()
    end = answer(process)
    assert (end["outcome"], end["exit_code"]) == ("drained", 143)


@pytest.mark.system
def test_a_killed_agent_takes_everything_with_it(agents: Agents) -> None:
    agents.prepare()
    process = agents.start("never_drain")
    agents.wait_for_training()
    assert len(session_pids(process.pid)) >= 4  # agent, fork server, two workers
    process.kill()
    process.wait()
    assert_nothing_left(agents, process)


@pytest.mark.system
def test_the_end_of_the_starting_process_drains(agents: Agents) -> None:
    agents.prepare()
    process = agents.start("train_until_drained", "--with-parent", "1")  # never its parent
    end = answer(process)
    assert (end["outcome"], end["exit_code"]) == ("drained", 143)


@pytest.mark.system
def test_a_second_agent_on_the_same_run_is_refused(agents: Agents) -> None:
    agents.prepare()
    lease = Lease(agents.run.lease)
    end = answer(agents.start("finish"))
    assert end["exit_code"] == 2
    assert f"process {os.getpid()} on {socket.gethostname()}" in end["message"]
    lease.close()


@pytest.mark.system
def test_a_port_in_use_is_named(agents: Agents) -> None:
    agents.prepare()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        end = answer(agents.start("finish", "--rendezvous", f"127.0.0.1:{port}"))
    assert end["exit_code"] == 2
    assert f"port {port} on 127.0.0.1 is in use" in end["message"]
    assert "--rendezvous HOST:PORT" in end["message"]


@pytest.mark.system
def test_one_node_listens_on_the_loopback_interface_alone(agents: Agents) -> None:
    agents.prepare()
    process = agents.start("never_drain")
    agents.wait_for_training()
    addresses = _listening(session_pids(process.pid))
    assert addresses  # the store, and gloo's sockets
    assert all(address.endswith("0100007F") for address in addresses)


def _listening(pids: list[int]) -> list[str]:
    """Local addresses, as the kernel prints them, of these processes' listening sockets."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = str(entry.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    listen = "0A"
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path("/proc/net", table).read_text().splitlines()[1:]
    ]
    return [f[1].split(":")[0] for f in lines if f[3] == listen and f[9] in inodes]


@pytest.mark.system
def test_two_nodes_meet_and_finish_together(agents: Agents) -> None:
    agents.prepare(devices=1, nodes=2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = [
        agents.start("finish", "--rendezvous", endpoint, "--node-rank", str(rank))
        for rank in range(2)
    ]
    assert [answer(node)["outcome"] for node in nodes] == ["finished", "finished"]
    (started,) = agents.events("attempt_started")
    assert sorted(worker["rank"] for worker in started["workers"]) == [0, 1]
    assert "sum 1 of 2" in agents.run.log(1, 1).read_text()
    for node in nodes:
        wait_until(lambda pid=node.pid: not session_pids(pid), timeout_s=20.0)  # type: ignore[misc]


@pytest.mark.system
def test_an_error_on_one_node_ends_the_other_with_its_message(agents: Agents) -> None:
    agents.prepare(devices=1, nodes=2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = [
        agents.start("bad_data_on_rank_1", "--rendezvous", endpoint, "--node-rank", str(rank))
        for rank in range(2)
    ]
    for node in nodes:
        end = answer(node)
        assert end["exit_code"] == 1 and "shard-3.bin is damaged" in end["message"]
    assert len(agents.events("worker_lost")) == 1


@pytest.mark.system
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_gone_is_named_by_who_is_left_and_has_an_exit_code_of_its_own(
    agents: Agents, lost: int
) -> None:
    agents.prepare(devices=1, nodes=2, max_restarts=0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = [
        agents.start("never_drain", "--rendezvous", endpoint, "--node-rank", str(rank))
        for rank in range(2)
    ]
    agents.wait_for_training()
    for pid in session_pids(nodes[lost].pid):
        os.kill(pid, signal.SIGKILL)
    end = answer(nodes[1 - lost])
    assert (end["outcome"], end["exit_code"]) == ("failed", LostNodeError.exit_code)
    assert "shardyard resume" in end["message"]
    (event,) = agents.events("node_lost")
    assert (event["node"], event["node_rank"]) == (socket.gethostname(), lost)
    assert event["cause"] and len(event["ranks"]) == 1
    assert not agents.events("worker_lost")  # its peers' broken connections are no news


@pytest.mark.system
def test_where_the_first_node_is_lost_another_serves_the_store_and_the_attempt_goes_on(
    agents: Agents,
) -> None:
    agents.prepare(devices=1, nodes=2, min_nodes=1, max_nodes=2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def come(rank: int) -> subprocess.Popen[str]:
        words = ["--store-moves", "--rendezvous", endpoint, "--node-rank", str(rank)]
        return agents.start("train_until_drained", *words)

    lost, left = come(0), come(1)
    agents.wait_for_training()
    for pid in session_pids(lost.pid):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: bool(agents.events("resized")))
    (moved,) = agents.events("store_moved")
    assert (moved["node_rank"], moved["node"]) == (1, socket.gethostname())
    assert [event["node_rank"] for event in agents.events("node_lost")] == [0]
    assert is_locked(agents.run.lease)

    late = come(2)  # finds the store where it is now
    wait_until(lambda: len(agents.events("resized")) == 2)
    late.terminate()
    assert [answer(node)["exit_code"] for node in (left, late)] == [143, 143]
    sizes = [(each["generation"], each["world_size"]) for each in agents.events("rendezvous")]
    assert sizes == [(0, 2), (1, 1), (2, 2)]
    assert len(agents.events("attempt_ended")) == 1


@pytest.mark.system
def test_a_node_that_is_only_cut_off_from_the_first_does_not_go_on_beside_it(
    agents: Agents,
) -> None:
    agents.prepare(devices=1, nodes=2, min_nodes=1, max_nodes=2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["--store-moves", "--rendezvous", endpoint, "--node-rank"]
    lost, left = (agents.start("train_until_drained", *words, str(rank)) for rank in range(2))
    agents.wait_for_training()
    # the lease of a first node that lives on is held, here by another process
    agents.run.lease.rename(agents.run.lease.with_name("old"))
    holder = Lease(agents.run.lease)
    (started,) = agents.events("rendezvous")
    worker = started["workers"][1]["pid"]
    for pid in session_pids(lost.pid):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{worker}").exists())
    left.terminate()  # it would look for a store for a minute
    assert answer(left)["exit_code"] == LostNodeError.exit_code
    holder.close()
    assert not agents.events("store_moved")
    # for the others it is the lost one, and it does not speak for the run
    assert not agents.events("node_lost") and not agents.events("attempt_ended")


@pytest.mark.system
def test_nodes_without_a_meeting_place_are_refused(agents: Agents) -> None:
    agents.prepare(nodes=2)
    end = answer(agents.start("finish"))
    assert end["exit_code"] == 2 and "--rendezvous HOST:PORT" in end["message"]


@pytest.mark.system
def test_a_node_that_joins_resizes_the_group_and_a_drain_of_one_drains_both(
    agents: Agents,
) -> None:
    agents.prepare(devices=1, nodes=1, min_nodes=1, max_nodes=2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    first = agents.start("train_until_drained", "--rendezvous", endpoint)
    agents.wait_for_training(ranks=1)
    second = agents.start("train_until_drained", "--rendezvous", endpoint, "--node-rank", "1")
    agents.wait_for_training(ranks=2)
    first.terminate()
    assert [answer(node)["exit_code"] for node in (first, second)] == [143, 143]
    (resized,) = agents.events("resized")
    assert (resized["world_size_before"], resized["world_size"]) == (1, 2)
    assert not agents.events("worker_lost")


@pytest.mark.system
@pytest.mark.parametrize(("outcome", "code"), [("finished", 0), ("failed", 1)])
def test_a_node_that_comes_when_all_is_over_ends_as_the_others_did(
    agents: Agents, outcome: str, code: int
) -> None:
    agents.prepare(devices=1, nodes=2, min_nodes=1, max_nodes=2)
    told = EventWriter(agents.run.events, attempt=1, generation=0)
    told.write("attempt_ended", outcome=outcome, reason="so it was", exit_code=code)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    late = agents.start("finish", "--rendezvous", endpoint, "--node-rank", "1")
    end = answer(late)  # nobody serves a store there: it would be waited for, 300 s and longer
    assert end["exit_code"] == code
    assert "without this node, which came later: so it was" in end["message"]
    assert len(agents.events("attempt_ended")) == 1


@pytest.mark.system
def test_nodes_that_come_within_the_interval_are_taken_in_together(agents: Agents) -> None:
    interval_s = 20.0  # in which two agents start, also on a busy machine
    agents.prepare(devices=1, min_nodes=1, max_nodes=4, join_interval_s=interval_s)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def come(rank: int) -> subprocess.Popen[str]:
        words = ["--rendezvous", endpoint, "--node-rank", str(rank)]
        return agents.start("train_until_drained", *words)

    nodes = [come(0)]
    agents.wait_for_training(ranks=1)
    nodes.append(come(1))  # none has come before: it does not wait
    wait_until(lambda: bool(agents.events("resized")))
    nodes += [come(2), come(3)]
    wait_until(lambda: len(agents.events("resized")) == 2)
    first, second = agents.events("resized")
    # counted from when nodes agreed; the event comes once all of their workers have started
    started_within_s = 2.0
    assert second["t"] - first["t"] >= interval_s - started_within_s
    assert [each["world_size"] for each in (first, second)] == [2, 4]
    nodes[0].terminate()
    assert [answer(node)["exit_code"] for node in nodes] == [143] * 4


@pytest.mark.slow
def test_a_run_that_could_begin_with_one_node_waits_for_its_second(agents: Agents) -> None:
    agents.prepare(devices=1, nodes=2, min_nodes=1, start_wait_s=120.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    first = agents.start("finish", "--rendezvous", endpoint)
    time.sleep(6.0)  # longer than the last call of torch's rendezvous
    second = agents.start("finish", "--rendezvous", endpoint, "--node-rank", "1")
    assert [answer(node)["outcome"] for node in (first, second)] == ["finished", "finished"]
    assert [event["world_size"] for event in agents.events("rendezvous")] == [2]
