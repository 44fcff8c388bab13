"""Bytes that each mesh axis moves in a step: counted in a real step, beside the plan's formulas.

Every collective and message of the second step of a run is counted as it is called
(tests/distributed/traffic.py), by rank and by the axis whose group it goes over. The formulas are
those of `shardyard plan` (planner/traffic.py). Bar: 1 %, on every rank and axis; what experts
exchange depends on which of them the tokens visit, so there the mean over ranks is held to 10 %.

    python -m benchmarks.axis_traffic [--only tp]
"""

import argparse
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch.distributed as dist

from benchmarks.record import write_result
from shardyard.config.rules.custom_module import require_shape
from shardyard.planner.traffic import stage_traffic
from shardyard.planner.workload import workload_of
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.setup import set_up
from shardyard.train.training import Training
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus
from tests.distributed.traffic import Traffic

BAR, EXPERTS_BAR = 0.01, 0.1
GLOBAL_BATCH = 8
_RUNS_AT_ONCE = 4
"""Runs of one set of processes: each leaves process groups behind until its processes end."""
AXES = {
    "all-gather": "data", "reduce-scatter": "data", "all-reduce": "data", "tokens of tp": "tp",
    "sums of tp": "tp", "attention of cp": "cp", "visits of ep": "ep", "hidden states of pp": "pp",
    "tied table of pp": "pp",
}  # fmt: skip
"""Term of the plan -> axis; ``data`` is dp_replicate and dp_shard x cp."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layout, in which no two axes have the same ranks."""

    preset: str
    parallel: tuple[tuple[str, Any], ...]
    recompute: str | int = "none"
    lora_rank: int | None = None

    @property
    def processes(self) -> int:
        """The product of the degrees."""
        axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
        return math.prod(degree for axis, degree in self.parallel if axis in axes)

    @property
    def name(self) -> str:
        """Such as ``llama-tiny-deep tp2 dp_shard2``."""
        words = [self.preset, *(f"{axis}{degree}" for axis, degree in self.parallel)]
        words += [] if self.lora_rank is None else [f"lora{self.lora_rank}"]
        return " ".join([*words, *([f"recompute {self.recompute}"] * (self.recompute != "none"))])

    def sections(self) -> dict[str, dict[str, Any]]:
        """The recipe's settings."""
        return {
            "model": {"preset": self.preset, "lora": {"rank": self.lora_rank}},
            "task": {"name": "masked_lm" if self.preset == "bert-tiny" else "causal_lm"},
            "optim": {"global_batch": GLOBAL_BATCH, "micro_batch": 1},
            "parallel": dict(self.parallel),
            "memory": {"recompute": self.recompute},
            "cluster": {"devices": self.processes},
        }


def _case(
    preset: str, recompute: str | int = "none", lora_rank: int | None = None, **parallel: Any
) -> Case:
    axes = tuple(parallel.items())
    return Case(preset=preset, parallel=axes, recompute=recompute, lora_rank=lora_rank)


DENSE, MOE = "llama-tiny-deep", "mixtral-tiny"
CASES = (
    *(_case(DENSE, zero=zero, dp_replicate=2, dp_shard=2) for zero in (1, 2, 3)),
    *(_case(DENSE, tp=2, dp_shard=2, zero=zero) for zero in (1, 2, 3)),
    *(_case(DENSE, how, tp=2, dp_shard=2) for how in ("full", "selective", 2)),
    _case(DENSE, tp=2, dp_replicate=2),
    _case(DENSE, cp=2, dp_shard=2),
    _case(DENSE, "full", cp=2, dp_shard=2),
    _case(DENSE, cp=2, cp_exchange="heads", dp_shard=2),
    _case(DENSE, "full", cp=2, cp_exchange="heads", dp_shard=2),
    _case(DENSE, cp=2, tp=2, dp_shard=2),
    _case(DENSE, pp=2, dp_shard=2),
    _case(DENSE, pp=2, dp_replicate=2),
    _case(DENSE, pp=2, tp=2),
    _case(DENSE, pp=2, cp=2, dp_shard=2),
    _case(DENSE, pp=2, tp=2, dp_shard=2),
    _case(DENSE, pp=4, dp_shard=2),
    _case(DENSE, pp=2, dp_shard=2, schedule="interleaved", virtual_stages=2),
    _case(DENSE, pp=2, dp_shard=2, schedule="zb-v", virtual_stages=2),
    _case(DENSE, pp=2, dp_shard=2, schedule="zero-bubble"),
    _case("llama-laptop", pp=2, dp_shard=2),
    *(_case(DENSE, lora_rank=4, tp=2, dp_shard=2, zero=zero) for zero in (1, 3)),
    *(_case(DENSE, how, lora_rank=4, tp=2, dp_shard=2) for how in ("full", "selective", 2)),
    _case(DENSE, lora_rank=4, pp=2, dp_replicate=2),
    *(_case("olmo2-tiny", how, tp=2, dp_shard=2) for how in ("none", "full", "selective")),
    _case("gemma2-tiny", "full", tp=2, dp_shard=2),
    _case(MOE, ep=2, dp_shard=4),
    _case(MOE, "full", ep=2, dp_shard=4),
    _case(MOE, ep=2, dp_shard=4, dp_replicate=2),
    _case(MOE, ep=2, dp_shard=2, tp=2),
    _case(MOE, ep=2, dp_shard=2, pp=2),
    _case("qwen3-moe-tiny", ep=2, dp_shard=2, tp=2),
)


def main() -> int:
    """Count, print the table, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    cases = [case for case in CASES if args.only in case.name]
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(Path(scratch), cases)
    rows = [
        {"name": case.name, **asdict(case), "axes": axes}
        for case, axes in zip(cases, found, strict=True)
    ]
    missed = [case.name for case, axes in zip(cases, found, strict=True) if not is_met(axes)]
    write_result(
        "axis-traffic",
        {
            "bar": BAR, "bar_of_experts": EXPERTS_BAR, "missed": missed, "is_met": not missed,
            "work": {"seq_len": 32, "global_batch": GLOBAL_BATCH, "precision": "fp32"},
            "cases": rows,
        },
        args.out,
    )  # fmt: skip
    print(table(cases, found))
    print(f"\n{len(cases)} layouts; {'all within the bars' if not missed else f'MISSED: {missed}'}")
    return 1 if missed else 0


Axes = dict[str, dict[str, list[int]]]
"""Axis -> ``counted`` and ``planned``, bytes of each rank."""


def measure(scratch: Path, cases: Sequence[Case]) -> list[Axes]:
    """What each rank sends over each axis in the second step of a run, and what was planned."""
    corpus: Corpus = prepare_corpus(scratch)
    run_dirs = [
        make_run(scratch / str(index), corpus, case.sections()) for index, case in enumerate(cases)
    ]
    found = dict[int, Axes]()
    for processes in sorted({case.processes for case in cases}):
        same = [index for index, case in enumerate(cases) if case.processes == processes]
        for first in range(0, len(same), _RUNS_AT_ONCE):
            some = same[first : first + _RUNS_AT_ONCE]
            mine = [run_dirs[index] for index in some]
            by_rank = run_on_ranks(_count, processes, mine, timeout_s=1800.0)
            for place, index in enumerate(some):
                found[index] = _by_rank([rank[place] for rank in by_rank])
    return [found[index] for index in range(len(cases))]


def _by_rank(found: Sequence[tuple[dict[str, int], dict[str, int]]]) -> Axes:
    axes = {axis for rank in found for part in rank for axis in part}
    return {
        axis: {
            "counted": [counted.get(axis, 0) for counted, _ in found],
            "planned": [planned.get(axis, 0) for _, planned in found],
        }
        for axis in sorted(axes)
    }


def is_met(axes: Axes) -> bool:
    """Whether what is counted is what was planned."""
    return all(worst_error(axis, found) <= _bar(axis) for axis, found in axes.items())


def worst_error(axis: str, found: Mapping[str, Sequence[int]]) -> float:
    """Relative, of the worst rank; for ep of the mean over ranks."""
    counted, planned = found["counted"], found["planned"]
    if axis == "ep":
        return abs(fmean(counted) / fmean(planned) - 1)
    if 0 in planned:
        return float("inf")
    return max(abs(c / p - 1) for c, p in zip(counted, planned, strict=True))


def _bar(axis: str) -> float:
    return EXPERTS_BAR if axis == "ep" else BAR


def _count(run_dirs: list[RunDir]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """On each rank: bytes of each run by axis, counted and planned."""
    found = []
    for run_dir in run_dirs:
        hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
        training = set_up(run_dir, 0, hooks, local_rank=0)
        training.stepper.run(next(training.loader), lr=1e-3, drain=False)
        batches = next(training.loader)
        with Traffic() as traffic:  # the first step also sets groups up
            training.stepper.run(batches, lr=1e-3, drain=False)
        found.append((_by_axis(training, traffic), _planned(training)))
        training.close()
    return found


def _by_axis(training: Training, traffic: Traffic) -> dict[str, int]:
    mesh, axis_of = training.mesh, dict[tuple[int, ...], str]()
    groups = [(axis, mesh.dense.get_group(axis)) for axis in ("dp_replicate", "fsdp", "tp", "pp")]
    if mesh.experts is not None:
        groups += [("expert_shard", mesh.experts.get_group("expert_shard"))]
    if mesh.context is not None:
        groups += [("cp", mesh.group("cp"))]
    for axis, group in groups:
        ranks = tuple(dist.get_process_group_ranks(group))
        assert len(ranks) == 1 or ranks not in axis_of, f"{axis} cannot be told apart"
        axis_of[ranks] = axis if axis in ("tp", "pp", "cp") else "data"
    counted = Counter[str]()
    for (ranks, kind), nbytes in traffic.bytes.items():
        if mesh.experts is not None and kind == "all_to_all":  # nothing else does that
            counted["ep"] += nbytes
        elif nbytes and (ranks in axis_of or len(ranks) < training.world_size):
            counted[axis_of[ranks]] += nbytes
    return dict(counted)


def _planned(training: Training) -> dict[str, int]:
    resolved, layout = training.resolved, training.mesh.layout
    workload = workload_of(resolved.recipe, require_shape(resolved.shape), layout)
    planned = dict[str, int]()
    for term in stage_traffic(workload, training.mesh.stage_rank):
        axis = AXES[term.name]
        planned[axis] = planned.get(axis, 0) + term.bytes
    return planned


def table(cases: Sequence[Case], found: Sequence[Axes]) -> str:
    """Markdown: bytes of rank 0 over each axis, and the worst error of any rank."""
    lines = ["| layout | axis | counted | planned | worst rank |", "|---|---|---:|---:|---:|"]
    for case, axes in zip(cases, found, strict=True):
        for axis, each in axes.items():
            counted, planned = each["counted"][0], each["planned"][0]
            worst = worst_error(axis, each)
            lines.append(f"| {case.name} | {axis} | {counted:,} | {planned:,} | {worst:.2%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
