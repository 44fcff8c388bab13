"""The telemetry process: what it writes of devices that answer, lack, hang, raise, stand still."""

import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

from shardyard.rundir.telemetry import (
    DEVICE_FIELDS,
    LINK_FIELDS,
    NODE_FIELDS,
    read_telemetry,
)
from tests.telemetry.program import telemetry

pytestmark = pytest.mark.heavy  # starts a process


def test_each_field_of_each_device_is_written_and_what_it_lacks_is_null(tmp_path: Path) -> None:
    with telemetry(tmp_path, lacks=["temperature", "field-197"]) as program:
        program.tell({"step": [7, 7], "step_s": [0.2, 0.2], "compute_s": [0.1, None]})
        sample = program.wait_for(1)[0]
    assert sample.head.names == tuple(f"NVIDIA Fake {k}" for k in range(8))
    assert sample.head.memory_bytes == (80 * 2**30,) * 8
    lacking = {"temperature_c", "pcie_sent_bytes"}
    fields = {field.name for field in (*DEVICE_FIELDS, *LINK_FIELDS)}
    assert set(sample.devices) == fields - lacking
    assert sample.devices["utilisation"] == (0.97,) * 8
    assert sample.devices["memory_used_bytes"] == tuple(60 * 2**30 + k for k in range(8))
    assert set(sample.numbers) == {field.name for field in NODE_FIELDS}
    assert sample.ranks == {
        "step": (7, 7), "step_s": (0.2, 0.2), "compute_s": (0.1, None),
    }  # fmt: skip


def test_without_a_driver_the_node_itself_is_written(tmp_path: Path) -> None:
    with telemetry(tmp_path, no_driver=True) as program:
        sample = program.wait_for(1)[0]
    assert sample.head.names == () and sample.devices == {}
    assert sample.numbers["memory_available_bytes"]


def test_a_device_that_hangs_is_null_while_the_others_go_on(tmp_path: Path) -> None:
    with telemetry(tmp_path) as program:
        program.wait_for(1)
        program.set(hang=[3])
        hung = program.wait_for(4)[-1]
        program.set()
        well = program.wait_for(7)[-1]
    assert hung.unanswered == (3,)
    assert [value is None for value in hung.devices["power_w"]] == [k == 3 for k in range(8)]
    assert well.unanswered == () and well.devices["power_w"][3] is not None


def test_lines_keep_their_time_while_a_device_hangs(tmp_path: Path) -> None:
    with telemetry(tmp_path, hang=[0]) as program:
        samples = program.wait_for(5)
    gaps_s = [b.t - a.t for a, b in pairwise(samples)]
    assert max(gaps_s) < 1.5


def test_a_device_that_raises_is_null_and_said_once(tmp_path: Path) -> None:
    with telemetry(tmp_path) as program:
        program.wait_for(1)
        program.set(**{"raise": [2]})
        sample = program.wait_for(4)[-1]
    assert sample.devices["power_w"][2] is None and sample.devices["power_w"][1] is not None


def test_errors_of_the_driver_are_told_with_the_device(tmp_path: Path) -> None:
    with telemetry(tmp_path, xid=[[5, 79]]) as program:
        found = [pair for sample in program.wait_for(3) for pair in sample.xid]
    assert found == [(5, 79)]


def test_why_a_clock_is_held_down_is_told_but_not_the_usual_power_cap(tmp_path: Path) -> None:
    with telemetry(tmp_path, reasons={"0": 0x40, "1": 0x4, "2": 0x28}) as program:
        sample = program.wait_for(1)[0]
    assert sample.slowed_by == ("heat", "", "hardware and heat", "", "", "", "", "")


def test_a_link_that_is_set_to_less_than_it_could_be_is_found(tmp_path: Path) -> None:
    with telemetry(tmp_path, pcie={"2": [5, 8]}, every_s=0.1) as program:
        samples = program.wait_for(6)
        while not any(sample.findings for sample in samples) and len(samples) < 60:
            samples = program.wait_for(len(samples) + 1)
    sample = samples[-1]
    assert sample.devices["pcie_link_bytes_per_s"][1:3] == (63_015_384_608, 31_507_692_304)
    assert sample.devices["pcie_link_most_bytes_per_s"] == (63_015_384_608,) * 8
    (found,) = [found for sample in samples for found in sample.findings]
    assert (found["kind"], found["device"]) == ("slow_pcie", 2)


def test_only_the_devices_that_the_run_may_use_are_read(tmp_path: Path) -> None:
    with telemetry(tmp_path, devices=2, visible="6,GPU-4,1") as program:
        sample = program.wait_for(1)[0]
    assert sample.head.names == ("NVIDIA Fake 6", "NVIDIA Fake 4")


def test_a_counter_that_stands_still_is_marked(tmp_path: Path) -> None:
    with telemetry(tmp_path, still=[1], every_s=0.1) as program:
        sample = program.wait_for(14)[-1]
    assert sample.stuck == {
        "power_w": (1,), "pcie_sent_bytes": (1,), "pcie_received_bytes": (1,),
        "nvlink_sent_bytes": (1,), "nvlink_received_bytes": (1,),
    }  # fmt: skip


def test_it_ends_with_whoever_started_it_also_while_a_device_hangs(tmp_path: Path) -> None:
    with telemetry(tmp_path, hang=[0]) as program:
        program.wait_for(1)
        assert program.process.stdin is not None
        began_s = time.monotonic()
        program.process.stdin.close()
        program.process.wait(3)
    assert time.monotonic() - began_s < 1.5


def test_an_attempt_that_goes_on_appends_a_head_of_its_own(tmp_path: Path) -> None:
    for attempt in (1, 2):
        with telemetry(tmp_path, devices=1) as program:
            program.wait_for(attempt)
    samples = list(read_telemetry(program.file))
    assert len({sample.head.t for sample in samples}) == 2
    assert asdict(samples[0].head)["names"] == ("NVIDIA Fake 0",)
