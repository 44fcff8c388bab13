"""Does a run go on without the host whose ranks die at each start, and say which one that is?

    python -m benchmarks.left_out [--steps 100] [-- SETTING ...]

Three hosts, each a network namespace with a process of llama-tiny, at least two of which train. The
process of one of them is killed at each start: once of a host that serves nothing, once of the one
that serves the store. The others have to finish, and the host that was left out to end with them;
the event has to name it; the phases of the report have to sum to the wall time. Needs root. Writes
one JSON file; load does not change what it shows.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.hosts import Host, HostedRun, enter
from benchmarks.real_run import write_corpus
from benchmarks.record import write_result
from shardyard.report.run_data import read_run
from shardyard.report.walltime import account, total_phases
from shardyard.rundir.layout import RunDir

SETTINGS = (
    "model.preset=llama-tiny",
    "data.vocab_size=512",
    "data.seq_len=32",
    "optim.global_batch=6",
    "optim.micro_batch=1",
    "checkpoint.every=20",
    "cluster.device=cpu",
    "cluster.devices=1",
    "cluster.nodes=3",
    "elastic.min_nodes=2",
)
UNEXPLAINED = 0.01
"""Of the wall time, at most."""


def main() -> int:
    """Train, print, write the result file; returns 1 if anything is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="file of the result")
    parser.add_argument("settings", nargs="*", help="of the recipe, in place of its own")
    args = parser.parse_args()
    enter("benchmarks.left_out")
    settings = [*SETTINGS, f"run.steps={args.steps}", *args.settings]
    rows = [measure(bad, settings) for bad in (2, 0)]
    for row in rows:
        print(row)
    is_met = all(row["is_met"] for row in rows)
    write_result("left-out", {"is_met": is_met, "settings": settings, "rows": rows}, args.out)
    return 0 if is_met else 1


def measure(bad: int, settings: Sequence[str]) -> dict[str, Any]:
    """A run of three hosts, of which one is bad."""
    folder = Path(tempfile.mkdtemp(prefix="left-out-"))
    hosts = [Host(rank) for rank in range(3)]
    try:
        write_corpus(folder / "text")
        own = (f"data.source={folder}/text", f"data.dir={folder}/prepared")
        run = HostedRun(folder, RunDir(folder / "run"), [*settings, *own], nodes=3)
        run.begin(hosts)
        kills = _kill_at_each_start(run, hosts[bad].name)
        run.finish()
        return {"host": hosts[bad].name, "serves": bad == 0, "kills": kills, **_judged(run, bad)}
    finally:
        for host in hosts:
            host.lose()
            host.remove()
        shutil.rmtree(folder)


def _kill_at_each_start(run: HostedRun, host: str) -> int:
    """Until the others go on without it; how often."""
    kills = 0

    def met() -> Any:
        return run.events("rendezvous")[kills:]

    while True:
        workers = run.wait(met)[0]["workers"]
        pids = [worker["pid"] for worker in workers if worker["node"] == host]
        if not pids:
            return kills
        kills += 1
        with suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)


def _judged(run: HostedRun, bad: int) -> dict[str, Any]:
    told = run.events("node_left_out")
    phases = total_phases(account(read_run(run.run)))
    unexplained = abs(phases["unexplained"]) / sum(phases.values())
    named = [(event["node"], event["node_rank"]) for event in told]
    worlds = [event["world_size"] for event in run.events("rendezvous")]
    is_met = {
        "named": named == [(f"host-{bad}", bad)],
        "finished": len(run.events("run_finished")) == 1,
        "worlds": worlds == [3, 3, 3, 2],
        "phases": unexplained <= UNEXPLAINED,
    }
    return {
        "is_met": all(is_met.values()),
        "met": is_met,
        "cause": [event["cause"] for event in told],
        "worlds": worlds,
        "unexplained": round(unexplained, 5),
    }


if __name__ == "__main__":
    sys.exit(main())
