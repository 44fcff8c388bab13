"""Each check of a machine: what is fine, what is not, and how it is mended."""

import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard import doctor
from shardyard.control_groups import MemoryLimit, ProcessorLimit
from shardyard.doctor.finding import Finding
from shardyard.doctor.machine import (
    check_address,
    check_interface,
    check_machine,
    clock_finding,
    compute_capability_finding,
    cpu_limit_finding,
    devices_finding,
    driver_findings,
    locked_memory_finding,
    memory_limit_finding,
    nccl_of_torch,
    nvidia_devices_on_bus,
    nvidia_driver,
    open_files_finding,
    shared_memory_finding,
)
from shardyard.errors import RequestError
from shardyard.hardware.machine import Machine
from shardyard.network_interface import loopback_interface

MIB, GIB = 2**20, 2**30
H200 = Machine(
    device="cuda", name="NVIDIA H200", count=8, memory_bytes=141 * GIB, cores=192, hostname="a"
)
LAPTOP = Machine(device="cpu", name="A CPU", count=1, memory_bytes=16 * GIB, cores=8, hostname="b")


def versions(installed: dict[str, str]) -> Callable[[str], str | None]:
    return lambda package: installed.get(package)


def said(finding: Finding) -> str:
    return f"{finding.verdict}: {finding.what}. {finding.mend}"


@pytest.mark.parametrize(
    ("machine", "wanted", "words"),
    [
        (H200, 8, "ok: 8 x NVIDIA H200, 141.0 GiB"),
        (LAPTOP, None, "ok: no accelerator; 8 CPU cores: A CPU, 16.0 GiB"),
        (replace(H200, count=4), 8, "Use cluster.devices=4, or a machine with 8."),
        (replace(H200, name="NVIDIA X1"), None, "warning: 8 x NVIDIA X1, 141.0 GiB; it is not in"),
    ],
)
def test_devices(machine: Machine, wanted: int | None, words: str) -> None:
    assert words in said(devices_finding(machine, requested=wanted))


# CUDA 13 needs driver 580.65.06, any CUDA 12 runs on 525.60.13 (NVIDIA, CUDA release notes)
@pytest.mark.parametrize(
    ("driver", "on_bus", "cuda_major", "is_seen", "words"),
    [
        ("580.65.06", 8, 13, True, "ok: NVIDIA 580.65.06"),
        ("535.183.01", 8, 12, True, "ok: NVIDIA 535.183.01"),
        ("570.124.06", 8, 13, False, "built for CUDA 13, which needs 580.65.06. Install a newer"),
        (None, 8, 13, False, "problem: 8 NVIDIA devices on the PCI bus, but no driver is loaded"),
        ("580.65.06", 8, None, False, "is built without CUDA and sees no device. Install the whe"),
        ("580.65.06", 8, 13, False, "but torch sees no device. See `nvidia-smi`; in a container"),
    ],
)
def test_the_driver(
    driver: str | None, on_bus: int, cuda_major: int | None, is_seen: bool, words: str
) -> None:
    (finding,) = driver_findings(
        driver=driver, on_bus=on_bus, cuda_major=cuda_major, is_seen=is_seen
    )
    assert words in said(finding)


def test_a_machine_without_nvidia_devices_needs_no_driver() -> None:
    assert driver_findings(driver=None, on_bus=0, cuda_major=None, is_seen=False) == []


def test_the_driver_and_the_bus_are_read_as_linux_writes_them(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
    )
    assert nvidia_driver(version) == "580.65.06"
    assert nvidia_driver(tmp_path / "none") is None
    for name, vendor, kind in (
        ("0000:00:1e.0", "0x10de", "0x030200"),  # a GPU
        ("0000:00:1f.0", "0x10de", "0x068000"),  # an NVSwitch
        ("0000:00:05.0", "0x1d0f", "0x020000"),  # a network card of Amazon's
    ):
        (tmp_path / "bus" / name).mkdir(parents=True)
        (tmp_path / "bus" / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / "bus" / name / "class").write_text(f"{kind}\n")
    assert nvidia_devices_on_bus(tmp_path / "bus") == 1


def test_the_nccl_of_a_wheel_tells_its_cuda() -> None:
    assert nccl_of_torch(versions({"nvidia-nccl-cu13": "2.29.7"})) == (13, "2.29.7")
    assert nccl_of_torch(versions({"nvidia-nccl-cu12": "2.27.5"})) == (12, "2.27.5")
    assert nccl_of_torch(versions({})) == (None, None)


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (shared_memory_finding(64 * GIB), "ok: /dev/shm has 64.0 GiB"),
        (shared_memory_finding(64 * MIB), "warning: /dev/shm has 64.0 MiB; processes of a node"),
        (cpu_limit_finding(8.0, processes=8), "ok: 8 cores for 8 processes"),
        (cpu_limit_finding(1.5, processes=1), "ok: 1.5 cores for 1 process"),
        (
            cpu_limit_finding(3.5, processes=8),
            "warning: 3.5 cores for 8 processes; each tenth of a second, all pause once they have "
            "used it up. Raise it to a core a process",
        ),
        (open_files_finding(1024), "warning: 1,024 a process; rank 0"),
        (open_files_finding(65536), "ok: 65,536 a process"),
        (open_files_finding(resource.RLIM_INFINITY), "ok: no limit"),
        (
            locked_memory_finding(64 * 1024),
            "problem: 64.0 KiB a process; EFA and InfiniBand cannot",
        ),
        (locked_memory_finding(resource.RLIM_INFINITY), "ok: enough"),
        (clock_finding(0.01), "ok: 0.01 s behind the time server"),
        (clock_finding(-30), "warning: 30 s ahead of the time server. Start chrony"),
        (clock_finding(4000), "problem: 4e+03 s behind the time server. Start chrony"),
    ],
)
def test_limits_and_clock(finding: Finding, words: str) -> None:
    assert said(finding).startswith(words)


def test_the_name_of_a_machine_must_lead_to_it() -> None:
    assert check_address("localhost").verdict == "ok"
    nowhere = check_address("no-such-host.invalid")
    assert nowhere.verdict == "warning" and "to /etc/hosts, or fix DNS" in nowhere.mend


def test_all_is_looked_at_also_where_the_devices_do_not_answer(tmp_path: Path) -> None:
    def broken() -> Machine:
        raise RequestError("the probe of this machine's devices failed")

    found = {finding.name: finding for finding in check_machine(tmp_path, describe_machine=broken)}
    assert found["devices"].verdict == "problem"
    assert {"packages", "open files", "run folder", "address"} <= set(found)


@pytest.mark.parametrize(
    ("needed", "words"),
    [
        (None, "ok: 900.0 MiB, of control group /g"),
        (800 * MIB, "ok: 900.0 MiB, of control group /g; the plan needs 800.0 MiB"),
        (2 * GIB, "problem: 900.0 MiB, of control group /g; the plan needs 2.0 GiB. Raise it (--m"),
    ],
)
def test_a_memory_limit_is_held_against_the_plan(needed: int | None, words: str) -> None:
    limit = MemoryLimit(Path("/g"), 900 * MIB)
    assert said(memory_limit_finding(limit, needed_bytes=needed)).startswith(words)


@pytest.mark.parametrize(("processes", "verdict"), [(None, "ok"), (8, "ok"), (9, "warning")])
def test_a_limit_of_processor_time_is_held_against_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int | None, verdict: str
) -> None:
    limit = ProcessorLimit(tmp_path, cores=8.0)
    monkeypatch.setattr(doctor.machine, "processor_limit", lambda: limit)
    findings = check_machine(tmp_path, processes=processes, describe_machine=lambda: H200)
    assert [each.verdict for each in findings if each.name == "processor limit"] == [verdict]


V100 = replace(H200, name="Tesla V100-SXM2-16GB")


@pytest.mark.parametrize(
    ("machine", "cuda_major", "torch", "is_refused"),
    [
        (V100, 13, "2.13.0", True),
        (V100, 12, "2.11.0+cu128", True),
        (V100, 12, "2.13.0+cu126", False),
        (H200, 13, "2.13.0", False),
        (LAPTOP, None, "2.13.0+cpu", False),
    ],
)
def test_a_torch_without_code_for_the_device_is_a_problem(
    machine: Machine, cuda_major: int | None, torch: str, is_refused: bool
) -> None:
    found = compute_capability_finding(machine, cuda_major=cuda_major, torch=torch)
    assert (found is not None) == is_refused
    if found is not None:
        assert found.verdict == "problem" and "no code for Tesla V100" in found.what
        assert found.mend.startswith("Install torch 2.14 or older of https://download.pytorch.org")


def test_an_interface_that_a_variable_names_is_looked_for() -> None:
    assert check_interface({}) == []
    assert check_interface({"GLOO_SOCKET_IFNAME": loopback_interface()})[0].verdict == "ok"
    (finding,) = check_interface({"GLOO_SOCKET_IFNAME": "eth9"})
    assert finding.verdict == "problem" and "GLOO_SOCKET_IFNAME=eth9" in finding.what
    assert finding.mend.startswith("Unset the variable (`unset GLOO_SOCKET_IFNAME`)")


def test_a_host_name_of_64_letters_is_a_problem() -> None:
    finding = check_address("a" * 64)
    assert finding.verdict == "problem" and "64 letters" in finding.what
    assert finding.mend.startswith("Give the machine a shorter name: `hostname ")
