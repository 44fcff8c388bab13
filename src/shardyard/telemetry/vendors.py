"""Vendor libraries of device telemetry: the interface, NVML, AMD SMI and Gaudi."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from shardyard.hardware.machine import named_devices


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Numbers of one device; None: not reported, which is not 0."""

    utilisation: float | None = None
    """Share of the time in which any kernel ran, 0 to 1."""
    memory_used_bytes: int | None = None
    memory_copy_utilisation: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    ecc_uncorrected: int | None = None
    pcie_sent_bytes: int | None = None
    pcie_received_bytes: int | None = None
    nvlink_sent_bytes: int | None = None
    nvlink_received_bytes: int | None = None
    pcie_link_bytes_per_s: int | None = None
    """Current setting of its link, one way; a device at rest may lower it."""
    pcie_link_most_bytes_per_s: int | None = None
    """Highest setting that it and its slot support."""
    slowed_by: str | None = None
    """Why its clock is held down, beyond what is usual; empty: it is not."""


@dataclass(frozen=True)
class Device:
    """One that can be read."""

    name: str
    memory_bytes: int | None


class Counters(Protocol):
    """A vendor's library, opened once; its handles are kept."""

    @property
    def count(self) -> int: ...

    def device(self, index: int) -> Device:
        """Return a device; like ``read`` it may take long, and raise any error of the library."""
        ...

    def read(self, index: int) -> Reading:
        """The numbers of one device."""
        ...

    def wait_for_error(self, wait_s: float) -> tuple[int, int] | None:
        """The next error that the driver tells: (device, XID); None: none in that time."""
        ...


Opens = Callable[[int], Counters | None]
"""Function that opens a library for at most so many devices; None: missing, or sees none."""


def query_number(question: Callable[[], object], *, times: float = 1.0) -> float | None:
    """A number in another unit; None where the device does not have it, or not now."""
    try:
        found = question()
    except Exception:  # noqa: BLE001  each library has errors of its own, one for each field it lacks
        return None
    if not isinstance(found, int | float) or isinstance(found, bool):
        return None  # amdsmi answers "N/A"
    return found * times


def query_count(question: Callable[[], object], *, times: int = 1) -> int | None:
    """Ask like ``query_number``, and return a whole number."""
    found = query_number(question, times=times)
    return None if found is None else int(found)


# NVIDIA's devices, by NVML through its own Python binding (nvidia-ml-py).
#
# What a device or a driver lacks is not asked again: a refusal costs as much as an answer. PCIe is
# read from byte counters, where driver and device have them: NVML's older question for its rate
# watches the link for 20 ms each time.

_SLOWED_BY = {
    0x08: "hardware",
    0x20: "heat",  # by the driver
    0x40: "heat",  # by the device itself
    0x80: "power brake",
}
"""Bits of nvmlClocksEventReasons that no healthy device has for long. The power cap (0x4) is usual
at full load."""

_LANE_BYTES_PER_S = {
    1: 250_000_000, 2: 500_000_000, 3: 984_615_385, 4: 1_969_230_769, 5: 3_938_461_538,
    6: 7_562_500_000,
}  # fmt: skip
"""Bandwidth of one lane of a PCIe generation, one way.

2.5, 5, 8, 16, 32, 64 GT/s less their coding (8b/10b; 128b/130b; 242 of 256 bytes of a
flit). Source: PCI Express Base Specification 6.0.
"""

_ALL_LINKS = 0xFFFFFFFF
"""Scope of a field that means the sum over a device's links."""


def open_nvml(most: int) -> "Nvml | None":
    """NVML with the devices that this process may use, so many at most."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handles = _visible(pynvml)[:most]
    except pynvml.NVMLError:
        return None  # no driver
    return Nvml(pynvml, handles) if handles else None


def _visible(nvml: Any) -> list[Any]:
    """Handles of all devices, or of those that the environment names."""
    named = named_devices(os.environ)
    if named is None:
        count = nvml.nvmlDeviceGetCount()
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    found = []
    for name in named:
        try:
            by_index = name.isascii() and name.isdigit()
            ask = nvml.nvmlDeviceGetHandleByIndex if by_index else nvml.nvmlDeviceGetHandleByUUID
            found.append(ask(int(name) if by_index else name))
        except nvml.NVMLError:
            break  # CUDA, too, sees none behind the first name that it does not know
    return found


class Nvml:
    """All handles, opened once."""

    def __init__(self, nvml: Any, handles: list[Any]) -> None:
        self._nvml = nvml
        self._handles = handles
        self._unsupported: list[set[str]] = [set() for _ in handles]
        """Questions that each device does not answer."""
        self._most: dict[int, int | None] = {}
        self._errors = self._listen()

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self._handles)

    def device(self, index: int) -> Device:
        """See Counters."""
        handle = self._handles[index]
        return Device(
            name=self._nvml.nvmlDeviceGetName(handle),
            memory_bytes=self._ask(index, "memory", lambda: self._memory(handle).total),
        )

    def read(self, index: int) -> Reading:
        """See Counters."""
        nvml, handle = self._nvml, self._handles[index]
        use = self._ask(index, "use", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        milliwatts = self._ask(index, "power", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        reasons = self._ask(index, "reasons", lambda: self._reasons(handle))
        fields = self._fields(index)
        return Reading(
            utilisation=None if use is None else use.gpu / 100,
            memory_copy_utilisation=None if use is None else use.memory / 100,
            memory_used_bytes=self._ask(index, "memory", lambda: self._memory(handle).used),
            sm_clock_mhz=self._ask(
                index, "clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            ),
            temperature_c=self._ask(
                index,
                "temperature",
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ),
            power_w=None if milliwatts is None else milliwatts / 1000,
            slowed_by=None if reasons is None else _slowed_by(reasons),
            pcie_link_bytes_per_s=self._pcie_link(index, "Curr"),
            pcie_link_most_bytes_per_s=self._pcie_most(index),
            **fields,
        )

    def wait_for_error(self, wait_s: float) -> tuple[int, int] | None:
        """See Counters; without the right to listen it only waits."""
        nvml = self._nvml
        if self._errors is None:
            raise NotImplementedError("this driver tells no errors")
        try:
            told = nvml.nvmlEventSetWait_v2(self._errors, int(wait_s * 1000))
        except nvml.NVMLError_Timeout:
            return None
        uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in self._handles]
        return uuids.index(nvml.nvmlDeviceGetUUID(told.device)), int(told.eventData)

    def _listen(self) -> Any:
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            for handle in self._handles:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            return None
        return events

    def _pcie_most(self, index: int) -> int | None:
        """Asked once: it does not change while the driver is loaded."""
        if index not in self._most:
            self._most[index] = self._pcie_link(index, "Max")
        return self._most[index]

    def _pcie_link(self, index: int, which: str) -> int | None:
        nvml, handle = self._nvml, self._handles[index]
        parts = []
        for part in ("Generation", "Width"):
            function = getattr(nvml, f"nvmlDeviceGet{which}PcieLink{part}")
            parts.append(self._ask(index, f"pcie {which} {part}", partial(function, handle)))
        generation, lanes = parts
        lane = _LANE_BYTES_PER_S.get(generation)
        return None if lane is None or not lanes else lane * lanes

    def _memory(self, handle: Any) -> Any:
        return self._nvml.nvmlDeviceGetMemoryInfo(handle)

    def _reasons(self, handle: Any) -> int:
        nvml = self._nvml
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))

    def _fields(self, index: int) -> dict[str, int | None]:
        """Counters that are asked together; those of links count KiB."""
        nvml = self._nvml
        wanted = {
            "ecc_uncorrected": (nvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, 0, 1),
            "pcie_sent_bytes": (nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0, 1),
            "pcie_received_bytes": (nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0, 1),
            "nvlink_sent_bytes": (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS, 1024),
            "nvlink_received_bytes": (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS, 1024),
        }
        counts: dict[str, int | None] = dict.fromkeys(wanted)
        names = [name for name in wanted if name not in self._unsupported[index]]
        ids = [wanted[name][:2] for name in names]
        values = self._ask(
            index,
            "fields",
            lambda: nvml.nvmlDeviceGetFieldValues(self._handles[index], ids) if ids else [],
        )
        for name, value in zip(names, values or [], strict=False):
            if value.nvmlReturn == nvml.NVML_SUCCESS:
                counts[name] = _value(nvml, value) * wanted[name][2]
            elif value.nvmlReturn == nvml.NVML_ERROR_NOT_SUPPORTED:
                self._unsupported[index].add(name)
        return counts

    def _ask(self, index: int, name: str, question: Callable[[], Any]) -> Any:
        """An answer; None: not now, or never, which is remembered."""
        if name in self._unsupported[index]:
            return None
        try:
            return question()
        except self._nvml.NVMLError_NotSupported:
            self._unsupported[index].add(name)
        except self._nvml.NVMLError:
            pass
        return None


def _value(nvml: Any, field: Any) -> int:
    """Return a field's value, by its stated type."""
    match field.valueType:
        case nvml.NVML_VALUE_TYPE_DOUBLE:
            return int(field.value.dVal)
        case nvml.NVML_VALUE_TYPE_UNSIGNED_INT:
            return int(field.value.uiVal)
        case nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG:
            return int(field.value.sllVal)
        case _:
            return int(field.value.ullVal)


def _slowed_by(reasons: int) -> str:
    return " and ".join(dict.fromkeys(w for bit, w in _SLOWED_BY.items() if reasons & bit))


# AMD's devices, by amdsmi, which comes with ROCm.
#
# Its functions and units were read in its Python source (7.0.2); no device of AMD has run this.

_MIB = 2**20


def open_amdsmi(most: int) -> "Amdsmi | None":
    """The library with so many devices at most."""
    try:
        import amdsmi
    except (ImportError, KeyError, OSError):  # without ROCm its import fails in ways of its own
        return None
    try:
        amdsmi.amdsmi_init()
        handles = amdsmi.amdsmi_get_processor_handles()[:most]
    except amdsmi.AmdSmiLibraryException:
        return None
    return Amdsmi(amdsmi, handles) if handles else None


class Amdsmi:
    """All handles, opened once."""

    def __init__(self, smi: Any, handles: list[Any]) -> None:
        self._smi = smi
        self._handles = handles

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self._handles)

    def device(self, index: int) -> Device:
        """See Counters."""
        smi, handle = self._smi, self._handles[index]
        return Device(
            name=str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"]),
            memory_bytes=query_count(
                lambda: smi.amdsmi_get_gpu_vram_usage(handle)["vram_total"], times=_MIB
            ),
        )

    def read(self, index: int) -> Reading:
        """See Counters."""
        smi, handle = self._smi, self._handles[index]
        clock, place = smi.AmdSmiClkType.GFX, smi.AmdSmiTemperatureType.HOTSPOT
        now = smi.AmdSmiTemperatureMetric.CURRENT
        activity = smi.amdsmi_get_gpu_activity(handle)
        return Reading(
            utilisation=query_number(lambda: activity["gfx_activity"], times=0.01),
            memory_copy_utilisation=query_number(lambda: activity["umc_activity"], times=0.01),
            memory_used_bytes=query_count(
                lambda: smi.amdsmi_get_gpu_vram_usage(handle)["vram_used"], times=_MIB
            ),
            sm_clock_mhz=query_number(lambda: smi.amdsmi_get_clock_info(handle, clock)["clk"]),
            temperature_c=query_number(lambda: smi.amdsmi_get_temp_metric(handle, place, now)),
            power_w=query_number(lambda: smi.amdsmi_get_power_info(handle)["current_socket_power"]),
            ecc_uncorrected=query_count(
                lambda: smi.amdsmi_get_gpu_total_ecc_count(handle)["uncorrectable_count"]
            ),
        )

    def wait_for_error(self, wait_s: float) -> tuple[int, int] | None:
        """See Counters."""
        raise NotImplementedError("XIDs are NVIDIA's")


# Gaudi, by pyhlml, which comes with Habana's software.
#
# Its functions were read in its Python source (1.9.0.580); no device of Gaudi has run this.

_ON_CORE = 0
"""HLML_TEMPERATURE_ON_AIP: on the accelerator, not on the board."""


def open_hlml(most: int) -> "Hlml | None":
    """The library with so many devices at most."""
    try:
        import pyhlml
    except (ImportError, OSError):
        return None
    try:
        pyhlml.hlmlInit()
        count = pyhlml.hlmlDeviceGetCount()
        handles = [pyhlml.hlmlDeviceGetHandleByIndex(index) for index in range(count)][:most]
    except Exception:  # noqa: BLE001  its errors have no common class
        return None
    return Hlml(pyhlml, handles) if handles else None


class Hlml:
    """All handles, opened once."""

    def __init__(self, hlml: Any, handles: list[Any]) -> None:
        self._hlml = hlml
        self._handles = handles

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self._handles)

    def device(self, index: int) -> Device:
        """See Counters."""
        hlml, handle = self._hlml, self._handles[index]
        return Device(
            name=str(hlml.hlmlDeviceGetName(handle)),
            memory_bytes=query_count(lambda: hlml.hlmlDeviceGetMemoryInfo(handle).total),
        )

    def read(self, index: int) -> Reading:
        """See Counters."""
        hlml, handle = self._hlml, self._handles[index]
        return Reading(
            utilisation=query_number(
                lambda: hlml.hlmlDeviceGetUtilizationRates(handle), times=0.01
            ),
            memory_used_bytes=query_count(lambda: hlml.hlmlDeviceGetMemoryInfo(handle).used),
            sm_clock_mhz=query_number(lambda: hlml.hlmlDeviceGetClockInfo(handle)),
            temperature_c=query_number(lambda: hlml.hlmlDeviceGetTemperature(handle, _ON_CORE)),
            power_w=query_number(lambda: hlml.hlmlDeviceGetPowerUsage(handle), times=0.001),
        )

    def wait_for_error(self, wait_s: float) -> tuple[int, int] | None:
        """See Counters."""
        raise NotImplementedError("XIDs are NVIDIA's")
