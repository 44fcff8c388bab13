"""How the nodes of a job learn from node 0 which attempt they are in."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardyard.errors import LostNodeError, RequestError, ShardyardError
from shardyard.io.polling import wait_for
from shardyard.node.handshake import Session, SessionEnd
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "r")


@contextmanager
def waiting(run: RunDir) -> Iterator[list[int | SessionEnd]]:
    """A node that waits in a thread; what it heard."""
    heard: list[int | SessionEnd] = []
    thread = threading.Thread(target=lambda: heard.append(Session(run, "s").wait(log=print)))
    thread.start()
    time.sleep(0.2)
    yield heard
    thread.join(timeout=20)
    assert heard


def test_a_node_that_waits_hears_the_attempt(run: RunDir) -> None:
    with waiting(run) as heard, Session(run, "s").announced(3):
        while not heard:
            time.sleep(0.05)
    assert heard == [3]


def test_a_node_that_comes_late_joins_too(run: RunDir) -> None:
    with Session(run, "s").announced(2):
        assert Session(run, "s").wait(log=print) == 2


def test_the_word_of_a_node_0_that_is_gone_is_not_taken(run: RunDir) -> None:
    path = run.path / "sessions" / "s.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"attempt": 1, "beat": 7}))
    with waiting(run) as heard:
        time.sleep(1.0)
        assert heard == []
        Session(run, "s").withdraw()
        Session(run, "s").withdraw()  # nothing is left to take back
        with Session(run, "s").announced(2):
            while not heard:
                time.sleep(0.05)
    assert heard == [2]


@pytest.mark.heavy
def test_a_node_0_that_prepares_is_waited_for_as_long_as_it_lives(run: RunDir) -> None:
    def wait() -> int | SessionEnd:
        return Session(run, "s").wait(log=print, give_up_after_s=0.1, believe_end_after_s=60.0)

    with ThreadPoolExecutor() as pool:
        with Session(run, "s").preparing():
            wait_for(run.session("s").is_file, every_s=0.01)
            heard = pool.submit(wait)
            time.sleep(1.0)
            assert not heard.done()
        with Session(run, "s").announced(4):
            assert heard.result() == 4


def test_a_node_0_that_was_lost_while_it_prepared_is_not_waited_for(run: RunDir) -> None:
    with Session(run, "s").preparing():
        wait_for(run.session("s").is_file, every_s=0.01)
    with pytest.raises(
        LostNodeError, match=r"no sign of life for 10 ms in .*s\.json, while it prep"
    ):
        Session(run, "s").wait(log=print, believe_end_after_s=0.01)


def test_a_node_that_comes_to_a_run_that_trains_need_not_wait_for_a_beat(run: RunDir) -> None:
    path = run.path / "sessions" / "s.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"attempt": 4, "beat": 7, "begins": True}))
    with pytest.raises(LostNodeError):  # whoever said it may be gone
        Session(run, "s").wait(log=print, give_up_after_s=0.1)
    lease = Lease(run.lease)
    assert Session(run, "s").wait(log=print, give_up_after_s=0.1) == 4
    lease.close()


def test_the_end_is_told_with_its_exit_code(run: RunDir) -> None:
    with waiting(run) as heard:
        Session(run, "s").end("the text is empty", 2)
    assert heard == [SessionEnd("the text is empty", 2)]


def test_a_folder_that_vanished_is_not_made_anew_to_tell_the_end(run: RunDir) -> None:
    session = Session(run, "s")
    with session.announced(0):
        shutil.rmtree(run.path)
    session.end("the folder is gone", 1)
    assert not run.path.exists()


def test_an_end_that_is_left_over_is_believed_late(run: RunDir) -> None:
    Session(run, "s").end("finished", 0)
    with waiting(run) as heard:
        time.sleep(0.7)
        assert heard == []
        with Session(run, "s").announced(1):
            while not heard:
                time.sleep(0.05)
    assert heard == [1]
    Session(run, "s").end("finished", 0)
    word = Session(run, "s").wait(log=print, believe_end_after_s=0.3)
    assert word == SessionEnd("finished", 0)


def test_the_end_of_a_finished_run_is_believed_at_once(run: RunDir) -> None:
    Session(run, "s").end("finished", 0, is_over=True)
    assert Session(run, "s").wait(log=print) == SessionEnd("finished", 0)


def test_a_node_says_that_it_waits_and_gives_up_with_what_to_look_at(run: RunDir) -> None:
    said: list[str] = []
    with pytest.raises(ShardyardError) as caught:
        Session(run, "s").wait(log=said.append, log_every_s=0.4, give_up_after_s=0.9)
    assert said and said[0].startswith("waiting for node 0")
    assert "node 0 wrote no" in str(caught.value) and "s.json for 900 ms" in str(caught.value)
    assert "launch.run_dir" in str(caught.value)


def test_sessions_of_other_names_are_not_heard(run: RunDir) -> None:
    Session(run, "other").end("over", 0)
    with waiting(run) as heard:
        time.sleep(0.7)
        assert heard == []
        Session(run, "s").end("over", 1)
    assert heard == [SessionEnd("over", 1)]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 129, "a b"])
def test_a_name_that_is_no_file_name_is_refused(run: RunDir, name: str) -> None:
    with pytest.raises(RequestError, match="cannot be a file name"):
        Session(run, name)


def test_a_node_that_is_ready_begins_when_node_0_says_so(run: RunDir) -> None:
    node = Session(run, "s")
    with Session(run, "s").announced(3) as begin:
        with pytest.raises(LostNodeError, match="gave no sign of life for 300 ms"):
            node.wait_to_begin(3, lost_after_s=0.3)  # it has not said so, and beats every 2 s
        begin()
        assert node.wait_to_begin(3) is None
        with pytest.raises(LostNodeError, match="is in attempt 3, while this node got ready for"):
            node.wait_to_begin(2)
    Session(run, "s").end("a file differs", 2)
    assert node.wait_to_begin(3) == SessionEnd("a file differs", 2)
