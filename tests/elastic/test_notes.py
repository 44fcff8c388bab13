"""What ranks note in the agent's memory: read back as written, and cheap."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardyard.elastic import heartbeat
from shardyard.elastic.heartbeat import (
    STEPS_KEPT,
    SharedHeartbeat,
    StepRecord,
    clear_heartbeats,
    own_heartbeat,
    read_heartbeats,
    read_steps,
)
from shardyard.elastic.shared_memory import NOTES, AgentMemory
from shardyard.observe.trace import COLLECTIVE_FUNCTIONS
from shardyard.train.hooks import Heartbeat, WorkerPhase


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentMemory]:
    monkeypatch.setenv("SHARDYARD_MEMORY_NOTES", "")  # removed again afterwards
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    own_heartbeat.cache_clear()
    memory = AgentMemory.create(NOTES)
    assert memory is not None
    yield memory
    own_heartbeat.cache_clear()
    os.close(memory.descriptor)


@pytest.fixture
def public_functions() -> Iterator[None]:
    """Those of torch.distributed, put back afterwards."""
    before = {name: getattr(dist, name) for name in COLLECTIVE_FUNCTIONS if hasattr(dist, name)}
    yield
    for name, function in before.items():
        setattr(dist, name, function)


@pytest.fixture
def mine(memory: AgentMemory, public_functions: None) -> SharedHeartbeat:  # noqa: ARG001
    written = own_heartbeat()
    assert isinstance(written, SharedHeartbeat)
    return written


def test_what_one_rank_notes_the_agent_reads_and_no_other_record_changes(
    memory: AgentMemory, mine: SharedHeartbeat
) -> None:
    mine.begin_step(7, is_first=False)
    mine.end_collective(mine.begin_collective())
    mine.begin_collective()
    other, read = read_heartbeats(memory, 2)
    assert (other.pid, other.moved_ns) == (0, 0)
    assert (read.pid, read.step, read.phase) == (os.getpid(), 7, WorkerPhase.STEP)
    assert (read.collectives_started, read.collectives_ended) == (2, 1) and read.is_in_collective
    clear_heartbeats(memory)
    assert read_heartbeats(memory, 2)[1] == other


def test_nobody_has_noted_anything_at_first(memory: AgentMemory) -> None:
    assert read_heartbeats(memory, 2) == read_heartbeats(None, 2) == []


def test_a_step_is_its_own_work_and_its_waits(memory: AgentMemory, mine: SharedHeartbeat) -> None:
    mine.begin_step(1, is_first=True)
    assert read_heartbeats(memory, 2)[1].phase is WorkerPhase.FIRST_STEP
    mine.end_step()
    assert read_heartbeats(memory, 2)[1].step_ns == 0  # unlike the others
    mine.begin_step(2, is_first=False)
    mine.end_collective(mine.begin_collective() - 10**9)  # as if it had waited for a second
    mine.end_step()
    read = read_heartbeats(memory, 2)[1]
    assert read.step_ns - read.compute_ns >= 10**9


def test_the_newest_steps_are_kept_without_waits_for_others_and_for_samples(
    memory: AgentMemory, mine: SharedHeartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = [0]
    monkeypatch.setattr("shardyard.elastic.heartbeat.time.monotonic_ns", lambda: now_ns[0])
    group = heartbeat._number_of_ranks([2, 4, 6])
    for step in range(1, STEPS_KEPT + 3):
        mine.begin_step(step, is_first=step == 1)
        with mine.during(WorkerPhase.DATA):
            now_ns[0] += 10
        now_ns[0] += 100 + step
        for number, took_ns in ((0, 1000), (group, 2000), (group, 3000)):
            began_ns = mine.begin_collective()
            now_ns[0] += took_ns
            mine.end_collective(began_ns, number)
        mine.end_step()
    nothing, steps = read_steps(memory, 2, after=[0, 0])
    assert nothing == [] and [each.step for each in steps] == list(range(3, STEPS_KEPT + 3))
    assert steps[0] == StepRecord(
        step=3, compute_ns=103, data_ns=10, exchange_ns={"2-6-3": 5000}
    )  # fmt: skip
    newest = read_steps(memory, 2, after=[0, STEPS_KEPT + 1])[1]
    assert [each.step for each in newest] == [STEPS_KEPT + 2]
    clear_heartbeats(memory)
    assert read_steps(memory, 2, after=[0, 0]) == [[], []]


def test_a_step_that_is_being_written_is_not_read(
    memory: AgentMemory, mine: SharedHeartbeat
) -> None:
    for step in (1, 2, 3):
        mine.begin_step(step, is_first=step == 1)
        mine.end_step()
    mine._steps[3 % STEPS_KEPT * heartbeat._STEP_NUMBERS] = 0  # as before its last store
    assert [each.step for each in read_steps(memory, 2, after=[0, 0])[1]] == [2]


@pytest.mark.parametrize("ranks", [[0], [1, 2, 4], [], [0, 2**21]])
def test_a_group_of_one_or_of_uneven_ranks_has_no_number(ranks: list[int]) -> None:
    assert heartbeat._number_of_ranks(ranks) == 0


def test_a_phase_ends_in_the_one_before_also_by_an_error(
    memory: AgentMemory, mine: SharedHeartbeat
) -> None:
    mine.enter(WorkerPhase.STEP)
    with pytest.raises(ZeroDivisionError), mine.during(WorkerPhase.EVALUATE):
        assert read_heartbeats(memory, 2)[1].phase is WorkerPhase.EVALUATE
        raise ZeroDivisionError
    assert read_heartbeats(memory, 2)[1].phase is WorkerPhase.STEP


def test_collectives_of_torch_are_counted(
    memory: AgentMemory, mine: SharedHeartbeat, tmp_path: Path
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/m", rank=0, world_size=1)
    try:
        dist.all_reduce(torch.zeros(1))
        facts: list[Any] = [None]
        dist.all_gather_object(facts, "fact")
    finally:
        dist.destroy_process_group()
    assert (facts, mine) == (["fact"], own_heartbeat())
    read = read_heartbeats(memory, 2)[1]
    assert (read.collectives_started, read.collectives_ended) == (2, 2)


def test_outside_an_agent_nothing_is_noted_and_torch_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own_heartbeat.cache_clear()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    before = dist.all_reduce
    assert type(own_heartbeat()) is Heartbeat and dist.all_reduce is before
    own_heartbeat.cache_clear()


def test_the_longest_copy_of_the_state_is_noted_and_no_other_phase(
    memory: AgentMemory, mine: SharedHeartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = [0]
    monkeypatch.setattr("shardyard.elastic.heartbeat.time.monotonic_ns", lambda: now_ns[0])
    stays = (
        (WorkerPhase.SAVE, 30),
        (WorkerPhase.SAVE, 20),
        (WorkerPhase.WRITE, 90),
        (WorkerPhase.EVALUATE, 90),
    )
    for phase, took_ns in stays:
        with mine.during(phase):
            now_ns[0] += took_ns
    assert read_heartbeats(memory, 2)[1].save_ns == 30
