"""What moves on a terminal: the bar of an attempt."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from shardyard.cli.progress import AttemptBar, fit
from shardyard.control.follow import follow
from shardyard.rundir.layout import RunDir
from tests.control.test_follow import write_short_run
from tests.elastic.agents import Agents

FACTS = ["loss 4.5", "2.05 K tokens/s", "500 ms/step", "1 min left", "eval 4.25 (step 3)"]


def test_a_terminal_gets_a_bar_with_step_loss_and_evaluation(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run-1")
    Agents(run, tmp_path).prepare()  # 3 steps
    write_short_run(run)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160)
    follow(run, 1, None, view_factory=lambda resolved: AttemptBar(console, resolved.steps))
    shown = out.getvalue()
    assert "3/3" in shown and "loss 4.5" in shown and "eval loss 4.25 (step 3)" in shown
    assert "checkpoint of step 3 is durable" in shown


@pytest.mark.parametrize(
    ("room", "kept"), [(80, [0, 1, 2, 3, 4]), (60, [0, 1, 3, 4]), (40, [0, 3, 4]), (20, [0, 3])]
)
def test_a_narrow_terminal_keeps_what_matters_most(room: int, kept: list[int]) -> None:
    assert fit(FACTS, room) == [FACTS[place] for place in kept]
