"""Measurements that replace catalogue values: links, rates of a device, a step's time.

Four kinds of measurement are read. A table of all-reduces gives a link
(``planner/measured_network.py``). A short profile of one step, or a file of ceilings
(``planner/calibration.py``), gives what matrix products and memory reach, the latter
attention as well. The folder of a run gives one factor, its measured step over the step its
plan predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from shardyard.errors import RequestError
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.catalogue import accelerator_named
from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.links import Link
from shardyard.planner.measured_network import (
    CollectiveTable,
    fit_link,
    number,
    raise_if_invalid,
    read_object,
)
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir

# ``benchmarks.gpu.ceilings`` writes the rates that a device reached on the pieces of a step.
#
# Rates are those of whole blocks: each product weighs by its share of a block's arithmetic. Of the
# attention kernels the fastest counts, because training uses that one.

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
    """Name of the device as its driver prints it."""
    product_flops_per_s: float | None
    """bf16 products of a block, forward and backward."""
    fp8_flops_per_s: float | None
    attention_flops_per_s: float | None
    """Forward, half of all pairs counted."""
    attention_both_flops_per_s: float | None
    """Forward and backward."""
    bandwidth_bytes_per_s: float | None
    """Bandwidth of an element-wise kernel, read and written."""
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
            problems.append("it is a rehearsal: its rates have no meaning")
        if not isinstance(device, str):
            problems.append(f"hardware.name={device!r} is not text")
        found = [line for line in lines if _is_ok(line)] if isinstance(lines, list) else []
        if not found:
            problems.append("no line of it was measured")
        problems += [
            f"rate={line.get('rate')!r} of {line.get('what')!r} is not a number above 0"
            for line in found
            if not number(line.get("rate")) > 0
        ]
        raise_if_invalid(path, problems, HINT)
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
    # A mean without one of the shapes would be the rate of another model's block.
    if not rates.keys() >= _OF_A_BLOCK.keys():
        return None
    for matrix, count in _OF_A_BLOCK.items():
        _, inputs, outputs = rates[matrix]["shape"]
        flop += count * inputs * outputs
        # The products of a block run one after the other: their times add up, not their rates.
        seconds += count * inputs * outputs / rates[matrix]["rate"]
    return flop / seconds * _TERA


def _fastest(lines: Sequence[dict[str, Any]], **criteria: Any) -> float | None:
    rates = [
        line["rate"]
        for line in lines
        if all(line.get(key) == value for key, value in criteria.items())
    ]
    return max(rates) * _TERA if rates else None


LEAST_STEPS = 3
"""Steps after the first without which a run's median would be chance."""

PROFILE_HINT = (
    'Give {"kind": "step_profile", "device": "NVIDIA H100 80GB HBM3", "number_format": "bf16", '
    '"matmul_flops_per_s": ..., "bandwidth_bytes_per_s": ..., "kernel_s": ...}; what was not '
    "measured is left out."
)


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Rates that one device reached in a short profile of one step. None: not measured."""

    source: str
    """Name of the file."""
    device: str
    """Name of the device as its driver prints it."""
    number_format: str
    matmul_flops_per_s: float | None
    """Rate of the large matrix products."""
    bandwidth_bytes_per_s: float | None
    """Bandwidth of the element-wise kernels, read and written."""
    kernel_s: float | None
    """Start and drain of one kernel."""

    @staticmethod
    def read(path: Path) -> "StepProfile":
        """Read JSON of kind ``step_profile``.

        Raises:
            RequestError: The file cannot be used; all reasons are listed.
        """
        content = read_object(path)
        problems = [
            f"{key}={content.get(key)!r} is not text"
            for key in ("device", "number_format")
            if not isinstance(content.get(key), str)
        ]
        if content.get("kind") != "step_profile":
            kind = content.get("kind")
            problems.append(f"kind={kind!r} is neither 'step_profile', '{KIND}' nor 'collectives'")
        rates = {
            key: number(content[key])
            for key in ("matmul_flops_per_s", "bandwidth_bytes_per_s", "kernel_s")
            if content.get(key) is not None
        }
        problems += [
            f"{key}={content[key]!r} is not a number above 0"
            for key, value in rates.items()
            if not value > 0
        ]
        if not rates:
            problems.append("no value in it was measured")
        raise_if_invalid(path, problems, PROFILE_HINT)
        return StepProfile(
            source=path.name,
            device=content["device"],
            number_format=content["number_format"],
            matmul_flops_per_s=rates.get("matmul_flops_per_s"),
            bandwidth_bytes_per_s=rates.get("bandwidth_bytes_per_s"),
            kernel_s=rates.get("kernel_s"),
        )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Replacements of catalogue values. None: the catalogue's value is used."""

    link_inside: Link | None = None
    link_between: Link | None = None
    matmul_share: float | None = None
    """Share of the datasheet's peak that large matrix products reach."""
    bandwidth_share: float | None = None
    """Share of the datasheet's memory bandwidth that element-wise kernels reach."""
    attention_flops_per_s: float | None = None
    """Rate of attention's forward pass."""
    kernel_s: float | None = None
    """Start and drain of one kernel."""
    step_scale: float | None = None
    """Measured time of a step over predicted."""
    sources: tuple[str, ...] = ()
    """Measurements and their sources, a line each."""


def is_scaled(calibration: Calibration | None) -> bool:
    """Whether a measured step scales all predicted times."""
    return calibration is not None and calibration.step_scale is not None


def combined(parts: Sequence[Calibration]) -> Calibration:
    """Several measurements as one; of two of the same thing the later counts."""
    names = [name for name in Calibration.__dataclass_fields__ if name != "sources"]
    values: dict[str, Any] = {
        name: next((v for part in reversed(parts) if (v := getattr(part, name)) is not None), None)
        for name in names
    }
    return Calibration(**values, sources=tuple(line for part in parts for line in part.sources))


def read_calibration(path: Path, *, cluster: ClusterHardware) -> Calibration:
    """Read what was measured: a table, a profile of a step, a device's ceilings, a run's folder.

    Args:
        cluster: The planned one; its devices and nodes are like the measured ones.

    Raises:
        RequestError: The path is none of these, or what it holds cannot be used.
    """
    if path.is_dir():
        return _from_run(RunDir(path))
    if not path.is_file():
        raise RequestError(
            f"{path} does not exist. A calibration is a table of collectives (a log of nccl-tests, "
            ".csv or .json), a profile of a step or ceilings of a device (.json), or the folder of "
            "a run. Check the path."
        )
    kind = read_object(path).get("kind") if path.suffix == ".json" else "collectives"
    if kind == KIND:
        return _from_ceilings(DeviceCeilings.read(path), cluster.accelerator)
    if kind != "collectives":
        return _from_profile(StepProfile.read(path), cluster.accelerator)
    return _from_table(CollectiveTable.read(path), cluster)


def _from_table(table: CollectiveTable, cluster: ClusterHardware) -> Calibration:
    link = fit_link(table, cluster=cluster)
    if table.group(cluster).nodes == 1:
        return Calibration(link_inside=link, sources=(f"link inside nodes: {link.source}",))
    return Calibration(link_between=link, sources=(f"link between nodes: {link.source}",))


def _from_profile(profile: StepProfile, accelerator: Accelerator) -> Calibration:
    measured = accelerator_named(profile.device)
    # Names match whole: an H200 NVL is not an H200, and a MIG slice is not the device.
    if measured is None or measured.name != accelerator.name:
        raise RequestError(
            f"{profile.source} was measured on {profile.device!r}, the plan is for "
            f"{accelerator.name}. The speed of one device does not predict another's. Profile the "
            "planned device, or plan for the profiled one."
        )
    peak = accelerator.peak_flops_per_s(profile.number_format)
    matmul = _share(profile.matmul_flops_per_s, peak)
    bandwidth = _share(profile.bandwidth_bytes_per_s, accelerator.bandwidth_bytes_per_s)
    if max(matmul or 0, bandwidth or 0) > 1:
        raise RequestError(
            f"{profile.source} is above the datasheet of {accelerator.name}: "
            f"{matmul or 0:.2f} of its {profile.number_format} peak, {bandwidth or 0:.2f} of its "
            "memory bandwidth. No kernel does that. Check the format, and the units: FLOP and "
            "bytes a second of one device."
        )
    return Calibration(
        matmul_share=matmul,
        bandwidth_share=bandwidth,
        kernel_s=profile.kernel_s,
        sources=(f"rates of {accelerator.name}: measured, {profile.source}",),
    )


def _from_ceilings(ceilings: DeviceCeilings, accelerator: Accelerator) -> Calibration:
    rates = StepProfile(
        source=ceilings.source,
        device=ceilings.device,
        number_format="bf16",
        matmul_flops_per_s=ceilings.product_flops_per_s,
        bandwidth_bytes_per_s=ceilings.bandwidth_bytes_per_s,
        kernel_s=None,
    )
    attention = ceilings.attention_flops_per_s
    return replace(_from_profile(rates, accelerator), attention_flops_per_s=attention)


def _share(reached: float | None, peak: float | None) -> float | None:
    return None if reached is None or peak is None else reached / peak


def _from_run(run: RunDir) -> Calibration:
    """The newest attempt that took enough steps, against its own plan."""
    lines = [line for line in read_steps(run.metrics) if line.get("step_time_s")]
    # Each attempt is compared with its own plan, since a restart may have changed the layout.
    for attempt in sorted({line.get("attempt", 0) for line in lines}, reverse=True):
        times_s = _steady([line for line in lines if line.get("attempt", 0) == attempt])
        if len(times_s) < LEAST_STEPS:
            continue
        measured_s, predicted_s = median(times_s), _predicted_step_s(run.plan(attempt))
        words = f"{measured_s:.4g} s for {predicted_s:.4g} s predicted, median of {len(times_s)}"
        source = f"time of a step: measured, run {run.run_id}, attempt {attempt}, {words}"
        return Calibration(step_scale=measured_s / predicted_s, sources=(source,))
    raise RequestError(
        f"{run.path} has {len(lines)} measured steps and no attempt with {LEAST_STEPS} after its "
        "first. Their median would be chance. Give the folder of a run that took more."
    )


def _steady(lines: Sequence[dict[str, Any]]) -> list[float]:
    """Times of steps without the first of each generation, which compiles and warms up."""
    seen: set[int] = set()
    times_s = []
    for line in lines:
        generation = line.get("generation", 0)
        # A new generation starts new processes, so its first step compiles and warms up again.
        if generation in seen:
            times_s.append(float(line["step_time_s"]))
        seen.add(generation)
    return times_s


def _predicted_step_s(path: Path) -> float:
    """Seconds of a step as a plan.json has it."""
    plan = read_object(path)
    rate = (plan.get("speed") or {}).get("tokens_per_s")
    if not rate or not plan.get("tokens_per_step"):
        raise RequestError(
            f"{path} predicts no speed, which the measured step would be compared with. Take a run "
            "on a device whose peak the catalogue knows."
        )
    return float(plan["tokens_per_step"]) / float(rate)
