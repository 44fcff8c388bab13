"""Lines that count are those of a run that forgets what it lost, in any file order of starts."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

import shardyard
from shardyard.rundir.counted_lines import counted
from shardyard.rundir.jsonl import latest_evaluation, latest_steps, read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.rundir.state import read_state

Line = dict[str, Any]


class Run:
    """Writes lines as a run does, and forgets what a start has undone."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.events: list[Line] = []
        self.kept: list[Line] = []
        self.start = (0, -1)

    def begin(self, start: tuple[int, int], *, step: int) -> None:
        self.start = start
        self.kept = [line for line in self.kept if line["step"] <= step]
        if step:
            self._tell("checkpoint_loaded", step=step)
        self._tell("model_ready")

    def steps(self, first: int, last: int, *, evaluate_every: int = 5) -> None:
        attempt, generation = self.start
        for step in range(first, last + 1):
            self._add({"step": step, "loss": 1 / step, "attempt": attempt,
                       "generation": generation})  # fmt: skip
            if step % evaluate_every == 0:
                self.evaluate(step)

    def evaluate(self, step: int) -> None:
        self.kept = [line for line in self.kept if line["step"] != step or "eval" not in line]
        loss = 100 * self.start[0] + self.start[1] + 1 / step
        self._add({"step": step, "eval": {"loss": loss}})
        self._tell("evaluated", step=step, loss=loss)

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        self.kept.append(line)

    def _tell(self, kind: str, **fields: Any) -> None:
        attempt, generation = self.start
        self.events.append({"kind": kind, "attempt": attempt, "generation": generation, **fields})

    def write(self, folder: Path) -> RunDir:
        run = RunDir(folder / "r")
        run.path.mkdir(exist_ok=True)
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        run.events.write_text("".join(json.dumps(event) + "\n" for event in self.events))
        return run

    def assert_counted(self, folder: Path) -> None:
        """Every way of reading finds what the run has kept."""
        steps = [line for line in self.kept if "eval" not in line]
        evaluations = [line for line in self.kept if "eval" in line]
        found = counted(self.lines, self.events)
        assert list(found.steps) == steps
        assert list(found.evaluations) == evaluations
        assert len(found.steps) + len(found.lost) == sum("eval" not in line for line in self.lines)
        told = [each for each in self.events if each["kind"] == "evaluated" and found.counts(each)]
        assert {each["step"]: each["loss"] for each in told} == {
            line["step"]: line["eval"]["loss"] for line in evaluations
        }
        run = self.write(folder)
        assert read_steps(run.metrics) == steps
        assert read_evaluations(run.metrics) == evaluations
        assert list(latest_steps(run.metrics)) == steps[::-1]
        assert latest_evaluation(run.metrics) == (evaluations[-1] if evaluations else None)
        assert read_state(run).step == (steps[-1]["step"] if steps else None)


def test_steps_that_were_lost_and_never_repeated_do_not_count(tmp_path: Path) -> None:
    run = Run()
    run.begin((0, 0), step=0)
    run.steps(1, 33)
    run.begin((1, 0), step=20)
    run.assert_counted(tmp_path)  # before its first step
    run.steps(21, 24)
    run.assert_counted(tmp_path)  # before its first evaluation: the one of step 20 is the newest
    run.steps(25, 30)
    run.assert_counted(tmp_path)
    assert len(counted(run.lines, run.events).lost) == 13


def test_a_start_without_a_checkpoint_undoes_everything(tmp_path: Path) -> None:
    run = Run()
    run.begin((0, 0), step=0)
    run.steps(1, 12)
    run.begin((0, 1), step=0)
    run.assert_counted(tmp_path)
    run.steps(1, 3)
    run.assert_counted(tmp_path)


def test_an_evaluation_that_is_done_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    run = Run()
    run.begin((0, 0), step=0)
    run.steps(1, 22)
    run.begin((1, 0), step=20)
    run.evaluate(20)
    run.assert_counted(tmp_path)
    run.steps(21, 26)
    run.assert_counted(tmp_path)


@pytest.mark.parametrize("seed", range(20))
def test_any_history_of_losses_counts_as_the_run_that_went_through_it(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    run = Run()
    run.begin((0, 0), step=0)
    start, at = (0, 0), 0
    for _ in range(draw.randint(2, 9)):
        last = at + draw.randint(0, 12)
        run.steps(at + 1, last)
        run.assert_counted(tmp_path)
        at = draw.choice([0, last, draw.randint(0, last), max(0, last - 3)])
        start = draw.choice([(start[0], start[1] + 1), (start[0] + 1, 0)])
        run.begin(start, step=at)
        run.assert_counted(tmp_path)


def test_a_file_with_starts_in_another_order_counts_the_same() -> None:
    run = Run()
    run.begin((0, 0), step=0)
    run.steps(1, 12)
    run.begin((1, 0), step=10)
    run.steps(11, 14)
    found = counted(run.lines[14:] + run.lines[:14], run.events[::-1])
    assert [line["step"] for line in found.steps] == list(range(1, 15))
    assert found.steps[10]["attempt"] == 1 and [line["step"] for line in found.lost] == [11, 12]


def test_lines_of_one_start_may_come_in_portions_of_its_log() -> None:
    run = Run()
    run.begin((0, 0), step=0)
    run.steps(1, 12)
    found = counted(run.lines[:3] + run.lines[8:] + run.lines[3:8], run.events)
    assert [line["step"] for line in found.steps] == list(range(1, 13)) and not found.lost
    assert [line["step"] for line in found.evaluations] == [5, 10]


def test_lines_alone_say_what_was_lost_once_a_later_start_has_one() -> None:
    run = Run()
    run.begin((0, 0), step=0)
    run.steps(1, 12)
    run.begin((1, 0), step=10)
    run.steps(11, 11)
    assert [line["step"] for line in counted(run.lines).steps] == list(range(1, 12))


READS_ALL = {
    "rundir/jsonl.py", "report/run_data.py", "report/serve/curves.py",  # by counted_lines
    "observe/exporter.py", "elastic/restart_budget.py",  # whether anything is new
    "launchers/log_markers.py", "transfer/merge_jsonl.py",  # copies
    "drill/case_state.py",  # waits for a step
}  # fmt: skip
"""Files that look at lines of metrics.jsonl whether they count or not."""


def test_whatever_else_reads_metrics_reads_the_lines_that_count() -> None:
    package = Path(shardyard.__file__).parent
    reads = re.compile(r"read_lines(_backwards)?\([^)]*metrics")
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if reads.search(path.read_text())
    }
    assert found <= READS_ALL
