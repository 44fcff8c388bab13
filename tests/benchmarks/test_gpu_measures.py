"""What stands beside a measured cell: causes, shares, clocks, losses, and the limit of memory."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.beside import newest_ceilings, over_predicted, shares
from benchmarks.gpu.cells import LOADS, Cell, Place, reference
from benchmarks.gpu.clocks import Clocks
from benchmarks.gpu.equal_losses import DIFFER, RATES, checked
from benchmarks.gpu.kernels import by_cause, cause_of, covered_ms
from benchmarks.gpu.limit import limit_cells
from shardyard.planner.calibration import DeviceCeilings
from shardyard.telemetry.vendors import Device, Reading

GIB = 2**30
H200 = Place(
    device="cuda", devices=1, memory_bytes=140 * GIB, source="-", vocab_size=32000,
    prepared=Path("-"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NTN", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "GEMM"),
        ("aten::addmm", "GEMM"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>",
            "optimizer",
        ),
        ("void cunn_SoftMaxForward<8, float>", "loss"),
        ("nll_loss_forward_reduce_cuda_kernel_2d", "loss"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("aten::copy_", "copies"),
        ("triton_red_fused_mul_pow_0", "pointwise"),
        ("aten::mul", "pointwise"),
    ],
)
def test_a_kernel_has_the_cause_that_its_name_tells(name: str, cause: str) -> None:
    assert cause_of(name) == cause


def test_causes_add_up_to_all_rows_and_gaps_are_what_no_kernel_covers() -> None:
    rows = [
        {"cause": "GEMM", "ms": 2.0},
        {"cause": "loss", "ms": 1.0},
        {"cause": "GEMM", "ms": 3.0},
    ]
    found = by_cause(rows)
    assert (found["GEMM"], found["loss"], found["attention"]) == (5.0, 1.0, 0.0)
    assert sum(found.values()) == 6.0
    # two that overlap, one inside another, and 3 ms without any
    assert covered_ms([(0, 2000), (1000, 4000), (1500, 1600), (7000, 8000)]) == (8.0, 5.0)
    assert covered_ms([]) == (0.0, 0.0)


def test_a_share_is_the_arithmetic_by_its_time_over_the_ceiling() -> None:
    ceilings = DeviceCeilings(
        source="-", device="-", product_flops_per_s=500e12, fp8_flops_per_s=None,
        attention_flops_per_s=None, attention_both_flops_per_s=100e12,
        bandwidth_bytes_per_s=None, to_host_bytes_per_s=None,
    )  # fmt: skip
    flops = {"full": 48e9, "causal": 42e9}  # 36 G in products, 6 G in attention of half the pairs
    causes = {"GEMM": 100.0, "attention": 140.0}
    found = shares(causes, flops, 1000, recompute="none", ceilings=ceilings)
    assert found["GEMM"] == pytest.approx(36e9 * 1000 / 0.1 / 500e12)
    assert found["attention"] == pytest.approx(7e9 * 1000 / 0.14 / 100e12)
    again = shares(causes, flops, 1000, recompute="full", ceilings=ceilings)
    assert again["GEMM"] == pytest.approx(36e9 * 4 / 3 * 1000 / 0.1 / 500e12)
    nobody = shares(causes, flops, 1000, recompute="none", ceilings=None)
    assert nobody == {"GEMM": None, "attention": None}


def test_measured_stands_over_predicted() -> None:
    line = {
        "predicted": {"step_s": 2.0, "memory_bytes": 100}, "median_step_s": 3.0,
        "peak": [{"allocated_bytes": 110}, {"allocated_bytes": 90}],
    }  # fmt: skip
    assert over_predicted(line) == {"step": 1.5, "memory": 1.1}
    line = {**line, "predicted": {"step_s": None, "memory_bytes": 100}, "peak": []}
    assert over_predicted(line) == {"step": None, "memory": None}


def test_ceilings_of_a_rehearsal_give_no_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert newest_ceilings(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    file = tmp_path / "cpu" / "ceilings-1.json"
    line = {"what": "sum in place", "status": "ok", "rate": 1.0}
    content: dict[str, Any] = {
        "kind": "device_ceilings", "hardware": {"name": "NVIDIA H200"}, "lines": [line],
    }  # fmt: skip
    file.write_text(json.dumps({**content, "is_rehearsal": True}))
    assert newest_ceilings(tmp_path) is None
    assert "it is a rehearsal" in capsys.readouterr().err
    file.write_text(json.dumps(content))
    found = newest_ceilings(tmp_path)
    assert found is not None and found.bandwidth_bytes_per_s == 1e12


class FakeCounters:
    """Two devices that draw 700 W."""

    count = 2

    def device(self, index: int) -> Device:
        return Device(str(index), None)

    def read(self, index: int) -> Reading:
        return Reading(sm_clock_mhz=1980 - index, power_w=700.0, slowed_by="")

    def wait_for_error(self, wait_s: float) -> tuple[int, int] | None:
        raise NotImplementedError


def test_clocks_and_power_are_read_beside_a_measurement() -> None:
    with Clocks(2, every_s=0.01, open_counters=lambda _: FakeCounters()) as clocks:
        until = time.monotonic() + 5.0
        found: list[dict[str, Any]] = []
        while len(found) < 6 and time.monotonic() < until:
            time.sleep(0.01)
            found += clocks.take() or []
    assert {(row["device"], row["sm_clock_mhz"]) for row in found} == {(0, 1980), (1, 1979)}
    assert {row["power_w"] for row in found} == {700.0}
    assert found[-1]["t"] > found[0]["t"]


def test_without_a_driver_there_are_no_clocks() -> None:
    with Clocks(1, open_counters=lambda _: None) as clocks:
        assert clocks.take() is None


def line_of(losses: list[float], **changes: Any) -> dict[str, Any]:
    return {
        "model": "m", "blocks": None, "contender": "shardyard", "seq_len": 64, "status": "ok",
        "sequences_per_step_per_device": 4, "settings": [], "compile": True, "losses": losses,
        **dict.fromkeys(RATES, 1.0), **changes,
    }  # fmt: skip


PLAIN = line_of([10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0], compile=False)


def test_rates_stand_where_the_first_eight_losses_are_those_without_compilation() -> None:
    near = line_of([10.05, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 9.9])  # the ninth does not count
    found = checked(near, [PLAIN])
    assert found["status"] == "ok" and found["losses_apart"] == pytest.approx(0.005)


@pytest.mark.parametrize("seventh", [4.05, float("nan")])
def test_rates_are_withheld_where_a_loss_is_more_than_a_percent_away(seventh: float) -> None:
    far = line_of([10.0, 9.0, 8.0, 7.0, 6.0, 5.0, seventh, 3.0])
    found = checked(far, [PLAIN])
    assert found["status"] == DIFFER and "the rates are withheld" in found["message"]
    assert not set(RATES) & set(found) and found["losses"] == far["losses"]


def test_a_line_is_held_against_the_same_work_only() -> None:
    far = line_of([1.0])
    for other in (
        line_of([9.0], compile=False, contender="bare"),
        line_of([9.0], compile=False, settings=["precision.compute=fp8"]),
        line_of([9.0], compile=False, status="out of memory"),
        line_of([9.0]),
    ):
        assert checked(far, [other])["losses_apart"] is None
    more_memory = line_of([9.0], compile=False, settings=["memory.offload=activations"])
    assert checked(far, [more_memory])["status"] == DIFFER
    assert checked({"status": "out of memory"}, [PLAIN]) == {"status": "out of memory"}


def test_a_reference_is_the_same_work_uncompiled() -> None:
    cell = Cell(
        load=LOADS["llama2-7b"],
        contender="shardyard",
        recompute="none",
        micro_batch=1,
        compile=True,
    )
    found = reference(cell)
    assert (found.compile, found.recompute, found.variant) == (False, "full", "reference")
    assert found.load == cell.load


def test_cells_around_the_limit_fit_are_tight_and_are_over_it() -> None:
    from benchmarks.gpu.cells import tensor_bytes

    found = {cell.variant: cell for cell in limit_cells(H200)}
    share = {name: tensor_bytes(cell, H200) / H200.memory_bytes for name, cell in found.items()}
    assert list(found) == ["fits", "tight", "over"]
    assert share["fits"] <= 0.85 < share["tight"] <= 0.97 < 1.05 < share["over"] < 1.15
    assert not any(cell.halves for cell in found.values())
    assert all(cell.micro_batch == cell.load.sequences for cell in found.values())
