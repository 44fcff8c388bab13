"""The catalogue: exact names, dated prices, and no guess about a device it does not know."""

import csv
from pathlib import Path

import pytest

from shardyard.errors import RequestError
from shardyard.hardware.catalogue import (
    ACCELERATORS,
    accelerator_by_name,
    accelerator_named,
    instance,
    instance_names,
)

GROUND_TRUTH = Path(__file__).parents[2] / "benchmarks" / "groundtruth"


@pytest.mark.parametrize(
    ("driver_name", "bf16_tflops", "memory_gib"),
    [
        # Names as nvidia-smi prints them; rates from the vendors' datasheets, without sparsity.
        ("NVIDIA H200", 989, 141),
        ("NVIDIA H100 80GB HBM3", 989, 80),
        ("NVIDIA H100 PCIe", 756, 80),
        ("NVIDIA A100-SXM4-80GB", 312, 80),
        ("A100-SXM4-40GB", 312, 40),
        ("NVIDIA B200", 2250, 179),
        ("NVIDIA L40S", 362, 45),
        ("AMD Instinct MI300X", 1300, 192),
        ("GAUDI2", 432, 96),
    ],
)
def test_a_device_is_known_by_the_name_its_driver_prints(
    driver_name: str, bf16_tflops: float, memory_gib: int
) -> None:
    accelerator = accelerator_named(driver_name)
    assert accelerator is not None
    assert accelerator.peak_flops_per_s("bf16") == bf16_tflops * 1e12
    assert round(accelerator.memory_bytes / 2**30) == memory_gib


@pytest.mark.parametrize(
    "driver_name",
    [
        "NVIDIA H200 NVL",  # another board, with lower clocks
        "NVIDIA H200 MIG 1g.18gb",  # a slice of one
        "NVIDIA GH200 144G HBM3e",  # more and faster memory than the row's
        "NVIDIA L40",
        "NVIDIA A10",
        "Intel(R) Xeon(R) Platinum 8175M CPU @ 2.50GHz",
        "",
    ],
)
def test_a_device_that_no_row_names_is_unknown_and_not_guessed(driver_name: str) -> None:
    assert accelerator_named(driver_name) is None


def test_a_v100_has_no_bf16_rate() -> None:
    accelerator = accelerator_named("Tesla V100-SXM2-16GB")
    assert accelerator is not None
    assert accelerator.peak_flops_per_s("bf16") is None
    assert accelerator.peak_flops_per_s("fp16") == 125e12


def test_every_row_has_a_source() -> None:
    assert all(row.source for row in ACCELERATORS)
    assert len({row.name for row in ACCELERATORS}) == len(ACCELERATORS)


def test_an_instance_names_its_accelerators_and_its_dated_price() -> None:
    p5 = instance("p5.48xlarge")
    assert (p5.accelerator.name, p5.count, p5.usd_per_hour) == ("H100 SXM", 8, 55.04)
    assert "2026-07-20" in p5.price_source
    assert instance("p5e.48xlarge").usd_per_hour is None


def test_every_instance_can_be_built() -> None:
    assert all(instance(name).count >= 1 for name in instance_names())


def test_an_unknown_instance_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(RequestError, match=r"cluster\.instance='p5\.48xlage'.*p5\.48xlarge.*Take"):
        instance("p5.48xlage")
    with pytest.raises(RequestError, match=r"'quantum'.*It has p3\.2xlarge"):
        instance("quantum")


def table(name: str) -> list[dict[str, str]]:
    with (GROUND_TRUTH / name).open(newline="") as file:
        return list(csv.DictReader(file))


# Names in the published tables -> rows here.
MEASURED = {
    "NVIDIA A100 SXM": ["A100 40GB", "A100 80GB"],
    "NVIDIA A100 PCIe": ["A100 PCIe 40GB", "A100 PCIe 80GB"],
    "NVIDIA H100 SXM": ["H100 SXM"],
    "NVIDIA H200 SXM": ["H200"],
    "NVIDIA GH200 SXM": ["GH200"],
    "NVIDIA B200 SXM": ["B200"],
    "NVIDIA B300 SXM": ["B300"],
    "NVIDIA GB200 SXM": ["GB200"],
    "AMD MI300X": ["MI300X"],
    "AMD MI325X": ["MI325X"],
    "AMD MI355X": ["MI355X"],
    "Intel Gaudi 2": ["Gaudi2"],
    "Intel Gaudi 3": ["Gaudi3"],
}


@pytest.mark.parametrize("row", table("hardware_mamf_matmul.csv"), ids=lambda row: row["dtype"])
def test_what_a_matrix_product_reaches_is_what_was_measured(row: dict[str, str]) -> None:
    for name in MEASURED[row["accelerator"]]:
        reached = accelerator_by_name(name).achievable_flops_per_s(row["dtype"].lower())
        assert reached == pytest.approx(float(row["mamf_tflops"]) * 1e12, rel=1e-3)


def test_only_what_was_measured_says_so() -> None:
    says = {row.name for row in ACCELERATORS if row.achievable_source.startswith("measured")}
    assert says == {name for names in MEASURED.values() for name in names}


PEAKS = {
    **MEASURED,
    "NVIDIA GB300 SXM": ["GB300"],
    "NVIDIA H100 PCIe": ["H100 PCIe"],
    "NVIDIA L40S": ["L40S"],
    "AWS Trainium2 / Ultra": ["Trainium2"],
    "Intel Gaudi2": ["Gaudi2"],
    "Intel Gaudi3": ["Gaudi3"],
    "Google TPU v4": ["TPU v4"],
    "Google TPU v5e": ["TPU v5e"],
    "Google TPU v5p": ["TPU v5p"],
    "Google TPU v6e": ["TPU v6e"],
}


@pytest.mark.parametrize("row", table("hardware_peak_tflops.csv"), ids=lambda row: row["source"])
def test_peaks_are_those_of_the_collected_datasheets(row: dict[str, str]) -> None:
    for name in PEAKS.get(row["accelerator"], []):
        peaks = accelerator_by_name(name).peak_tflops
        wanted = {key: row[key] for key in ("fp32", "fp16", "bf16", "fp8", "fp4")}
        assert peaks == {
            key: float(text) for key, text in wanted.items() if text[:1].isdigit() and key in peaks
        }


def test_a_share_is_known_for_each_peak_or_for_none() -> None:
    for row in ACCELERATORS:
        assert set(row.achievable) in (set(), set(row.peak_tflops)), row.name
        assert all(0 < share < 1 for share in row.achievable.values()), row.name
        assert bool(row.achievable) == bool(row.achievable_source), row.name


@pytest.mark.parametrize(
    ("name", "gb_per_s", "network_gbps"),
    [
        # One direction: half of what the datasheets call NVLink bandwidth; a device's network.
        ("V100 32GB", 300 / 2, 100 / 2),
        ("A100 80GB", 600 / 2, 200),
        ("H100 SXM", 900 / 2, 400),
        ("B200", 1800 / 2, 400),
        ("Gaudi2", 21 * 100 / 8, 300),
    ],
)
def test_links_are_one_direction_of_one_device(
    name: str, gb_per_s: float, network_gbps: float
) -> None:
    row = accelerator_by_name(name)
    assert row.link is not None and row.network is not None
    assert row.link.bytes_per_s == gb_per_s * 1e9
    assert row.network.bytes_per_s == network_gbps / 8 * 1e9


def test_the_count_that_gives_gaudi_its_peak_gives_gaudi_2_its_datasheet() -> None:
    gaudi, gaudi2 = accelerator_by_name("Gaudi"), accelerator_by_name("Gaudi2")
    assert gaudi.peak_tflops["bf16"] == pytest.approx(4 * 64 * 64 * 2 * 1.9e9 / 1e12, rel=1e-3)
    assert gaudi2.peak_tflops["bf16"] == pytest.approx(2 * 256 * 256 * 2 * 1.65e9 / 1e12, rel=2e-3)


def test_a_row_is_found_by_its_name_in_any_case() -> None:
    assert accelerator_by_name("h100 sxm").name == "H100 SXM"
    with pytest.raises(RequestError, match=r"'H100 SMX' is not in .* Nearest: H100 SXM.*Take one"):
        accelerator_by_name("H100 SMX")
    with pytest.raises(RequestError, match=r"It has V100 16GB, .*by its numbers in a cluster file"):
        accelerator_by_name("?")


def test_what_an_instance_has_beside_its_accelerators() -> None:
    p4d = instance("p4d.24xlarge")
    assert (p4d.efa_count, p4d.network_gbps, p4d.vcpus) == (4, 400, 96)
    assert p4d.host_memory_bytes == 1152 * 2**30
    assert p4d.local_disk_bytes == 8000e9
    assert "2026-08-21" in p4d.source
    assert instance("trn2.48xlarge").accelerator.device == "xla"
    assert instance("dl1.24xlarge").accelerator.device == "hpu"
