"""The catalogue: exact names, dated prices, and no guess about a device it does not know."""

import pytest

from shardyard.errors import RequestError
from shardyard.hardware.catalogue import (
    _INSTANCES,
    ACCELERATORS,
    accelerator_named,
    instance,
)


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
    assert all(instance(name).count >= 1 for name in _INSTANCES)


def test_an_unknown_instance_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(RequestError, match=r"cluster\.instance='p5\.48xlage'.*p5\.48xlarge.*Take"):
        instance("p5.48xlage")
    with pytest.raises(RequestError, match=r"'quantum'.*It has p3\.2xlarge"):
        instance("quantum")
