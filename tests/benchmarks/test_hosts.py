"""Hosts that come and go, and drains, are measured; how long they take is no matter here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import drain_times
from tests.mounts import needs_root

pytestmark = pytest.mark.slow

SMALL = ("model.preset=llama-tiny", "data.vocab_size=512", "data.seq_len=32")


def result_of(program: str, *words: str, out: Path) -> Any:
    command = [sys.executable, "-m", f"benchmarks.{program}", f"--out={out}", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert out.is_file(), done.stderr[-3000:]
    return json.loads(out.read_text())


@needs_root
@pytest.mark.parametrize("options", [(), ("--silently",)])
def test_a_lost_host_and_its_return_are_named_and_cost_no_more_than_one_copy(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    found = result_of("lost_node", "--tries=1", *options, out=tmp_path / "lost.json")
    assert (found["is_met"]["named"], found["is_met"]["lost_steps"]) == (True, True)
    assert next(each["host"] for each in found["tries"]) == "host-0"  # which served the store
    assert {each["lost"]["from"] for each in found["tries"]} == {"snapshot_restored"}


@needs_root
def test_a_run_goes_on_without_the_host_whose_ranks_die_at_each_start(tmp_path: Path) -> None:
    found = result_of("left_out", "--steps=60", out=tmp_path / "left.json")
    assert found["is_met"], found["rows"]
    assert [row["host"] for row in found["rows"]] == ["host-2", "host-0"]


@needs_root
def test_sums_without_an_order_survive_three_changes_of_hosts(tmp_path: Path) -> None:
    words = ("--steps=400", "--mode=exact", "--", *SMALL)
    found = result_of("resize_hosts", *words, out=tmp_path / "resized.json")
    assert found["is_met"], found["modes"]["exact"]


def test_the_phases_of_a_drain_are_measured() -> None:
    found = drain_times.measure([None, 0.05])
    assert set(found[0]["seconds"]) == set(drain_times.PHASES) and found[0]["is_saved"]
    assert found[1]["exit_code"] == 143 and found[1]["timeout_s"] == 0.05
