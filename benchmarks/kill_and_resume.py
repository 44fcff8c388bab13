"""Kill a run at random moments, resume it, and compare it with one that was left alone.

    python -m benchmarks.kill_and_resume --kills 20

Everything of the run is ended by SIGKILL: the command line, the agent and all workers. Half of the
kills wait for a moment during a save. Among the kills NaN is injected: into a gradient at the same
steps of both runs, which skip them; and into a weight of the killed run, which must end by itself,
leave only checkpoints that are finite, and go on from the newest of them. Then the same is asked
across layouts: a run that is stopped half-way and resumed with other processes and strategies.
Writes one JSON file.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import write_result
from shardyard.checkpoint.finite import not_finite_in_file
from shardyard.elastic.faults import VARIABLE
from shardyard.observe.samples import SAMPLES_MARK
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lines import read_lines, read_steps

KILLED_STEPS = 500
"""Long enough that the run is not finished before its last kill."""
LAYOUT_STEPS = 60
GLOBAL_BATCH = 6
RECIPE = [
    "model.preset=llama-tiny",
    "model.dropout=0.1",
    "data.source=text",
    "data.vocab_size=512",
    "data.seq_len=64",
    "data.eval_fraction=0.1",
    f"optim.global_batch={GLOBAL_BATCH}",
    "optim.micro_batch=1",
    "optim.lr=3e-3",
    "checkpoint.every=3",
    "task.eval_every_steps=50",
    "observe.sample_ids=true",
    "cluster.device=cpu",
]
LONGEST_LIFE_S = 16.0
"""Latest moment of a kill after the start; training begins after about half of it."""
GRADIENT_NANS = 12
"""Steps, spread over the run, at which both runs find NaN in a gradient."""
KILLS_PER_WEIGHT_NAN = 4
"""The killed run gets NaN into a weight after every so many kills, first after the second, which
waited for a save."""
LAYOUTS = [
    ("FULL_SHARD", 2, "NO_SHARD", 3),
    ("NO_SHARD", 2, "FULL_SHARD", 1),
    ("ZERO_1", 3, "HYBRID_SHARD", 4),
]
"""(strategy, processes) of the first half and of the second."""


def main() -> int:
    """Run the study in a folder of its own; exit 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    random.seed(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="kill-and-resume-"))
    try:
        write_corpus(folder / "text")
        killed = _kill_study(folder, args.kills)
        layouts = [_layout_study(folder, *layout) for layout in LAYOUTS]
    finally:
        shutil.rmtree(folder)
    passed = killed["weights_bit_equal"] and killed["samples_equal"]
    passed = passed and killed["killed_while_running"] == args.kills
    survived = [nan["is_survived"] for nan in killed["weight_nans"]]
    passed = passed and bool(survived) and all(survived)
    passed = passed and killed["skipped_steps_equal"]
    passed = passed and all(
        row["samples_equal"] and row["max_relative_loss_difference"] <= 1e-4 for row in layouts
    )
    result = {"passed": passed, "kills": killed, "other_layouts": layouts}
    print(json.dumps(result, indent=1))
    write_result("kill-and-resume", result, args.out)
    return 0 if passed else 1


def write_corpus(folder: Path) -> None:
    """This package's own source as text: real, small and always there."""
    folder.mkdir()
    source = Path(__file__).parents[1] / "src" / "shardyard"
    for index, file in enumerate(sorted(source.rglob("*.py"))):
        (folder / f"{index:03d}.txt").write_text(file.read_text() or "# empty\n")


def _kill_study(folder: Path, kills: int) -> dict[str, Any]:
    layout = ["cluster.devices=2", "parallel.strategy=FULL_SHARD", f"run.steps={KILLED_STEPS}"]
    calm, killed = (RunDir(folder / "runs" / name) for name in ("calm", "killed"))
    faults = [f"gradient@{step}" for step in _steps_apart(GRADIENT_NANS)]
    _finish(start(folder, ["train", *RECIPE, *layout, "run.id=calm"], faults))
    moments, weight_nans = [], []
    command = ["train", *RECIPE, *layout, "run.id=killed"]
    for number in range(kills):
        process = start(folder, command, faults)
        moments.append(_kill_at_random(process, killed, number))
        if killed.recipe.is_file():
            command = ["resume", "killed"]
        if number % KILLS_PER_WEIGHT_NAN == 1 and killed.checkpoint_steps():
            weight_nans.append(_break_a_weight(folder, killed, faults))
    _finish(start(folder, command, faults))
    return {
        "steps": KILLED_STEPS,
        "moments": moments,
        "killed_while_running": sum(moment["was_running"] for moment in moments),
        "kills_during_a_save": sum(moment["was_saving"] for moment in moments),
        "gradient_nans": faults,
        "skipped_steps_equal": _skipped(calm) == _skipped(killed) == len(faults),
        "weight_nans": weight_nans,
        "attempts": len(killed.attempts()),
        "final_step": killed.checkpoint_steps()[-1],
        "weights_bit_equal": _digests(calm) == _digests(killed),
        "samples_equal": _samples(calm)
        == _samples(killed)
        == _every_position_once(calm, KILLED_STEPS),
        "max_relative_loss_difference": _loss_difference(calm, killed),
    }


def _kill_at_random(
    process: subprocess.Popen[bytes], run_dir: RunDir, number: int
) -> dict[str, Any]:
    """SIGKILL everything at a random moment of start or training; every second time, in a save."""
    started = time.monotonic()
    moment_s = random.uniform(0.3, LONGEST_LIFE_S)
    wants_save = number % 2 == 1
    saves_to_see = random.randint(1, 4)
    seen: set[str] = set()
    was_saving = False
    while process.poll() is None:
        scratch = {path.name for path in run_dir.checkpoints.glob("*.tmp")}
        was_saving, seen = bool(scratch), seen | scratch
        if wants_save and scratch and len(seen) >= saves_to_see:
            break
        if not wants_save and time.monotonic() - started >= moment_s:
            break
        time.sleep(0.001)
    was_running = process.poll() is None
    kill_tree(process)
    steps = [line["step"] for line in read_steps(run_dir.metrics)]
    return {
        "after_s": round(time.monotonic() - started, 3),
        "was_running": was_running,
        "was_saving": was_saving,
        "steps_done": steps[-1] if steps else 0,
    }


def _steps_apart(number: int) -> list[int]:
    """Random steps, one in each part of the run, so that no two follow each other closely."""
    part = KILLED_STEPS // number
    return [part * index + random.randint(2, part - 1) for index in range(number)]


def _break_a_weight(folder: Path, run_dir: RunDir, faults: list[str]) -> dict[str, Any]:
    """Resume with NaN put into a weight a few steps on; the run must end, and stay resumable."""
    before = run_dir.checkpoint_steps()[-1]
    broken = before + random.randint(1, 8)
    process = start(folder, ["resume", run_dir.run_id], [*faults, f"weight@{broken}"])
    exit_code = process.wait(timeout=600)
    ended = [line for line in read_lines(run_dir.events) if line["kind"] == "attempt_ended"]
    newest = run_dir.checkpoint_steps()[-1]
    wrong = [
        text
        for step in run_dir.checkpoint_steps()
        for file in run_dir.checkpoint(step).glob("*.safetensors")
        for text in not_finite_in_file(file)
    ]
    is_survived = exit_code == 1 and before <= newest < broken and not wrong
    return {
        "from_step": before,
        "weight_broken_after_step": broken,
        "exit_code": exit_code,
        "newest_checkpoint": newest,
        "not_finite_in_checkpoints": wrong,
        "reason": ended[-1].get("reason") if ended else None,
        "is_survived": is_survived,
    }


def _skipped(run_dir: RunDir) -> int:
    """Steps of a run whose gradient was not finite."""
    return sum(line["grad_norm"] is None for line in read_steps(run_dir.metrics))


def _layout_study(
    folder: Path, first: str, first_processes: int, second: str, second_processes: int
) -> dict[str, Any]:
    """Half of the run with one layout, the other half with another, against all with the first."""
    length = f"run.steps={LAYOUT_STEPS}"
    before = [f"parallel.strategy={first}", f"cluster.devices={first_processes}", length]
    after = [f"parallel.strategy={second}", f"cluster.devices={second_processes}"]
    name = f"{first}-{first_processes}-{second}-{second_processes}".lower().replace("_", "-")
    whole, halves = RunDir(folder / "runs" / f"whole-{name}"), RunDir(folder / "runs" / name)
    _finish(start(folder, ["train", *RECIPE, *before, f"run.id={whole.run_id}"]))
    process = start(folder, ["train", *RECIPE, *before, f"run.id={name}"])
    while process.poll() is None and not any(
        line["step"] >= LAYOUT_STEPS // 2 for line in read_lines(halves.metrics)
    ):
        time.sleep(0.01)
    kill_tree(process)
    _finish(start(folder, ["resume", name, *after]))
    worlds = [line["world_size"] for line in read_steps(halves.metrics)]
    return {
        "first": f"{first} x {first_processes}",
        "second": f"{second} x {second_processes}",
        "steps_of_each": [worlds.count(first_processes), worlds.count(second_processes)],
        "samples_equal": _samples(halves)
        == _samples(whole)
        == _every_position_once(whole, LAYOUT_STEPS),
        "max_relative_loss_difference": _loss_difference(whole, halves),
    }


def start(
    folder: Path, arguments: list[str], faults: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "shardyard", *arguments]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, env={**os.environ, VARIABLE: ",".join(faults)},
        )  # fmt: skip


def _finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait(timeout=600) != 0:
        raise SystemExit(f"{process.args!r} ended with {process.returncode}")


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process and all that descend from it, again until none is left."""
    family = {process.pid}
    while True:
        family |= _descendants(family)
        alive = [pid for pid in family if _is_alive(pid)]
        if not alive:
            break
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.poll()
    process.wait()


def _descendants(family: set[int]) -> set[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields is not None:
                parents[int(entry.name)] = int(fields[1])
    found: set[int] = set()
    while new := {pid for pid, parent in parents.items() if parent in family | found} - found:
        found |= new
    return found - family


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the name: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _is_alive(pid: int) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z"


def _digests(run_dir: RunDir) -> dict[str, str]:
    """SHA-256 of every tensor file of the last checkpoint."""
    folder = run_dir.checkpoint(run_dir.checkpoint_steps()[-1])
    files = json.loads((folder / "manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items()}


def _samples(run_dir: RunDir) -> dict[int, int]:
    """Stream position -> sample, as the ranks logged them; the last reading stands."""
    samples: dict[int, int] = {}
    for attempt in run_dir.attempts():
        for log in sorted((run_dir.path / "logs" / f"attempt-{attempt}").glob("rank-*.log")):
            for line in log.read_text(errors="replace").splitlines():
                if line.startswith(SAMPLES_MARK) and line.endswith("}"):
                    entry = json.loads(line.removeprefix(SAMPLES_MARK))
                    samples.update(zip(entry["positions"], entry["samples"], strict=True))
    return dict(sorted(samples.items()))


def _every_position_once(run_dir: RunDir, steps: int) -> dict[int, int]:
    """The samples of a run if no position of its steps is missing; else nothing."""
    samples = _samples(run_dir)
    return samples if list(samples) == list(range(steps * GLOBAL_BATCH)) else {}


def _loss_difference(one: RunDir, other: RunDir) -> float:
    pairs = zip(read_steps(one.metrics), read_steps(other.metrics), strict=True)
    return max(abs(float(a["loss"]) / float(b["loss"]) - 1) for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
