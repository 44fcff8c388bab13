"""The benchmarks of killed workers: what they make of rows, and that they run and end, small."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kill_loop, recovery
from benchmarks.killed_run import schedule
from benchmarks.restart_phases import PHASES
from shardyard.drill.scene import TaggedProcesses
from shardyard.io.polling import wait_for


def ours(rank: int, seconds: float, **fields: Any) -> dict[str, Any]:
    """A kill of ours; all of its seconds are of the first step."""
    counts = {"parked_bytes": 0, "state_bytes": 2**20, "read_bytes": 0, "cached_bytes": 0}
    phases = dict.fromkeys(PHASES, 0.0) | {"first step": seconds}
    return {"rank": rank, **phases, "usual step": 0.1, **counts, **fields}


def theirs(rank: int, seconds: float | None, start: int = 1) -> dict[str, Any]:
    outcome = "hung" if seconds is None else "stepped"
    return {"rank": rank, "seconds": seconds, "outcome": outcome, "start_of_runs": start}


def test_no_phase_of_a_kill_is_lost_on_its_way_into_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kill(_folder: Path, _run: Any, _words: Any, many: int, rows: list[dict[str, Any]]) -> None:
        rows += [ours(0, 0.5, start=0.25) for _ in range(many)]

    monkeypatch.setattr(recovery, "kill_in_one_run", kill)
    monkeypatch.setattr(recovery, "write_corpus", lambda _folder: None)
    found = recovery.measure(["tiny"], kills=4, kills_a_start=2)
    assert recovery.table_of(found["kills"], None)["tiny"]["seconds"] == 0.75


def test_ranks_are_told_apart_and_a_hang_counts_with_the_time_that_was_waited() -> None:
    kills = {
        "tiny": [ours(0, 0.5), ours(1, 0.4), ours(0, 0.5), ours(1, 0.4)],
        "torchrun": [theirs(0, 20.0), theirs(1, 4.0), theirs(0, None), theirs(1, 6.0, start=2)],
    }
    table = recovery.table_of(kills, None)
    assert (table["tiny"]["rank_0_s"], table["tiny"]["another_s"]) == (0.5, 0.4)
    assert table["tiny"]["its_share"] == pytest.approx(0.35 / 0.45, abs=0.001)
    assert (table["torchrun"]["rank_0_s"], table["torchrun"]["another_s"]) == (70.0, 5.0)
    assert (table["torchrun"]["hung"], table["torchrun"]["starts"]) == (1, 2)
    assert table["torchrun beside tiny"] == {"rank_0": 140.0, "another": 12.5}
    assert recovery.judge(table) == {"tiny": True, "torchrun": True}


@pytest.mark.parametrize(
    ("seconds", "cached_bytes", "is_met"),
    [(0.9, 0, [True, True]), (1.2, 0, [False, True]), (0.9, 4096, [True, False])],
)
def test_much_state_may_cost_a_copy_and_a_fifth_and_no_read(
    seconds: float, cached_bytes: int, is_met: list[bool]
) -> None:
    kills = {"tiny": [ours(0, 0.5)], "large": [ours(0, seconds, cached_bytes=cached_bytes)]}
    found = recovery.judge(recovery.table_of(kills, {"warm_s": 0.5, "first_s": 2.0}))
    assert [found["large"], found["large reads no checkpoint"]] == is_met


def test_one_schedule_is_given_to_both() -> None:
    due = schedule(mtbf_s=20.0, for_s=2000.0, seed=1)
    assert (
        due
        == schedule(mtbf_s=20.0, for_s=2000.0, seed=1)
        != schedule(mtbf_s=20.0, for_s=2000.0, seed=2)
    )
    times = [each.after_s for each in due]
    assert times == sorted(times) and times[-1] < 2000.0 and 70 < len(due) < 140
    assert {each.among([7, 5]) for each in due} == {5, 7}
    assert [each.share < 0.5 for each in due] == [each.among([7, 5]) == 5 for each in due]


def test_steps_that_are_done_again_count_once_and_those_outside_of_the_kills_not() -> None:
    steps = [
        {"step": step, "t": float(t), "seconds": 1.0}
        for step, t in ((1, 1), (2, 2), (3, 3), (4, 4), (3, 12), (4, 13), (5, 14), (6, 25))
    ]
    assert (
        kill_loop.share_of(kill_loop.lives_of(steps, [2.5, 13.5, 22.5])) == 3 / 20
    )  # steps 3 to 5, once each
    assert kill_loop.share_of(kill_loop.lives_of(steps, [2.5])) is None


def test_the_bars_of_the_loop_hold_for_every_seed() -> None:
    def loop(measured: float, simulated: float, share: float | None) -> dict[str, Any]:
        drill = {"kills": [1, 2, 3], "measured": measured, "simulated": simulated, "restart_s": 1.0}
        torchrun = None
        if share is not None:
            torchrun = {"share": share, "kills": 2, "hung": 0, "starts": 1}
        return {"seed": 1, "ours": drill, "torchrun": torchrun}

    good, off, near = loop(0.8, 0.82, 0.5), loop(0.8, 0.84, 0.5), loop(0.8, 0.8, 0.65)
    rows = [kill_loop.row_of(each) for each in (good, off, near)]
    assert kill_loop.judge(rows[:1]) == {"simulated": True, "torchrun": True}
    assert kill_loop.judge(rows[:2]) == {"simulated": False, "torchrun": True}
    assert kill_loop.judge([rows[0], rows[2]]) == {"simulated": True, "torchrun": False}
    assert kill_loop.judge([kill_loop.row_of(loop(0.8, 0.8, None))]) == {"simulated": True}


@pytest.mark.system
def test_a_copy_is_taken_by_all_processes_at_once() -> None:
    found = recovery.copy_seconds(2**22, 2)
    assert found["bytes"] == 2**22 and 0 < found["warm_s"] < 5 and found["first_s"] > 0


@pytest.mark.system
@pytest.mark.slow
def test_kills_of_ours_and_of_torchrun_are_measured() -> None:
    found = recovery.measure(
        ("tiny", "large", "torchrun"), 2, 2, ["checkpoint.every=5"], large_blocks=1
    )
    assert not found["failures"]
    assert [row["rank"] for row in found["kills"]["torchrun"]] == [1, 0]
    table = recovery.table_of(found["kills"], found["copy"])
    assert table["large"]["cached_bytes"] == 0 and table["large"]["copy_s"] > 0
    assert table["large"]["state_mib"] > 50
    assert table["torchrun"]["kills"] == 2 and table["torchrun"]["seconds"] > 1
    assert table["torchrun beside tiny"]["rank_0"] > 1


@pytest.mark.slow
def test_with_a_compiler_too() -> None:
    found = recovery.measure(("compiled",), 2, 2, ["checkpoint.every=5"])
    assert not found["failures"]
    parked, not_parked = recovery.table_of(found["kills"], None).values()
    assert parked["first_step_beyond_usual_s"] < not_parked["first_step_beyond_usual_s"]


@pytest.mark.slow
def test_a_loop_of_kills_is_measured_beside_torchrun() -> None:
    found = kill_loop.measure(1, mtbf_s=3.0, for_s=40.0, every=5, with_torchrun=True)
    row = kill_loop.row_of(found)
    assert row["kills"] >= 3 and 0 < row["measured"] < 1 and 0 < row["simulated"] < 1
    assert found["torchrun"]["starts"] >= 1 and found["torchrun"]["lives"]


@pytest.fixture
def mark() -> Iterator[TaggedProcesses]:
    marked = TaggedProcesses("SHARDYARD_TEST_RECOVERY")
    yield marked
    marked.kill_all()


@pytest.mark.system
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("tiny", signal.SIGTERM),
        ("torchrun", signal.SIGKILL),
        pytest.param("tiny", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("torchrun", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_benchmark_that_is_ended_ends_what_it_started(
    kind: str, number: signal.Signals, mark: TaggedProcesses
) -> None:
    command = [sys.executable, "-m", "benchmarks.recovery", "--only", kind, "--kills", "50"]
    steps = {"tiny": "runs/*/metrics.jsonl", "torchrun": "torchrun/steps.jsonl"}[kind]
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as scratch:  # tmp_path is too long for a socket
        environment = {**os.environ, **mark.environment, "TMPDIR": scratch}
        process = subprocess.Popen(command, cwd=root, env=environment, start_new_session=True)
        found = partial(_any_of, Path(scratch), f"recovery-*/{steps}")
        assert wait_for(found, every_s=0.1, within_s=120.0)
        assert len(mark.pids()) >= 4
        process.send_signal(number)
        process.wait(timeout=60)
        assert mark.wait_for_end(60.0) == []
        is_tidy = not _any_of(Path(scratch), "recovery-*")
        assert is_tidy == (number is not signal.SIGKILL)


def _any_of(folder: Path, pattern: str) -> bool:
    return any(folder.glob(pattern))
