"""How far rounding alone drives two runs of the quickstart apart.

    python -m benchmarks.rounding_growth

The quickstart twice, with micro-batches of 4 and of 2 samples: the same samples, processes and
formula, and sums in another order. So much may the losses of two layouts differ that are both
right. At the recipe's learning rate and at a tenth of it. No bar: it measures what a bar for other
world sizes can ask.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.launched_losses import run_verb
from benchmarks.record import write_result
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir

LEARNING_RATES = (3e-3, 3e-4)
MICRO_BATCHES = (4, 2)
SHOWN_STEPS = (1, 10, 30, 60, 90, 120, 150, 180, 210, 240)


def main() -> int:
    """Run the four, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory(prefix="rounding-") as scratch:
        for rate in LEARNING_RATES:
            one, other = (_losses(Path(scratch), rate, size) for size in MICRO_BATCHES)
            rows[f"{rate:g}"] = _row(one, other)
    write_result(
        "rounding-growth", {"micro_batches": MICRO_BATCHES, "by_learning_rate": rows}, args.out
    )
    print(table(rows))
    return 0


def _losses(scratch: Path, rate: float, micro_batch: int) -> list[float]:
    run_id = f"lr-{rate:g}-micro-batch-{micro_batch}".replace(".", "-")
    folders = [f"run.dir={scratch / 'runs'}", f"data.dir={scratch / 'prepared'}"]
    settings = [f"optim.lr={rate:g}", f"optim.micro_batch={micro_batch}", f"run.id={run_id}"]
    run_verb(["train", *folders, *settings])
    return [line["loss"] for line in read_steps(RunDir(scratch / "runs" / run_id).metrics)]


def _row(one: list[float], other: list[float]) -> dict[str, Any]:
    differences = [abs(a / b - 1) for a, b in zip(one, other, strict=True)]
    return {
        "first_step_that_differs": next(
            (step for step, value in enumerate(differences, start=1) if value), None
        ),
        "greatest": max(differences),
        "last": differences[-1],
        "at_step": {step: differences[step - 1] for step in SHOWN_STEPS},
        "losses": [one, other],
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown: relative difference of a step's loss, by learning rate."""
    head = " | ".join(str(step) for step in SHOWN_STEPS)
    lines = [f"| learning rate | {head} | greatest |", "|---|" + "---:|" * (len(SHOWN_STEPS) + 1)]
    for rate, row in rows.items():
        cells = " | ".join(f"{value:.1e}" for value in row["at_step"].values())
        lines.append(f"| {rate} | {cells} | {row['greatest']:.1e} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
