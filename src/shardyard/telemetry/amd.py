"""AMD's devices, by amdsmi, which comes with ROCm.

Its functions and units were read in its Python source (7.0.2); no device of AMD has run this.
"""

from typing import Any

from shardyard.telemetry.counters import Device, Reading, asked, asked_whole

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
        """Of devices."""
        return len(self._handles)

    def device(self, index: int) -> Device:
        """See Counters."""
        smi, handle = self._smi, self._handles[index]
        return Device(
            name=str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"]),
            memory_bytes=asked_whole(
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
            utilisation=asked(lambda: activity["gfx_activity"], times=0.01),
            memory_copy_utilisation=asked(lambda: activity["umc_activity"], times=0.01),
            memory_used_bytes=asked_whole(
                lambda: smi.amdsmi_get_gpu_vram_usage(handle)["vram_used"], times=_MIB
            ),
            sm_clock_mhz=asked(lambda: smi.amdsmi_get_clock_info(handle, clock)["clk"]),
            temperature_c=asked(lambda: smi.amdsmi_get_temp_metric(handle, place, now)),
            power_w=asked(lambda: smi.amdsmi_get_power_info(handle)["current_socket_power"]),
            ecc_uncorrected=asked_whole(
                lambda: smi.amdsmi_get_gpu_total_ecc_count(handle)["uncorrectable_count"]
            ),
        )

    def wait_for_error(self, wait_s: float) -> tuple[int, int] | None:
        """See Counters."""
        raise NotImplementedError("XIDs are NVIDIA's")
