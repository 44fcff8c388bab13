"""Workers: all tasks are done, errors come back, a killed worker is no hang."""

import os
import signal
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path

import pytest

from shardyard.data.workers import Task, run_tasks
from shardyard.errors import DataError, StorageError


@dataclass(frozen=True)
class Write:
    path: Path

    def __call__(self) -> None:
        self.path.write_text(str(os.getpid()))


@dataclass(frozen=True)
class Fail:
    def __call__(self) -> None:
        raise StorageError("no room")


@dataclass(frozen=True)
class Die:
    def __call__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_every_task_is_done_once(tmp_path: Path, workers: int) -> None:
    tasks: list[Task] = [Write(tmp_path / str(number)) for number in range(5)]
    done: list[Task] = []
    run_tasks(tasks, workers=min(workers, 3), on_done=done.append)
    assert sorted(done, key=tasks.index) == tasks
    pids = {int((tmp_path / str(number)).read_text()) for number in range(5)}
    assert (os.getpid() in pids) == (workers == 1)
    assert active_children() == []


def test_no_task_needs_no_worker() -> None:
    run_tasks([], workers=2, on_done=lambda _: None)


def test_an_error_of_a_task_comes_back_as_it_is() -> None:
    with pytest.raises(StorageError, match="no room"):
        run_tasks([Fail(), Fail()], workers=2, on_done=lambda _: None)
    assert active_children() == []


def test_a_killed_worker_is_named_and_says_what_to_do() -> None:
    message = r"worker prepare-\d was killed by SIGKILL.*memory.*smaller data\.workers"
    with pytest.raises(DataError, match=message):
        run_tasks([Die(), Die()], workers=2, on_done=lambda _: None)
    assert active_children() == []
