"""Locks: one holder at a time, told or waited for, and given back when the file is closed."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardyard.locks import locked, take_lock


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
