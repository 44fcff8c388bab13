"""Is this machine fit to train? Each check, also of its clock, measures one thing and judges it.

Judging is apart from reading and pure, so that the judgement of machines that we do not have is
tested too.
"""

import os
import re
import resource
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from shardyard.config.schema.recipe import Checkpoint
from shardyard.config.versions import (
    ENGINES,
    OLDEST_CODE,
    WHEEL_OF_OLDER,
    Engine,
    check_packages,
    installed_version,
    wheels_for_older,
)
from shardyard.control_groups import MemoryLimit, memory_limit, processor_limit
from shardyard.doctor.finding import Finding
from shardyard.doctor.storage import check_disk, check_locks
from shardyard.errors import RequestError
from shardyard.hardware.catalogue import accelerator_named
from shardyard.hardware.machine import Machine, probe
from shardyard.network_interface import VARIABLE, host_name_problem, problem_of
from shardyard.units import format_bytes

GIB = 2**30

_NCCL_PACKAGES = {13: "nvidia-nccl-cu13", 12: "nvidia-nccl-cu12"}
"""Major version of CUDA -> the package that torch's wheel brings its NCCL in."""

_LEAST_DRIVER = {13: "580.65.06", 12: "525.60.13"}
"""NVIDIA, CUDA toolkit release notes: oldest Linux driver that runs any toolkit of a major."""

_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"


def check_machine(
    run_dir: Path,
    *,
    requested_devices: int | None = None,
    processes: int | None = None,
    checkpoint_bytes: int | None = None,
    retention: Checkpoint | None = None,
    host_bytes: int | None = None,
    engines: tuple[Engine, ...] = ENGINES,
    describe_machine: Callable[[], Machine] = probe,
) -> list[Finding]:
    """Everything that can be said of this machine in a few seconds.

    Args:
        run_dir: Where the runs' folders will be.
        requested_devices: Devices of one node that the recipe asks for.
        processes: Of one node, as the recipe asks for; None: one a device that is found.
        checkpoint_bytes: Size of one, as planned; None: not known.
        retention: Checkpoints that are kept; None: as many as a recipe keeps that does not say.
        host_bytes: Host memory that the recipe's plan needs on a node; None: not known.
        engines: Packages that a recipe needs.
        describe_machine: What describes the devices.
    """
    machine: Machine | None = None
    findings: list[Finding] = []
    try:
        machine = describe_machine()
        findings.append(devices_finding(machine, requested=requested_devices))
    except RequestError as error:
        findings.append(Finding(name="devices", verdict="problem", what=str(error)))
    cuda_major, nccl = nccl_of_torch()
    if (
        machine is not None
        and (old := compute_capability_finding(machine, cuda_major=cuda_major)) is not None
    ):
        findings.append(old)
    findings += [
        *driver_findings(
            driver=nvidia_driver(), on_bus=nvidia_devices_on_bus(), cuda_major=cuda_major,
            is_seen=machine is not None and machine.device != "cpu",
        ),
        *check_engines(engines),
    ]  # fmt: skip
    if nccl is not None:
        findings.append(Finding(name="NCCL", verdict="ok", what=f"{nccl}, of the torch wheel"))
    has_rdma = any(Path("/sys/class/infiniband").glob("*"))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if processes is None:
        processes = 1 if machine is None else machine.count
    if (limit := processor_limit()) is not None:
        findings.append(cpu_limit_finding(limit.cores, processes=processes))
    if (memory := memory_limit()) is not None:
        findings.append(memory_limit_finding(memory, needed_bytes=host_bytes))
    findings += [
        *([] if (shared := shared_memory_bytes()) is None else [shared_memory_finding(shared)]),
        open_files_finding(files),
        *([locked_memory_finding(locked)] if has_rdma else []),
        check_disk(run_dir, retention or Checkpoint(), checkpoint_bytes=checkpoint_bytes),
        *check_locks(run_dir),
        check_address(socket.gethostname()),
        *check_interface(os.environ),
    ]
    offset_s = clock_offset_s()
    return findings if offset_s is None else [*findings, clock_finding(offset_s)]


def devices_finding(machine: Machine, *, requested: int | None) -> Finding:
    """Report how many devices of which kind there are, and whether they are enough and known."""
    each = f"{machine.name}, {format_bytes(machine.memory_bytes)}"
    if machine.device == "cpu":
        what = f"no accelerator; {machine.cores} CPU cores: {each}"
        return Finding(name="devices", verdict="ok", what=what)
    what = f"{machine.count} x {each}"
    if requested is not None and requested > machine.count:
        return Finding(
            name="devices", verdict="problem",
            what=f"{what}, but cluster.devices={requested}",
            mend=f"Use cluster.devices={machine.count}, or a machine with {requested}.",
        )  # fmt: skip
    if accelerator_named(machine.name) is None:
        return Finding(
            name="devices", verdict="warning",
            what=f"{what}; it is not in the catalogue, so that neither MFU nor speed is known",
            mend="Give observe.peak_tflops, or describe it in a cluster.file.",
        )  # fmt: skip
    return Finding(name="devices", verdict="ok", what=what)


def compute_capability_finding(
    machine: Machine, *, cuda_major: int | None, torch: str | None = None
) -> Finding | None:
    """Whether the installed torch has code for an old device.

    Args:
        torch: Its version; None: of what is installed.
    """
    accelerator = accelerator_named(machine.name)
    capability = None if accelerator is None else accelerator.capability
    found = torch or installed_version("torch") or ""
    if capability is None or capability >= OLDEST_CODE or found.endswith(WHEEL_OF_OLDER):
        return None
    if cuda_major == 12 and not found.endswith("cu128"):
        return None  # of a build that does not say which CUDA 12 it is for
    return Finding(
        name="torch", verdict="problem",
        what=f"torch {found} has no code for {machine.name}, of compute capability "
        f"{capability[0]}.{capability[1]}",
        mend=f"Install torch 2.14 or older of {wheels_for_older()}, or use newer machines.",
    )  # fmt: skip


def driver_findings(
    *, driver: str | None, on_bus: int, cuda_major: int | None, is_seen: bool
) -> list[Finding]:
    """Whether the NVIDIA driver is there, new enough for torch's wheel, and seen by torch."""
    if not on_bus and driver is None:
        return []
    least = _LEAST_DRIVER.get(cuda_major or 0)
    if driver is None:
        return [
            Finding(
                name="driver", verdict="problem",
                what=f"{on_bus} NVIDIA devices on the PCI bus, but no driver is loaded",
                mend=f"Install driver {least or 'of a CUDA that torch was built for'} or newer.",
            )
        ]  # fmt: skip
    if least is not None and _numbers(driver) < _numbers(least):
        return [
            Finding(
                name="driver", verdict="problem",
                what=f"NVIDIA {driver}, but torch is built for CUDA {cuda_major}, which needs "
                f"{least}",
                mend="Install a newer driver, or the torch wheel of an older CUDA.",
            )
        ]  # fmt: skip
    if cuda_major is None and not is_seen:
        return [
            Finding(
                name="driver", verdict="problem",
                what=f"NVIDIA {driver}, but torch {installed_version('torch')} is built without "
                "CUDA and sees no device",
                mend="Install the wheel for CUDA: https://pytorch.org/get-started/locally.",
            )
        ]  # fmt: skip
    if not is_seen:
        return [
            Finding(
                name="driver", verdict="problem",
                what=f"NVIDIA {driver}, but torch sees no device",
                mend="See `nvidia-smi`; in a container, hand the devices in (--gpus all).",
            )
        ]  # fmt: skip
    return [Finding(name="driver", verdict="ok", what=f"NVIDIA {driver}")]


def check_engines(engines: tuple[Engine, ...] = ENGINES) -> list[Finding]:
    """The installed packages against the table of compatibility."""
    try:
        warnings = check_packages(engines)
    except RequestError as error:
        what, _, mend = str(error).partition("\nInstall them with: ")
        text = " ".join(what.split())
        return [Finding(name="packages", verdict="problem", what=text, mend=mend)]
    if not warnings:
        what = f"torch {installed_version('torch')} and all others are within the tested range"
        return [Finding(name="packages", verdict="ok", what=what)]
    mend = "Mostly harmless; if something breaks, install the versions of constraints.txt."
    return [Finding(name="packages", verdict="warning", what=w, mend=mend) for w in warnings]


def shared_memory_finding(num_bytes: int) -> Finding:
    """/dev/shm: NCCL joins the devices of a node through it, and a container has 64 MiB of it."""
    what = f"/dev/shm has {format_bytes(num_bytes)}"
    if num_bytes >= GIB:
        return Finding(name="shared memory", verdict="ok", what=what)
    return Finding(
        name="shared memory", verdict="warning",
        what=f"{what}; processes of a node that exchange data through it may end with a bus error",
        mend="docker run --shm-size=8g; on Kubernetes launch.kubernetes.shared_memory_gib.",
    )  # fmt: skip


def cpu_limit_finding(limit_cores: float, *, processes: int) -> Finding:
    """Each process needs a core, or its device waits for the next thing to do."""
    what = f"{limit_cores:g} cores for {processes} process{'es' if processes > 1 else ''}"
    if limit_cores >= processes:
        return Finding(name="processor limit", verdict="ok", what=what)
    return Finding(
        name="processor limit", verdict="warning",
        what=f"{what}; each tenth of a second, all pause once they have used it up",
        mend="Raise it to a core a process at least, or take it away: resources.limits.cpu in "
        "Kubernetes, --cpus of a container, cpu.max of a control group.",
    )  # fmt: skip


def memory_limit_finding(limit: MemoryLimit, *, needed_bytes: int | None) -> Finding:
    """The memory of a container or job step, where the kernel kills a process that needs more."""
    what = f"{format_bytes(limit.bytes)}, of control group {limit.group}"
    if needed_bytes is None:
        return Finding(name="memory limit", verdict="ok", what=what)
    what += f"; the plan needs {format_bytes(needed_bytes)}"
    if needed_bytes <= limit.bytes:
        return Finding(name="memory limit", verdict="ok", what=what)
    return Finding(
        name="memory limit", verdict="problem", what=what,
        mend="Raise it (--memory of a container, resources.limits.memory in Kubernetes, --mem of "
        "Slurm), or use a smaller optim.micro_batch.",
    )  # fmt: skip


def open_files_finding(limit: int) -> Finding:
    """Data shards, checkpoint files and connections of all ranks are open files."""
    if limit == resource.RLIM_INFINITY or limit >= 4096:
        shown = "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,} a process"
        return Finding(name="open files", verdict="ok", what=shown)
    return Finding(
        name="open files", verdict="warning",
        what=f"{limit:,} a process; rank 0 of a large run holds a connection to every other",
        mend="ulimit -n 65536, or nofile in /etc/security/limits.conf.",
    )  # fmt: skip


def locked_memory_finding(limit: int) -> Finding:
    """EFA and InfiniBand register memory, which locks it."""
    if limit == resource.RLIM_INFINITY or limit >= 16 * GIB:
        return Finding(name="locked memory", verdict="ok", what="enough for EFA and InfiniBand")
    return Finding(
        name="locked memory", verdict="problem",
        what=f"{format_bytes(limit)} a process; EFA and InfiniBand cannot register their buffers",
        mend="ulimit -l unlimited; in a container --ulimit memlock=-1.",
    )  # fmt: skip


def check_address(hostname: str) -> Finding:
    """Whether this machine's name leads to this machine, as the other nodes will need it."""
    if wrong := host_name_problem(hostname):
        what, _, remedy = wrong.partition(" Give")
        return Finding(name="address", verdict="problem", what=what, mend=f"Give{remedy}")
    try:
        address = str(socket.getaddrinfo(hostname, None, socket.AF_INET)[0][4][0])
    except OSError:
        return Finding(
            name="address", verdict="warning",
            what=f"the name {hostname!r} of this machine resolves to no address",
            mend=f"Several nodes need it: add `ADDRESS {hostname}` to /etc/hosts, or fix DNS.",
        )  # fmt: skip
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        try:
            socket.create_connection((address, listener.getsockname()[1]), timeout=2).close()
        except OSError as error:
            return Finding(
                name="address", verdict="problem",
                what=f"{hostname} is {address}, where a port opened here is not reached: {error}",
                mend="Correct /etc/hosts or DNS, or let the firewall pass the nodes to each other.",
            )  # fmt: skip
    loopback = " (only from this machine; fine for one node)" * address.startswith("127.")
    return Finding(name="address", verdict="ok", what=f"{hostname} is {address}{loopback}")


def check_interface(environ: Mapping[str, str]) -> list[Finding]:
    """Whether processes can use the network interfaces that a variable names, where it does."""
    if not environ.get(VARIABLE):
        return []
    name, wrong = "interface", problem_of(environ)
    if not wrong:
        what = f"{VARIABLE}={environ[VARIABLE]}"
        return [Finding(name=name, verdict="ok", what=what)]
    what, _, remedy = wrong.partition(" Unset")
    return [Finding(name=name, verdict="problem", what=what, mend=f"Unset{remedy}")]


def clock_finding(offset_s: float) -> Finding:
    """AWS refuses requests that are signed 5 minutes off; nodes compare times of files."""
    what = f"{abs(offset_s):.3g} s {'behind' if offset_s > 0 else 'ahead of'} the time server"
    mend = "Start chrony or systemd-timesyncd."
    if abs(offset_s) > 300:
        return Finding(name="clock", verdict="problem", what=what, mend=mend)
    if abs(offset_s) > 2:
        return Finding(name="clock", verdict="warning", what=what, mend=mend)
    return Finding(name="clock", verdict="ok", what=what)


def shared_memory_bytes() -> int | None:
    """Size of /dev/shm; None: there is none."""
    with suppress(OSError):
        size = os.statvfs("/dev/shm")
        return size.f_blocks * size.f_frsize
    return None


def nvidia_driver(version_file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Version of the loaded kernel module."""
    with suppress(OSError):
        found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", version_file.read_text())
        return found[0] if found else None
    return None


def nvidia_devices_on_bus(bus: Path = Path("/sys/bus/pci/devices")) -> int:
    """Devices that are there, whether or not a driver is."""
    return sum(
        _read(device / "vendor") == _NVIDIA_VENDOR
        and _read(device / "class").startswith(_DISPLAY_CLASS)
        for device in bus.glob("*")
    )


def nccl_of_torch(
    find_version: Callable[[str], str | None] = installed_version,
) -> tuple[int | None, str | None]:
    """Major version of CUDA that torch's wheel was built for, and the NCCL that came with it."""
    for major, package in _NCCL_PACKAGES.items():
        found = find_version(package)
        if found is not None:
            return major, found
    return None, None


def _read(file: Path) -> str:
    with suppress(OSError):
        return file.read_text().strip()
    return ""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


AMAZON_TIME = ("169.254.169.123", 123)
"""Link-local, on every EC2 instance; it never leaves the machine's own network."""

_SINCE_1900_S = 2_208_988_800  # NTP counts from 1900, Unix from 1970


def clock_offset_s(
    server: tuple[str, int] = AMAZON_TIME, *, timeout_s: float = 0.3
) -> float | None:
    """Seconds that the server is ahead of this clock; None: it did not answer in time."""
    question = b"\x23" + bytes(47)  # version 4, client
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(timeout_s)
        try:
            sent = time.time()
            client.sendto(question, server)
            answer = client.recv(512)
            received = time.time()
        except OSError:
            return None
    if len(answer) < 48 or answer[1] == 0:  # stratum 0: it refuses to say
        return None
    arrived, left = _unix_s(answer[32:40]), _unix_s(answer[40:48])
    return ((arrived - sent) + (left - received)) / 2


def _unix_s(stamp: bytes) -> float:
    whole, part = struct.unpack("!II", stamp)
    return float(whole) - _SINCE_1900_S + float(part) / 2**32
