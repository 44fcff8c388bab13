"""The quickstart on a real Slurm of four nodes: left alone, with a node killed, removed and added.

    python -m benchmarks.slurm_quickstart

Slurm's daemons run on this machine (as root, Debian's packages), a process a node. The losses are
held against `shardyard train` of the same recipe: with four processes, and as it stands with two.
Writes one JSON file. The two minutes that Slurm lets a requeued job wait are skipped.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.record import write_result
from shardyard.rundir.jsonl import read_lines, read_steps
from shardyard.rundir.layout import RunDir
from tests.launchers.slurm_cluster import SlurmCluster, slurm_cluster

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "benchmarks" / "laptop.yaml"
STEPS = 240
SHOWN_STEPS = (1, 30, 60, 90, 120, 150, 180, 210, 240)
KILLED_AT = 140
"""Twenty steps after the checkpoint of step 120."""
REMOVED_AT, ADDED_AT = 60, 150
TOLERANCE = 1e-4
"""Greatest relative difference of a loss where the world size differs: sums in another order."""
_PATIENCE_S = 3600.0
_THREADS = {"OMP_NUM_THREADS": "1"}


Measured = tuple[RunDir, list[dict[str, Any]]]
"""A run to its end, and what happened to it."""


class Study:
    """A folder with runs, and a Slurm."""

    def __init__(self, folder: Path, cluster: SlurmCluster) -> None:
        self.folder = folder
        self.cluster = cluster

    def shardyard(self, *words: str) -> str:
        """Run a verb to its end; returns stdout."""
        paths = {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
        done = subprocess.run(
            [sys.executable, "-m", "shardyard", *words],
            cwd=self.folder, env={**self.cluster.env, **paths, **_THREADS},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(
                f"shardyard {' '.join(words)} ended with {done.returncode}: {done.stderr}"
            )
        return done.stdout

    def train(self, run_id: str, devices: int) -> RunDir:
        self.shardyard("train", str(RECIPE), f"run.id={run_id}", f"cluster.devices={devices}")
        return self.run_dir(run_id)

    def launch(self, run_id: str) -> str:
        """Submit a run on four nodes; returns the job's id."""
        environment = json.dumps({"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **_THREADS})
        answer = self.shardyard(
            "launch", str(RECIPE), "--on", "slurm", "--yes", "--json", f"run.id={run_id}",
            "cluster.nodes=4", "cluster.devices=1", f"launch.env={environment}",
        )  # fmt: skip
        return str(json.loads(answer)["job_id"])

    def run_dir(self, run_id: str) -> RunDir:
        return RunDir(self.folder / "runs" / run_id)

    def wait(self, is_so: Callable[[], bool], what: str) -> float:
        """Wait for something; returns the seconds it took."""
        started_s = time.monotonic()
        while not is_so():
            if time.monotonic() - started_s > _PATIENCE_S:
                raise SystemExit(f"{what}: not within {_PATIENCE_S:g} s")
            time.sleep(0.5)
        return time.monotonic() - started_s

    def wait_for_step(self, run: RunDir, step: int, *, attempt: int = 0) -> float:
        return self.wait(
            lambda: any(
                line["step"] >= step and line["attempt"] >= attempt for line in _lines(run)
            ),
            f"step {step} of {run.run_id}",
        )

    def wait_for_end(self, job_id: str) -> None:
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        self.wait(lambda: self.cluster.state(job_id) in over, f"the end of job {job_id}")
        if self.cluster.state(job_id) != "COMPLETED":
            raise SystemExit(f"job {job_id} is {self.cluster.state(job_id)}")


def main() -> int:
    """Run the study in a folder of its own; exit 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the result file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slurm-quickstart-") as name:
        folder = Path(name)
        (folder / "slurm").mkdir()
        with slurm_cluster(folder / "slurm") as cluster:
            result = _study(Study(folder, cluster))
    print(json.dumps(result, indent=1))
    write_result("slurm-quickstart", result, args.out)
    return 0 if result["passed"] else 1


def _study(study: Study) -> dict[str, Any]:
    base = study.train("train-4", 4)
    rows: dict[str, dict[str, Any]] = {}
    for name, measure in _CASES.items():
        run, interruptions = measure(study)
        rows[name] = {**_row(run, base), "interruptions": interruptions}
        print(f"{name}: {json.dumps(rows[name])}", file=sys.stderr, flush=True)
    return {
        "passed": all(
            row["is_equal_up_to_other_world_size"]
            and row["max_relative_loss_difference"] <= TOLERANCE
            for row in rows.values()
        ),
        "tolerance": TOLERANCE,
        "steps": STEPS,
        "train, 4 processes": _chosen(base),
        "compared with train, 4 processes": rows,
    }


def _alone(study: Study) -> Measured:
    study.wait_for_end(study.launch("alone"))
    return study.run_dir("alone"), []


def _two(study: Study) -> Measured:
    """The recipe as it stands."""
    return study.train("train-2", 2), []


def _killed(study: Study) -> Measured:
    """SIGKILL to the daemon, step manager and tasks of a node; Slurm requeues the job."""
    job, run, cluster = study.launch("killed"), study.run_dir("killed"), study.cluster
    study.wait_for_step(run, KILLED_AT)
    cluster.kill_node("127.0.0.3")
    started_s = time.monotonic()
    noticed_s = study.wait(lambda: cluster.state(job) == "PENDING", "requeued")
    cluster.start_node("127.0.0.3")  # the job needs four, and there are no more
    cluster.start_now(job, patience_s=_PATIENCE_S)
    study.wait_for_step(run, 1, attempt=1)
    what = {
        "what": "node killed",
        "slurm_requeued_s": round(noticed_s, 1),
        "going_on_s": round(time.monotonic() - started_s, 1),
        **_interruption(run, 1),
    }
    study.wait_for_end(job)
    return run, [what]


def _scaled(study: Study) -> Measured:
    """`shardyard scale` to three nodes, and back to four."""
    study.launch("scaled")
    run, interruptions = study.run_dir("scaled"), []
    for attempt, (what, at, nodes) in enumerate(
        (("node removed", REMOVED_AT, 3), ("node added", ADDED_AT, 4)), start=1
    ):
        study.wait_for_step(run, at)
        started_s = time.monotonic()
        answer = study.shardyard("scale", "scaled", str(nodes), "--yes", "--json")
        submitted_s = time.monotonic() - started_s
        study.wait_for_step(run, 1, attempt=attempt)
        interruptions.append(
            {
                "what": f"{what} by shardyard scale: {nodes} nodes",
                "drained_and_submitted_s": round(submitted_s, 1),
                "going_on_s": round(time.monotonic() - started_s, 1),
                **_interruption(run, attempt),
            }
        )
    study.wait_for_end(str(json.loads(answer)["job_id"]))
    return run, interruptions


_CASES: dict[str, Callable[[Study], Measured]] = {
    "slurm, 4 nodes": _alone,
    "slurm, a node killed": _killed,
    "slurm, a node removed and one added": _scaled,
    "train, 2 processes": _two,
}


def _interruption(run: RunDir, attempt: int) -> dict[str, Any]:
    """Where the run was stopped, where it went on, and what was done twice."""
    stopped = max(line["step"] for line in _lines(run) if line["attempt"] < attempt)
    loaded = [
        event["step"]
        for event in read_lines(run.events)
        if event["kind"] == "checkpoint_loaded" and event["attempt"] == attempt
    ]
    return {
        "stopped_after_step": stopped,
        "went_on_from_step": loaded[0],
        "steps_lost_and_repeated": stopped - loaded[0],
    }


def _row(run: RunDir, base: RunDir) -> dict[str, Any]:
    losses, expected = _losses(run), _losses(base)
    if list(losses) != list(range(1, STEPS + 1)):
        raise SystemExit(f"{run.run_id} has not each of its {STEPS} steps")
    worlds = [int(line["world_size"]) for line in read_steps(run.metrics)]
    before = next((at for at, size in enumerate(worlds) if size != 4), STEPS)
    equal = next((at for at in range(STEPS) if losses[at + 1] != expected[at + 1]), STEPS)
    return {
        "losses": _chosen(run),
        "steps_by_world_size": {str(size): worlds.count(size) for size in sorted(set(worlds))},
        "bit_equal_until_step": equal,
        "is_equal_up_to_other_world_size": equal >= before,
        "max_relative_loss_difference": max(
            abs(loss / expected[step] - 1) for step, loss in losses.items()
        ),
    }


def _chosen(run: RunDir) -> dict[str, float]:
    losses = _losses(run)
    return {str(step): losses[step] for step in SHOWN_STEPS}


def _losses(run: RunDir) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_steps(run.metrics)}


def _lines(run: RunDir) -> list[dict[str, Any]]:
    return [line for line in read_lines(run.metrics) if "loss" in line]


if __name__ == "__main__":
    sys.exit(main())
