"""The side job `fetch` on its node: sends a run's files, or is there to be read."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardyard.control.fetch import list_here
from shardyard.io.aws import s3_client
from shardyard.io.complete import Complete
from shardyard.log import say
from shardyard.node.side_job import SideWork
from shardyard.rundir.layout import RunDir
from shardyard.transfer.listing import Listing
from shardyard.transfer.s3 import parse_place, upload
from shardyard.units import format_bytes


def serve(
    work: SideWork, *, listed: Callable[[RunDir, str], Listing] = list_here
) -> dict[str, Any]:
    """On the node: send a run's files to S3, or be there to be read."""
    via = work.arguments.get("via")
    if via is None:
        return stay(work)
    place, client = parse_place(str(via)), s3_client()
    listing = listed(work.run, str(work.arguments["step"]))
    made_of = {
        "run": work.run.run_id,
        "steps": list(listing.steps),
        "best": listing.best,
        "warnings": list(listing.warnings),
    }
    complete = Complete(files=listing.files, made_of=made_of)
    say(f"sending {len(listing.files)} files, {format_bytes(listing.bytes)}, to {place}")
    upload(
        client, work.run.path, complete, place, told=lambda name, _: say(f"there: {name}"),
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
    """On the node: be there until nobody has read for a while."""
    idle_s = float(work.arguments["idle_s"])
    last = clock()
    while clock() - last < idle_s:
        sleep(_POLL_S)
        if has_reader(processes):
            last = clock()
    return {"ended": f"nobody read for {idle_s:.0f} s"}


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
