"""Every fault of `shardyard drill`, several times on several layouts: noticed, and named right.

    OMP_NUM_THREADS=1 python -m benchmarks.drill_table [--tries 10] [--only LAYOUT ...]
        [--faults LIST]
    python -m benchmarks.drill_table --sum FILE ...

The faults of `benchmarks/timed_kills.py` are tried too. A layout is processes x hosts. Each fault
is tried on every layout that allows it, at least `--tries` times in all; 8x1 is for those that do
not die. Several hosts train with `precision.reduce=exact`, so that bits are compared also where a
node was lost. One result file for each layout, and the table of all that were asked for at the end.
With `--sum` nothing is tried: it is the table of results that are there.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.real_run import answer_of, end_by_signals, program, write_corpus
from benchmarks.record import write_result
from benchmarks.restart_phases import RECIPE

ALIVE = ("sigstop", "gil", "sleep", "slow", "pulses", "network-cut")
"""Kinds in which nothing dies: bars of their own."""
_HOSTS = ("cluster.devices=1", "precision.reduce=exact")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "2x1": ("cluster.devices=2", "optim.micro_batch=4"),
    "4x1": ("cluster.devices=4", "optim.micro_batch=2"),
    "8x1": ("cluster.devices=8", "optim.micro_batch=1"),
    "2x2": (*_HOSTS, "cluster.nodes=2", "optim.micro_batch=4", "elastic.min_nodes=1"),
    "4x4": (*_HOSTS, "cluster.nodes=4", "optim.micro_batch=2", "elastic.min_nodes=3"),
}
_OTHERS_OWN = (
    "run.steps=", "checkpoint.every=", "elastic.max_restarts=", "cluster.devices=",
    "optim.micro_batch=",
)  # fmt: skip
_SETTINGS = (
    "elastic.check_bits_every=5", "elastic.join_interval_s=5", "task.eval_every_steps=null",
    "task.generate_tokens=0",
)  # fmt: skip
_OWN_SETTINGS = {
    "kill-in-snapshot": ("elastic.snapshot_every=2",),
    "bit": ("parallel.strategy=NO_SHARD",),
    "pulses": ("--steps", "600"),
    "joining-node": ("--steps", "600"),
}
"""Of faults that need drills of their own: with snapshots a restart reads no checkpoint; of a shard
there is one copy; a rank that is stopped now and then is told by the mean of many steps; a node
that comes needs some 15 s of a machine's two cores, beside those that train."""
_ONLY_ON = {"bit": ("4x1", "4x4"), "pulses": ("2x1", "4x1", "2x2")}
"""Layouts of which a fault needs one: enough replicas; quick enough for many steps."""
_STEPS = 200


def main() -> int:
    """Run what was asked for, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=10, help="of each fault, in all")
    parser.add_argument("--only", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--faults", help="these alone, joined by commas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--sum", nargs="+", type=Path, metavar="FILE", help="of earlier results")
    args = parser.parse_args()
    if args.sum:
        _show([case for file in args.sum for case in json.loads(file.read_text())["cases"]])
        return 0
    end_by_signals()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="drill-table-") as scratch:
        folder = Path(scratch)
        write_corpus(folder / "text")
        allowed = {name: possible(folder, name, args.faults) for name in args.only}
        for layout in args.only:
            file = None if args.out is None else args.out / f"drill-{layout}.json"
            found: list[dict[str, Any]] = []
            for drilled in _drills(folder, layout, allowed, tries=args.tries, seed=args.seed):
                found += drilled  # written after each drill: a table takes hours, and may be ended
                content = {"layout": layout, "table": table(found), "cases": found}
                write_result(f"drill-{layout}", content, file)
            cases += found
    _show(cases)
    return 0


def _show(cases: Iterable[dict[str, Any]]) -> None:
    for name, row in table(cases).items():
        print(name, *(f"{key} {value}" for key, value in row.items()), sep="  ")


def possible(folder: Path, layout: str, faults: str | None) -> dict[str, tuple[str, ...]]:
    """Faults that a layout allows, and the settings with which."""
    found: dict[str, tuple[str, ...]] = {}
    for own in ((), *_OWN_SETTINGS.values()):
        names = json.loads(_shardyard(folder, layout, own, ("--dry-run", "--json")))["possible"]
        found |= {name: own for name in names if _OWN_SETTINGS.get(name, ()) == own}
    return {
        name: own
        for name, own in found.items()
        if (faults is None or name in faults.split(","))
        and (layout != "8x1" or name in ALIVE)
        and layout in _ONLY_ON.get(name, LAYOUTS)
    }


def repeats(allowed: dict[str, dict[str, tuple[str, ...]]], tries: int) -> dict[str, int]:
    """Fault -> times on each layout that allows it."""
    names = {name for each in allowed.values() for name in each}
    return {
        name: math.ceil(tries / sum(name in each for each in allowed.values())) for name in names
    }


def _drills(
    folder: Path, layout: str, allowed: dict[str, dict[str, tuple[str, ...]]], *, tries: int,
    seed: int,
) -> Iterator[list[dict[str, Any]]]:  # fmt: skip
    """The cases of each drill."""
    times = repeats(allowed, tries)
    groups: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for name, own in allowed[layout].items():
        groups.setdefault((times[name], own), []).append(name)
    for number, ((count, own), names) in enumerate(groups.items()):
        words = (
            "--faults", ",".join(names), "--repeat", str(count), "--seed", str(seed), "--json",
            "--dir", str(folder / f"drill-{layout}-{number}"),
        )  # fmt: skip
        cases = json.loads(_shardyard(folder, layout, own, words))["cases"]
        yield [_brief(case) for case in cases]


def _shardyard(folder: Path, layout: str, own: Sequence[str], words: Sequence[str]) -> str:
    recipe = [word for word in RECIPE if not word.startswith(_OTHERS_OWN)]
    settings = (*LAYOUTS[layout], *_SETTINGS, "--steps", str(_STEPS), *own)
    command = program("benchmarks.timed_kills", *recipe, *settings, *words)
    code, answer = answer_of(folder, command)
    if code not in (0, 1):
        raise SystemExit(f"the drill of {layout} ended with {code}")
    return answer


def table(cases: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By fault, of all, and of the kinds that do not die."""
    listed = list(cases)
    names = dict.fromkeys(case["fault"] for case in listed)
    rows = {name: _row([case for case in listed if case["fault"] == name]) for name in names}
    alive = [case for case in listed if case["fault"] in ALIVE]
    return {**rows, "all": _row(listed), "those that do not die": _row(alive)}


def _row(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    verdicts = [case["verdict"] for case in cases]
    due = len(verdicts)
    counts = {
        "noticed": sum(each["is_noticed"] for each in verdicts),
        "cause_right": sum(each["is_cause_right"] for each in verdicts),
        "recovered": sum(each["has_recovered"] for each in verdicts),
        "nothing_left": sum(not each["left"] for each in verdicts),
    }
    outcomes = [each["exact"] for each in verdicts]
    return {
        **{name: f"{count} of {due}" for name, count in counts.items()},
        **{name: outcomes.count(name) for name in ("equal", "different", "not proven")},
    }


def _brief(case: dict[str, Any]) -> dict[str, Any]:
    """Without what is long, losses, digests and events: the judgement holds what they say."""
    dropped = ("losses", "worlds", "digests", "samples", "events", "ends")
    return {name: value for name, value in case.items() if name not in dropped}


if __name__ == "__main__":
    sys.exit(main())
