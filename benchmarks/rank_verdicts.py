"""Does the judge of ranks name who is slow, in time, and nobody else? On seeded traces (simulated).

    python -m benchmarks.rank_verdicts [--traces 500] [--half held-out|tuning] [--loaded-steps 0]

`benchmarks/rank_traces.py` draws runs of 8 to 512 ranks with noise, drift, hiccups, evaluations,
saves, stalls and, in three of four, a fault. The same blocks of steps are given to the judge
(`shardyard/telemetry/health/ranks.py`) and to a fixed threshold: a rank is slow whose speed
is below 0.7 of the fastest one's, or of its own best. The judge's numbers were chosen on the first
half of the seeds; the other half is the one to publish.

Scored are changes by 10 % or more within 20 steps of where they begin (data: 60, since the start:
120), and whether those named are those that are slow, and nobody else. Then 10,000 healthy steps of
a machine that others use, several times; and with --loaded-steps really: twice as many processes as
cores compute, each step with a barrier, and no fault.

The bars: precision 0.99, recall 0.97, the right ones in 0.95, no false alarm in healthy steps.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import c_double
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rank_traces import Fault, Floats, Trace, drawn, healthy, loud
from benchmarks.record import write_result
from shardyard.telemetry.health.ranks import (
    BLOCK_STEPS,
    RankBlock,
    StragglerDetector,
    group_name,
)

PRECISION_BAR, RECALL_BAR, RIGHT_BAR = 0.99, 0.97, 0.95
FIXED = 0.7
WITHIN_STEPS = {"data": 60, "since start": 120, "link since start": 120}
"""After the first step of a fault of this shape; of all others ``ONSET_STEPS``."""
ONSET_STEPS = 20
SETTLED_STEPS = 60
"""After its begin, who is named is compared with who is slow; or at its end if that is earlier."""
HEALTHY_STEPS, HEALTHY_TRACES = 10_000, 10
FIRST_HELD_OUT = 200_000
"""Seeds below are for choosing the judge's numbers."""
_AS_OF_S = 0.2
"""As long as recorded steps are made to be, so that no least difference in seconds hides any."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """A unit is said to be slow from a step on, or to be so no more."""

    kind: str
    unit: tuple[int, ...]
    step: int
    is_over: bool
    is_since_start: bool = False


Look = Callable[[Sequence[RankBlock]], list[Word]]


class FixedThreshold:
    """A rank is slow whose speed is below a share of the fastest one's, or of its own best."""

    def __init__(self, ranks_of_stage: int) -> None:
        self._ranks_of_stage = ranks_of_stage
        self._best_s: Floats | None = None
        self._named: set[int] = set()

    def look(self, blocks: Sequence[RankBlock]) -> list[Word]:
        """Judge one block."""
        took_s = np.median([block.compute_s for block in blocks], axis=1)
        best_s = took_s if self._best_s is None else np.minimum(self._best_s, took_s)
        self._best_s = best_s
        fastest_s = np.repeat(
            took_s.reshape(-1, self._ranks_of_stage).min(axis=1), self._ranks_of_stage
        )
        speed = np.minimum(fastest_s, best_s) / took_s
        found = []
        for block, share in zip(blocks, speed, strict=True):
            if (share < FIXED) != (block.rank in self._named):
                self._named ^= {block.rank}
                is_over = block.rank not in self._named
                found.append(
                    Word(kind="compute", unit=(block.rank,), step=block.last_step, is_over=is_over)
                )
        return found


def by_judge(trace: Trace) -> Look:
    """The judge of a run."""
    judge = StragglerDetector(trace.ranks // trace.stages)

    def look(blocks: Sequence[RankBlock]) -> list[Word]:
        return [
            Word(
                kind=each.what,
                unit=each.ranks,
                step=each.step,
                is_over=each.is_over,
                is_since_start=each.is_since_start,
            )
            for each in judge.evaluate(blocks)
        ]

    return look


def by_fixed_threshold(trace: Trace) -> Look:
    """The other one."""
    return FixedThreshold(trace.ranks // trace.stages).look


def blocks_of(trace: Trace) -> Iterator[list[RankBlock]]:
    """What the ranks would tell, block by block."""
    count = trace.steps // BLOCK_STEPS

    def cut(seconds: Floats) -> Any:
        """By block and rank, the steps of each."""
        whole = seconds[: count * BLOCK_STEPS].reshape(count, BLOCK_STEPS, -1)
        return whole.transpose(0, 2, 1).tolist()

    compute_s, data_s = cut(trace.compute_s), cut(trace.data_s)
    exchange: list[list[tuple[str, int, Any]]] = [[] for _ in range(trace.ranks)]
    for ranks, seconds in trace.exchange_s.items():
        name, by_block = group_name(ranks), cut(seconds)
        assert name is not None
        for member, rank in enumerate(ranks):
            exchange[rank].append((name, member, by_block))
    for block in range(count):
        yield [
            RankBlock(
                rank=rank,
                node=f"node-{rank // trace.devices}",
                block=block,
                compute_s=compute_s[block][rank],
                data_s=data_s[block][rank],
                exchange_s={name: of[block][member] for name, member, of in exchange[rank]},
            )
            for rank in range(trace.ranks)
        ]


@dataclass
class Score:
    """Of many traces."""

    told: int = 0
    true: int = 0
    due: int = 0
    found: int = 0
    right: int = 0
    steps_to: list[int] = field(default_factory=list)
    by: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Shape of fault, size of it, noise or number of ranks -> due, found, right."""

    def add(self, trace: Trace, words: Sequence[Word]) -> None:
        """Count what was said of one trace."""
        begun = [word for word in words if not word.is_over]
        right = [w for w in words if w.is_over or any(_is_of(w, f) for f in trace.faults)]
        self.told += len(begun)
        self.true += sum(any(_is_of(word, fault) for fault in trace.faults) for word in begun)
        for fault in trace.faults:
            if fault.tell != "must":
                continue
            within = fault.begin + WITHIN_STEPS.get(fault.shape, ONSET_STEPS)
            times = [w.step for w in begun if _is_of(w, fault) and w.step <= within]
            # A rank that is said to be slow when it becomes slower is named already.
            is_named = bool(
                _named_at(right, fault.begin - 1) & {(fault.kind, u) for u in fault.units}
            )
            is_found = bool(times) or is_named
            is_right = is_found and self._is_right(trace, fault, words)
            if times:
                self.steps_to.append(min(times) - fault.begin + 1)
            kinds = (fault.shape, _size(fault), trace.machine, f"{trace.ranks} ranks")
            for count in (*(self.by[kind] for kind in kinds),):
                count.update(due=1, found=is_found, right=is_right)
            self.due, self.found = self.due + 1, self.found + is_found
            self.right += is_right

    def _is_right(self, trace: Trace, fault: Fault, words: Sequence[Word]) -> bool:
        """Whether those named then are those that are slow: all of the fault, and nobody else."""
        settled = max(SETTLED_STEPS, WITHIN_STEPS.get(fault.shape, 0))
        step = min(fault.begin + settled, fault.end - 1)
        named = _named_at(words, step)
        mine = {(fault.kind, unit) for unit in fault.units}
        allowed = {
            (other.kind, unit)
            for other in trace.faults
            if (other.since or other.begin) <= step and other.tell != "no"
            for unit in other.units
        }
        return mine <= named <= allowed

    def join(self, other: "Score") -> None:
        """Count what another one has counted, too."""
        self.told, self.true = self.told + other.told, self.true + other.true
        self.due, self.found = self.due + other.due, self.found + other.found
        self.right += other.right
        self.steps_to += other.steps_to
        for kind, count in other.by.items():
            self.by[kind].update(count)

    def row(self) -> dict[str, Any]:
        """The numbers of the table."""
        return {
            "told": self.told,
            "precision": self.true / self.told if self.told else None,
            "due": self.due,
            "recall": self.found / self.due if self.due else None,
            "right": self.right / self.found if self.found else None,
            "median_steps": float(np.median(self.steps_to)) if self.steps_to else None,
            "by": {
                kind: {
                    "due": count["due"],
                    "recall": count["found"] / count["due"],
                    "right": count["right"] / count["found"] if count["found"] else None,
                }
                for kind, count in sorted(self.by.items())
            },
        }


def _is_of(word: Word, fault: Fault) -> bool:
    """Whether what is said is so, or was so within the last two blocks."""
    since = fault.begin if fault.since is None else fault.since
    is_there = since <= word.step < fault.end + 2 * BLOCK_STEPS
    return is_there and fault.tell != "no" and word.kind == fault.kind and word.unit in fault.units


def _named_at(words: Sequence[Word], step: int) -> set[tuple[str, tuple[int, ...]]]:
    named: set[tuple[str, tuple[int, ...]]] = set()
    for word in words:
        if word.step <= step:
            (named.discard if word.is_over else named.add)((word.kind, word.unit))
    return named


def _size(fault: Fault) -> str:
    if fault.kind == "link":
        return "a link"
    bounds = (1.15, 1.3, 2.0)
    return next((f"up to {b - 1:.0%}" for b in bounds if fault.factor <= b), "more than 100%")


Draw = Callable[[int], Trace]
Judges = Sequence[Callable[[Trace], Look]]


def score(seeds: Sequence[int], draw: Draw, judges: Judges, *, processes: int = 1) -> list[Score]:
    """One score a judge, all of the same blocks."""
    total = [Score() for _ in judges]
    one = partial(_score_one, draw, judges)
    if processes == 1:
        parts: Iterator[list[Score]] = map(one, seeds)
        return _summed(total, parts)
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return _summed(total, pool.imap_unordered(one, seeds))


def _score_one(draw: Draw, judges: Judges, seed: int) -> list[Score]:
    trace = draw(seed)
    looks = [judge(trace) for judge in judges]
    words: list[list[Word]] = [[] for _ in judges]
    for blocks in blocks_of(trace):
        for look, said in zip(looks, words, strict=True):
            said += look(blocks)
    scores = [Score() for _ in judges]
    for each, said in zip(scores, words, strict=True):
        each.add(trace, said)
    return scores


def _summed(total: list[Score], parts: Iterable[list[Score]]) -> list[Score]:
    for part in parts:
        for mine, other in zip(total, part, strict=True):
            mine.join(other)
    return total


def alarms(trace: Trace, judge: Callable[[Trace], Look]) -> int:
    """How often a rank of a trace without a fault is said to be slow."""
    look = judge(trace)
    return sum(not word.is_over for blocks in blocks_of(trace) for word in look(blocks))


def record_loaded(steps: int, ranks: int, *, work_s: float = 0.008) -> Trace:
    """A real run of processes that compute and meet, without a fault.

    Args:
        ranks: More than there are cores, so that they hold each other up.
        work_s: Of a step on a core of its own.
    """
    started = multiprocessing.get_context("fork")
    barrier, shared = started.Barrier(ranks), started.RawArray(c_double, steps * ranks)
    compute_s = np.frombuffer(memoryview(shared), dtype=np.float64).reshape(steps, ranks)
    loops = _loops_in(work_s)

    def work(rank: int) -> None:
        matrix = np.full((64, 64), 1e-3)
        for step in range(steps):
            began_s = time.perf_counter()
            for _ in range(loops):
                matrix @ matrix
            compute_s[step, rank] = time.perf_counter() - began_s
            barrier.wait()

    processes = [started.Process(target=work, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return Trace(
        seed=0,
        machine="loaded",
        nodes=1,
        devices=ranks,
        stages=1,
        compute_s=compute_s * (_AS_OF_S / np.median(compute_s)),
        data_s=np.zeros_like(compute_s),
    )


def _loops_in(seconds: float) -> int:
    matrix, loops, began_s = np.full((64, 64), 1e-3), 0, time.perf_counter()
    while time.perf_counter() - began_s < 0.5:
        matrix @ matrix
        loops += 1
    return max(1, round(loops * seconds / 0.5))


def main() -> int:
    """Judge, print, write the result file; returns 1 if a bar is missed."""
    args = _arguments()
    first = FIRST_HELD_OUT if args.half == "held-out" else 0
    seeds = range(first, first + args.traces)
    judges = (by_judge, by_fixed_threshold)
    names = ("judge", f"fixed threshold {FIXED}")
    began_s = time.monotonic()
    scored = score(seeds, drawn, judges, processes=args.processes)
    rows = {name: each.row() for name, each in zip(names, scored, strict=True)}
    scored = score(seeds[: args.traces // 5], loud, judges, processes=args.processes)
    loud_rows = {name: each.row() for name, each in zip(names, scored, strict=True)}
    quiet = {
        name: [
            alarms(healthy(seed, machine="shared", steps=HEALTHY_STEPS), judge)
            for seed in seeds[: args.healthy]
        ]
        for name, judge in zip(names, judges, strict=True)
    }
    content: dict[str, Any] = {
        "is_simulated": True,
        "half": args.half,
        "traces": args.traces,
        "first_seed": first,
        "bars": {"precision": PRECISION_BAR, "recall": RECALL_BAR, "right": RIGHT_BAR},
        "scores": rows,
        "shared_machine": loud_rows,
        "alarms_in_healthy_steps": {"steps": HEALTHY_STEPS, "of_traces": quiet},
    }
    if args.loaded_steps:
        trace = record_loaded(args.loaded_steps, 2 * (os.cpu_count() or 1))
        found = {name: alarms(trace, judge) for name, judge in zip(names, judges, strict=True)}
        content["alarms_in_real_steps"] = {
            "steps": trace.steps, "processes": trace.ranks, **found
        }  # fmt: skip
    content["seconds"] = round(time.monotonic() - began_s, 1)
    content["is_met"] = _is_met(content, names[0])
    print(table(content))
    write_result("rank-verdicts", content, args.out)
    return 0 if content["is_met"] else 1


def _is_met(content: dict[str, Any], name: str) -> bool:
    row = content["scores"][name]
    real = content.get("alarms_in_real_steps", {}).get(name, 0)
    return (
        (row["precision"] or 0.0) >= PRECISION_BAR
        and (row["recall"] or 0.0) >= RECALL_BAR
        and (row["right"] or 0.0) >= RIGHT_BAR
        and not any(content["alarms_in_healthy_steps"]["of_traces"][name])
        and not real
    )


def table(content: dict[str, Any]) -> str:
    """The scores side by side, as Markdown."""
    rows = content["scores"]
    names = list(rows)
    lines = [f"| | bar | {' | '.join(names)} |", "|---|---:|" + "---:|" * len(names)]
    for key, words in (("precision", "precision"), ("recall", "recall, in time"),
                       ("right", "the right ranks or link")):  # fmt: skip
        told = " | ".join(_share(rows[name][key]) for name in names)
        lines.append(f"| {words} | {content['bars'][key]} | {told} |")
    steps = " | ".join(_number(rows[name]["median_steps"]) for name in names)
    lines.append(f"| steps to the word, median | | {steps} |")
    for kind in rows[names[0]]["by"]:
        found = " | ".join(_share(rows[name]["by"][kind]["recall"]) for name in names)
        lines.append(f"| recall, {kind} ({rows[names[0]]['by'][kind]['due']}) | | {found} |")
    loud_rows = content["shared_machine"]
    for key in ("precision", "recall"):
        found = " | ".join(_share(loud_rows[name][key]) for name in names)
        lines.append(f"| shared machine, 1.5 to 4 times: {key} | | {found} |")
    quiet = content["alarms_in_healthy_steps"]
    found = " | ".join(
        f"{sum(quiet['of_traces'][n])} in {len(quiet['of_traces'][n])}" for n in names
    )
    lines.append(
        f"| false alarms, shared machine, runs of {quiet['steps']:,} steps | 0 | {found} |"
    )
    if real := content.get("alarms_in_real_steps"):
        found = " | ".join(str(real[name]) for name in names)
        lines.append(
            f"| the same, {real['steps']:,} real steps of {real['processes']} processes | 0 | "
            f"{found} |"
        )
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--traces", type=int, default=500)
    parser.add_argument("--half", choices=["held-out", "tuning"], default="held-out")
    parser.add_argument("--healthy", type=int, default=HEALTHY_TRACES, help="long runs")
    parser.add_argument("--loaded-steps", type=int, default=0, help="really, on this machine")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
