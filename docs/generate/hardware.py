"""docs/hardware.md: every accelerator and EC2 type of the catalogue with its sources."""

import csv
import io
from collections.abc import Iterable, Sequence

from shardyard.hardware import cluster_file
from shardyard.hardware.accelerator import GIB, Accelerator
from shardyard.hardware.catalogue import (
    ACCELERATORS,
    BLOCK_USD_PER_HOUR,
    TABLE_SOURCE,
    instance,
    instance_names,
    rate_of,
)
from shardyard.hardware.cluster import cluster_of
from shardyard.hardware.links import Link

_INTRODUCTION = """\
# Hardware

GPUs, other accelerators and EC2 instance types that `shardyard plan` knows: memory, peak FLOP/s,
links and prices. [hardware-sources.csv](hardware-sources.csv) has the source of every figure. An
empty cell means that no source gives it; a plan that needs it is an error.

All rates are of one direction and of one device while all others send too. Peaks are the
datasheets', dense. "Reached" is the best published bf16 matrix product (fp16 where there is no
bf16), as a share of the peak. A star means that another device's share is used. Links are those
of the vendor's reference system, within a node unless "joins" has a number of devices; the latency
is that of a collective of two devices."""

_OWN = """\
## A cluster of your own

`cluster.file: our-h100s.yaml` in a recipe (`cluster.instance` stays out), with:"""

_OWN_REST = f"""\
Without `achievable` (a share by format), a device with its own numbers counts as reaching
{cluster_file.UNMEASURED_SHARE:.0%} of its peak, the median of the measured ones. Other keys of an
accelerator: `processors`, `host_link_gb_per_s`, `device` (torch's name of its kind: cuda, also
of ROCm, xpu, hpu, xla, or a name of its vendor's)."""


def page() -> str:
    """The whole page."""
    parts = [
        _INTRODUCTION,
        "## Accelerators",
        _table(_ACCELERATOR_HEAD, map(_accelerator_row, ACCELERATORS)),
        "## EC2 types",
        f"Source: {TABLE_SOURCE}. Prices: {instance('p5.48xlarge').price_source}.",
        _blocks(),
        _table(_INSTANCE_HEAD, map(_instance_row, instance_names())),
        _OWN,
        f"```yaml\n{example()}\n```",
        _OWN_REST,
    ]
    return "\n\n".join(parts) + "\n"


def _blocks() -> str:
    """What is known of capacity blocks."""
    known = ", ".join(f"{name} ${usd:.2f} an hour" for name, usd in BLOCK_USD_PER_HOUR.items())
    source = rate_of(instance(next(iter(BLOCK_USD_PER_HOUR))), "block").source
    return (
        f"Capacity blocks: {known} ({source}). Of other types, of spot and of savings plans no "
        "price is in a table; [`shardyard plan --prices aws`](verbs/plan.md#prices) asks AWS."
    )


def example() -> str:
    """A cluster file: the indented lines of the story of ``cluster_file``."""
    lines = (cluster_file.__doc__ or "").splitlines()
    return "\n".join(line[4:] for line in lines if line.startswith("    "))


_ACCELERATOR_HEAD = (
    "name", "memory GiB", "GB/s", "fp32", "fp16", "bf16", "fp8 TFLOP/s", "reached", "processors",
    "link GB/s", "latency us", "joins", "network Gb/s", "host GB/s",
)  # fmt: skip


def _accelerator_row(row: Accelerator) -> Sequence[str]:
    peaks = [_number(row.peak_tflops.get(name)) for name in ("fp32", "fp16", "bf16", "fp8")]
    share = row.achievable.get("bf16", row.achievable.get("fp16"))
    rule = "" if row.achievable_source.startswith("measured") else "*"
    return (
        row.name,
        _number(row.memory_bytes / GIB),
        _giga(row.bandwidth_bytes_per_s),
        *peaks,
        "" if share is None else f"{share:.1%}{rule}",
        _number(row.processors),
        "" if row.link is None else f"{row.link.name}: {_giga(row.link.bytes_per_s)}",
        "" if row.link is None else _micro(row.link),
        "" if row.nvlink_domain is None else f"{row.nvlink_domain:,}",
        "" if row.network is None else f"{row.network.name}: {_gigabits(row.network)}",
        _giga(row.host_link_bytes_per_s),
    )


def sources() -> str:
    """The sources of all figures of accelerators, as a table in CSV."""
    rows: list[Sequence[str]] = [("device", "figure", "source")]
    for row in ACCELERATORS:
        links = [("links", row.link), ("networks", row.network)]
        found = [
            *(("peaks and memory", part) for part in row.source.split("; ")),
            ("reached", row.achievable_source),
            *((name, link.source) for name, link in links if link is not None),
        ]
        rows += [(row.name, figure, source) for figure, source in found if source]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


_INSTANCE_HEAD = (
    "type", "devices", "GB/s inside", "network Gb/s", "EFA", "GB/s a device between", "latency us",
    "vCPUs", "RAM GiB", "NVMe GB", "USD an hour",
)  # fmt: skip


def _instance_row(name: str) -> Sequence[str]:
    row = instance(name)
    cluster = cluster_of(row, nodes=2)
    return (
        row.name,
        f"{row.count} x {row.accelerator.name}",
        "" if row.count == 1 else f"{cluster.inside.name}: {_giga(cluster.inside.bytes_per_s)}",
        _number(row.network_gbps),
        _number(row.efa_count),
        _giga(cluster.between.bytes_per_s),
        _micro(cluster.between),
        _number(row.vcpus),
        _number(row.host_memory_bytes / GIB),
        _giga(row.local_disk_bytes),
        "" if row.usd_per_hour is None else f"{row.usd_per_hour:,.2f}",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.5g}" if value < 1e4 else f"{value:,.0f}"


def _giga(value: float | None) -> str:
    return "" if value is None else _number(value / 1e9)


def _gigabits(link: Link) -> str:
    return f"{link.bytes_per_s * 8 / 1e9:g}"


def _micro(link: Link) -> str:
    return f"{link.latency_s * 1e6:.1f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
