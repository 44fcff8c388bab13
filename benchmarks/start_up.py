"""How long the command line and `import shardyard` take to answer; beside another checkout's, too.

And what an agent and a fork server import before a node's training begins. Whole processes, wall
and processor time, one warm-up, nothing else running. The bars are of medians. With
``--before`` each command is started in turn here and there, and the median of the ratios of such
pairs is told: times of two moments do not compare on a machine that others use.

    python -m benchmarks.start_up [--before FOLDER]
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
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
OLD_NAMES = {"shardyard.elastic.peer_snapshots": "shardyard.elastic.neighbour"}
"""Modules of a node -> what they are called in checkouts before 2026-11-29."""
VERBS = {"--help": 0.3, REFUSED: 0.7, PLAN: None}
AGENT = "an agent's imports"
NODE = {
    AGENT: (
        "import shardyard.elastic.forkserver as server; "
        "getattr(server, 'skip_shape_inference', int)(); "  # earlier checkouts have none
        "import shardyard.elastic.agent, shardyard.elastic.peer_snapshots"
    ),
    (FORK_SERVER := "a fork server's imports"): "import shardyard.elastic.forkserver",
}
"""Of each node of a run; the fork server does its work when a child of an agent imports it."""
_PRELOAD = (
    "torch", "transformers.models.llama.modeling_llama", "shardyard.train.run",
    "shardyard.elastic.worker", "shardyard.tasks.causal_lm",
)  # fmt: skip
BARS_S: dict[str, float | None] = {
    **VERBS, "import shardyard": 0.25, "shardyard.plan(...)": None, **dict.fromkeys(NODE),
}  # fmt: skip
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
        of_processor = f" ({row['median_cpu_s']:.3f} s of a processor)"
        print(f"{name}: median {row['median_s']:.3f} s{of_processor}{bar}{ratio}")
    return 0 if is_met else 1


def _measure(name: str, runs: int, before: Path | None) -> dict[str, Any]:
    pairs = before is not None and name not in PYTHON
    here, there = [], []
    for _ in range(runs + 1):
        here.append(_times_s(name, ROOT))
        if pairs and before is not None:
            there.append(_times_s(name, before))
    row = {"bar_s": BARS_S[name], **_medians(here[1:])}
    if pairs:
        row |= {f"before_{key}": value for key, value in _medians(there[1:]).items()}
        for key, which in (("ratio", 0), ("cpu_ratio", 1)):
            ratios = [a[which] / b[which] for a, b in zip(here[1:], there[1:], strict=True)]
            row[key] = round(median(ratios), 4)
    return row


def _medians(times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    wall_s, cpu_s = zip(*times, strict=True)
    return {
        "median_s": median(wall_s), "times_s": wall_s, "median_cpu_s": median(cpu_s),
        "cpu_s": cpu_s,
    }  # fmt: skip


def _command(name: str) -> Sequence[str]:
    if (program := (PYTHON | NODE).get(name)) is not None:
        return [sys.executable, "-c", program]
    started = "import sys; from shardyard.cli import main; sys.exit(main())"
    return [sys.executable, "-c", started, *name.split()]


def _in(checkout: Path, program: str) -> str:
    """The program with the names that modules have in this checkout."""
    for name, old in OLD_NAMES.items():
        if (checkout / "src" / f"{old.replace('.', '/')}.py").is_file():
            program = program.replace(name, old)
    return program


def _times_s(name: str, checkout: Path) -> tuple[float, float]:
    """Seconds from start to end, and of a processor."""
    env = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")}
    env |= {"PYTHONDONTWRITEBYTECODE": ""}  # else each start compiles all modules anew
    command = [_in(checkout, word) for word in _command(name)]
    with tempfile.TemporaryDirectory(prefix="start-up-") as scratch:
        if name == FORK_SERVER:  # this process is the agent
            env |= {
                "SHARDYARD_AGENT_PID": str(os.getpid()), "SHARDYARD_AGENT_SCRATCH": scratch,
                "SHARDYARD_PRELOAD": ",".join(_PRELOAD),
            }  # fmt: skip
        before_s, started = _cpu_of_children_s(), time.perf_counter()
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        seconds = time.perf_counter() - started
    assert ended.returncode == (2 if name == REFUSED else 0), ended.stderr
    return round(seconds, 4), round(_cpu_of_children_s() - before_s, 4)


def _cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _commit(checkout: Path) -> str:
    asked = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
