"""Checks of Slurm for a run: its controller, partition, devices, folder; read-only."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardyard.doctor.finding import Finding
from shardyard.errors import ShardyardError
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.slurm.clients import Shell, ask
from shardyard.launchers.slurm.script import unused_image, warnings

_SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "cifs", "fuse", "9p",
           "virtiofs", "glusterfs", "pvfs2", "orangefs", "afs")  # fmt: skip
"""Types of file systems that several machines can mount; fuse.* are among them."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One line of sinfo: nodes of a partition with equal generic resources."""

    name: str
    is_default: bool
    nodes: int
    is_up: bool
    gres: str
    """``gpu:a100:8(S:0-1),nvme:1``, or ``(null)``."""


def slurm_checks(
    request: LaunchRequest, shell: Shell, *, wants_gpus: bool, ask_when: Callable[[], str]
) -> list[Finding]:
    """Run all checks of Slurm that are possible before a job is submitted.

    Args:
        shell: Runs Slurm's clients.
        wants_gpus: Whether the script asks for what Slurm calls gpu.
        ask_when: When the job would start, in Slurm's words; raises where it would be rejected.
    """
    try:
        # First, because with the controller away each question waits for its own time-out.
        ask(shell, ["scontrol", "ping"])
        rows = read_partitions(ask(shell, ["sinfo", "-h", "-o", "%P|%D|%a|%G"]))
    except ShardyardError as error:
        return [Finding(name="Slurm", verdict="problem", what=str(error))]
    findings = [Finding(name="Slurm", verdict="ok", what="its controller answers")]
    chosen, finding = choose(rows, request.recipe.launch.slurm.partition, nodes=request.nodes)
    findings.append(finding)
    if chosen and wants_gpus:
        findings += check_gres(chosen, request)
    findings.append(check_folder(Path(request.run_dir), Path("/proc/mounts")))
    findings += [
        Finding(name="secrets", verdict="warning", what=what) for what in warnings(request.recipe)
    ]
    unused = unused_image(request.recipe)
    if unused is not None:
        findings.append(Finding(name="image", verdict="warning", what=unused))
    # `sbatch --test-only` would only repeat what is wrong with the partition.
    if finding.verdict != "problem":
        findings.append(_when(ask_when))
    return findings


def read_partitions(text: str) -> list[Partition]:
    """The answer to ``sinfo -h -o '%P|%D|%a|%G'``."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 3]
    return [
        Partition(
            # sinfo marks the default partition with a star.
            name=name.rstrip("*"), is_default=name.endswith("*"), nodes=int(nodes),
            is_up=state == "up", gres="|".join(gres),
        )
        # Generic resources come last in the line, because their text may hold a bar.
        for name, nodes, state, *gres in rows
    ]  # fmt: skip


def choose(
    rows: list[Partition], requested: str | None, *, nodes: int
) -> tuple[list[Partition], Finding]:
    """Lines of the partition that the job would go to, and what is to be said of it."""
    chosen = [
        row for row in rows if (row.is_default if requested is None else row.name == requested)
    ]
    known = ", ".join(sorted({row.name for row in rows})) or "none"
    if not chosen:
        asked = (
            "no partition is the default"
            if requested is None
            else (f"partition {requested!r} does not exist")
        )
        return [], Finding(
            name="partition", verdict="problem", what=f"{asked}; there are {known}",
            mend="Set launch.slurm.partition to one of them.",
        )  # fmt: skip
    name, there = chosen[0].name, sum(row.nodes for row in chosen)
    what = f"{name} has {there} nodes, {nodes} are wanted"
    if there < nodes:
        return chosen, Finding(
            name="partition", verdict="problem", what=what,
            mend="Lower cluster.nodes, or set another launch.slurm.partition.",
        )  # fmt: skip
    if not chosen[0].is_up:
        return chosen, Finding(
            name="partition", verdict="warning", what=f"{what}; it is closed, so that jobs wait",
            mend=f"Ask the administrators when it opens, or use another of {known}.",
        )  # fmt: skip
    return chosen, Finding(name="partition", verdict="ok", what=what)


def check_gres(chosen: list[Partition], request: LaunchRequest) -> list[Finding]:
    """Whether enough nodes have the devices that the recipe, and the catalogue, speak of."""
    wanted = request.devices_per_node
    counts = [(gpus_of(row.gres), row.nodes) for row in chosen]
    enough = sum(nodes for (_, count), nodes in counts if count >= wanted)
    shown = ", ".join(sorted({row.gres for row in chosen}))
    if enough < request.nodes:
        mend = "Lower cluster.devices, or set another launch.slurm.partition."
        if not any(count for (_, count), _ in counts):
            mend = (
                "If this Slurm manages no GPUs, set launch.slurm.request_gpus=false: nodes are "
                "taken whole all the same. Else set another launch.slurm.partition."
            )
        return [
            Finding(
                name="devices", verdict="problem",
                what=f"{enough} nodes of {chosen[0].name} have {wanted} devices or more, "
                f"{request.nodes} are wanted; its generic resources are {shown}",
                mend=mend,
            )
        ]  # fmt: skip
    kinds = {kind for (kind, count), _ in counts if kind and count >= wanted}
    cluster = request.cluster
    if (
        cluster is not None
        and kinds
        and not any(_is_same_device(kind, cluster.accelerator.name) for kind in kinds)
    ):
        return [
            Finding(
                name="devices", verdict="warning",
                what=f"{cluster.name} of the catalogue has {cluster.accelerator.name}, Slurm calls "
                f"its own {', '.join(sorted(kinds))}: memory and speed may be predicted wrongly",
                mend="Describe the machines in a cluster.file.",
            )
        ]  # fmt: skip
    return [Finding(name="devices", verdict="ok", what=f"{enough} nodes with {shown}")]


def gpus_of(gres: str) -> tuple[str, int]:
    """The first type, if it is named, and the number of all: ``gpu:a100:8(S:0-1)`` -> a100, 8."""
    found = re.findall(r"\bgpu(?::([^:,()]+))?:(\d+)(?=[,(]|$)", gres)
    return (found[0][0], sum(int(number) for _, number in found)) if found else ("", 0)


def check_folder(run_dir: Path, mounts: Path) -> Finding:
    """Whether the run's folder is on a file system that nodes can share; only its type is known."""
    kind = file_system_of(run_dir, mounts)
    if kind is None:
        return Finding(name="run folder", verdict="ok", what=f"{run_dir}; its type is not known")
    if kind.partition(".")[0] in _SHARED:
        return Finding(name="run folder", verdict="ok", what=f"{run_dir} is on {kind}")
    return Finding(
        name="run folder", verdict="warning",
        what=f"{run_dir} is on {kind}, which machines seldom share; nodes that do not see it fail",
        mend="Choose a folder that the nodes see too, by run.dir.",
    )  # fmt: skip


def file_system_of(path: Path, mounts: Path) -> str | None:
    """Type of the file system that holds a path; None: there is no such table."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    places = [line.split()[1:3] for line in lines if len(line.split()) > 2]
    resolved = path.absolute()
    found = [(len(where), kind) for where, kind in places if resolved.is_relative_to(where)]
    # The longest mount point above a path is the one that holds it.
    return max(found)[1] if found else None


def _when(ask_when: Callable[[], str]) -> Finding:
    try:
        return Finding(name="request", verdict="ok", what=f"Slurm would take it: {ask_when()}")
    except ShardyardError as error:
        return Finding(name="request", verdict="problem", what=str(error))


def _is_same_device(kind: str, name: str) -> bool:
    """Whether Slurm's type of a GPU can mean a row of the catalogue: ``h100_sxm``, H100 SXM."""
    words = re.findall(r"(?<![a-z])[a-z]+\d+[a-z]*|(?<!\d)\d+gb", kind.lower())
    flat = name.lower().replace(" ", "")
    return not words or any(word in flat for word in words)
