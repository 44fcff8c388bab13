"""The script for a machine that is there for minutes: its parts, and all of it on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.ceilings import measure
from benchmarks.gpu.kernels import kernel_profile
from benchmarks.gpu.pack import too_large
from shardyard.families.presets import PRESETS
from tests.models import varlen_on_cpu

assert varlen_on_cpu.__doc__, "gives a CPU the operator"
pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
SCRIPT = "benchmarks/gpu/one_call.sh"


def test_ceilings_have_a_line_for_what_works_and_one_for_what_does_not() -> None:
    shape = PRESETS["llama-tiny"].shape
    lines = list(measure(shape, 32, device=torch.device("cpu"), seconds=1e-3))
    by_name = {(line["what"], line.get("kernel"), line.get("backward")): line for line in lines}
    assert [line["what"] for line in lines].count("product") == 7  # the head is never in fp8
    assert by_name["attention", "FLASH_ATTENTION", True]["rate"] > 0.0
    cudnn = by_name["attention", "CUDNN_ATTENTION", False]
    assert cudnn["status"] == "failed" and "No viable backend" in cudnn["message"]
    sums = {line["sum"]: line["rate"] for line in lines if line["what"] == "weight gradient"}
    assert sums.keys() == {"none", "fp32"} and min(sums.values()) > 0.0
    told = {line["by"]: line for line in lines if line["what"] == "attention of documents"}
    assert told["mask"]["rate"] > 0.0 and told["length"]["rate"] > 0.0


def test_a_products_rate_is_its_flop_by_its_time() -> None:
    shape = PRESETS["llama-tiny"].shape
    line = next(measure(shape, 64, device=torch.device("cpu"), seconds=0.01))
    assert line["shape"] == [64, shape.hidden_size, shape.hidden_size]
    assert 0.0 < line["rate"] < 10.0  # TFLOP/s of a CPU; bytes or plain FLOP/s would be far away
    assert line["rate"] <= max(line["windows"])


def test_the_kernel_table_names_what_took_most_of_a_step_first() -> None:
    left_II = torch.randn(256, 256)
    found = kernel_profile(lambda: left_II @ left_II, torch.device("cpu"))
    rows = found["kernels"]
    assert rows[0]["name"] == "aten::mm" and rows[0]["calls"] == 1
    assert rows == sorted(rows, key=lambda row: -row["ms"])
    assert found["causes"]["GEMM"] >= rows[0]["ms"] > 0.0
    assert 0.0 <= found["causes"]["gaps"] <= found["step_ms"]


def test_a_folder_that_is_too_large_is_refused_with_what_makes_it_large(tmp_path: Path) -> None:
    for part, size in (("wheels", 2**20), ("prepared", 3 * 2**20)):
        (tmp_path / part).mkdir()
        (tmp_path / part / "file").write_bytes(bytes(size))
    assert too_large(tmp_path, most_mib=4.0) is None
    problem = too_large(tmp_path, most_mib=3.5)
    assert problem is not None
    assert problem.startswith(f"{tmp_path} has 4.0 MiB, and 3.5 can be carried")
    assert "(prepared 3.0, wheels 1.0)" in problem


def test_a_part_that_does_not_exist_is_refused_before_anything_is_begun(tmp_path: Path) -> None:
    done = run_script(tmp_path, "9", "ceiling")
    assert done.returncode == 2
    assert (
        "ceiling is no part. There are: ceilings, ours, trainer, bare, fp8, limit, saving, turns, "
        "images." in done.stderr
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_rehearsal_of_the_one_call_writes_a_file_for_each_part(tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.mkdir()
    for number in range(20):
        words = " ".join(f"word{(number * 31 + n * n) % 977}" for n in range(400))
        (source / f"{number}.txt").write_text(words)
    prepared = subprocess.run(
        [
            sys.executable, "-m", "shardyard", "prepare", "benchmarks/gpu/text.yaml",
            f"data.source={source}", f"data.dir={tmp_path / 'carried' / 'prepared'}",
            "data.vocab_size=512",
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert prepared.returncode == 0, prepared.stderr

    parts = ("ceilings", "ours", "bare", "fp8", "saving", "turns", "images")
    done = run_script(tmp_path, "10", *parts)

    assert done.returncode == 0, done.stderr
    files = {file.name.split("-")[0]: file for file in (tmp_path / "out").glob("*/*.json")}
    assert set(files) == {"tiny", *parts}, done.stderr
    plain, ours = json.loads(files["ours"].read_text())["cells"]
    assert (plain["variant"], plain["compile"], len(plain["losses"]) >= 8) == (
        "reference",
        False,
        True,
    )
    assert ours["status"] == "ok" and ours["compile"] and ours["kernels"]
    assert ours["losses_apart"] <= 0.01
    assert ours["causes"]["GEMM"] > 0.0 and ours["share_of_ceiling"]["GEMM"] is None
    assert ours["predicted"]["memory_bytes"] > 0 and ours["clocks"] is None
    bare = json.loads(files["bare"].read_text())["cells"]
    assert [(line["status"], line["compile"]) for line in bare] == [("ok", False), ("ok", True)]
    [saved] = json.loads(files["saving"].read_text())["cells"]
    assert [save["step"] for save in saved["saving"]["saves"]] == [2, 4, 6]
    assert saved["saving"]["copy_bytes_per_s"] > 0 and saved["saving"]["times_a_copy"] > 0
    turns = {line["variant"]: line for line in json.loads(files["turns"].read_text())["cells"]}
    assert turns["usual"]["times_the_first"] == 1.0 and len(turns["usual"]["step_s"]) == 3
    assert turns["selective"]["losses"] == pytest.approx(turns["usual"]["losses"], rel=1e-3)
    assert "runs only on NVIDIA devices" in turns["cudnn"]["message"]
    [images] = json.loads(files["images"].read_text())["cells"]
    assert images["status"] == "ok" and min(images["images_per_s"].values()) > 0
    assert [len(found) for found in images["rounds_images_per_s"].values()] == [2, 2]
    # what was prepared before was taken as it is: nothing else was prepared
    assert ours["losses"][0] == pytest.approx(6.2, abs=0.2)  # ln 512 = 6.24


def run_script(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "REHEARSE": "1", "PYTHON": sys.executable,
        "OUT": str(folder / "out"), "CARRIED": str(folder / "carried"),
    }  # fmt: skip
    return subprocess.run(
        ["bash", SCRIPT, *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
