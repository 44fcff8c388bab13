"""Side jobs on their node: export, fetch, prepare and probe."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardyard.config.model.hub import commit_of, digest_of
from shardyard.config.paths import make_paths_absolute
from shardyard.control.attempt import prepare_data
from shardyard.control.export import EXPORTS, export_from, export_options, run_export
from shardyard.control.fetch import list_local_folder
from shardyard.control.request import Request
from shardyard.doctor.paths import check_paths
from shardyard.io.aws import s3_client
from shardyard.io.digests import FolderDigests
from shardyard.io.object_store import parse_location
from shardyard.log import info
from shardyard.node.main import with_homes
from shardyard.node.side_job import SideWork
from shardyard.rundir.layout import RunDir
from shardyard.transfer.download import RemoteListing
from shardyard.transfer.s3 import upload
from shardyard.units import format_bytes


def export_on_node(work: SideWork) -> dict[str, Any]:
    """Export on the node: to a folder that it sees, or to S3, or next to the run."""
    to = work.arguments["to"]
    if to is not None:
        return export_from(work.run, str(to), work.arguments)
    options = export_options(work.arguments)
    return run_export(work.run, "--into", str(work.run.path / EXPORTS), options)


# The side job `fetch` on its node: sends a run's files, or is there to be read.


def serve(
    work: SideWork, *, listed: Callable[[RunDir, str], RemoteListing] = list_local_folder
) -> dict[str, Any]:
    """On the node: send a run's files to S3, or be there to be read."""
    via = work.arguments.get("via")
    if via is None:
        return stay(work)
    place, client = parse_location(str(via)), s3_client()
    listing = listed(work.run, str(work.arguments["step"]))
    made_of = {
        "run": work.run.run_id,
        "steps": list(listing.steps),
        "best": listing.best,
        "warnings": list(listing.warnings),
    }
    complete = FolderDigests(files=listing.files, provenance=made_of)
    info(f"sending {len(listing.files)} files, {format_bytes(listing.bytes)}, to {place}")
    upload(
        client, work.run.path, complete, place, told=lambda name, _: info(f"there: {name}"),
        replaces=True,
    )  # fmt: skip
    return {"place": str(place), "files": len(listing.files), "bytes": listing.bytes}


_POLL_S = 1.0


def stay(
    work: SideWork,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    processes: Path = Path("/proc"),
) -> dict[str, Any]:
    """Wait on the node until no process has read for a while."""
    idle_s = float(work.arguments["idle_s"])
    last = clock()
    while clock() - last < idle_s:
        sleep(_POLL_S)
        if has_reader(processes):
            last = clock()
    return {"ended": f"no reader for {idle_s:.0f} s"}


def has_reader(processes: Path) -> bool:
    """Whether another process than this one and those that started it runs in this container."""
    known, pid = {1}, os.getpid()
    while pid > 1 and pid not in known:
        known.add(pid)
        pid = _parent(processes, pid)
    others = [int(entry.name) for entry in processes.iterdir() if entry.name.isdecimal()]
    # its own children were started by it; a command of a reader comes from outside
    return any(each not in known and _parent(processes, each) not in known - {1} for each in others)


def _parent(processes: Path, pid: int) -> int:
    try:
        stat = (processes / str(pid) / "stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return os.getpid()  # gone meanwhile


# The side job `prepare` on its node: the model is fetched, the data prepared, as node 0 would.


def prepare(work: SideWork) -> dict[str, Any]:
    """Fetch the model, prepare the data; what is there already is found."""
    recipe = make_paths_absolute(work.recipe)
    shares_folder = bool(work.arguments["shares_folder"])
    recipe = with_homes(recipe, work.run, shares_folder=shares_folder)
    if recipe.data.workers == "auto" and not work.arguments["is_this_machine"]:
        # a container counts the cores of its whole machine
        data = recipe.data.model_copy(update={"workers": recipe.launch.side.cpus})
        recipe = recipe.model_copy(update={"data": data})
    request = Request.of(recipe, name=work.run.run_id)
    folder = request.model_dir
    if folder is not None:
        info(f"the model's files are in {folder}")
    facts = prepare_data(request, verify=bool(work.arguments["verify"]))
    return {
        "data": asdict(facts),
        "model_dir": None if folder is None else str(folder),
        "model_commit": None if folder is None else commit_of(folder),
        "model_digest": None if folder is None else digest_of(folder),
    }


# The side job `probe`: what a node finds at the recipe's paths, sent and answered.
#
# `shardyard doctor --probe` sends it; nothing of it stays, here or there.


def probe(work: SideWork) -> dict[str, Any]:
    """On the node: look at the paths; the folder that this job was given is left as it was."""
    shares_folder = bool(work.arguments["shares_folder"])
    recipe = with_homes(work.recipe, work.run, shares_folder=shares_folder)
    found = check_paths(
        recipe,
        work.run.path.parent,
        checkpoint_bytes=work.arguments["checkpoint_bytes"],
        mounts=work.arguments["mounts"],
    )
    if not shares_folder:
        with suppress(OSError):  # empty, where the scheduler's own files are not in it
            work.run.path.rmdir()
    return {"findings": [asdict(finding) for finding in found]}
