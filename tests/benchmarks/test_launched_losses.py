"""How the losses of several launchers are judged."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.launched_losses import BAR, PLACES, judge, make_text, table
from shardyard.data.sources import list_files


def part(*losses: float) -> dict[str, Any]:
    return {"losses": list(losses)}


def test_the_greatest_difference_of_any_two_is_told() -> None:
    result = judge({"train": part(2.0, 1.0), "local": part(2.0, 1.0), "slurm": part(2.0, 1.5)})
    assert result["greatest_relative_difference"] == pytest.approx(1 / 3)
    assert result["differences"]["train, local"] == 0.0
    assert not result["is_met"] and not result["is_complete"]
    assert "| local, slurm | 3.3e-01 |" in table(result)


def test_all_launchers_within_the_bar_meet_it() -> None:
    result = judge({name: part(4.0, 4.0 * (1 + BAR / 3)) for name in PLACES})
    assert result["is_met"] and result["is_complete"]


def test_a_run_that_is_shorter_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        judge({"train": part(2.0, 1.0), "local": part(2.0)})


def test_the_copy_of_the_text_is_the_same_corpus(tmp_path: Path) -> None:
    folder = make_text(tmp_path / "text")
    copied = [(file.name, file.size_bytes) for file in list_files(str(folder))]
    assert copied == [(file.name, file.size_bytes) for file in list_files("python-stdlib")]
