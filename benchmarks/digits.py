"""The example of images beside k-nearest neighbours, on the digits that both have never seen.

``examples/digits.yaml`` is trained as a user would, once for each seed, and judged after its last
step. The neighbours are by Euclidean distance of the 64 pixels as they are; of the labels of k, the
most frequent one, the smallest of several. Both learn from the same 1,438 digits.

    python -m benchmarks.digits
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import write_result
from shardyard.data.images.digits import read_digits

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits.yaml"
BAR = 0.985
NEIGHBOURS = (1, 3, 5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and compare; 1 if the mean of all seeds stays below the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], help="settings that differ")
    parser.add_argument("--out", type=Path, help="the result file")
    asked = parser.parse_args(arguments)
    runs = [trained(seed, asked.set) for seed in range(asked.seeds)]
    mean = float(np.mean([run["top1"] for run in runs]))
    content = {
        "bar": BAR,
        "top1_mean": mean,
        "runs": runs,
        "nearest_neighbours": {f"k={k}": nearest_neighbours(k) for k in NEIGHBOURS},
        "settings_that_differ": asked.set,
    }
    print(json.dumps(content, indent=2))
    write_result("digits", content, asked.out)
    return 0 if mean >= BAR else 1


def trained(seed: int, settings: Sequence[str]) -> dict[str, Any]:
    """Held-out scores of one run, and what it took: seconds, and seconds of all cores."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", str(EXAMPLE), "--json", "run.id=digits", f"run.seed={seed}", *settings]
        began_s, began_cpu_s = time.monotonic(), _children_s()
        done = subprocess.run(
            [sys.executable, "-m", "shardyard", *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        wall_s, cpu_s = time.monotonic() - began_s, _children_s() - began_cpu_s
        lines = (Path(folder) / "runs" / "digits" / "metrics.jsonl").read_text().splitlines()
    scores = [each["eval"] for line in lines if "eval" in (each := json.loads(line))]
    assert json.loads(done.stdout)["outcome"] == "finished"
    return {"seed": seed, **scores[-1], "wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1)}


def nearest_neighbours(k: int) -> float:
    """Share of the held-out digits that the k nearest of the others tell."""
    digits = list(read_digits())
    pixels = np.array([digit.pixels.ravel() for digit in digits], dtype=np.int64)
    labels = np.array([digit.label for digit in digits])
    is_held_out = np.array([digit.is_validation for digit in digits])
    known, asked = pixels[~is_held_out], pixels[is_held_out]
    distances = ((asked[:, None] - known[None]) ** 2).sum(axis=2)
    nearest = labels[~is_held_out][np.argsort(distances, axis=1, kind="stable")[:, :k]]
    guesses = np.array([np.bincount(row).argmax() for row in nearest])
    return float((guesses == labels[is_held_out]).mean())


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
