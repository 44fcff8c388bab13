"""Three hundred steps on real text: one process beside data, tensor and pipeline ranks together.

A dense model and a mixture of experts learn this Python's own source files with the same settings,
by `shardyard train` in one process and on 2 x 2 x 2 ranks (the mixture with its experts over two of
them). Their losses are printed, plotted and compared. Bar: the final loss within 0.5 %.

    python -m benchmarks.loss_parity [--models dense moe] [--steps 300]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.record import result_file, write_result
from shardyard.hardware.machine import probe
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir

NAME = "loss-parity"
BAR = 0.005
LAST = 20
"""Steps whose mean loss is called final: one step's depends on its samples."""
ROOT = Path(__file__).parents[1]
PRESETS = {"dense": "llama-tiny", "moe": "mixtral-tiny"}
ALONE = ("cluster.devices=1", "optim.micro_batch=8")
SPLIT = (
    "cluster.devices=8", "optim.micro_batch=2",
    "parallel.dp_shard=2", "parallel.tp=2", "parallel.pp=2",
)  # fmt: skip
LAYOUTS = {
    "dense": {"one process": ALONE, "dp 2 x tp 2 x pp 2": SPLIT},
    "moe": {
        "one process": ALONE,
        "dp 2 x tp 2 x pp 2, ep 2": (*SPLIT, "parallel.ep=2"),
    },
}


def main() -> int:
    """Train, print, plot, write the result file; returns 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="file of the result; the plot lies beside it")
    args = parser.parse_args()
    out = args.out or result_file(NAME, probe())
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        for model in args.models:
            runs = {
                layout: _train(Path(scratch), model, f"{model}-{number}", words, args.steps)
                for number, (layout, words) in enumerate(LAYOUTS[model].items())
            }
            found[model] = {"preset": PRESETS[model], "runs": runs, **compare(runs)}
            _print(model, found[model])
    is_met = all(each["final_difference"] <= BAR for each in found.values())
    work = {"steps": args.steps, "global_batch": 8, "seq_len": 64, "source": "python-stdlib"}
    write_result(NAME, {"bar": BAR, "is_met": is_met, "work": work, "models": found}, out)
    plot(found, out.with_suffix(".svg"))
    return 0 if is_met else 1


def compare(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Relative differences between the two runs: of the final losses, and the largest of a step."""
    one, other = (run["losses"] for run in runs.values())
    final_one, final_other = (sum(losses[-LAST:]) / LAST for losses in (one, other))
    return {
        "final_loss": final_one,
        "final_difference": abs(final_other / final_one - 1),
        "largest_difference": max(abs(b / a - 1) for a, b in zip(one, other, strict=True)),
    }


def plot(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """One panel a model: both curves, and below the difference of each step."""
    figure = Figure(figsize=(4.5 * len(found), 4.5), layout="constrained")
    panels = figure.subplots(2, len(found), squeeze=False, height_ratios=(3, 1), sharex="col")
    for column, (model, each) in enumerate(found.items()):
        upper, lower = panels[0][column], panels[1][column]
        for (layout, run), style in zip(each["runs"].items(), ("-", "--"), strict=True):
            upper.plot(run["losses"], style, label=layout, linewidth=1.2)
        one, other = (run["losses"] for run in each["runs"].values())
        lower.semilogy([max(abs(b / a - 1), 1e-12) for a, b in zip(one, other, strict=True)])
        upper.set_title(f"{model}: {each['preset']}")
        upper.set_ylabel("loss, nats a token")
        upper.legend()
        lower.set_ylabel("relative difference")
        lower.set_xlabel("step")
    figure.savefig(path, metadata={"Date": None})


def _train(
    scratch: Path, model: str, run_id: str, words: Sequence[str], steps: int
) -> dict[str, Any]:
    recipe = scratch / "parity.yaml"
    sections = {
        "run": {"dir": str(scratch / "runs"), "steps": steps},
        "data": {"dir": str(scratch / "prepared"), "seq_len": 64, "vocab_size": 1024},
        "optim": {"lr": 3e-3, "global_batch": 8},
        "checkpoint": {"every": steps},
        "cluster": {"device": "cpu"},
    }
    recipe.write_text(json.dumps(sections))
    settings = [f"model.preset={PRESETS[model]}", f"run.id={run_id}", *words]
    command = [sys.executable, "-m", "shardyard", "train", str(recipe), *settings]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    subprocess.run(command, env=env, stdout=sys.stderr, check=True, timeout=7200)
    lines = read_steps(RunDir(scratch / "runs" / run_id).metrics)
    return {
        "settings": list(words),
        "seconds": round(time.monotonic() - started, 1),
        "losses": [line["loss"] for line in lines],
    }


def _print(model: str, found: Mapping[str, Any]) -> None:
    layouts = list(found["runs"])
    print(f"{model} ({found['preset']})\n| step | {' | '.join(layouts)} |\n|---:|---:|---:|")
    losses = [run["losses"] for run in found["runs"].values()]
    for step in sorted({1, *range(50, len(losses[0]) + 1, 50), len(losses[0])}):
        print(f"| {step} | " + " | ".join(f"{each[step - 1]:.6f}" for each in losses) + " |")
    print(
        f"final loss {found['final_loss']:.4f}, difference {found['final_difference']:.1e}; "
        f"largest of a step {found['largest_difference']:.1e}\n",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
