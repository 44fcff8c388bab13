"""The GPU benchmark on a CPU: every line that can run here does, so that it cannot rot unseen."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.cells import CONTENDERS, LOADS, Place, cells, recipe
from benchmarks.gpu.job import Job
from benchmarks.gpu.measure import Session
from benchmarks.gpu.pace import LEAST_STEPS, Pace
from benchmarks.gpu.run import missing_packages, table
from benchmarks.gpu.variants import LOADS as VARIED
from benchmarks.gpu.variants import VARIANTS, variant_cells
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.rules.check import check_trainable
from shardyard.hardware.machine import Machine

pytestmark = pytest.mark.system

H200 = Machine(
    device="cuda", name="NVIDIA H200", count=1, memory_bytes=143771 * 2**20, cores=16, hostname="-"
)
FACTS = DatasetMetadata(
    dir="prepared/none", fingerprint="0", vocab_size=32000, train_tokens=10**7, eval_tokens=0,
    train_documents=9, eval_documents=0, unigram_entropy=8.0,
)  # fmt: skip


def place_of(machine: Machine, folder: Path) -> Place:
    return Place(
        device=machine.device, devices=1, memory_bytes=machine.memory_bytes,
        source="python-stdlib", vocab_size=32000, prepared=folder,
    )  # fmt: skip


def session_on(machine: Machine, folder: Path, answers: list[dict[str, Any]]) -> Session:
    """A session whose processes are not started but answer in turn."""

    def answer(_job: Job, _devices: int) -> dict[str, Any]:
        return answers.pop(0)

    return Session(
        machine=machine, place=place_of(machine, folder), data=FACTS, scratch=folder,
        steps=5, warm_up=2, run=answer,
    )  # fmt: skip


@pytest.mark.slow
def test_a_rehearsal_measures_every_contender_and_writes_one_file(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        words = " ".join(f"word{(number * 31 + n * n) % 977}" for n in range(400))
        (text / f"{number}.txt").write_text(words)
    command = [
        sys.executable, "-m", "benchmarks.gpu.run", "--rehearse", "--source", str(text),
        "--prepared", str(tmp_path / "prepared"), "--out", str(tmp_path / "results"),
        "--recompute", "full", "--steps", "3", "--warm-up", "2", "--minutes", "10",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

    (file,) = (tmp_path / "results").glob("*/train-*.json")
    content = json.loads(file.read_text())
    by_contender = {line["contender"]: line for line in content["cells"]}
    assert list(by_contender) == ["shardyard", "bare", "trainer"]
    for name in ("shardyard", "bare"):
        line = by_contender[name]
        assert line["status"] == "ok", line
        assert len(line["step_times_s"]) == 3
        assert sum(line["step_times_s"]) == pytest.approx(line["wall_s"], rel=0.1, abs=0.01)
        assert line["mfu_full"] is None  # a CPU has no peak in the catalogue
        assert line["losses"][0] == pytest.approx(6.2, abs=0.2)  # ln 512 = 6.24
    assert by_contender["trainer"]["status"] in ("ok", "not installed")
    assert "| shardyard |" in done.stdout


def test_a_rehearsal_of_variants_measures_settings_against_each_other(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(" ".join(f"word{n * n % 977}" for n in range(400)))
    command = [
        sys.executable, "-m", "benchmarks.gpu.run", "--rehearse", "--source", str(text),
        "--prepared", str(tmp_path / "prepared"), "--out", str(tmp_path / "results"),
        "--variants", "bf16", "offload", "--steps", "3", "--warm-up", "2", "--minutes", "10",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "results").glob("*/variants-*.json")
    bf16, offload = json.loads(file.read_text())["cells"]
    assert [bf16["status"], offload["status"]] == ["ok", "ok"]
    assert offload["settings"] == ["memory.offload=activations"]
    # one rank that keeps all on its CPU adds gradients up in another order (low_precision.py)
    assert offload["losses"] == pytest.approx(bf16["losses"], rel=1e-4)


def test_every_variant_is_a_recipe_that_can_be_trained(tmp_path: Path) -> None:
    for cell in variant_cells(list(VARIED.values()), list(VARIANTS)):
        assert check_trainable(recipe(cell, place_of(H200, tmp_path))) == [], cell.variant


def test_what_is_out_of_memory_is_tried_again_in_halves_and_recorded(tmp_path: Path) -> None:
    refused = {"status": "out of memory", "message": "CUDA out of memory"}
    session = session_on(H200, tmp_path, [refused, refused, refused, refused])
    place = place_of(H200, tmp_path)
    (cell,) = cells([LOADS["llama-1b"]], ["none"], ["bare"], place)

    lines = list(session.measure(cell, seconds=1000.0, least_s=1.0))

    assert [line["micro_batch"] for line in lines] == [8, 4, 2, 1]
    assert {line["status"] for line in lines} == {"out of memory"}
    assert "CUDA out of memory" in lines[0]["message"]


def test_rates_and_mfu_follow_from_the_median_step(tmp_path: Path) -> None:
    answer = {
        "status": "ok", "step_times_s": [1.0, 2.0, 9.0], "wall_s": 12.0,
        "peak": [{"allocated_bytes": 3 * 2**30}], "losses": [10.4],
    }  # fmt: skip
    (cell,) = cells([LOADS["llama2-7b"]], ["full"], ["shardyard"], place_of(H200, tmp_path))

    (line,) = session_on(H200, tmp_path, [answer]).measure(cell, seconds=1000.0, least_s=1.0)

    assert line["tokens_per_s_per_device"] == 4 * 4096 / 2.0
    # Llama 2 7B: N = 6.738 B - 0.131 B of the input embedding; 6 N + 12 x 32 x 4096 x 4096
    assert line["mfu_full"] == pytest.approx(8192 * (6 * 6.607e9 + 6.442e9) / 989e12, rel=1e-3)
    assert line["mfu_causal"] == pytest.approx(8192 * (6 * 6.607e9 + 3.221e9) / 989e12, rel=1e-3)
    assert line["peak_gib"] == 3.0


def test_a_cell_without_time_is_recorded_as_not_run(tmp_path: Path) -> None:
    (cell,) = cells([LOADS["llama-1b"]], ["none"], ["bare"], place_of(H200, tmp_path))
    (line,) = session_on(H200, tmp_path, []).measure(cell, seconds=10.0, least_s=45.0)
    assert (line["status"], line["message"]) == ("not run", "no time was left")


def test_the_first_try_is_the_largest_micro_batch_whose_tensors_fit(tmp_path: Path) -> None:
    found = {
        cell.recompute: cell.micro_batch
        for cell in cells(
            [LOADS["llama2-7b"]], ["none", "selective", "full"], ["shardyard"],
            place_of(H200, tmp_path),
        )
    }  # fmt: skip
    # 151 GB of memory less 16 + 2 bytes x 6.74 B of states leave 30; a sequence keeps 25, 11 and 1
    assert found == {"none": 1, "selective": 2, "full": 4}


def test_who_is_first_changes_and_selective_is_ours_alone(tmp_path: Path) -> None:
    order = [
        (cell.recompute, cell.contender)
        for cell in cells(
            [LOADS["llama-1b"]], ["none", "selective", "full"], ["shardyard", "bare"],
            place_of(H200, tmp_path),
        )
    ]  # fmt: skip
    assert order == [
        ("none", "shardyard"), ("none", "bare"),
        ("selective", "shardyard"),
        ("full", "bare"), ("full", "shardyard"),
    ]  # fmt: skip


def test_the_pace_stops_early_when_time_is_short() -> None:
    pace = Pace(torch.device("cpu"), steps=1000, warm_up=2, stop_at=time.time())
    pace.start()
    steps = 0
    while not pace.is_done:
        time.sleep(0.001)
        pace.mark()
        steps += 1
    assert steps == 2 + LEAST_STEPS
    assert len(pace.step_times_s()) == LEAST_STEPS


def test_missing_and_old_packages_are_named() -> None:
    assert missing_packages({"torch": "2.11", "numpy": "1.26"}) == []
    (old, absent) = missing_packages({"numpy": "99.0", "no-such-package": "1.0"})
    assert old.startswith("numpy>=99.0 (there is ")
    assert absent == "no-such-package>=1.0"


def test_the_table_shows_a_dash_for_what_a_line_lacks() -> None:
    line = {"model": "m", "contender": "bare", "status": "out of memory", "micro_batch": 1}
    assert (
        table([line]).splitlines()[-1] == "| m | - | - | bare | 1 | out of memory | - | - | - | - |"
    )


def test_every_contender_is_compiled_or_none(tmp_path: Path) -> None:
    place = place_of(H200, tmp_path)
    found = list(cells([LOADS["llama2-7b"]], ["none"], list(CONTENDERS), place, compiles=[True]))
    assert [cell.compile for cell in found] == [True, True, True]
    assert recipe(found[0], place).model.compile


def test_settings_are_those_of_our_own_contender(tmp_path: Path) -> None:
    place, settings = place_of(H200, tmp_path), ["precision.optimizer_states=bf16"]
    found = cells([LOADS["llama3-8b"]], ["none"], list(CONTENDERS), place, settings=settings)
    by_contender = {cell.contender: recipe(cell, place).precision for cell in found}
    assert by_contender["shardyard"].optimizer_states == "bf16"
    assert by_contender["bare"].optimizer_states == by_contender["trainer"].optimizer_states
    assert by_contender["bare"].optimizer_states != "bf16"


def test_what_this_device_cannot_do_is_a_line_and_not_the_end(tmp_path: Path) -> None:
    cpu = replace(H200, device="cpu", name="CPU")
    (cell,) = cells(
        [LOADS["llama-1b"]], ["none"], ["shardyard"], place_of(cpu, tmp_path),
        settings=["precision.compute=fp8"],
    )  # fmt: skip
    (line,) = session_on(cpu, tmp_path, []).measure(cell, seconds=1000.0, least_s=1.0)
    assert line["status"] == "failed"
    assert "precision.compute=fp8 but CPU does not multiply fp8" in line["message"]
