"""Who is blamed for a hang, and with what words; how long is too long; what a dump says."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shardyard.config.schema.recipe import Elastic
from shardyard.elastic.hang_watch import (
    Activity,
    Budgets,
    HangWatch,
    RankStatus,
    culprits,
    waits_in,
)
from shardyard.elastic.heartbeat import HeartbeatRecord
from shardyard.elastic.process_inspection import Frame, ProcessState, main_stack
from shardyard.train.hooks import WorkerPhase


def look(
    rank: int, doing: Activity, *, overdue: bool = True, long_overdue: bool = False
) -> RankStatus:
    is_waiting = doing is Activity.WAITING
    return RankStatus(
        rank=rank, node=f"n{rank}", pid=100 + rank, step=7, phase="step", quiet_s=4.0,
        is_overdue=overdue, is_long_overdue=long_overdue, doing=doing, where="work (a.py:1)",
        collective="all_reduce" if is_waiting else None,
    )  # fmt: skip


WAITING = look(0, Activity.WAITING)


@pytest.mark.parametrize(
    ("doing", "reason"),
    [
        (Activity.STOPPED, "its process is stopped, as by SIGSTOP"),
        (Activity.STORAGE, "it waits for storage or for a device's driver, and hears no signal"),
        (Activity.COMPUTING, "it computes in work (a.py:1), in no collective"),
        (Activity.STARVED, "it gets no processor: too many processes want one"),
        (Activity.SLEEPING, "it sleeps or waits in work (a.py:1), in no collective"),
    ],
)
def test_the_rank_that_is_in_no_collective_is_blamed(doing: Activity, reason: str) -> None:
    (hang,) = culprits([WAITING, look(1, doing), look(2, Activity.WAITING)])
    assert (hang.rank, hang.node, hang.collective) == (1, "n1", "all_reduce")
    assert hang.reason == f"{reason}; 2 other ranks wait for it in all_reduce"
    assert hang.cause == f"hung for 4.0 s in step 7, step: {hang.reason}"
    assert hang.event()["seconds"] == 4.0


def test_nobody_is_blamed_while_one_rank_may_be_right() -> None:
    assert culprits([WAITING, look(1, Activity.COMPUTING, overdue=False)]) == []


def test_a_stopped_rank_is_blamed_whatever_the_others_do() -> None:
    busy = look(0, Activity.COMPUTING, overdue=False)
    (hang,) = culprits([busy, look(1, Activity.STOPPED)])
    assert (hang.rank, hang.collective) == (1, None)
    assert culprits([busy, look(1, Activity.STOPPED, overdue=False)]) == []


def test_a_long_step_of_all_ranks_is_no_hang_for_long() -> None:
    busy = [look(rank, Activity.COMPUTING) for rank in range(2)]
    assert culprits(busy) == []
    assert [hang.rank for hang in culprits([replace(b, is_long_overdue=True) for b in busy])] == [
        0, 1,
    ]  # fmt: skip


def test_where_all_wait_for_each_other_none_is_blamed_and_the_network_is_named() -> None:
    waiting = [look(rank, Activity.WAITING) for rank in (1, 0)]
    assert culprits(waiting) == []
    (hang,) = culprits([replace(each, is_long_overdue=True) for each in waiting])
    assert (hang.rank, hang.node) == (None, "n0")
    assert hang.reason == (
        "every rank waits for others in all_reduce: a broken network, or ranks that call "
        "different collectives"
    )


DUMP = """Thread 0x1 (most recent call first):
  File "/x/threading.py", line 320 in wait

Current thread 0x2 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 3 in all_gather
  File "/x/torch/distributed/c10d_logger.py", line 5 in wrapper
  File "/x/mine.py", line 9 in <lambda>

Extension modules: numpy
"""


def test_the_main_thread_is_read_out_of_a_dump() -> None:
    stack = main_stack(DUMP)
    assert stack[0] == Frame("/x/torch/distributed/distributed_c10d.py", 3, "all_gather")
    assert len(stack) == 3 and waits_in(stack) == "all_gather"
    assert waits_in(stack[2:]) is None and waits_in([]) is None
    assert main_stack(DUMP.partition("Current")[0]) == []


def test_a_rank_that_reads_a_step_from_the_device_waits_for_others() -> None:
    assert waits_in([Frame("/x/shardyard/train/step.py", 9, "read")]) == "read"
    assert waits_in([Frame("/x/shardyard/train/step.py", 9, "run")]) is None


class Node:
    """Two ranks whose notes and states a test sets, and a clock that it moves."""

    def __init__(self, *, compiles: bool = False, slow_s: float = 48.0) -> None:
        elastic = Elastic(hang_min_s=3.5, hang_slow_s=slow_s)
        budgets = Budgets.of(elastic, compiles=compiles)
        assert budgets is not None
        self.notes = [
            HeartbeatRecord(
                pid=pid, step=1, phase=WorkerPhase.STEP, collectives_started=1, collectives_ended=1,
                step_ns=0, compute_ns=0, save_ns=0, moved_ns=1,
            )
            for pid in (100, 101)
        ]  # fmt: skip
        self.letters, self.cpu_s, self.now_s = ["S", "S"], [0.0, 0.0], 0.0
        self.watch = HangWatch(
            budgets, read=lambda: self.notes, pids=(100, 101), state_of=self._state_of
        )
        self.look()

    def _state_of(self, pid: int) -> ProcessState:
        return ProcessState(self.letters[pid - 100], self.cpu_s[pid - 100])

    def change(self, ranks: Sequence[int] = (0, 1), **notes: Any) -> None:
        for rank in ranks:
            moved_ns = self.notes[rank].moved_ns + 1
            self.notes[rank] = replace(self.notes[rank], moved_ns=moved_ns, **notes)

    def learn(self, step_s: float) -> None:
        """Both take some steps, and then wait in a collective and compute."""
        for step in range(1, 9):
            self.change(step=step, step_ns=int(step_s * 1e9) + step)
            self.look()
        self.change([0], collectives_started=2)
        self.look()

    def look(self) -> None:
        self.watch.poll(self.now_s)

    def pass_time(self, seconds: float, *, cpu: float = 0.0) -> None:
        """Look ten times a second; rank 1 has this share of a processor."""
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            self.cpu_s[1] += 0.1 * cpu
            self.look()


def test_eight_usual_steps_are_too_long_and_3_5_seconds_at_least() -> None:
    quick, slow = Node(), Node()
    quick.learn(0.1)
    slow.learn(1.0)
    for node, budget_s in ((quick, 3.5), (slow, 8.0)):
        node.pass_time(budget_s - 0.2)
        assert not node.watch.is_suspicious()
        node.pass_time(0.4)
        assert node.watch.is_suspicious()


def test_a_rank_that_moves_excuses_all() -> None:
    node = Node()
    node.learn(0.1)
    for _ in range(4):
        node.pass_time(2.0)
        node.change([1])
        node.look()
    assert not node.watch.is_suspicious()


@pytest.mark.parametrize(
    ("phase", "letter", "cpu", "compiles"),
    [
        (WorkerPhase.SAVE, "S", 0.0, False),  # the first
        (WorkerPhase.WRITE, "S", 0.0, False),
        (WorkerPhase.DATA, "S", 0.0, False),
        (WorkerPhase.EVALUATE, "S", 1.0, False),  # the first: nobody knows how long it takes
        (WorkerPhase.STEP, "D", 0.0, False),
        (WorkerPhase.STEP, "R", 0.0, False),  # no processor for it
        (WorkerPhase.STEP, "R", 1.0, True),  # compiles again, perhaps
    ],
)
def test_what_is_no_usual_step_may_take_long(
    phase: WorkerPhase, letter: str, cpu: float, compiles: bool
) -> None:
    node = Node(compiles=compiles)
    node.learn(0.1)
    node.change([1], phase=phase)
    node.letters[1] = letter
    node.look()
    node.pass_time(47.0, cpu=cpu)
    assert not node.watch.is_suspicious()
    node.pass_time(2.0, cpu=cpu)
    assert node.watch.is_suspicious()


@pytest.mark.parametrize(("longest_s", "budget_s"), [(0.2, 90.0), (20.0, 100.0), (60.0, 240.0)])
def test_a_later_save_may_take_five_times_the_longest_so_far_and_90_seconds_at_least(
    longest_s: float, budget_s: float
) -> None:
    node = Node(slow_s=240.0)
    node.learn(0.1)
    node.change([1], phase=WorkerPhase.SAVE, save_ns=int(longest_s * 1e9))
    node.look()
    node.pass_time(budget_s - 0.2)
    assert not node.watch.is_suspicious()
    node.pass_time(0.4)
    assert node.watch.is_suspicious()


def test_one_rank_s_saves_say_nothing_of_another_s_first() -> None:
    node = Node(slow_s=240.0)
    node.learn(0.1)
    node.change([0], save_ns=10**9, collectives_started=3)
    node.change([1], phase=WorkerPhase.SAVE)
    node.look()
    node.pass_time(239.0)
    assert not node.watch.is_suspicious()


def test_a_first_step_may_take_long_and_a_stopped_rank_is_never_right() -> None:
    node = Node()
    node.change(phase=WorkerPhase.FIRST_STEP)
    node.pass_time(40.0)
    assert not node.watch.is_suspicious()
    node.letters[1] = "T"
    node.look()
    assert node.watch.is_suspicious()
    assert [each.doing for each in node.watch.statuses((4, 5), "n0", {})] == [
        Activity.SLEEPING, Activity.STOPPED,
    ]  # fmt: skip


def test_a_later_evaluation_may_take_three_times_the_longest_before() -> None:
    node = Node()
    node.learn(0.1)
    node.change(phase=WorkerPhase.EVALUATE)
    node.look()
    node.pass_time(4.0)
    node.change(phase=WorkerPhase.STEP)
    node.look()
    node.change(phase=WorkerPhase.EVALUATE)
    node.look()
    node.pass_time(11.0)
    assert not node.watch.is_suspicious()
    node.pass_time(2.0)
    assert node.watch.is_suspicious()


def test_time_in_which_the_node_stood_still_is_not_counted() -> None:
    node = Node()
    node.learn(0.1)
    node.now_s += 3600.0  # as where a scheduler suspends all processes of a job
    node.look()
    assert not node.watch.is_suspicious()


def test_a_stack_says_that_a_rank_waits_which_could_not_note_it() -> None:
    node = Node()
    node.learn(0.1)
    node.pass_time(4.0)
    plain, told = node.watch.statuses((0, 1), "n0", {})[1], node.watch.statuses(
        (0, 1), "n0", {101: main_stack(DUMP)}
    )[1]  # fmt: skip
    assert (plain.doing, plain.collective) == (Activity.SLEEPING, None)
    assert (told.doing, told.collective) == (Activity.WAITING, "all_gather")


def test_a_rank_that_has_noted_nothing_is_not_judged() -> None:
    node = Node()
    node.learn(0.1)
    node.change([1], pid=7)  # of a process before it
    node.look()
    node.pass_time(60.0)
    assert not node.watch.is_suspicious()


def test_null_switches_it_off() -> None:
    assert Budgets.of(Elastic(hang_steps=None), compiles=False) is None
