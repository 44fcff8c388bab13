"""A cluster file becomes a cluster; all that is wrong with it is told at once."""

import csv
import re
from pathlib import Path
from statistics import median

import pytest

from docs.generate.hardware import example
from shardyard.errors import RecipeError, RequestError
from shardyard.hardware.cluster_file import UNMEASURED_SHARE, read_cluster_file

MEASURED = Path(__file__).parents[2] / "benchmarks" / "groundtruth" / "hardware_mamf_matmul.csv"


def written(folder: Path, text: str) -> Path:
    path = folder / "ours.yaml"
    path.write_text(text)
    return path


def test_the_example_of_the_documentation_is_read(tmp_path: Path) -> None:
    cluster = read_cluster_file(written(tmp_path, example()), nodes=3)
    assert (cluster.name, cluster.accelerator.name, cluster.devices) == (
        "our-h100s",
        "H100 SXM",
        24,
    )
    assert cluster.inside.bytes_per_s == 450e9
    assert cluster.between.bytes_per_s == 3200e9 / 8 / 8
    assert cluster.host_memory_bytes == 2048 * 2**30
    assert cluster.usd_per_hour == 120
    assert cluster.price_source == "ours.yaml"


def test_what_is_left_out_comes_from_the_accelerator(tmp_path: Path) -> None:
    path = written(tmp_path, "{accelerator: a100 80gb, devices_per_node: 4}")
    cluster = read_cluster_file(path, nodes=1)
    assert (cluster.name, cluster.inside.name, cluster.between.name) == ("ours", "NVLink 3", "none")
    assert (cluster.usd_per_hour, cluster.local_disk_bytes) == (None, None)


def test_a_device_may_be_given_by_its_numbers(tmp_path: Path) -> None:
    text = """
accelerator:
  {name: X1, memory_gib: 96, peak_tflops: {bf16: 500, fp8: 1000}, achievable: {bf16: 0.7},
   bandwidth_gb_per_s: 3000, processors: 100, host_link_gb_per_s: 30, device: xpu}
devices_per_node: 8
inside_gb_per_s: 200
between_gb_per_s: 25
"""
    cluster = read_cluster_file(written(tmp_path, text), nodes=2)
    device = cluster.accelerator
    assert (device.name, device.memory_bytes, device.device) == ("X1", 96 * 2**30, "xpu")
    assert device.achievable_flops_per_s("bf16") == 350e12
    assert device.achievable == {"bf16": 0.7, "fp8": UNMEASURED_SHARE}
    assert (cluster.inside.bytes_per_s, cluster.between.bytes_per_s) == (200e9, 25e9)


def test_the_share_nobody_gives_is_the_median_of_what_was_measured() -> None:
    with MEASURED.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["dtype"] == "BF16"]
    shares = [float(row["efficiency"].rstrip("%")) / 100 for row in rows]
    assert len(shares) == 12
    assert round(median(shares), 2) == UNMEASURED_SHARE


def test_everything_impossible_is_told_at_once(tmp_path: Path) -> None:
    text = """
acelerator: H100 SXM
accelerator: H100 SMX
devices_per_node: 0
inside_gb_per_s: -1
host_memory_gib: many
usd_per_node_hour: .nan
"""
    with pytest.raises(RecipeError) as refused:
        read_cluster_file(written(tmp_path, text), nodes=2)
    said = str(refused.value)
    assert "ours.yaml has 7 problems" in said
    for words in (
        "acelerator: unknown key. Did you mean accelerator?",
        "'H100 SMX' is not in the catalogue. Nearest: H100 SXM",
        "devices_per_node=0 cannot be. Give a whole number of at least 1.",
        "inside_gb_per_s=-1 cannot be. Give a number of 0 or more.",
        "network_gbps: is missing, but cluster.nodes=2. Give the Gb/s of one node",
        "host_memory_gib=many is not a number. Write digits without a unit.",
        "usd_per_node_hour=nan cannot be.",
    ):
        assert words in said


OWN = "accelerator: {memory_gib: 1, bandwidth_gb_per_s: 1, peak_tflops: {bf16: 1}"

WRONG = [
    ("devices_per_node: 1", "accelerator: is missing. Name one of the catalogue, such as H100 SXM"),
    ("accelerator: L4", "devices_per_node: is missing."),
    ("accelerator: L4\ndevices_per_node: 1.5", "Give a whole number of at least 1."),
    ("accelerator: L4\ndevices_per_node: true", "devices_per_node=True is not a number."),
    ("accelerator: L4\nname: 7", "name=7 is not text. Put it in quotes."),
    (
        "accelerator: L4\nnetwork_gbps: 0",
        "network_gbps=0 is not possible, as no data would arrive.",
    ),
    ("network_gbps: 1\nbetween_gb_per_s: 1", "say the same, of a node and of a device. Keep one."),
    ("accelerator: MI250X\ndevices_per_node: 8", "inside_gb_per_s: is missing, and the catalogue"),
    ("accelerator: {}", "accelerator.memory_gib: is missing"),
    ("accelerator: {}", "accelerator.peak_tflops: says no rate. Give some of fp32, fp16, bf16"),
    (f"{OWN}, watts: 1}}", "accelerator.watts: unknown key. There are name, memory_gib"),
    (f"{OWN}, achievable: {{bf16: 80}}}}", "bf16=80 is more than the whole peak. Give a share"),
    (f"{OWN}, achievable: 0.8}}", "accelerator.achievable=0.8 says no format. Write it like {bf16"),
    (f"{OWN}, device: gpu}}", "accelerator.device=gpu is called cuda by torch. Use cuda."),
    ("accelerator: {peak_tflops: {int4: 1}}", "accelerator.peak_tflops.int4: unknown key"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_a_wrong_value_says_what_to_write(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        read_cluster_file(written(tmp_path, text), nodes=1)
    assert words in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"nowhere\.yaml cannot be read: No such file.*docs/hard"
    ):
        read_cluster_file(tmp_path / "nowhere.yaml", nodes=1)
    with pytest.raises(RequestError, match=r"ours\.yaml holds no keys\. It needs accelerator"):
        read_cluster_file(written(tmp_path, "- 1"), nodes=1)
    with pytest.raises(RequestError, match=r"ours\.yaml, line 1.*"):
        read_cluster_file(written(tmp_path, "{"), nodes=1)


@pytest.mark.parametrize("name", ["azure-mi300x", "coreweave-gb200", "coreweave-hgx-b200"])
def test_a_cluster_of_another_cloud_is_read_and_its_price_has_a_date(name: str) -> None:
    path = Path(__file__).parents[2] / "examples" / "clusters" / f"{name}.yaml"
    found = read_cluster_file(path, 8)
    assert found.usd_per_node_hour and found.host_memory_bytes
    assert re.search(r"# Price: on demand.*2026-09-\d\d", path.read_text())
    # each of its devices has 400 Gb/s, in bytes
    assert found.between.bytes_per_s == 50e9
    assert found.reach == min(found.devices, found.accelerator.nvlink_domain or 8)
