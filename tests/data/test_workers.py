"""Workers: all tasks are done, errors come back, a killed worker is no hang."""

import os
import signal
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path

import pytest

from shardyard.data.workers import Task, run_tasks
from shardyard.errors import DataError, SourceError, StorageError


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


@pytest.mark.heavy
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


@pytest.mark.heavy
def test_an_error_of_a_task_comes_back_as_it_is() -> None:
    with pytest.raises(StorageError, match="no room"):
        run_tasks([Fail(), Fail()], workers=2, on_done=lambda _: None)
    assert active_children() == []


@dataclass(frozen=True)
class Panic(BaseException):
    """As the Rust libraries raise."""


@dataclass(frozen=True)
class Raise:
    error: BaseException

    def __str__(self) -> str:
        return "text.jsonl"

    def __call__(self) -> None:
        raise self.error


@pytest.mark.heavy
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            UnicodeEncodeError("utf-8", "\ud800", 0, 1, "why"),
            r"text\.jsonl: UnicodeEncodeError at ",
        ),
        (Panic(), r"text\.jsonl: Panic at test_workers\.py:\d+: .*a bug of shardyard: report it"),
        (RuntimeError("odd"), r"at test_workers\.py:\d+: odd\. Finished pieces are kept"),
        (MemoryError(), r"text\.jsonl: memory ran out\. .*with a smaller data\.workers"),
    ],
)
def test_what_nobody_thought_of_is_one_message_too(
    error: BaseException, message: str, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match=message) as told:
        run_tasks([Raise(error), Raise(error)], workers=workers, on_done=lambda _: None)
    assert "\n" not in str(told.value)
    assert "Traceback" not in capfd.readouterr().err
    assert active_children() == []


@pytest.mark.heavy
def test_an_error_keeps_its_exit_code_on_the_way_from_a_worker() -> None:
    tasks = [Raise(SourceError("a.jsonl:7: not JSON"))] * 2
    with pytest.raises(SourceError, match=r"a\.jsonl:7") as told:
        run_tasks(tasks, workers=2, on_done=lambda _: None)
    assert told.value.exit_code == 2


@pytest.mark.heavy
def test_a_killed_worker_is_named_and_says_what_to_do() -> None:
    message = r"worker prepare-\d was killed by SIGKILL.*memory.*smaller data\.workers"
    with pytest.raises(DataError, match=message):
        run_tasks([Die(), Die()], workers=2, on_done=lambda _: None)
    assert active_children() == []
