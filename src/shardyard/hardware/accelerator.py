"""One accelerator model: what its datasheet says, and what was measured of it."""

from dataclasses import dataclass, field

from shardyard.hardware.links import Link

GIB = 2**30
MIB = 2**20

_OTHER_WORDS = {
    "cuda": ("gpu", "nvidia", "rocm", "hip", "amd"),
    "xpu": ("intel",),
    "hpu": ("gaudi", "habana"),
    "xla": ("tpu", "neuron", "trainium"),
}
"""torch's name of a kind of device -> other names of it."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One accelerator model. None, or a missing format: no source gives the value."""

    name: str
    memory_bytes: int
    peak_tflops: dict[str, float] = field(default_factory=dict)
    """Datasheet peak without sparsity, by number format; a missing format is not known."""
    achievable: dict[str, float] = field(default_factory=dict)
    """Best matrix product anybody reached, as a share of the peak, by number format."""
    achievable_source: str = ""
    """Source of the shares: a measurement, or the rule used instead of one."""
    measured: frozenset[str] = frozenset()
    """Formats with timed products on this very part; a rule gives the others."""
    bandwidth_bytes_per_s: float | None = None
    """Peak of the device's own memory."""
    power_share: float = 1.0
    """Clock under load against that of the same chip at full power: its power limit's square root,
    as power grows at least with the square of the clock."""
    processors: int | None = None
    """Parts that each compute a tile of a matrix product: SMs, compute units, tensor cores."""
    link: Link | None = None
    """Joins it with its peers in the vendor's reference system."""
    host_link_bytes_per_s: float | None = None
    """To the memory of its host, one direction."""
    network: Link | None = None
    """Joins nodes of the vendor's reference system; a device's share."""
    nvlink_domain: int | None = None
    """Devices that ``link`` joins, where they are more than those of a node."""
    device: str = "cuda"
    """torch's name of its kind, as in ``cluster.device``; xla can be planned, not trained."""
    capability: tuple[int, int] | None = None
    """NVIDIA's compute capability: which code runs on it. None: another vendor's, or not known."""
    driver_names: tuple[str, ...] = ()
    """Regular expressions; each must match the whole of the name that the driver prints."""
    source: str = ""
    """Source of the rates and the memory."""

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies bf16 numbers: NVIDIA's do from Ampere on (CUDA's guide)."""
        return self.capability is None or self.capability >= (8, 0)

    def peak_flops_per_s(self, number_format: str) -> float | None:
        """Peak FLOP/s of one device in a format; None if no source gives it."""
        tflops = self.peak_tflops.get(number_format)
        return None if tflops is None else tflops * 1e12

    def unmeasured(self, number_format: str) -> str:
        """Why the rate of products in a format is no measurement; empty: somebody timed them."""
        if number_format in self.measured:
            return ""
        source = self.achievable_source
        if not source.startswith("measured"):
            return f"no {number_format} product was timed on {self.name} ({source})"
        share = "the share of the peak is that of bf16"
        return f"no {number_format} product was timed on {self.name}: {share}"

    def achievable_flops_per_s(self, number_format: str) -> float | None:
        """The best rate of a matrix product on one device; None if no source gives it."""
        peak = self.peak_flops_per_s(number_format)
        share = self.achievable.get(number_format)
        return None if peak is None or share is None else peak * share


HALVES = frozenset({"bf16", "fp16"})
"""Run on the same circuits at the same rate: who timed one has timed both."""
HALVES_AND_FP8 = HALVES | {"fp8"}


def device_kind_error(device: str) -> str | None:
    """Why a word is no kind of device; None if it may be one: a vendor may have added it."""
    meant = next((kind for kind, words in _OTHER_WORDS.items() if device in words), None)
    return None if meant is None else f"={device} is called {meant} by torch. Use {meant}."


def measured_efficiency(
    peak_tflops: dict[str, float], *, bf16: float, fp8: float | None = None
) -> dict[str, float]:
    """Return measured TFLOP/s of the best matrix product, as shares of the peak.

    Rule: a format without a measurement takes the share of bf16. fp16 runs on the same circuits
    at the same rate. fp8 and fp32 are limited by power and by feeding the circuits like bf16.
    Where both were measured, fp8 reached 1 to 9 % of the peak less than bf16 (on Gaudi 3, 3 %
    more).
    """
    shares = dict.fromkeys(peak_tflops, round(bf16 / peak_tflops["bf16"], 3))
    if fp8 is not None:
        shares["fp8"] = round(fp8 / peak_tflops["fp8"], 3)
    return shares


def sibling_efficiency(
    sibling: dict[str, float], peak_tflops: dict[str, float]
) -> dict[str, float]:
    """Return the shares of an unmeasured part: those of the measured part most like it."""
    return {name: sibling.get(name, sibling["bf16"]) for name in peak_tflops}
