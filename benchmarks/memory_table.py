"""Bytes per rank of each zero level, tp degree and recompute: the real model beside arithmetic.

The real model takes a step on fake devices (`internals/dry-run.md`), which count what its tensors
take; beside it stands what `shardyard plan` computes. States are parameters, optimizer state and
the summed gradients, as they lie when the optimizer steps; activations are what autograd keeps for
the backward pass, as it lies at the loss without the logits. Bars: 2 % for each of the states, 5 %
for activations.

    python -m benchmarks.memory_table [--only 70b]
"""

import argparse
import itertools
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.record import write_result
from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Recipe
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.planner.dry_run import PhasePeak, dry_run
from shardyard.planner.memory import needs
from shardyard.planner.workload import workload_of

GIB = 2**30
BARS = {"parameters": 0.02, "gradients": 0.02, "optimizer": 0.02, "activations": 0.05}
SEQ_LEN, PASSES = 4096, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting of one model."""

    model: str
    dp_shard: int
    tp: int = 1
    zero: int = 3
    recompute: str = "none"

    @property
    def name(self) -> str:
        """Such as ``7b dp 8 tp 2 zero 3 full``."""
        return f"{self.model} dp {self.dp_shard} tp {self.tp} zero {self.zero} {self.recompute}"

    @property
    def layout(self) -> Layout:
        """How the ranks split the model."""
        return Layout(dp_replicate=1, dp_shard=self.dp_shard, tp=self.tp, zero=self.zero)

    def recipe(self) -> Recipe:
        """The recipe, without any ``auto`` that memory depends on."""
        sections = {
            "model": {"preset": "llama2-7b", "dropout": 0.0},  # the shape is given beside it
            "data": {"seq_len": SEQ_LEN},
            "optim": {
                "lr": 1e-4,
                "weight_decay": 0.1,
                "global_batch": PASSES * self.dp_shard,
                "micro_batch": 1,
            },
            "precision": {"compute": "bf16", "reduce": "fp32", "output": "bf16"},
            "memory": {"recompute": self.recompute},
        }
        return Recipe.model_validate(sections)


SHAPES: dict[str, ModelShape] = {
    "7b/8": replace(PRESETS["llama2-7b"].shape, num_hidden_layers=4),
    "70b": PRESETS["llama2-70b"].shape,
}
"""``7b/8``: Llama 2 7B with 4 of its 32 blocks, so that 27 settings take minutes."""

RECOMPUTES = ("none", "selective", "full")
CASES = (
    *(
        Case(model="7b/8", dp_shard=16 // tp, tp=tp, zero=zero, recompute=recompute)
        for tp, zero, recompute in itertools.product((1, 2, 8), (1, 2, 3), RECOMPUTES)
    ),
    *(Case(model="70b", dp_shard=16, tp=8, recompute=recompute) for recompute in RECOMPUTES),
    Case(model="70b", dp_shard=128, recompute="full"),
)


def main() -> int:
    """Run all cases, print the table, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    rows = {}
    print(f"| setting | {' | '.join(f'{term}, GiB' for term in BARS)} | largest error |")
    print("|---|" + "---:|" * (len(BARS) + 1))
    for case in CASES:
        if args.only in case.name:
            rows[case.name] = {"case": asdict(case), **compare(case)}
            print(_line(case, rows[case.name]), flush=True)
    missed = [
        f"{name}: {term}"
        for name, row in rows.items()
        for term, bar in BARS.items()
        if abs(row["errors"][term]) > bar
    ]
    content = {
        "bars": BARS, "missed": missed, "is_met": not missed,
        "work": {"seq_len": SEQ_LEN, "micro_batch": 1, "micro_batches": PASSES, "compute": "bf16"},
        "cases": rows,
    }  # fmt: skip
    write_result("memory-table", content, args.out)
    print(f"\n{len(rows)} settings; {'all within the bars' if not missed else f'MISSED: {missed}'}")
    return 1 if missed else 0


def compare(case: Case) -> dict[str, Any]:
    """Bytes of each kind, by the dry run and by the plan, and their relative differences."""
    recipe, shape = case.recipe(), SHAPES[case.model]
    run = dry_run(recipe, shape, case.layout)
    at_loss = _last(run.moments, "loss")
    at_end = _last(run.moments, "optimizer step")
    held = {
        "parameters": at_end.terms["parameters"],
        "gradients": at_end.terms["gradients"],
        "optimizer": at_end.terms["optimizer"],
        "activations": at_loss.terms["activations"],
    }
    workload = workload_of(recipe, shape, case.layout)
    loss, _, end = needs(workload, 0)
    formats = workload.formats  # gradients are split as parameters are, at every zero level
    planned = {
        "parameters": round(end.parameters),
        "gradients": round(end.parameters * formats.gradient_bytes / formats.weight_bytes),
        "optimizer": round(end.optimizer),
        "activations": round(loss.activations),
    }
    return {
        "dry_run": held,
        "planned": planned,
        "errors": {term: planned[term] / held[term] - 1 for term in BARS},
        "peak_bytes": run.peak.bytes,
        "moments": [asdict(moment) for moment in run.moments],
    }


def _last(moments: tuple[PhasePeak, ...], phase: str) -> PhasePeak:
    return [moment for moment in moments if moment.phase == phase][-1]


def _line(case: Case, row: dict[str, Any]) -> str:
    held = " | ".join(f"{row['dry_run'][term] / GIB:.3f}" for term in BARS)
    worst = max(row["errors"].values(), key=abs)
    return f"| {case.name} | {held} | {worst:+.2%} |"


if __name__ == "__main__":
    sys.exit(main())
