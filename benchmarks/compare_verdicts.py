"""Does `shardyard compare` say faster or slower only where it is so, and find what is slower?

Two sources of step times, each compared with itself (A/A), and with one side made 5 % and 1 %
slower:

- seeded traces: noise that neighbouring steps share, spikes, a machine that drifts while runs come
  and go, and an offset of each run. Single runs one after the other, and pairs that alternate.
- real ones (``--runs FOLDER``): runs of one recipe that were made one after the other, by
  ``--record``, or any others. Single ones side by side in time, and pairs that alternate.

    python -m benchmarks.compare_verdicts
    python -m benchmarks.compare_verdicts --record 12 --steps 160 --runs /tmp/recorded
"""

import argparse
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.record import write_result
from shardyard.report.compare.statistics import (
    MIN_PAIRS,
    MIN_STEPS,
    Pace,
    compare_speed,
    pace_of,
)
from shardyard.report.run_data import read_run
from shardyard.report.walltime import account
from shardyard.rundir.layout import RunDir

TRIES = 200
FALSE_BAR, FOUND_BAR, SMALL_BAR = 0.05, 0.90, 0.90
"""Of A/A: false verdicts; of 5 %: found; of 1 %: called inconclusive."""
EFFECTS = {"A/A": 1.0, "5 % slower": 1.05, "1 % slower": 1.01}
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What makes steps of one recipe differ; standard deviations are of the logarithm."""

    step_s: float = 0.2
    step_noise: float = 0.03
    correlation: float = 0.6
    """Of neighbouring steps."""
    spikes: float = 0.02
    """Share of steps that take 1.3 to 4 times as long."""
    drift: float = 0.01
    """Of the machine, over all runs."""
    drift_s: float = 300.0
    """In which it forgets what it was."""
    between_runs: float = 0.007
    """Offset that a run has from its start to its end."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Runs of a comparison."""

    pairs: int
    steps: int
    """Of each run."""
    pause_s: float = 20.0
    """Between two runs."""


MACHINES = {
    "quiet": Noise(step_noise=0.01, spikes=0.005, drift=0.003, between_runs=0.003),
    "shared": Noise(),
    "shared, slow drift": Noise(drift=0.015, drift_s=1800.0),
}
PLANS = {
    "one run each, 1,000 steps": Plan(pairs=1, steps=1000),
    "five pairs in turn, 200 steps": Plan(pairs=5, steps=200),
}


def main() -> int:
    """Judge, print, write the result file; returns 1 if a bar is missed."""
    args = _arguments()
    if args.record:
        record(args.runs, args.record, args.steps)
    cases: dict[str, Any] = {}
    if not args.only_real:
        for machine, noise in MACHINES.items():
            for name, plan in PLANS.items():
                cases[f"seeded: {machine}; {name}"] = {
                    "noise": asdict(noise), "plan": asdict(plan),
                    **_judged(partial(traces, noise, plan), args.tries, must_find=plan.pairs > 1),
                }  # fmt: skip
    if args.runs is not None:
        cases |= _real(read_paces(args.runs), args.tries)
    for name, case in cases.items():
        print(f"{name}: {_line(case)}")
    content = {"bars": [FALSE_BAR, FOUND_BAR, SMALL_BAR], "tries": args.tries, "cases": cases}
    write_result("compare-verdicts", content, args.out)
    return 0 if all(case["is_met"] for case in cases.values()) else 1


def _real(paces: Sequence[Pace], tries: int) -> dict[str, Any]:
    """Recorded runs, with all their step times, so that anybody can judge them again."""
    levels = [fmean(np.log(pace.seconds)) for pace in paces]
    about = {
        "runs": len(paces),
        "spread_between_runs": stdev(levels),
        "step_times_s": [[float(f"{s:.4g}") for s in pace.seconds] for pace in paces],
    }
    found = {"real: one run each": _judged(partial(neighbours, paces, 1), tries, must_find=False)}
    if len(paces) >= 2 * MIN_PAIRS:
        pairs = min(5, len(paces) // 2)
        chosen = _judged(partial(neighbours, paces, pairs), tries, must_find=True)
        found[f"real: {pairs} pairs in turn"] = chosen
    return {name: {**about, **case} for name, case in found.items()}


Drawn = Callable[[int], tuple[list[Pace], list[Pace]]]
"""From a seed two sides of one recipe."""


def _judged(draw: Drawn, tries: int, *, must_find: bool) -> dict[str, Any]:
    """Verdicts by effect, and whether the bars are met.

    Args:
        must_find: Whether it is held to what it finds. One run a side is not: it cannot tell itself
            from the machine that it ran on, and says so.
    """
    verdicts: dict[str, Counter[str]] = {name: Counter() for name in EFFECTS}
    halves: list[float] = []
    for seed in range(tries):
        baseline, other = draw(seed)
        for name, factor in EFFECTS.items():
            speed = compare_speed(baseline, [slowed(pace, factor) for pace in other])
            verdicts[name][speed.verdict] += 1
            if speed.high is not None and speed.low is not None and factor == 1:
                halves.append((speed.high / speed.low) ** 0.5 - 1)
    shares = {name: {v: n / tries for v, n in found.items()} for name, found in verdicts.items()}
    false = 1 - shares["A/A"].get("inconclusive", 0.0)
    found_5 = shares["5 % slower"].get("slower", 0.0)
    small = shares["1 % slower"].get("inconclusive", 0.0)
    return {
        "verdicts": shares,
        "median_half_interval": sorted(halves)[len(halves) // 2] if halves else None,
        "is_held_to": "all bars" if must_find else "false verdicts alone",
        "is_met": false <= FALSE_BAR
        and (not must_find or (found_5 >= FOUND_BAR and small >= SMALL_BAR)),
    }


def slowed(pace: Pace, factor: float) -> Pace:
    """The same run, had each step taken so many times as long."""
    return replace(pace, seconds=tuple(factor * each for each in pace.seconds))


def traces(noise: Noise, plan: Plan, seed: int) -> tuple[list[Pace], list[Pace]]:
    """Two sides of one recipe, in turn A B, B A, A B, ..., on one machine whose drift goes on."""
    draw = np.random.default_rng(seed)
    drift, t = noise.drift * draw.standard_normal(), 0.0
    sides: tuple[list[Pace], list[Pace]] = ([], [])
    for pair in range(plan.pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            drift = _later(drift, noise, plan.pause_s, draw)
            drifts = _drift(drift, noise, plan.steps, draw)
            offset = noise.between_runs * draw.standard_normal()
            logs = _noise(noise, plan.steps, draw) + offset + drifts
            drift = float(drifts[-1])
            seconds = tuple((noise.step_s * np.exp(logs)).tolist())
            sides[side].append(Pace(name=f"{'AB'[side]}{pair}", started_t=t, seconds=seconds))
            t += plan.pause_s + sum(seconds)
    return sides


def _later(drift: float, noise: Noise, seconds: float, draw: np.random.Generator) -> float:
    kept = math.exp(-seconds / noise.drift_s)
    return kept * drift + noise.drift * math.sqrt(1 - kept**2) * float(draw.standard_normal())


def _drift(drift: float, noise: Noise, steps: int, draw: np.random.Generator) -> Floats:
    """The machine's drift at each step of a run, from what it was before it."""
    kept = float(np.exp(-noise.step_s / noise.drift_s))
    fresh = draw.standard_normal(steps) * noise.drift * (1 - kept**2) ** 0.5
    return _correlated(drift, kept, fresh)


def _correlated(last: float, kept: float, fresh: Floats) -> Floats:
    values = []
    for each in fresh.tolist():
        last = kept * last + each
        values.append(last)
    return np.array(values)


def _noise(noise: Noise, steps: int, draw: np.random.Generator) -> Floats:
    """Correlated noise of the given spread, and spikes."""
    fresh = draw.standard_normal(steps) * noise.step_noise * (1 - noise.correlation**2) ** 0.5
    logs = _correlated(noise.step_noise * draw.standard_normal(), noise.correlation, fresh)
    spikes = draw.random(steps) < noise.spikes
    logs[spikes] += np.log(draw.uniform(1.3, 4.0, int(spikes.sum())))
    return logs


def neighbours(paces: Sequence[Pace], pairs: int, seed: int) -> tuple[list[Pace], list[Pace]]:
    """Runs that followed one another, dealt to two sides in turn, the first of a pair by lot."""
    draw = random.Random(seed)
    first = draw.randrange(len(paces) - 2 * pairs + 1)
    sides: tuple[list[Pace], list[Pace]] = ([], [])
    for place in range(first, first + 2 * pairs, 2):
        side = draw.randrange(2)
        sides[side].append(paces[place])
        sides[1 - side].append(paces[place + 1])
    return sides


def read_paces(folder: Path) -> list[Pace]:
    """The runs of a folder with enough steps, in order of their start."""
    return sorted(_paces(folder), key=lambda pace: pace.started_t)


def _paces(folder: Path) -> Iterator[Pace]:
    for each in folder.iterdir():
        if (each / "recipe.yaml").is_file():
            run = read_run(RunDir(each))
            pace, _ = pace_of(run, account(run))
            if len(pace.seconds) >= MIN_STEPS:
                yield pace


def record(folder: Path, runs: int, steps: int) -> None:
    """The quickstart, shortened, so many times one after the other."""
    for number in range(runs):
        overrides = (
            f"run.steps={steps}", f"run.id=aa-{number:03d}", f"run.dir={folder}",
            "task.eval_every_steps=null", "task.generate_tokens=0",
            f"checkpoint.every={10 * steps}",
        )  # fmt: skip
        command = ["train", "examples/quickstart.yaml", *overrides]
        subprocess.run([sys.executable, "-m", "shardyard", *command], check=True)


def _line(case: dict[str, Any]) -> str:
    told = [
        f"{name} " + ", ".join(f"{verdict} {share:.1%}" for verdict, share in sorted(found.items()))
        for name, found in case["verdicts"].items()
    ]
    half = case["median_half_interval"]
    width = "" if half is None else f"; interval ± {half:.1%}"
    return f"{'; '.join(told)}{width}; {'met' if case['is_met'] else 'MISSED'}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tries", type=int, default=TRIES)
    parser.add_argument("--runs", type=Path, help="a folder of recorded runs of one recipe")
    parser.add_argument("--record", type=int, default=0, help="so many runs into it, first")
    parser.add_argument("--steps", type=int, default=160, help="of each of them")
    parser.add_argument("--only-real", action="store_true", help="no seeded traces")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.record and args.runs is None:
        parser.error("--record needs --runs")
    return args


if __name__ == "__main__":
    sys.exit(main())
