"""A cluster of one's own, described in a YAML file: what an EC2 type says of an instance.

    name: our-h100s
    accelerator: H100 SXM        # of the catalogue, or the device's own numbers:
    # accelerator: {name: X1, memory_gib: 96, peak_tflops: {bf16: 500}, bandwidth_gb_per_s: 3000}
    devices_per_node: 8
    network_gbps: 3200           # of a node; or between_gb_per_s: of a device
    inside_gb_per_s: 450         # of a device; left out: the accelerator's own link
    host_memory_gib: 2048
    local_disk_gb: 30400
    usd_per_node_hour: 40

All rates are of one direction.
"""

import difflib
import math
from pathlib import Path
from typing import Any

from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.file_faults import broken_link_on_path
from shardyard.hardware.accelerator import GIB, Accelerator, device_kind_error
from shardyard.hardware.catalogue import accelerator_by_name
from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.links import ALONE, Link, direct, network
from shardyard.io.yaml import read_yaml

UNMEASURED_SHARE = 0.78
"""Share of its peak that a device without a measurement reaches.

It is the median of the 12 that were measured in bf16
(benchmarks/groundtruth/hardware_mamf_matmul.csv).
"""

_CLUSTER_KEYS = (
    "name", "accelerator", "devices_per_node", "inside_gb_per_s", "between_gb_per_s",
    "network_gbps", "host_memory_gib", "local_disk_gb", "usd_per_node_hour",
)  # fmt: skip
_ACCELERATOR_KEYS = (
    "name", "memory_gib", "peak_tflops", "achievable", "bandwidth_gb_per_s", "processors",
    "host_link_gb_per_s", "device",
)  # fmt: skip
_FORMATS = ("fp32", "fp16", "bf16", "fp8")


def read_cluster_file(path: Path, nodes: int) -> ClusterHardware:
    """Return a cluster of ``nodes`` nodes, each as the file describes one.

    Raises:
        RequestError: The file cannot be read or is no YAML mapping.
        RecipeError: It describes no possible cluster; all problems.
    """
    form = _Form(_content(path))
    form.reject_unknown(_CLUSTER_KEYS)
    accelerator = _accelerator(form)
    devices = form.whole("devices_per_node", needed=True)
    inside = _inside(form, accelerator, devices)
    between = _between(form, devices, nodes)
    host_gib, disk_gb = form.above_zero("host_memory_gib"), form.number("local_disk_gb")
    cluster_name, usd = form.text("name") or path.stem, form.number("usd_per_node_hour")
    if form.errors:
        raise RecipeError(form.errors, f"cluster file {path}")
    assert accelerator and devices and inside and between  # else there was a problem
    return ClusterHardware(
        name=cluster_name,
        accelerator=accelerator,
        devices_per_node=devices,
        nodes=nodes,
        inside=inside,
        between=between,
        host_memory_bytes=None if host_gib is None else round(host_gib * GIB),
        local_disk_bytes=None if disk_gb is None else round(disk_gb * 1e9),
        usd_per_node_hour=usd,
        price_source=f"no usd_per_node_hour in {path.name}" if usd is None else path.name,
    )


class _Form:
    """A mapping of the file, read key by key; what is wrong with a value becomes a problem."""

    def __init__(self, tree: dict[str, Any], prefix: str = "") -> None:
        self.tree = tree
        self.prefix = prefix
        self.errors: list[Problem] = []

    def reject_unknown(self, keys: tuple[str, ...]) -> None:
        for key in self.tree:
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
                hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(keys)}."
                self.add_error(key, f"unknown key. {hint}")

    def add_error(self, key: str, text: str) -> None:
        self.errors.append(Problem(f"{self.prefix}{key}", text))

    def text(self, key: str) -> str | None:
        value = self.tree.get(key)
        if value is None or isinstance(value, str):
            return value
        self.add_error(key, f"={value} is not text. Put it in quotes.")
        return None

    def number(self, key: str, *, needed: bool = False) -> float | None:
        """A finite number that is not negative; None if it is left out or wrong."""
        value = self.tree.get(key)
        if value is None:
            if needed:
                self.add_error(key, "is missing. Give a number.")
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.add_error(key, f"={value} is not a number. Write digits without a unit.")
        elif not math.isfinite(value) or value < 0:
            self.add_error(key, f"={value} cannot be. Give a number of 0 or more.")
        else:
            return value
        return None

    def above_zero(self, key: str, *, needed: bool = False) -> float | None:
        value = self.number(key, needed=needed)
        if value == 0:
            self.add_error(
                key, "=0 is not possible, as no data would arrive. Give a number above 0."
            )
            return None
        return value

    def whole(self, key: str, *, needed: bool = False) -> int | None:
        value = self.number(key, needed=needed)
        if value is None:
            return None
        if value < 1 or value != int(value):
            self.add_error(key, f"={value} cannot be. Give a whole number of at least 1.")
            return None
        return int(value)


def _content(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or NUL in the path
        if link := broken_link_on_path(path):
            raise RequestError(f"cluster file {path}{link}") from error
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RequestError(
            f"cluster file {path} cannot be read: {reason}. cluster.file must name a YAML file "
            "with accelerator, devices_per_node and network_gbps; docs/hardware.md shows one."
        ) from error
    content = read_yaml(text, source=f"cluster file {path}")
    if not isinstance(content, dict):
        raise RequestError(
            f"cluster file {path} holds no keys. It needs accelerator, devices_per_node and "
            "network_gbps; docs/hardware.md shows one."
        )
    return content


def _accelerator(form: _Form) -> Accelerator | None:
    value = form.tree.get("accelerator")
    if isinstance(value, dict):
        own = _Form(value, "accelerator.")
        found = _own_accelerator(own)
        form.errors += own.errors
        return found
    if not isinstance(value, str):
        text = "is missing. Name one of the catalogue, such as H100 SXM, or give its numbers."
        form.add_error("accelerator", text)
        return None
    try:
        return accelerator_by_name(value)
    except RequestError as error:
        form.add_error("accelerator", str(error).removeprefix("accelerator "))
        return None


def _own_accelerator(form: _Form) -> Accelerator | None:
    form.reject_unknown(_ACCELERATOR_KEYS)
    name = form.text("name") or "own device"
    memory_gib = form.above_zero("memory_gib", needed=True)
    bandwidth = form.above_zero("bandwidth_gb_per_s", needed=True)
    host_link = form.above_zero("host_link_gb_per_s")
    peaks = _by_format(form, "peak_tflops")
    if not peaks:
        form.add_error("peak_tflops", "says no rate. Give some of " + ", ".join(_FORMATS) + ".")
    given = _by_format(form, "achievable")
    for number_format, share in given.items():
        if share > 1:
            text = f"={share} is more than the whole peak. Give a share, such as 0.8."
            form.add_error(f"achievable.{number_format}", text)
    processors = form.whole("processors")
    device = form.text("device") or "cuda"
    wrong = device_kind_error(device)
    if wrong is not None:
        form.add_error("device", wrong)
    if memory_gib is None or form.errors:
        return None
    return Accelerator(
        name=name,
        memory_bytes=round(memory_gib * GIB),
        peak_tflops=peaks,
        achievable={key: given.get(key, UNMEASURED_SHARE) for key in peaks},
        measured=frozenset(given),
        achievable_source="the cluster file; else the median of what was measured of others",
        bandwidth_bytes_per_s=None if bandwidth is None else bandwidth * 1e9,
        processors=processors,
        host_link_bytes_per_s=None if host_link is None else host_link * 1e9,
        device=device,
        source="the cluster file",
    )


def _by_format(form: _Form, key: str) -> dict[str, float]:
    """``{bf16: 989}``: a number above 0 for each format that is given."""
    tree = form.tree.get(key, {})
    if not isinstance(tree, dict):
        form.add_error(key, f"={tree} says no format. Write it like {{bf16: {tree}}}.")
        return {}
    inner = _Form(tree, f"{form.prefix}{key}.")
    inner.reject_unknown(_FORMATS)
    found = {name: inner.above_zero(name) for name in _FORMATS}
    form.errors += inner.errors
    return {name: value for name, value in found.items() if value is not None}


def _inside(form: _Form, accelerator: Accelerator | None, devices: int | None) -> Link | None:
    rate = form.above_zero("inside_gb_per_s")
    if rate is not None:
        return direct("inside the node", gb_per_s=rate, source="the cluster file")
    if devices == 1:
        return ALONE
    if accelerator is not None and accelerator.link is None and "inside_gb_per_s" not in form.tree:
        text = (
            f"is missing, and the catalogue knows no link of {accelerator.name}. Give what one of "
            f"the {devices} devices sends to the others, in one direction."
        )
        form.add_error("inside_gb_per_s", text)
    return accelerator.link if accelerator is not None else None


def _between(form: _Form, devices: int | None, nodes: int) -> Link | None:
    keys = ("network_gbps", "between_gb_per_s")
    of_node, of_device = form.above_zero(keys[0]), form.above_zero(keys[1])
    given = [key for key in keys if form.tree.get(key) is not None]
    if len(given) == 2:
        text = "and between_gb_per_s say the same, of a node and of a device. Keep one."
        form.add_error("network_gbps", text)
    if not given and nodes == 1:
        return ALONE
    if not given:
        text = f"is missing, but cluster.nodes={nodes}. Give the Gb/s of one node, one direction."
        form.add_error("network_gbps", text)
    source = "the cluster file"
    if of_device is not None:
        return network("network", gbps=of_device * 8, source=source)
    if of_node is not None and devices is not None:
        return network("network", gbps=of_node / devices, source=source)
    return None
