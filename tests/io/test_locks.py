"""Locks: one holder at a time, told or waited for, and given back when the file is closed."""

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardyard.io.files import close_locked, drop_lock, locked, missing_locks, take_lock


@contextmanager
def opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_lock_has_one_holder_until_it_is_closed(tmp_path: Path) -> None:
    with opened(tmp_path) as second:
        with opened(tmp_path) as first:
            assert take_lock(first) and not take_lock(second)
            assert not take_lock(second, is_shared=True)
        assert take_lock(second)


def test_several_share_a_lock_that_nobody_has_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as first, opened(tmp_path) as second, opened(tmp_path) as third:
        assert take_lock(first, is_shared=True) and take_lock(second, is_shared=True)
        assert not take_lock(third)


def test_the_second_is_told_once_and_begins_when_the_first_has_ended(tmp_path: Path) -> None:
    file, story = tmp_path / "lock", list[str]()
    told = threading.Event()

    def tell() -> None:
        story.append("waits")
        told.set()

    def second() -> None:
        with locked(file, waits=tell):
            story.append("second")

    thread = threading.Thread(target=second)
    with locked(file, waits=lambda: story.append("never")):
        thread.start()
        assert told.wait(10)
        story.append("first")
    thread.join(10)
    assert story == ["waits", "first", "second"]


def test_a_lock_is_given_back_where_its_block_fails(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with pytest.raises(KeyError), locked(file, waits=lambda: None):
        raise KeyError
    with opened(file) as descriptor:
        assert take_lock(descriptor)


def test_a_lock_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), locked(tmp_path / "none" / "lock", waits=lambda: None):
        pass


def _without_flock(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A file system that has no locks, as the kernel says it."""

    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_still_has_one_holder_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    _without_flock(monkeypatch, number)
    first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    assert take_lock(first) and not take_lock(second) and not take_lock(second, is_shared=True)
    close_locked(first)
    assert take_lock(second, is_shared=True)
    with opened(tmp_path) as third:
        assert take_lock(third, is_shared=True)
        drop_lock(third)
    close_locked(second)
    assert missing_locks(tmp_path) == os.strerror(number)


@pytest.mark.heavy
def test_without_locks_of_the_file_system_another_process_is_kept_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _without_flock(monkeypatch, errno.ENOSYS)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    assert take_lock(descriptor)
    assert not _taken_by_a_child(tmp_path)
    close_locked(descriptor)
    assert _taken_by_a_child(tmp_path)


def _taken_by_a_child(path: Path) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if take_lock(os.open(path, os.O_RDONLY)) else 1)
    return os.waitpid(child, 0)[1] == 0


def test_a_file_system_with_locks_is_not_complained_of(tmp_path: Path) -> None:
    assert missing_locks(tmp_path) is None
