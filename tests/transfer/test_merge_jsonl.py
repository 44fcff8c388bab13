"""Two homes of a run have one life: every line once, the newest of a step last."""

from pathlib import Path
from typing import Any

from shardyard.launchers.log_markers import mark, rebuild
from shardyard.rundir.jsonl import LineWriter, read_lines, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.transfer.merge_jsonl import merge_lines


def step(number: int, loss: float) -> dict[str, Any]:
    return {"step": number, "loss": loss}


def event(t: float, kind: str) -> dict[str, Any]:
    return {"t": t, "kind": kind, "attempt": 0, "generation": 0}


def write(path: Path, *lines: dict[str, Any]) -> None:
    writer = LineWriter(path)
    for line in lines:
        writer.append(line)
    writer.close()


def test_events_of_both_sides_stand_once_in_the_order_of_their_time(tmp_path: Path) -> None:
    here, there = tmp_path / "events.jsonl", tmp_path / "brought"
    write(here, event(1, "run_started"), event(3, "first_step"))
    write(there, event(2, "rendezvous"), event(3, "first_step"), event(4, "run_finished"))
    assert merge_lines(there, here) == 2
    assert [line["t"] for line in read_lines(here)] == [1, 2, 3, 4]
    before = here.stat().st_mtime_ns
    assert merge_lines(there, here) == 0
    assert here.stat().st_mtime_ns == before


def test_of_a_steps_lines_that_of_the_nodes_stands(tmp_path: Path) -> None:
    here, there = tmp_path / "metrics.jsonl", tmp_path / "brought"
    write(here, step(1, 5.0), step(2, 4.0))
    write(there, step(1, 5.0), step(2, 4.0), step(2, 4.5), step(3, 3.0))
    with here.open("a") as file:
        file.write('{"step": 2, "loss": 9.0}\n{"torn')
    merge_lines(there, here)
    assert [line["loss"] for line in read_steps(here)] == [5.0, 4.5, 3.0]


def test_what_the_log_told_already_comes_no_second_time_in_either_order(tmp_path: Path) -> None:
    run, there = RunDir(tmp_path / "run"), tmp_path / "brought"
    lines = [step(1, 5.0), step(2, 4.0), step(3, 3.0)]
    told = [mark("metrics", line) for line in lines]
    write(there, *lines)
    rebuild(told[:2], run.path)
    merge_lines(there, run.metrics)
    assert rebuild(told, run.path) == 0
    assert list(read_lines(run.metrics)) == lines


def test_an_evaluation_that_was_done_again_with_the_same_bits_is_brought(tmp_path: Path) -> None:
    here, there = tmp_path / "metrics.jsonl", tmp_path / "brought"
    lost = {**step(1, 5.0), "attempt": 0}
    again = {**step(1, 5.0), "attempt": 1}
    judged = {"step": 1, "eval": {"loss": 4.0}}
    write(here, lost, judged)
    write(there, lost, judged, again, judged)
    assert merge_lines(there, here) == 2
    assert list(read_lines(here)) == [lost, judged, again, judged]
    assert merge_lines(there, here) == 0
