"""Muon beside AdamW on the quickstart: steps to the validation loss at which AdamW ends.

Both take the same learning rates with the first seed. Each then runs with its best rate and other
seeds. Steps are those of the first evaluation at or below the loss at which AdamW with the same
seed ends.

    python -m benchmarks.muon
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.real_run import verb
from benchmarks.record import write_result

EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
RATES = (1.5e-3, 3e-3, 6e-3)
EVERY = 52
"""Steps from evaluation to evaluation."""

Evaluations = list[tuple[int, float]]
"""(step, validation loss) in order."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and compare; 1 if Muon needs as many steps as AdamW in the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--out", type=Path, help="the result file")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        by_rate = {
            name: {rate: trained(Path(folder), name, rate, seed=0) for rate in asked.rates}
            for name in ("adamw", "muon")
        }
        best = {
            name: min(runs, key=lambda rate: runs[rate][-1][1]) for name, runs in by_rate.items()
        }
        seeds = []
        for seed in range(asked.seeds):
            runs = {
                name: by_rate[name][rate] if not seed else trained(Path(folder), name, rate, seed)
                for name, rate in best.items()
            }
            seeds.append(_compared(seed, runs))
            print(json.dumps({key: seeds[-1][key] for key in ("seed", "share")}), flush=True)
    share = statistics.median(each["share"] for each in seeds)
    content = {
        "median_share_of_steps": share,
        "best_rates": best,
        "last_losses_by_rate": {
            name: {f"{rate:g}": run[-1][1] for rate, run in runs.items()}
            for name, runs in by_rate.items()
        },
        "seeds": seeds,
    }
    write_result("muon", content, asked.out)
    return 0 if share < 1 else 1


def trained(folder: Path, optimizer: str, rate: float, seed: int) -> Evaluations:
    """Evaluations of one run."""
    run_id = f"{optimizer}-{rate:g}-{seed}"
    settings = (
        f"optim.name={optimizer}", f"optim.lr={rate}", f"run.seed={seed}", f"run.id={run_id}",
        f"task.eval_every_steps={EVERY}", "task.generate_tokens=0", "checkpoint.every=10000",
    )  # fmt: skip
    subprocess.run(
        verb("train", str(EXAMPLE), *settings), cwd=folder, check=True, stdout=subprocess.DEVNULL
    )
    lines = (folder / "runs" / run_id / "metrics.jsonl").read_text().splitlines()
    return [
        (each["step"], each["eval"]["loss"])
        for line in lines
        if "eval" in (each := json.loads(line))
    ]


def _compared(seed: int, runs: dict[str, Evaluations]) -> dict[str, Any]:
    last_step, goal = runs["adamw"][-1]
    reached = next((step for step, loss in runs["muon"] if loss <= goal), None)
    return {
        "seed": seed,
        "goal": goal,
        "adamw_steps": last_step,
        "muon_steps": reached,
        "share": reached / last_step if reached else 1.0,
        "evaluations": runs,
    }


if __name__ == "__main__":
    sys.exit(main())
