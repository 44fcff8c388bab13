"""Rates of one device: between what nobody exceeds and what everybody reaches, by shape."""

from dataclasses import replace

import pytest

from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.catalogue import accelerator_by_name
from shardyard.planner.calibration import Calibration
from shardyard.planner.kernels import Rates, missing_rate, rates

H100, A100 = accelerator_by_name("H100 SXM"), accelerator_by_name("A100 80GB")


def reached(found: Rates, rows: int, columns: int, depth: int) -> float:
    """FLOP/s of a product."""
    return 2 * rows * columns * depth / found.matmul_s(rows, columns, depth)


def test_a_large_product_reaches_what_runs_reach_and_no_more_than_was_ever_measured() -> None:
    # the best product anybody timed on an H100 is 0.803 of 989 TFLOP/s (ml-engineering, mamf);
    # published training runs, products and all the rest, end at 0.46 to 0.49
    assert 0.5 < reached(rates(H100, "bf16"), 8192, 8192, 8192) / 989e12 < 0.803
    # A100: 0.869 of 312, and runs of Megatron-LM at 0.57
    assert 0.6 < reached(rates(A100, "bf16"), 8192, 8192, 8192) / 312e12 < 0.869


def test_small_products_are_slower_than_large_ones() -> None:
    found = [reached(rates(H100, "bf16"), n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192)]
    assert found == sorted(found)
    assert found[0] < 0.05 * found[-1], "4 tiles for 132 multiprocessors"


def test_products_of_odd_widths_are_slower() -> None:
    # a vocabulary of 50,257 entries and the next multiple of 64
    odd, even = (rates(A100, "bf16").matmul_s(8192, columns, 4096) for columns in (50257, 50304))
    assert odd > 1.5 * even
    eights = rates(A100, "bf16").matmul_s(8192, 8200, 4096)
    assert rates(A100, "bf16").matmul_s(8192, 8256, 4096) < eights, "8,200 is no multiple of 64"


def test_a_tile_more_than_there_are_processors_takes_a_second_wave() -> None:
    # 12 x 9 tiles of 256 x 128 on 108 multiprocessors, then one row of tiles more
    found = rates(A100, "bf16")
    full = reached(found, 12 * 256, 9 * 128, 8192)
    assert reached(found, 12 * 256, 10 * 128, 8192) < 0.9 * full


def test_a_product_with_one_row_is_as_fast_as_memory() -> None:
    weight_bytes = 2 * 8192 * 8192
    assert rates(H100, "bf16").matmul_s(1, 8192, 8192) > weight_bytes / 3350e9
    assert reached(rates(H100, "bf16"), 1, 8192, 8192) < 0.01 * 989e12


def test_element_wise_operators_take_what_memory_and_their_starts_take() -> None:
    found = rates(H100, "bf16")
    assert found.elementwise_s(3350e9, kernels=1) == pytest.approx(1.1, rel=0.1)
    assert found.elementwise_s(0, kernels=10) == 10 * found.elementwise_s(0, kernels=1) > 0


def test_fp8_products_are_faster_and_attention_is_not() -> None:
    half, quarter = rates(H100, "bf16"), rates(H100, "fp8")
    assert 1.5 < quarter.flops_per_s / half.flops_per_s < 2.1
    assert quarter.flash_flops_per_s == half.flash_flops_per_s


def test_flash_attention_reaches_what_its_authors_say() -> None:
    # Dao 2023: up to 230 TFLOP/s on A100, forward; Shah et al. 2024: 35 % of an H100 at best
    assert 0.3 * 312e12 < rates(A100, "bf16").flash_flops_per_s < 230e12
    found = rates(H100, "bf16")
    assert found.flash_flops_per_s < 0.35 * 989e12 < found.fused_flops_per_s < 0.75 * 989e12


def test_a_lower_power_limit_slows_arithmetic_and_not_memory() -> None:
    full = rates(H100, "bf16")
    limited = rates(replace(H100, power_share=0.8), "bf16")
    assert limited.flops_per_s == pytest.approx(0.8 * full.flops_per_s)
    assert limited.bytes_per_s == full.bytes_per_s


def test_what_was_measured_replaces_the_shares() -> None:
    measured = Calibration(matmul_share=0.7, bandwidth_share=0.8)
    found = rates(H100, "bf16", measured)
    assert found.flops_per_s == pytest.approx(0.7 * 989e12, rel=1e-3)
    assert found.bytes_per_s == pytest.approx(0.8 * 3350e9)
    assert rates(H100, "bf16", Calibration()) == rates(H100, "bf16")


def test_the_measured_start_of_a_kernel_counts_in_products_and_element_wise_operators() -> None:
    slow = rates(H100, "bf16", Calibration(kernel_s=1e-3))
    assert slow.elementwise_s(0, kernels=3) == pytest.approx(3e-3)
    assert slow.matmul_s(64, 64, 64) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize(
    ("device", "number_format", "words"),
    [
        ("A10G", "bf16", "the catalogue has no bf16 peak for A10G"),
        ("V100 32GB", "bf16", "the catalogue has no bf16 peak for V100 32GB"),
        ("A100 80GB", "fp8", "the catalogue has no fp8 peak for A100 80GB"),
    ],
)
def test_a_rate_that_no_source_gives_is_named(device: str, number_format: str, words: str) -> None:
    assert missing_rate(accelerator_by_name(device), number_format) == words


def test_a_device_of_ones_own_needs_a_bandwidth_and_a_measured_product() -> None:
    bare = Accelerator(name="X1", memory_bytes=2**36, peak_tflops={"bf16": 100.0})
    assert missing_rate(bare, "bf16") == "the catalogue has no memory bandwidth for X1"
    fed = replace(bare, bandwidth_bytes_per_s=1e12)
    assert missing_rate(fed, "bf16") == "the speed of a bf16 product on X1 is not measured"
    whole = replace(fed, achievable={"bf16": 0.8})
    assert missing_rate(whole, "bf16") is None
    assert reached(rates(whole, "bf16"), 8192, 8192, 8192) < 80e12
