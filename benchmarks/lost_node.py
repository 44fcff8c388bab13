"""Seconds from a lost node to the next finished step, and from its replacement's start to the next.

    python -m benchmarks.lost_node [--tries 10] [--silently] [--give-way] [-- SETTING ...]

Four hosts, each a network namespace with a process of llama-tiny, at least three of which train.
In turn the host that serves the store at which all meet, and another one, is lost: all of its
processes are killed, which the others hear as ended connections; with `--silently` its cable is cut
before that, as by a power cut, and they hear nothing. The others go on with three; the host comes
back with empty memory, and four go on. The bars: 8 s for each; no more steps lost than lie between
two of the states that survive, and one. Those are the copies in memory where each node's is kept by
another one too, else the checkpoints. Phases are told by the run's own events:

| phase | from, to |
|---|---|
| notice | the loss, `node_lost`; of one that comes: its start, the others' end of training |
| meet | to the end of the rendezvous |
| start | to the set-up: a process each, imports, process groups, mesh |
| set-up | data, model, optimizer |
| load | `checkpoint_loaded.seconds`, or `snapshot_restored.seconds` |
| first step | `model_ready`, `first_step` |

Four hosts on two cores are not four machines: with `--give-way` those that train leave the cores to
one that comes until it trains too (SCHED_IDLE), so that its imports take as long as on a host of
its own.

Needs root. Writes one JSON file; seconds mean something on an idle machine alone.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hosts import Host, HostedRun, enter
from benchmarks.real_run import write_corpus
from benchmarks.record import write_result
from shardyard.rundir.layout import RunDir

PHASES = ("notice", "meet", "start", "set-up", "load", "first step")
BAR_S = 8.0
EVERY = 5
SETTINGS = (
    "model.preset=llama-tiny",
    "data.vocab_size=512",
    "data.seq_len=64",
    "optim.global_batch=8",
    "optim.micro_batch=1",
    "run.steps=1000000",
    "checkpoint.every=50",
    f"elastic.snapshot_every={EVERY}",
    "parallel.strategy=FULL_SHARD",
    "cluster.device=cpu",
    "cluster.devices=1",
    "cluster.nodes=4",
    "elastic.min_nodes=3",
    "elastic.max_restarts=1000000",
    "elastic.join_interval_s=0",
)


def main() -> int:
    """Measure, print the medians, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=10, help="of each kind of node")
    parser.add_argument("--silently", action="store_true", help="lost as by a power cut")
    parser.add_argument("--give-way", action="store_true", help="cores for the host that comes")
    parser.add_argument("--out", type=Path, help="file of the result")
    parser.add_argument("settings", nargs="*", help="of the recipe, in place of its own")
    args = parser.parse_args()
    enter("benchmarks.lost_node")
    tries = measure(args.tries, args.settings, is_told=not args.silently, give_way=args.give_way)
    rows = {
        (kind, which): [each[kind] for each in tries if each["served"] == (which == "server")]
        for kind in ("lost", "joined")
        for which in ("server", "other")
    }
    summary = {f"{kind}, {which}": _summary(found) for (kind, which), found in rows.items()}
    for name, row in summary.items():
        print(name, *(f"{phase} {seconds:.3f}" for phase, seconds in row.items()), sep="  ")
    is_named = all(each[kind]["is_named"] for each in tries for kind in ("lost", "joined"))
    lost_steps = max(each["lost"]["lost_steps"] for each in tries)
    is_met = {
        "seconds": all(row["total"] <= BAR_S for row in summary.values()),
        "lost_steps": lost_steps <= EVERY + 1,
        "named": is_named,
    }
    print(f"most steps lost {lost_steps}, every {EVERY} a state; bars {is_met}")
    content = {"settings": [*SETTINGS, *args.settings], "bar_s": BAR_S, "is_met": is_met}
    content |= {"gives_way": args.give_way}
    content |= {"most_lost_steps": lost_steps, "medians_s": summary, "tries": tries}
    write_result("lost-node", content, args.out)
    return 0 if all(is_met.values()) else 1


def measure(
    tries: int, settings: Sequence[str] = (), *, is_told: bool = True, give_way: bool = False
) -> list[dict[str, Any]]:
    """So many losses of each kind of host, and their replacements."""
    folder = Path(tempfile.mkdtemp(prefix="lost-node-"))
    hosts = [Host(rank) for rank in range(4)]
    try:
        write_corpus(folder / "text")
        own = (f"data.source={folder}/text", f"data.dir={folder}/prepared")
        run = HostedRun(folder, RunDir(folder / "run"), [*SETTINGS, *own, *settings], nodes=4)
        run.begin(hosts)
        kinds = [number % 2 == 0 for number in range(2 * tries)]
        found = [
            _try(run, hosts, served=served, is_told=is_told, give_way=give_way) for served in kinds
        ]
        run.drain()
        return found
    finally:
        for host in hosts:
            host.lose()
        shutil.rmtree(folder)


def _try(
    run: HostedRun, hosts: list[Host], *, served: bool, is_told: bool, give_way: bool
) -> dict[str, Any]:
    """Lose the host that serves the store, or the one after it, and start it again."""
    generation = _steady(run)
    moved = run.events("store_moved")
    server = moved[-1]["node_rank"] if moved else 0
    host = hosts[server if served else (server + 1) % len(hosts)]
    last = run.steps()[-1]["step"]
    lost_t = host.lose(is_told=is_told)
    after = _next_step(run, generation, nodes=3)
    told = run.events("node_lost", generation=generation)
    row = _phases(run, after, began_t=lost_t, noticed_t=told[0]["t"] if told else lost_t)
    row["is_named"] = [event["node"] for event in told] == [host.name]
    row["lost_steps"] = last - row["from_step"]
    generation = _steady(run)
    others = [other for other in hosts if other is not host] if give_way else []
    with _behind(others):
        came_t = run.come(host)
        after = _next_step(run, generation, nodes=4)
    (met,) = run.events("rendezvous", generation=after)
    joined = _phases(run, after, began_t=came_t, noticed_t=met["t"] - met["seconds"])
    (resized,) = run.events("resized", generation=after)
    joined["is_named"] = resized["joined"] == [host.name]
    return {"served": served, "host": host.name, "lost": row, "joined": joined}


@contextmanager
def _behind(hosts: Sequence[Host]) -> Iterator[None]:
    """What runs on these hosts gets a core only where nothing else wants it; so do its children."""
    _schedule(hosts, os.SCHED_IDLE)
    yield
    _schedule(hosts, os.SCHED_OTHER)


def _schedule(hosts: Sequence[Host], policy: int) -> None:
    for pid in (pid for host in hosts for pid in host.pids()):
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))


def _steady(run: HostedRun) -> int:
    """Wait until the newest generation has copied its state more than once; its number."""

    def found() -> int | None:
        met = run.events("rendezvous")
        generation = met[-1]["generation"] if met else -1
        steps = [line for line in run.steps() if line["generation"] == generation]
        return generation + 1 if len(steps) > 3 * EVERY else None

    return int(run.wait(found)) - 1


def _next_step(run: HostedRun, generation: int, *, nodes: int) -> int:
    """Wait for the first step of a later generation with so many nodes; its number."""

    def found() -> int | None:
        after = [event["generation"] for event in run.events("first_step")]
        sizes = {met["generation"]: met["world_size"] for met in run.events("rendezvous")}
        return next((g for g in after if g > generation and sizes[g] == nodes), None)

    return int(run.wait(found))


def _phases(run: HostedRun, generation: int, *, began_t: float, noticed_t: float) -> dict[str, Any]:
    met, ready, stepped = (
        run.events(kind, generation=generation)[0]
        for kind in ("rendezvous", "model_ready", "first_step")
    )
    loaded = run.events("checkpoint_loaded", "snapshot_restored", generation=generation)[0]
    seconds = {
        "notice": noticed_t - began_t,
        "meet": met["t"] - noticed_t,
        "start": ready["t"] - ready["seconds"] - met["t"],
        "set-up": ready["seconds"] - loaded["seconds"],
        "load": loaded["seconds"],
        "first step": stepped["t"] - ready["t"],
    }
    return {
        "generation": generation,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "from": loaded["kind"],
        "from_step": loaded["step"],
    }


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    phases = {name: median(row["seconds"][name] for row in rows) for name in PHASES}
    total = median(sum(row["seconds"].values()) for row in rows)
    return {name: round(value, 4) for name, value in {**phases, "total": total}.items()}


if __name__ == "__main__":
    sys.exit(main())
