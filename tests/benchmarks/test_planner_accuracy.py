"""The accuracy report end to end, with planners whose errors are known by construction."""

import csv
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planner_accuracy
from benchmarks.accuracy_text import render
from benchmarks.planner_table import read_table
from shardyard.errors import RequestError
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.workload import Workload

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "groundtruth" / "measured_runs.csv"
KEYS = {
    "rows_used", "rows_skipped", "mape", "p90", "bias", "spearman", "regret_mean", "regret_max",
    "mape_scaled", "memory_mape", "oom_recall", "oom_false_alarms",
}  # fmt: skip


@dataclass(frozen=True)
class FakeMemory:
    allocated_bytes: float = 40 * 2**30
    reserved_bytes: float = 44 * 2**30
    device_bytes: float = 48 * 2**30


@dataclass(frozen=True)
class FakeFit:
    verdict: str = "fits"


@dataclass(frozen=True)
class FakeEstimate:
    tokens_per_s_per_device: float
    memory: FakeMemory = FakeMemory()
    fit: FakeFit = FakeFit()


def planner_by_tp(speeds: Mapping[int, float], *, ooms_above: int = 99) -> planner_accuracy.Planner:
    """A planner that looks at tp alone."""

    def estimate(workload: Workload, cluster: ClusterHardware) -> FakeEstimate:
        if workload.layout.tp not in speeds:
            raise RequestError(f"tp={workload.layout.tp} on {cluster.name} is not for this planner")
        verdict = "does not fit" if workload.micro_batch > ooms_above else "fits"
        return FakeEstimate(speeds[workload.layout.tp], fit=FakeFit(verdict))

    return estimate


def table(folder: Path, *rows: Mapping[str, str]) -> Path:
    with TABLE.open(encoding="utf-8", newline="") as file:
        base = next(r for r in csv.DictReader(file) if r["id"] == "bigscience-tr11-0152")
    path = folder / "table.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(base))
        writer.writeheader()
        for cells in rows:
            writer.writerow(base | {"mem_gb": "", "mem_kind": ""} | dict(cells))
    return path


def layout(tp: int, rate: float, **cells: str) -> dict[str, str]:
    """384 devices: pp 12, dp x tp = 32."""
    return {
        "tp": str(tp), "dp": str(32 // tp), "tokens_per_s_per_gpu": str(rate), "family": "one",
        **cells,
    }  # fmt: skip


def test_errors_order_and_regret_of_one_group(tmp_path: Path) -> None:
    path = table(tmp_path, layout(2, 80), layout(4, 100), layout(8, 90))
    answer = planner_accuracy.run(path, planner_by_tp({2: 88, 4: 80, 8: 81}))
    one = answer["families"]["one"]
    assert one["mape"] == pytest.approx((0.1 + 0.2 + 0.1) / 3, abs=1e-6)
    assert one["bias"] == pytest.approx((0.1 - 0.2 - 0.1) / 3, abs=1e-6)
    assert one["spearman"] == -1  # measured 80 < 90 < 100, predicted 88 > 81 > 80
    assert one["regret_mean"] == one["regret_max"] == pytest.approx(0.25)
    assert one["groups"] == 1
    assert answer["macro"]["mape"] == one["mape"]


def test_two_layouts_are_no_group_and_a_repeated_one_counts_once(tmp_path: Path) -> None:
    path = table(tmp_path, layout(2, 80), layout(4, 100), layout(4, 104), layout(4, 96))
    one = planner_accuracy.run(path, planner_by_tp({2: 88, 4: 80}))["families"]["one"]
    assert (one["groups"], one["spearman"], one["regret_mean"]) == (0, None, None)
    assert one["speed_rows"] == 4


def test_rows_of_quality_c_stand_apart(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        layout(2, 100),
        layout(4, 100, quality="C"),
        layout(4, 100, family="c", quality="C"),
    )
    answer = planner_accuracy.run(path, planner_by_tp({2: 110, 4: 300}))
    one = answer["families"]["one"]
    assert one["mape"] == pytest.approx(0.1)
    assert one["quality_c"]["mape"] == pytest.approx(2.0)
    assert one["rows_used"] == 2
    assert answer["families"]["c"]["mape"] == pytest.approx(2.0)
    assert not answer["families"]["c"]["in_macro"]
    assert answer["macro"]["mape"] == pytest.approx(0.1)


def test_macro_is_the_mean_of_sources_and_the_worst_regret(tmp_path: Path) -> None:
    two = [layout(tp, rate, family="two") for tp, rate in ((2, 100), (4, 60), (8, 50))]
    path = table(tmp_path, layout(2, 80), layout(4, 100), layout(8, 90), *two)
    answer = planner_accuracy.run(path, planner_by_tp({2: 100, 4: 80, 8: 70}))
    one, other = answer["families"]["one"], answer["families"]["two"]
    assert (one["regret_max"], other["regret_max"]) == (0.25, 0)
    assert answer["macro"]["regret_max"] == 0.25
    assert answer["macro"]["regret_mean"] == 0.125
    assert answer["macro"]["mape"] == pytest.approx((one["mape"] + other["mape"]) / 2, abs=1e-6)


def test_memory_is_compared_with_the_number_that_was_printed(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        layout(8, 80, mem_gb="50", mem_kind="nvidia-smi (GB)"),
        layout(4, 80, mem_gb="40", mem_kind="max reserved (GiB)"),
    )
    answer = planner_accuracy.run(path, planner_by_tp({4: 80, 8: 80}))
    errors = answer["families"]["one"]["memory_mape"]
    assert errors == {"max reserved (GiB)": 0.1, "nvidia-smi (GB)": 0.04}
    assert answer["macro"]["memory_mape_by_number"] == {"device": 0.04, "reserved": 0.1}


def test_a_peak_below_the_states_is_of_another_run(tmp_path: Path) -> None:
    path = table(tmp_path, layout(2, 80, mem_gb="20", mem_kind="nvidia-smi (GB)"))
    one = planner_accuracy.run(path, planner_by_tp({2: 80}))["families"]["one"]
    assert (one["rows_used"], one["memory_mape"]) == (1, None)


def test_out_of_memory_is_called_or_alarmed(tmp_path: Path) -> None:
    oom = {"outcome": "oom", "tokens_per_s_per_gpu": ""}
    path = table(
        tmp_path,
        layout(2, 0, micro_batch_size="8") | oom,
        layout(4, 0) | oom,
        layout(4, 80),
        layout(8, 80, micro_batch_size="8"),
    )
    one = planner_accuracy.run(path, planner_by_tp({2: 80, 4: 80, 8: 80}, ooms_above=4))[
        "families"
    ]["one"]
    assert (one["oom_recall"], one["oom_false_alarms"]) == (0.5, 0.5)
    assert one["oom_counts"]["ooms"] == 2
    low, high = one["oom_counts"]["recall_interval"]
    assert low < 0.5 < high


def test_a_refusal_of_the_planner_is_a_row_left_out(tmp_path: Path) -> None:
    path = table(tmp_path, layout(2, 80), layout(4, 80))
    one = planner_accuracy.run(path, planner_by_tp({2: 80}))["families"]["one"]
    assert one["rows_skipped"] == {"refused by the planner": 1}


def test_every_row_of_our_table_is_used_or_says_why_not() -> None:
    answer = planner_accuracy.run(TABLE, planner_by_tp(dict.fromkeys((1, 2, 4, 8), 1000.0)))
    families: dict[str, dict[str, Any]] = answer["families"]
    rows = read_table(TABLE)
    counted = sum(f["rows_used"] + sum(f["rows_skipped"].values()) for f in families.values())
    assert counted == len(rows) == 851
    assert answer["macro"]["rows_used"] == 786
    assert all(set(family) >= KEYS for family in families.values())
    assert set(answer["macro"]) >= KEYS
    assert families["litgpt-mem"]["mape"] is None
    assert families["bigscience-tr11"]["groups"] == 12
    assert set(answer["leave_one_source_out"]) >= {"vtrain-single", "korthikanti"}


def test_the_text_stays_below_a_hundred_columns() -> None:
    answer = planner_accuracy.run(TABLE, planner_by_tp(dict.fromkeys((1, 2, 4, 8), 1000.0)))
    text = render(answer, table="measured_runs.csv")
    assert max(len(line) for line in text.splitlines()) < 100
    for words in ("macro", "OOMs", "6 adapters of another kind than LoRA", "Leave one source out"):
        assert words in text


def test_json_is_printed_alone_and_rows_are_written_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path, layout(2, 80), layout(4, 80, sharding="DDP", act_ckpt="custom"))
    rows = tmp_path / "rows.csv"
    code = planner_accuracy.main(
        ["--table", str(path), "--json", "--rows", str(rows)], planner=planner_by_tp({2: 100})
    )
    assert code == 0
    assert set(json.loads(capsys.readouterr().out)["families"]) == {"one"}
    lines = list(csv.DictReader(rows.read_text(encoding="utf-8").splitlines()))
    assert [line["ratio"] for line in lines] == ["1.25", ""]
    assert lines[1]["skipped"] == "recompute mode not understood"


@pytest.mark.heavy
@pytest.mark.parametrize(
    "how", [["benchmarks/planner_accuracy.py"], ["-m", "benchmarks.planner_accuracy"]]
)
def test_as_a_file_and_as_a_module_a_bad_table_ends_with_2_and_no_traceback(how: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *how, "--table", "nowhere.csv"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: --table nowhere.csv cannot be read")
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_a_row_without_a_mode_of_recompute_is_judged_by_the_fastest_that_fits(
    tmp_path: Path,
) -> None:
    """``none`` does not fit; offloaded activations are slower than ``selective`` here."""
    speeds = {"none": 100.0, "selective": 90.0, "full": 75.0}

    def estimate(workload: Workload, _: ClusterHardware) -> FakeEstimate:
        offloads = workload.techniques.offload == "activations"
        fits = offloads or workload.recompute != "none"
        rate = speeds[str(workload.recompute)] * (0.8 if offloads else 1.0)
        return FakeEstimate(rate, fit=FakeFit("fits" if fits else "does not fit"))

    open_mode = layout(8, 90, act_ckpt="")
    stated = layout(8, 100, act_ckpt="none", family="stated")
    answer = planner_accuracy.run(table(tmp_path, open_mode, stated), estimate)["families"]
    assert (answer["one"]["mape"], answer["one"]["oom_false_alarms"]) == (0.0, 0.0)
    assert (answer["stated"]["mape"], answer["stated"]["oom_false_alarms"]) == (0.0, 1.0)


def test_memory_is_judged_where_nobody_timed_the_device(tmp_path: Path) -> None:
    def refuse(_: Workload, __: ClusterHardware) -> FakeEstimate:
        raise RequestError("no rates")

    memory = layout(
        8, 0, tokens_per_s_per_gpu="", iter_time_s="", mem_gb="60", mem_kind="max allocated (GiB)"
    )
    path = table(tmp_path, memory, layout(8, 90, family="two"))
    answer = planner_accuracy.run(path, refuse)["families"]
    assert answer["one"]["memory_rows"] == 1 and answer["one"]["speed_rows"] == 0
    assert answer["two"]["rows_skipped"] == {"refused by the planner": 1}
