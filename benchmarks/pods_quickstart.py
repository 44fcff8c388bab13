"""The quickstart in pods of the project's own image: lost, added and removed, against one machine.

    python -m benchmarks.pods_quickstart

Podman plays the kubelet and `tests/launchers/kubernetes/pod_runs.py` the controllers: no Kubernetes
is asked. Bars: the losses of a JobSet are those of `shardyard train` with two processes to the last
bit, also when a pod is killed; those of an elastic PyTorchJob to 1e-5, as other sums have other
orders. At the recipe's learning rate rounding grows beyond that (benchmarks/rounding_growth.py),
with `--settings optim.lr=3e-4` it does not. Needs root and podman. Writes one JSON file.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.record import write_result
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from tests.launchers.kubernetes.pod_runs import (
    ELASTIC,
    OVERRIDES,
    PodRun,
    loss_difference,
    repeated_steps,
    train,
)
from tests.launchers.kubernetes.pods import running_podman

LOSE_AFTER_STEP = 130
"""A little after the checkpoint of step 120."""


def main() -> int:
    """Run all, write the result; exit 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-once", action="store_true", help="all runs at once: seconds say less")
    parser.add_argument("--settings", nargs="*", default=(), help="such as optim.lr=3e-4")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    with running_podman() as podman:
        built = podman.build()
        _say(f"image: {built}")
        volume = podman.make_volume()
        reference = RunDir(volume / "reference")
        lost, elastic = (
            PodRun(podman, RunDir(volume / name), settings=tuple(args.settings))
            for name in ("jobset", "elastic")
        )
        with ThreadPoolExecutor(max_workers=3 if args.at_once else 1) as pool:
            runs = [
                pool.submit(train, podman, reference, *args.settings),
                pool.submit(elastic.elastic),
                pool.submit(lost.jobset, lose_a_pod_after=LOSE_AFTER_STEP),
            ]
            for run in runs:
                run.result()
        rows = {pods.run.run_id: _row(pods, reference) for pods in (lost, elastic)}
        losses = [line["loss"] for line in read_steps(reference.metrics)]
    passed = all(row["is_met"] for row in rows.values())
    result = {
        "passed": passed,
        "image": asdict(built),
        "settings": args.settings,
        "overrides": OVERRIDES,
        "overrides_elastic": ELASTIC,
        "reference_losses": losses,
        "runs": rows,
    }
    write_result("pods-quickstart", result, args.out)
    return 0 if passed else 1


def _row(pods: PodRun, reference: RunDir) -> dict[str, Any]:
    steps = read_steps(pods.run.metrics)
    bar = 1e-5 if {line["world_size"] for line in steps} != {2} else 0.0
    difference = loss_difference(pods.run, reference)
    row = {
        "bar": bar,
        "is_met": difference <= bar,
        "greatest_relative_loss_difference": difference,
        "greatest_until_step": {
            last: loss_difference(pods.run, reference, last_step=last) for last in (30, 60, 120)
        },
        "repeated_steps": repeated_steps(pods.run),
        "changes": [asdict(change) for change in pods.changes],
        "losses": [line["loss"] for line in steps],
        "world_sizes": [line["world_size"] for line in steps],
    }
    short = {key: value for key, value in row.items() if key not in ("losses", "world_sizes")}
    _say(f"{pods.run.run_id}: {json.dumps(short, indent=1)}")
    return row


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
