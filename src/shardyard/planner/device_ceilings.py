"""What a device reached on the pieces of a training step: the file of ``benchmarks.gpu.ceilings``.

Rates are those of whole blocks: products weigh by what of a block's arithmetic they are, and of
attention's kernels the fastest counts, as it is the one that training takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.planner.collective_table import number, read_object, refuse

KIND = "device_ceilings"
HINT = (
    "Measure the planned device: python -m benchmarks.gpu.ceilings. The file must be whole and of "
    "a device, not of a rehearsal."
)
_OF_A_BLOCK = {"q, o": 2, "gate, up": 2, "down": 1}
"""Name of a matrix -> how many of its shape a block multiplies with."""
_TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class DeviceCeilings:
    """Rates of one device; None: not measured, or the device lacks it."""

    source: str
    """Name of the file."""
    device: str
    """As its driver prints it."""
    product_flops_per_s: float | None
    """bf16 products of a block, forward and backward."""
    fp8_flops_per_s: float | None
    attention_flops_per_s: float | None
    """Forward, half of all pairs counted."""
    attention_both_flops_per_s: float | None
    """Forward and backward."""
    bandwidth_bytes_per_s: float | None
    """Of an element-wise kernel, read and written."""
    to_host_bytes_per_s: float | None
    """To pinned host memory."""

    @staticmethod
    def read(path: Path) -> "DeviceCeilings":
        """Read JSON of kind ``device_ceilings``.

        Raises:
            RequestError: The file cannot be used; all reasons are listed.
        """
        content = read_object(path)
        hardware, lines = content.get("hardware"), content.get("lines")
        device = hardware.get("name") if isinstance(hardware, dict) else None
        problems = []
        if content.get("kind") != KIND:
            problems.append(f"kind={content.get('kind')!r} is not {KIND!r}")
        if content.get("is_rehearsal"):
            problems.append("it is a rehearsal: its rates mean nothing")
        if not isinstance(device, str):
            problems.append(f"hardware.name={device!r} is no text")
        found = [line for line in lines if _is_ok(line)] if isinstance(lines, list) else []
        if not found:
            problems.append("no line of it was measured")
        problems += [
            f"rate={line.get('rate')!r} of {line.get('what')!r} is no number above 0"
            for line in found
            if not number(line.get("rate")) > 0
        ]
        refuse(path, problems, HINT)
        assert isinstance(device, str)
        return DeviceCeilings(
            source=path.name,
            device=device,
            product_flops_per_s=_of_products(found, "bf16"),
            fp8_flops_per_s=_of_products(found, "fp8"),
            attention_flops_per_s=_fastest(found, what="attention", backward=False),
            attention_both_flops_per_s=_fastest(found, what="attention", backward=True),
            bandwidth_bytes_per_s=_fastest(found, what="sum in place"),
            to_host_bytes_per_s=_fastest(found, what="copy to pinned host memory"),
        )


def _is_ok(line: Any) -> bool:
    return isinstance(line, dict) and line.get("status") == "ok"


def _of_products(lines: Sequence[dict[str, Any]], number_format: str) -> float | None:
    """All arithmetic of a block over all its time; None where a product of it is missing."""
    flop = seconds = 0.0
    rates = {
        line.get("matrix"): line
        for line in lines
        if line.get("what") == "product" and line.get("format") == number_format
    }
    if not rates.keys() >= _OF_A_BLOCK.keys():
        return None
    for matrix, count in _OF_A_BLOCK.items():
        _, inputs, outputs = rates[matrix]["shape"]
        flop += count * inputs * outputs
        seconds += count * inputs * outputs / rates[matrix]["rate"]
    return flop / seconds * _TERA


def _fastest(lines: Sequence[dict[str, Any]], **wanted: Any) -> float | None:
    rates = [
        line["rate"]
        for line in lines
        if all(line.get(key) == value for key, value in wanted.items())
    ]
    return max(rates) * _TERA if rates else None
