"""How quick and how small the verbs are that launch and follow runs; no cluster is asked.

- `launch --dry-run` as a whole process until its first byte: bar 1 s each.
- `runs`, and `status` of one, in a folder of 1,000 launched runs: bar 2 s each.
- `logs --all --follow` of 8, 64 and 512 ranks whose files one process writes meanwhile: all lines
  arrive; ten times the bytes take at most 8 MiB more of memory; at most 16 files are open.

    python -m benchmarks.launching
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import write_result
from shardyard.config.load import dump_recipe, load_recipe
from shardyard.io.files import write_json
from shardyard.launchers.ledger import Ledger, Submission
from shardyard.launchers.local_job import JobFile
from shardyard.launchers.process_identity import Identity
from shardyard.rundir.jsonl import METRIC_KEYS, EventWriter
from shardyard.rundir.layout import RunDir

DRY_RUN_BAR_S, LIST_BAR_S = 1.0, 2.0
MORE_MEMORY_BAR_BYTES, FILES_BAR = 8 * 2**20, 16
RUNS, LINES_OF_A_RUN = 1000, 100
RANKS = (8, 64, 512)
BYTES, TIMES = 4 * 2**20, 10
LINE_BYTES, ROUNDS, ROUND_S = 100, 40, 0.1

_FAR = (
    "examples/llama2-7b-finetune.yaml",
    "launch.image=registry.example/shardyard@sha256:0123",
    "launch.run_dir=/shared/runs",
)
_EFS = "launch.volumes=[{path: /shared, efs: fs-0123456789abcdef0}]"
_CLAIM = "launch.volumes=[{path: /shared, claim: shared}]"
_IN_PODS = ("secrets.HF_TOKEN=k8s:hf-token/token",)
_IN_BATCH = (
    "secrets.HF_TOKEN=ssm:hf-token",
    "launch.aws_batch.execution_role=arn:aws:iam::123456789012:role/reads-hf-token",
)
DRY_RUNS = {
    "slurm": ("examples/quickstart.yaml", "launch.slurm.partition=cpu", "cluster.devices=8"),
    "kubernetes": (*_FAR, "launch.kubernetes.context=mine", _CLAIM, *_IN_PODS),
    "aws-batch": (*_FAR, "launch.aws_batch.queue=gpu", _EFS, *_IN_BATCH),
}


def main() -> int:
    """Measure, print, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    dry_runs = {place: _timed(_dry_run_s(place), args.repeats, DRY_RUN_BAR_S) for place in DRY_RUNS}
    with tempfile.TemporaryDirectory() as folder:
        lists = _lists(Path(folder), args.repeats)
    follows = []
    for ranks in RANKS:
        for total_bytes in (BYTES, BYTES * TIMES):
            with tempfile.TemporaryDirectory() as folder:
                follows.append(_follow(Path(folder), ranks, total_bytes))
            print(follows[-1], file=sys.stderr)
    growth = [
        {"ranks": once["ranks"], "more_bytes": more["peak_bytes"] - once["peak_bytes"]}
        for once, more in zip(follows[::2], follows[1::2], strict=True)
    ]
    is_met = {
        "dry_run": all(row["median_s"] <= DRY_RUN_BAR_S for row in dry_runs.values()),
        "list": all(row["median_s"] <= LIST_BAR_S for row in lists.values()),
        "lines": all(row["lines_read"] == row["lines_written"] for row in follows),
        "memory": all(row["more_bytes"] <= MORE_MEMORY_BAR_BYTES for row in growth),
        "files": all(row["most_files"] <= FILES_BAR for row in follows),
    }
    content = {
        "is_met": is_met,
        "dry_run_until_first_byte": dry_runs,
        "list": {"runs": RUNS, "lines_of_a_run": LINES_OF_A_RUN, "commands": lists},
        "follow": {
            "bar_files": FILES_BAR,
            "bar_more_bytes": MORE_MEMORY_BAR_BYTES,
            "runs": follows,
            "more_memory_for_10_times_the_bytes": growth,
        },
    }
    write_result("launching", content, args.out)
    for name, row in {**dry_runs, **lists}.items():
        wall_s, cpu_s = row["median_s"], row["median_cpu_s"]
        print(f"{name}: median {wall_s:.3f} s (CPU {cpu_s:.3f} s), bar {row['bar_s']} s")
    print(json.dumps(is_met))
    return 0 if all(is_met.values()) else 1


def _timed(measure: Any, repeats: int, bar_s: float) -> dict[str, Any]:
    """Of what children took; their CPU time says what a busy machine added to the wall time."""
    times_s, cpu_s = [], []
    for _ in range(repeats + 1):
        before = _cpu_of_children_s()
        times_s.append(round(measure(), 4))
        cpu_s.append(round(_cpu_of_children_s() - before, 4))
    return {
        "bar_s": bar_s,
        "median_s": median(times_s[1:]),
        "median_cpu_s": median(cpu_s[1:]),
        "times_s": times_s[1:],
    }


def _cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _shardyard(*words: str) -> list[str]:
    return [str(Path(sys.executable).parent / "shardyard"), *words]


def _dry_run_s(place: str) -> Any:
    command = _shardyard("launch", *DRY_RUNS[place], "--on", place, "--dry-run")

    def measure() -> float:
        started_s = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            first = process.stdout.read(1)
            seconds = time.perf_counter() - started_s
            process.stdout.read()
        assert first and process.returncode == 0, command
        return seconds

    return measure


# -- lists -----------------------------------------------------------------------------------


def _lists(folder: Path, repeats: int) -> dict[str, dict[str, Any]]:
    """A tenth of the runs are not over by their events, so that their launcher is asked."""
    recipe = dump_recipe(load_recipe([Path("examples/quickstart.yaml")]))
    for number in range(RUNS):
        _make_run(RunDir(folder / f"run-{number:04d}"), recipe, is_over=number % 10 != 0)
    where = ("--runs-dir", str(folder))
    commands = {"runs": ("runs", *where), "status": ("status", f"run-{RUNS // 2:04d}", *where)}
    return {
        name: _timed(_whole_s(_shardyard(*words)), repeats, LIST_BAR_S)
        for name, words in commands.items()
    }


def _whole_s(command: list[str]) -> Any:
    def measure() -> float:
        started_s = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - started_s

    return measure


def _make_run(run_dir: RunDir, recipe: str, *, is_over: bool) -> None:
    run_dir.path.mkdir()
    run_dir.recipe.write_text(recipe)
    events = EventWriter(run_dir.events, attempt=0, generation=0)
    events.write("attempt_started", workers=[], world_size=2)
    if is_over:
        events.write("run_finished")
        events.write("attempt_ended", outcome="finished", exit_code=0, reason="finished")
    events.close()
    with run_dir.metrics.open("w") as file:
        for step in range(1, LINES_OF_A_RUN + 1):
            line = dict.fromkeys(METRIC_KEYS, 1.2345678901234567)
            file.write(json.dumps({**line, "step": step, "attempt": 0, "generation": 0}) + "\n")
    _make_job(run_dir, Identity(2**22 - 1, "1", "an earlier boot"), nodes=2)


def _make_job(run_dir: RunDir, who: Identity, *, nodes: int) -> Path:
    """A local job whose one process is ``who``; returns the folder of its logs."""
    folder = run_dir.path / "logs" / "job-0"
    folder.mkdir(parents=True)
    job = JobFile(
        program=[], run_dir=str(run_dir.path), nodes=nodes, fewest_nodes=nodes, devices_per_node=1,
        env={}, max_restarts=0, drain_timeout_s=1.0, time_limit_s=None,
    )  # fmt: skip
    write_json(folder / "job.json", asdict(job))
    write_json(folder / "status.json", {"exit_code": 0, "reason": "", "restarts": 0, "nodes": []})
    ledger = Ledger(run_dir.ledger)
    details = {"folder": str(folder), "boot": who.boot}
    name, id = f"{run_dir.run_id}/job-0", f"{who.pid}-{who.started}"
    entry = ledger.intend("local job", name, launcher="local", **details)
    ledger.confirm(entry, id)
    ledger.record(
        Submission(launcher="local", run_id=run_dir.run_id, id=id, name=name, details=details)
    )
    return folder


# -- following -------------------------------------------------------------------------------

_WRITER = """
import sys, time
from pathlib import Path
folder, ranks, total, line_bytes, rounds, round_s = sys.argv[1:]
folder, ranks, rounds = Path(folder), int(ranks), int(rounds)
count = int(total) // int(line_bytes) // ranks // rounds
sys.stdin.readline()
for number in range(rounds):
    for rank in range(ranks):
        line = f"rank {rank} round {number} ".ljust(int(line_bytes) - 1, ".") + "\\n"
        with (folder / f"node-{rank}.log").open("a") as file:
            file.write(line * count)
    time.sleep(float(round_s))
"""


@dataclass
class _Watched:
    """What /proc says of a process while it lives."""

    peak_bytes: int = 0
    most_files: int = 0

    def look(self, pid: int) -> None:
        with suppress(OSError, IndexError, ValueError):
            text = Path(f"/proc/{pid}/status").read_text()
            peak_kib = int(text.split("VmHWM:")[1].split()[0])
            self.peak_bytes = max(self.peak_bytes, peak_kib * 1024)
            self.most_files = max(self.most_files, len(list(Path(f"/proc/{pid}/fd").iterdir())))


def _follow(folder: Path, ranks: int, total_bytes: int) -> dict[str, Any]:
    run_dir = RunDir(folder / "run")
    run_dir.path.mkdir()
    run_dir.recipe.write_text(
        dump_recipe(load_recipe([Path("examples/quickstart.yaml")], [f"cluster.nodes={ranks}"]))
    )
    logs = run_dir.path / "logs" / "job-0"
    numbers = [ranks, total_bytes, LINE_BYTES, ROUNDS, ROUND_S]
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(logs), *map(str, numbers)], stdin=subprocess.PIPE
    ) as writer:
        who = Identity.of(writer.pid)
        assert who is not None and writer.stdin is not None
        _make_job(run_dir, who, nodes=ranks)
        command = _shardyard("logs", "run", "--all", "--follow", "--runs-dir", str(folder))
        started_s, watched, lines_read = time.perf_counter(), _Watched(), 0
        with subprocess.Popen(command, stdout=subprocess.PIPE) as follower:
            assert follower.stdout is not None
            is_over = threading.Event()
            watching = threading.Thread(target=_watch, args=(follower.pid, watched, is_over))
            watching.start()
            writer.stdin.write(b"go\n")
            writer.stdin.close()
            while block := follower.stdout.read(2**16):
                lines_read += block.count(b"\n")
            is_over.set()
            watching.join()
    count = total_bytes // LINE_BYTES // ranks // ROUNDS * ROUNDS * ranks
    return {
        "ranks": ranks,
        "bytes": count * LINE_BYTES,
        "lines_written": count,
        "lines_read": lines_read,
        "seconds": round(time.perf_counter() - started_s, 2),
        **asdict(watched),
    }


def _watch(pid: int, watched: _Watched, is_over: threading.Event) -> None:
    while not is_over.wait(0.02):
        watched.look(pid)


if __name__ == "__main__":
    sys.exit(main())
