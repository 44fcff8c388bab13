"""What stands beside a measured cell: the plan's numbers, and its share of the ceilings."""

import sys
from pathlib import Path
from typing import Any

from shardyard.errors import RequestError
from shardyard.planner.calibration import DeviceCeilings

_EXECUTED = 7 / 6
"""Of attention's FLOP with half of all pairs: the backward pass computes the scores again."""


def newest_ceilings(folder: Path) -> DeviceCeilings | None:
    """Of what ``benchmarks.gpu.ceilings`` wrote into a folder of results; None: nothing usable."""
    for file in sorted(folder.glob("*/ceilings-*.json"), reverse=True):
        try:
            return DeviceCeilings.read(file)
        except RequestError as error:
            print(f"no share of the ceilings: {error}", file=sys.stderr)
    return None


def predicted(plan: dict[str, Any]) -> dict[str, Any]:
    """Of a plan.json: time and memory, and their terms; None where the plan says nothing."""
    return {
        "step_s": plan["step_s"],
        "memory_bytes": plan["memory_bytes"],
        "time": {term["name"]: term["seconds"] for term in plan["time"]},
        "memory": {term["name"]: term["bytes"] for term in plan["memory"]},
    }


def over_predicted(line: dict[str, Any]) -> dict[str, float | None]:
    """Measured over predicted."""
    said = line["predicted"]
    most = max((rank["allocated_bytes"] or 0 for rank in line["peak"]), default=0)
    return {
        "step": line["median_step_s"] / said["step_s"] if said["step_s"] else None,
        "memory": most / said["memory_bytes"] if most and said["memory_bytes"] else None,
    }


def shares(
    causes: dict[str, float],
    flops: dict[str, float],
    tokens: int,
    *,
    recompute: str,
    ceilings: DeviceCeilings | None,
) -> dict[str, float | None]:
    """What products and attention of a profiled step reached, as a share of what they can.

    Args:
        causes: Milliseconds, from ``kernels.kernel_profile``.
        flops: Of one token, by convention: planner/kernels.py.
        tokens: Of the step.
        recompute: With full, the forward pass is computed twice.
    """
    pairs = flops["full"] - flops["causal"]
    products = flops["full"] - 2 * pairs
    again = 4 / 3 if recompute == "full" else 1.0
    return {
        "GEMM": _share(
            products * again * tokens,
            causes["GEMM"],
            ceilings.product_flops_per_s if ceilings else None,
        ),
        "attention": _share(
            pairs * (_EXECUTED + (1 / 3 if recompute == "full" else 0)) * tokens,
            causes["attention"],
            ceilings.attention_both_flops_per_s if ceilings else None,
        ),
    }


def _share(flop: float, ms: float, ceiling: float | None) -> float | None:
    return flop / (ms / 1e3) / ceiling if ms > 0 and ceiling else None
