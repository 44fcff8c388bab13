"""How long the command line and `import shardyard` take to answer; beside another checkout's, too.

Whole processes, wall time, one warm-up, nothing else running. The bars are of medians. With
``--before`` each command is started in turn here and there, and the median of the ratios of such
pairs is told: times of two moments do not compare on a machine that others use.

    python -m benchmarks.start_up [--before FOLDER]
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import write_result

ROOT = Path(__file__).parents[1]
PLAN = "plan model.preset=llama2-7b cluster.instance=p5.48xlarge run.steps=1000 --layouts 0"
_RECIPE = "{'model': {'preset': 'llama2-7b'}, 'cluster': {'instance': 'p5.48xlarge'}}"
PYTHON = {
    "import shardyard": "import shardyard",
    "shardyard.plan(...)": f"import shardyard; shardyard.plan({_RECIPE}, 'run.steps=1', layouts=0)",
}
"""What is called in a program of one's own; an earlier checkout may not have it."""

REFUSED = "config model.preset=llama-tiny optim.lr=fast"
VERBS = {"--help": 0.3, REFUSED: 0.7, PLAN: None}
BARS_S: dict[str, float | None] = {**VERBS, "import shardyard": 0.25, "shardyard.plan(...)": None}
"""Median in seconds, where there is a bar."""


def main() -> int:
    """Measure, print, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--before", type=Path, help="another checkout, for the same Python")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    rows = {name: _measure(name, args.runs, args.before) for name in BARS_S}
    is_met = all(row["median_s"] <= row["bar_s"] for row in rows.values() if row["bar_s"])
    before = None if args.before is None else _commit(args.before)
    write_result("start-up", {"is_met": is_met, "before": before, "commands": rows}, args.out)
    for name, row in rows.items():
        bar = "" if row["bar_s"] is None else f", bar {row['bar_s']} s"
        ratio = f", {row['ratio']:.3f} of before" if "ratio" in row else ""
        print(f"{name}: median {row['median_s']:.3f} s{bar}{ratio}")
    return 0 if is_met else 1


def _measure(name: str, runs: int, before: Path | None) -> dict[str, Any]:
    command = _command(name)
    pairs = before is not None and name in VERBS
    here_s, there_s = [], []
    for _ in range(runs + 1):
        here_s.append(_time_s(command, ROOT, code=2 if name == REFUSED else 0))
        if pairs and before is not None:
            there_s.append(_time_s(command, before, code=2 if name == REFUSED else 0))
    row: dict[str, Any] = {
        "bar_s": BARS_S[name], "median_s": median(here_s[1:]), "times_s": here_s[1:],
    }  # fmt: skip
    if pairs:
        ratios = [here / there for here, there in zip(here_s[1:], there_s[1:], strict=True)]
        row |= {"before_times_s": there_s[1:], "ratio": round(median(ratios), 4)}
    return row


def _command(name: str) -> Sequence[str]:
    if name in PYTHON:
        return [sys.executable, "-c", PYTHON[name]]
    started = "import sys; from shardyard.cli import main; sys.exit(main())"
    return [sys.executable, "-c", started, *name.split()]


def _time_s(command: Sequence[str], checkout: Path, *, code: int) -> float:
    """Seconds from start to end, of a command that ends with this exit code."""
    path = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")}
    started = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=path)
    seconds = time.perf_counter() - started
    assert ended.returncode == code, ended.stderr
    return round(seconds, 4)


def _commit(checkout: Path) -> str:
    asked = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
