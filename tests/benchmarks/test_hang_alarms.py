"""The benchmark of hangs runs, small; how soon they are noticed is no matter here."""

from pathlib import Path

import pytest

from benchmarks.hang_alarms import false_alarms, stopped_ranks
from benchmarks.real_run import write_corpus


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("model.compile=true",)])
def test_no_false_alarm_beside_evaluations_and_saves_and_a_stopped_rank_is_blamed(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    write_corpus(tmp_path / "text")
    small = ["data.seq_len=64", "checkpoint.every=10", "task.eval_every_steps=5", *settings]
    calm = false_alarms(tmp_path, steps=30, load=1.0, settings=small)
    assert (calm["exit_code"], calm["steps"], calm["losses"]) == (0, 30, [])
    assert calm["evaluations"] == 6 and calm["saves"] >= 3
    (stop,) = stopped_ranks(tmp_path, stops=1, seed=0, settings=small)
    assert stop["is_right"], stop["told"]
