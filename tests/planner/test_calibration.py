"""What was measured replaces the catalogue's: tables, profiles, folders of runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard.errors import RequestError
from shardyard.hardware.catalogue import instance
from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.links import NVLINK_3, network
from shardyard.planner.calibration import Calibration, StepProfile, read_calibration

P4D = Path(__file__).parents[2] / "benchmarks" / "groundtruth" / "nccl_all_reduce_2x_p4d_4efa.csv"
CLUSTER = ClusterHardware(
    name="2 x p4d", accelerator=instance("p4d.24xlarge").accelerator, devices_per_node=8, nodes=2,
    inside=NVLINK_3, between=network("4 x EFA", gbps=50, source="400 Gb/s for 8"),
    host_memory_bytes=None, local_disk_bytes=None, usd_per_node_hour=None, price_source="",
)  # fmt: skip
PROFILE = {
    "kind": "step_profile", "device": "NVIDIA A100-SXM4-40GB", "number_format": "bf16",
    "matmul_flops_per_s": 249.6e12, "bandwidth_bytes_per_s": 1.244e12, "kernel_s": 3e-6,
}  # fmt: skip


def json_file(folder: Path, content: Any) -> Path:
    path = folder / "profile.json"
    path.write_text(json.dumps(content))
    return path


def run_folder(folder: Path, lines: list[dict[str, Any]], plan: dict[str, Any]) -> Path:
    """A run of one attempt, number 1."""
    (folder / "attempts" / "1").mkdir(parents=True)
    (folder / "attempts" / "1" / "plan.json").write_text(json.dumps(plan))
    text = "".join(json.dumps({"attempt": 1, "generation": 0, **line}) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


PLAN = {"tokens_per_step": 8192, "speed": {"tokens_per_s": 4096.0, "reason": "-"}}


def test_a_table_over_two_nodes_gives_the_link_between_them() -> None:
    found = read_calibration(P4D, cluster=CLUSTER)
    assert found.link_between is not None
    assert found.link_between.bytes_per_s < CLUSTER.between.bytes_per_s
    assert found.sources == (
        "link between nodes: measured, nccl_all_reduce_2x_p4d_4efa.csv, 16 ranks",
    )
    assert found == Calibration(link_between=found.link_between, sources=found.sources)


def test_a_table_of_one_node_gives_the_link_inside(tmp_path: Path) -> None:
    rows = [{"size_bytes": 2**power, "time_s": 5e-5 + 2**power / 1e11} for power in range(16, 24)]
    content = {
        "kind": "collectives", "collective": "all_reduce", "ranks": 8, "ranks_per_node": 8,
        "rows": rows,
    }  # fmt: skip
    found = read_calibration(json_file(tmp_path, content), cluster=CLUSTER)
    assert found.link_between is None
    assert found.link_inside is not None
    # 1.75 x 100 GB/s on the bus is 0.8 of the datasheet's
    assert found.link_inside.bytes_per_s == pytest.approx(175e9 / 0.8, rel=1e-3)


def test_a_profile_gives_shares_of_the_datasheet(tmp_path: Path) -> None:
    found = read_calibration(json_file(tmp_path, PROFILE), cluster=CLUSTER)
    # A100 40 GB: 312 TFLOP/s and 1,555 GB/s
    assert found.matmul_share == pytest.approx(0.8)
    assert found.bandwidth_share == pytest.approx(0.8)
    assert found.kernel_s == 3e-6
    assert found.sources == ("rates of A100 40GB: measured, profile.json",)


def test_what_a_profile_leaves_out_stays_the_catalogues(tmp_path: Path) -> None:
    only = {key: PROFILE[key] for key in ("kind", "device", "number_format", "kernel_s")}
    found = read_calibration(json_file(tmp_path, only), cluster=CLUSTER)
    assert (found.matmul_share, found.bandwidth_share, found.kernel_s) == (None, None, 3e-6)


def test_a_profile_of_another_device_is_refused(tmp_path: Path) -> None:
    path = json_file(tmp_path, {**PROFILE, "device": "NVIDIA H200"})
    with pytest.raises(
        RequestError, match=r"'NVIDIA H200', the plan is for A100 40GB.*Profile the"
    ):
        read_calibration(path, cluster=CLUSTER)


def test_a_rate_above_the_datasheet_is_refused(tmp_path: Path) -> None:
    path = json_file(tmp_path, {**PROFILE, "matmul_flops_per_s": 600e12})
    with pytest.raises(RequestError, match=r"1\.92 of its bf16 peak.*Check the format, and the"):
        read_calibration(path, cluster=CLUSTER)


def test_everything_wrong_with_a_profile_is_told_at_once(tmp_path: Path) -> None:
    path = json_file(tmp_path, {"device": 7, "kernel_s": -1, "matmul_flops_per_s": "fast"})
    with pytest.raises(RequestError) as caught:
        StepProfile.read(path)
    text = str(caught.value)
    assert "5 problems" in text
    assert "device=7 is not text" in text
    assert "number_format=None is not text" in text
    assert "kind=None is neither 'step_profile', 'device_ceilings' nor 'collectives'" in text
    assert "matmul_flops_per_s='fast' is not a number above 0" in text
    assert "kernel_s=-1 is not a number above 0" in text
    with pytest.raises(RequestError, match=r"no value in it was measured\nGive"):
        StepProfile.read(json_file(tmp_path, {**dict.fromkeys(PROFILE), **{
            key: PROFILE[key] for key in ("kind", "device", "number_format")
        }}))  # fmt: skip


def test_a_run_gives_its_median_step_over_the_predicted_one(tmp_path: Path) -> None:
    times_s = [30.0, 2.4, 2.5, 9.0, 2.6]  # the first one compiles
    lines: list[dict[str, Any]] = [
        {"step": step, "step_time_s": time_s} for step, time_s in enumerate(times_s, 1)
    ]
    lines.append({"step": 5, "eval": {"loss": 1.0}})
    found = read_calibration(run_folder(tmp_path / "a-run", lines, PLAN), cluster=CLUSTER)
    # predicted: 8,192 tokens at 4,096 a second are 2 s; the median of the last four is 2.55 s
    assert found.step_scale == pytest.approx(2.55 / 2)
    assert found.sources == (
        "time of a step: measured, run a-run, attempt 1, 2.55 s for 2 s predicted, median of 4",
    )


def test_a_run_of_too_few_steps_is_refused(tmp_path: Path) -> None:
    lines = [{"step": step, "step_time_s": 1.0} for step in (1, 2, 3)]
    with pytest.raises(RequestError, match=r"3 measured steps and no attempt with 3 after its"):
        read_calibration(run_folder(tmp_path, lines, PLAN), cluster=CLUSTER)


def test_a_run_whose_plan_predicted_no_speed_is_refused(tmp_path: Path) -> None:
    lines = [{"step": step, "step_time_s": 1.0} for step in range(1, 9)]
    silent = {"tokens_per_step": 8192, "speed": {"tokens_per_s": None, "reason": "CPU"}}
    with pytest.raises(RequestError, match=r"predicts no speed.*whose peak the catalogue knows"):
        read_calibration(run_folder(tmp_path, lines, silent), cluster=CLUSTER)


def test_a_path_to_nothing_says_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"does not exist.*the folder of a run"):
        read_calibration(tmp_path / "none.csv", cluster=CLUSTER)
