# ruff: noqa: N801, N802, N816, N818  names are the binding's
"""Stands in for NVIDIA's binding: the functions that are asked, over devices that a file describes.

`FAKE_NVML` names a JSON file that is read anew soon after it changes, so that a test can say what
the devices do from now on: {"devices": 8, "call_s": 0.0001, "hang": [3], "raise": [2],
"lacks": ["power"], "still": [1], "clocks": {"0": 900}, "reasons": {"0": 64}, "xid": [[5, 79]],
"pcie": {"0": [3, 8]}, "no_driver": true}. Each question sleeps for `call_s`, as a real one does in
the driver.
"""

import json
import os
import time
from ctypes import c_double, c_longlong, c_uint, c_ulong, c_ulonglong
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_SUCCESS = 0
NVML_ERROR_NOT_SUPPORTED = 3
NVML_CLOCK_SM = 1
NVML_TEMPERATURE_GPU = 0
NVML_VALUE_TYPE_DOUBLE, NVML_VALUE_TYPE_UNSIGNED_INT, NVML_VALUE_TYPE_UNSIGNED_LONG = 0, 1, 2
NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, NVML_VALUE_TYPE_SIGNED_LONG_LONG = 3, 4
NVML_FI_DEV_ECC_DBE_VOL_TOTAL = 4
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
NVML_FI_DEV_PCIE_COUNT_TX_BYTES, NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 197, 198
nvmlEventTypeXidCriticalError = 8


class NVMLError(Exception):
    """Any refusal."""


class NVMLError_NotSupported(NVMLError):
    """The device does not have it."""


class NVMLError_Timeout(NVMLError):
    """Nothing came."""


_told_xids = 0


_looked_s = float("-inf")
_read: tuple[int, dict[str, Any]] = (0, {})
_LOOK_EVERY_S = 0.02
"""A look at the file costs as much as a question to a real driver, and there are nine a device."""


def _world() -> dict[str, Any]:
    global _looked_s, _read
    now_s = time.monotonic()
    if now_s - _looked_s > _LOOK_EVERY_S:
        file = Path(os.environ["FAKE_NVML"])
        changed_ns = file.stat().st_mtime_ns
        if _read[0] != changed_ns:
            _read = (changed_ns, json.loads(file.read_text()))
        _looked_s = now_s
    return _read[1]


def _asked(name: str, handle: int) -> dict[str, Any]:
    world = _world()
    time.sleep(world.get("call_s", 0.0))
    while handle in world.get("hang", []):
        time.sleep(0.05)
        world = _world()
    if handle in world.get("raise", []):
        raise NVMLError("Unknown Error")
    if name in world.get("lacks", []):
        raise NVMLError_NotSupported("Not Supported")
    return world


def _moves(world: dict[str, Any], handle: int) -> float:
    return 0.0 if handle in world.get("still", []) else time.monotonic()


def nvmlInit() -> None:
    if _world().get("no_driver"):
        raise NVMLError("Driver Not Loaded")


def nvmlDeviceGetCount() -> int:
    return int(_world()["devices"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    if index >= nvmlDeviceGetCount():
        raise NVMLError("Invalid Argument")
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    return nvmlDeviceGetHandleByIndex(int(uuid.removeprefix("GPU-")))


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle}"


def nvmlDeviceGetName(handle: int) -> str:
    return f"NVIDIA Fake {handle}"


def nvmlDeviceGetMemoryInfo(handle: int) -> Any:
    _asked("memory", handle)
    return SimpleNamespace(total=80 * 2**30, used=60 * 2**30 + handle)


def nvmlDeviceGetUtilizationRates(handle: int) -> Any:
    _asked("use", handle)
    return SimpleNamespace(gpu=97, memory=41)


def nvmlDeviceGetClockInfo(handle: int, kind: int) -> int:
    assert kind == NVML_CLOCK_SM
    world = _asked("clock", handle)
    return int(world.get("clocks", {}).get(str(handle), 1980))


def nvmlDeviceGetTemperature(handle: int, kind: int) -> int:
    assert kind == NVML_TEMPERATURE_GPU
    _asked("temperature", handle)
    return 61


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    world = _asked("power", handle)
    return 650_000 + int(_moves(world, handle) * 1000) % 5000


def nvmlDeviceGetCurrentClocksEventReasons(handle: int) -> int:
    world = _asked("reasons", handle)
    return int(world.get("reasons", {}).get(str(handle), 0x4))


def nvmlDeviceGetCurrPcieLinkGeneration(handle: int) -> int:
    return int(_asked("pcie", handle).get("pcie", {}).get(str(handle), [5, 16])[0])


def nvmlDeviceGetCurrPcieLinkWidth(handle: int) -> int:
    return int(_asked("pcie", handle).get("pcie", {}).get(str(handle), [5, 16])[1])


def nvmlDeviceGetMaxPcieLinkGeneration(handle: int) -> int:
    _asked("pcie", handle)
    return 5


def nvmlDeviceGetMaxPcieLinkWidth(handle: int) -> int:
    _asked("pcie", handle)
    return 16


def nvmlDeviceGetFieldValues(handle: int, ids: list[tuple[int, int]]) -> list[Any]:
    world = _asked("fields", handle)
    found = []
    for number, _scope in ids:
        is_lacking = f"field-{number}" in world.get("lacks", [])
        moved = 0 if number == NVML_FI_DEV_ECC_DBE_VOL_TOTAL else int(_moves(world, handle) * 1e6)
        value = SimpleNamespace(
            ullVal=c_ulonglong(moved).value,
            uiVal=c_uint(moved).value,
            ulVal=c_ulong(moved).value,
            sllVal=c_longlong(moved).value,
            dVal=c_double(moved).value,
        )
        found.append(
            SimpleNamespace(
                nvmlReturn=NVML_ERROR_NOT_SUPPORTED if is_lacking else NVML_SUCCESS,
                valueType=NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
                value=value,
            )
        )
    return found


def nvmlEventSetCreate() -> object:
    return object()


def nvmlDeviceRegisterEvents(handle: int, kind: int, events: object) -> None:
    del handle, events
    assert kind == nvmlEventTypeXidCriticalError


def nvmlEventSetWait_v2(events: object, wait_ms: int) -> Any:
    global _told_xids
    del events
    until_s = time.monotonic() + wait_ms / 1000
    while time.monotonic() < until_s:
        xids = _world().get("xid", [])
        if len(xids) > _told_xids:
            device, code = xids[_told_xids]
            _told_xids += 1
            return SimpleNamespace(device=device, eventData=code)
        time.sleep(0.5)  # a real one waits in the driver, and costs nothing
    raise NVMLError_Timeout("Timeout")
