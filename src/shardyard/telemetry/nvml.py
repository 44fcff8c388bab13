"""NVIDIA's devices, by NVML through its own Python binding (nvidia-ml-py).

What a device or a driver lacks is not asked again: a refusal costs as much as an answer. PCIe is
read from byte counters, where driver and device have them: NVML's older question for its rate
watches the link for 20 ms each time.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from shardyard.hardware.visible import named_devices
from shardyard.telemetry.counters import Device, Reading

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
"""Of one lane of a PCIe generation, one way: 2.5, 5, 8, 16, 32, 64 GT/s less their coding (8b/10b;
128b/130b; 242 of 256 bytes of a flit). Source: PCI Express Base Specification 6.0."""

_ALL_LINKS = 0xFFFFFFFF
"""As the scope of a field: the sum over a device's links."""


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
        self._lacks: list[set[str]] = [set() for _ in handles]
        """Of each device, the questions that it does not answer."""
        self._most: dict[int, int | None] = {}
        self._errors = self._listen()

    @property
    def count(self) -> int:
        """Of devices."""
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
        found: dict[str, int | None] = dict.fromkeys(wanted)
        names = [name for name in wanted if name not in self._lacks[index]]
        ids = [wanted[name][:2] for name in names]
        values = self._ask(
            index,
            "fields",
            lambda: nvml.nvmlDeviceGetFieldValues(self._handles[index], ids) if ids else [],
        )
        for name, value in zip(names, values or [], strict=False):
            if value.nvmlReturn == nvml.NVML_SUCCESS:
                found[name] = _value(nvml, value) * wanted[name][2]
            elif value.nvmlReturn == nvml.NVML_ERROR_NOT_SUPPORTED:
                self._lacks[index].add(name)
        return found

    def _ask(self, index: int, name: str, question: Callable[[], Any]) -> Any:
        """An answer; None: not now, or never, which is remembered."""
        if name in self._lacks[index]:
            return None
        try:
            return question()
        except self._nvml.NVMLError_NotSupported:
            self._lacks[index].add(name)
        except self._nvml.NVMLError:
            pass
        return None


def _value(nvml: Any, field: Any) -> int:
    """What a field holds, by the type that it says."""
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
