"""200 SIGKILLs at random moments of real runs: does each end in the bits of the undisturbed run?

    OMP_NUM_THREADS=1 python -m benchmarks.kills [--scale 1.0] [--only KILL ...] [-- SETTING ...]

| kills | of | at |
|---|---|---|
| 50 | a rank | a random moment of a save |
| 50 | a rank | a random moment of the copy of its state into a snapshot |
| 50 | a rank | a random moment of a restart's load |
| 20 | an agent | any moment |
| 30 | a rank | any moment |

Each kill is a case of a drill (`benchmarks/timed_kills.py`). A kill that came when the save, the
copy or the load was over is told and does not count: others are made until there are enough. A
state that was damaged and taken for sound would show as other losses, samples or final bits than
the twin's.
Writes one JSON file, anew after each drill.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.real_run import answer_of, end_by_signals, program, write_corpus
from benchmarks.record import write_result
from benchmarks.restart_phases import RECIPE

WANTED = {
    "kill-in-save": 50, "kill-in-snapshot": 50, "kill-in-load": 50, "agent": 20, "sigkill": 30,
}  # fmt: skip
_SNAPSHOTS = ("elastic.snapshot_every=2",)
"""Of the drill with kills in copies alone: with them a restart reads no checkpoint."""
_DRILLS_OWN = ("run.steps=", "checkpoint.every=", "elastic.max_restarts=")
_BRIEF = ("task.eval_every_steps=null", "task.generate_tokens=0")
_STEPS = 60
_MOST_ROUNDS = 20
_MOST_A_ROUND = 25


def main() -> int:
    """Measure, print the counts, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of kills")
    parser.add_argument("--only", nargs="+", choices=WANTED, default=list(WANTED))
    parser.add_argument("--out", type=Path, help="file of the result")
    parser.add_argument("settings", nargs="*", help="for all runs")
    args = parser.parse_args()
    end_by_signals()
    wanted = {name: math.ceil(WANTED[name] * args.scale) for name in args.only}
    cases: list[dict[str, Any]] = []
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        write_corpus(Path(scratch) / "text")
        for seed in range(1, _MOST_ROUNDS + 1):
            due = {name: count - hits(cases, name) for name, count in wanted.items()}
            if max(due.values()) <= 0:
                break
            for drilled in one_round(Path(scratch), due, args.settings, seed=seed):
                cases += drilled  # written after each drill: all take an hour, and may be ended
                rows = {name: row_of(cases, name, count) for name, count in wanted.items()}
                content = {"rows": rows, "cases": [_brief(case) for case in cases]}
                write_result("kills", content, args.out)
    for name, row in rows.items():
        print(name, *(f"{key} {value}" for key, value in row.items()), sep="  ")
    return 0 if all(row["equal"] == row["kills"] >= row["wanted"] for row in rows.values()) else 1


def one_round(
    folder: Path, due: dict[str, int], settings: Sequence[str], *, seed: int
) -> Iterator[list[dict[str, Any]]]:
    """Cases of what is due, of each at most a few, drill by drill; those with snapshots are drills
    of their own, as a restart then reads no checkpoint."""
    asked = {name: min(count, _MOST_A_ROUND) for name, count in due.items() if count > 0}
    for in_copies in (False, True):
        names = {name: count for name, count in asked.items() if ("snapshot" in name) == in_copies}
        for count in sorted(set(names.values())):
            faults = ",".join(name for name, times in names.items() if times == count)
            own = (*settings, *(_SNAPSHOTS if in_copies else ()))
            yield _drill(folder, faults, count, own, seed=seed)


def _drill(
    folder: Path, faults: str, repeat: int, settings: Sequence[str], *, seed: int
) -> list[dict[str, Any]]:
    recipe = [word for word in RECIPE if not word.startswith(_DRILLS_OWN)] + [*_BRIEF]
    place = folder / f"drill-{seed}-{faults.replace(',', '-')}"
    command = program(
        "benchmarks.timed_kills", *recipe, *settings, "--steps", str(_STEPS),
        "--faults", faults, "--repeat", str(repeat), "--seed", str(seed), "--json",
        "--dir", str(place),
    )  # fmt: skip
    code, answer = answer_of(folder, command)
    if code not in (0, 1):
        raise SystemExit(f"the drill of {faults} ended with {code}")
    cases: list[dict[str, Any]] = json.loads(answer)["cases"]
    return cases


def has_hit(case: dict[str, Any]) -> bool:
    """Whether the kill came at the moment that was meant."""
    return case["struck_t"] is not None and bool(case["notes"].get("was_inside", True))


def hits(cases: Sequence[dict[str, Any]], name: str) -> int:
    return sum(case["fault"] == name and has_hit(case) for case in cases)


def row_of(cases: Sequence[dict[str, Any]], name: str, wanted: int) -> dict[str, Any]:
    """Counts of one kind of kill."""
    of_kind = [case for case in cases if case["fault"] == name]
    verdicts = [case["verdict"] for case in of_kind if has_hit(case)]
    return {
        "wanted": wanted,
        "kills": len(verdicts),
        "beside_the_moment": len(of_kind) - len(verdicts),
        **{
            outcome.replace(" ", "_"): sum(each["exact"] == outcome for each in verdicts)
            for outcome in ("equal", "different", "not proven")
        },
        "left_something": sum(bool(each["left"]) for each in verdicts),
    }


def _brief(case: dict[str, Any]) -> dict[str, Any]:
    kept = ("fault", "number", "seed", "rank", "node", "asked_step", "notes", "resumes")
    verdict = case["verdict"]
    return {
        **{name: case[name] for name in kept},
        **{name: verdict[name] for name in ("exact", "why", "said", "problems")},
    }


if __name__ == "__main__":
    sys.exit(main())
