"""A file of ceilings: what it says of a block, and what of it a plan takes."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard.errors import RequestError
from shardyard.hardware.catalogue import instance
from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.links import NVLINK_3, network
from shardyard.planner.calibration import DeviceCeilings, read_calibration
from shardyard.planner.kernels import rates

A100 = instance("p4d.24xlarge").accelerator
CLUSTER = ClusterHardware(
    name="p4d", accelerator=A100, devices_per_node=8, nodes=1,
    inside=NVLINK_3, between=network("4 x EFA", gbps=50, source="400 Gb/s for 8"),
    host_memory_bytes=None, local_disk_bytes=None, usd_per_node_hour=None, price_source="",
)  # fmt: skip


def product(matrix: str, inputs: int, outputs: int, rate: float) -> dict[str, Any]:
    return {
        "what": "product", "matrix": matrix, "shape": [4096, inputs, outputs], "format": "bf16",
        "status": "ok", "rate": rate,
    }  # fmt: skip


LINES = [
    product("q, o", 100, 100, 200.0),
    product("gate, up", 100, 200, 100.0),
    product("down", 200, 100, 200.0),
    product("head", 100, 900, 1.0),
    {"what": "sum in place", "status": "ok", "rate": 1.2},
    {"what": "attention", "kernel": "FLASH_ATTENTION", "backward": False, "status": "ok",
     "rate": 150.0},
    {"what": "attention", "kernel": "CUDNN_ATTENTION", "backward": False, "status": "failed",
     "message": "No viable backend"},
]  # fmt: skip
CONTENT = {
    "kind": "device_ceilings", "hardware": {"name": "NVIDIA A100-SXM4-40GB"}, "lines": LINES,
}  # fmt: skip


def file_of(folder: Path, content: Any) -> Path:
    path = folder / "ceilings.json"
    path.write_text(json.dumps(content))
    return path


def test_products_weigh_by_their_arithmetic(tmp_path: Path) -> None:
    found = DeviceCeilings.read(file_of(tmp_path, CONTENT))
    # 2 + 4 + 2 parts of arithmetic at 200, 100 and 200: 8 / (0.01 + 0.04 + 0.01)
    assert found.product_flops_per_s == pytest.approx(8 / 0.06 * 1e12)
    assert found.attention_flops_per_s == 150e12
    assert found.attention_both_flops_per_s is None
    assert found.fp8_flops_per_s is None


def test_a_plan_takes_what_was_measured(tmp_path: Path) -> None:
    found = read_calibration(file_of(tmp_path, CONTENT), cluster=CLUSTER)
    assert found.sources == ("rates of A100 40GB: measured, ceilings.json",)
    measured = rates(A100, "bf16", found)
    assert measured.flops_per_s == pytest.approx(8 / 0.06 * 1e12)
    assert measured.flash_flops_per_s == measured.fused_flops_per_s == pytest.approx(150e12)
    assert measured.bytes_per_s == pytest.approx(1.2e12)
    assert measured.kernel_s == rates(A100, "bf16").kernel_s


def test_a_block_of_which_a_product_is_missing_has_no_rate(tmp_path: Path) -> None:
    content = {**CONTENT, "lines": LINES[1:]}
    assert DeviceCeilings.read(file_of(tmp_path, content)).product_flops_per_s is None


def test_ceilings_of_another_device_are_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path, {**CONTENT, "hardware": {"name": "NVIDIA H200"}})
    with pytest.raises(RequestError, match=r"'NVIDIA H200', the plan is for A100 40GB.*Profile"):
        read_calibration(path, cluster=CLUSTER)


def test_rates_above_the_datasheet_are_refused(tmp_path: Path) -> None:
    fast = [{**LINES[4], "rate": 12.0}]
    with pytest.raises(RequestError, match=r"above the datasheet.*7\.7. of its memory bandwidth"):
        read_calibration(file_of(tmp_path, {**CONTENT, "lines": fast}), cluster=CLUSTER)


def test_a_rehearsal_and_all_else_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    wrong = {
        "kind": "device_ceilings", "is_rehearsal": True,
        "lines": [{"what": "sum in place", "status": "ok", "rate": "fast"}],
    }  # fmt: skip
    with pytest.raises(RequestError) as caught:
        read_calibration(file_of(tmp_path, wrong), cluster=CLUSTER)
    text = str(caught.value)
    assert "3 problems" in text
    assert "it is a rehearsal: its rates have no meaning" in text
    assert "hardware.name=None is not text" in text
    assert "rate='fast' of 'sum in place' is not a number above 0" in text
    assert "Measure the planned device: python -m benchmarks.gpu.ceilings" in text


def test_a_file_in_which_nothing_was_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no line of it was measured"):
        DeviceCeilings.read(file_of(tmp_path, {**CONTENT, "lines": [LINES[-1]]}))
    with pytest.raises(RequestError, match="kind='cells' is not 'device_ceilings'"):
        DeviceCeilings.read(file_of(tmp_path, {**CONTENT, "kind": "cells"}))
