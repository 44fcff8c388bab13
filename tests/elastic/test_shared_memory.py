"""What a worker writes into the agent's memory is there when the worker is gone."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.elastic.shared_memory import AgentMemory, attach

WRITER = (
    "import os, signal; from shardyard.elastic.heartbeat import attach; "
    "attach('test_memory', 64)[3:8] = b'notes'; os.kill(os.getpid(), signal.SIGKILL)"
)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentMemory]:
    monkeypatch.setenv("SHARDYARD_MEMORY_TEST_MEMORY", "")  # removed again afterwards
    memory = AgentMemory.create("test_memory")
    assert memory is not None
    yield memory
    os.close(memory.descriptor)


@pytest.mark.heavy
def test_it_outlives_the_worker_that_wrote_it_and_leaves_no_name(memory: AgentMemory) -> None:
    assert memory.view() is None
    subprocess.run([sys.executable, "-c", WRITER], check=False)
    view = memory.view()
    assert view is not None and view[3:8] == b"notes" and len(view) == 64
    assert not list(Path("/dev/shm").glob("*test_memory*"))


def test_it_grows_and_never_shrinks(memory: AgentMemory) -> None:
    first, second, third = (attach("test_memory", size_bytes) for size_bytes in (64, 128, 64))
    assert first is not None and second is not None and third is not None
    second[100:102] = b"ab"
    third[0:1] = b"c"
    view = memory.view()
    assert view is not None and len(view) == 128 and (view[0:1], view[100:102]) == (b"c", b"ab")
    assert first[0:1] == b"c"


def test_a_process_without_an_agent_has_none() -> None:
    assert attach("of_nobody", 64) is None
