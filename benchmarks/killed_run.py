"""Kill random ranks of one run for some time: the share that trains, and the simulation's.

    OMP_NUM_THREADS=1 python -m benchmarks.killed_run RECIPE --mtbf 20 --for 600
        [--seed 0] [--steps 200] [--patience 60] [--dir DIR]

RECIPE is files and settings, as of `shardyard drill`. One run without an end loses a rank again and
again, `--mtbf` seconds apart on average (exponential, drawn from `--seed`), for `--for` seconds.
Evaluations are off; there are six saves in `--steps` steps. The result is drill.json in DIR.

Both shares are of the time from the first kill to the last, in steps whose result stands. Both see
the same lives, each from one kill to the next. The simulation is the planner's own. It uses
this very run's times for a restart, a step and a save, so that only the model of a failure differs.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.real_run import end_by_signals
from shardyard.drill.case import Commands, DrillWorkspace
from shardyard.drill.case_state import CaseState, MissedInjection
from shardyard.drill.recipe import DrillRecipe, read_drill_recipe
from shardyard.drill.run import default_folder
from shardyard.drill.sandbox import enter_namespaces
from shardyard.errors import ShardyardError
from shardyard.io.files import make_folder, write_json
from shardyard.log import info
from shardyard.planner.effective_time import simulate_failures
from shardyard.rundir.counted_lines import counted
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir
from shardyard.units import format_seconds

_FEWEST_KILLS = 3
_POLL_S = 0.02
_ENDLESS = (
    "run.steps=100000000",
    "elastic.max_restarts=1000000",
    "task.eval_every_steps=null",  # the simulation knows of none
)


def main() -> int:
    """Measure, write the result file, print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="+", help="files and settings")
    parser.add_argument("--mtbf", type=float, required=True, help="mean seconds between kills")
    parser.add_argument("--for", dest="for_s", type=float, required=True, help="seconds of it all")
    parser.add_argument("--seed", type=int, default=0, help="of moments and ranks")
    parser.add_argument("--steps", type=int, default=200, help="steps with six saves in them")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds, as of a drill")
    parser.add_argument("--dir", type=Path, help="folder of the run and the result")
    args = parser.parse_args()
    end_by_signals()
    try:
        drilled = read_drill_recipe(args.recipe, steps=args.steps)
        folder = (args.dir or default_folder(args.recipe)).resolve()
        workspace = DrillWorkspace(folder=folder, patience_s=args.patience)
        workspace.check_unused()
        if why := enter_namespaces():
            print(f"not in namespaces of its own: {why}", file=sys.stderr)
        found = run_loop(drilled, workspace, mtbf_s=args.mtbf, for_s=args.for_s, seed=args.seed)
    except ShardyardError as error:
        raise SystemExit(str(error)) from error
    print(json.dumps(found.to_json(), indent=1))
    return 0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A rank that was killed."""

    t: float
    """Unix seconds."""
    generation: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class KillLoop:
    """Result of a kill loop. Seconds are of the time between the first kill and the last."""

    seed: int
    mtbf_s: float
    kills: tuple[Kill, ...]
    wall_s: float
    productive_s: float
    """Seconds in steps whose result was kept."""
    restart_s: float
    """Median, from a kill to the beginning of the first step after it."""
    step_s: float
    steps_between_saves: int
    blocking_s: float
    """For which a save stops the training, median."""
    lag_s: float
    """From then until the save is durable, median."""
    measured: float
    """Share of the wall time that trained."""
    simulated: float
    """The same by the planner's simulation of these lives."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ScheduledKill:
    """A kill that is to come."""

    after_s: float
    """Since the first step of the run."""
    share: float
    """Share of the ranks, in order, up to the killed one; below 1."""

    def among(self, ranks: Sequence[int]) -> int:
        """Return which of these ranks is killed."""
        return sorted(ranks)[int(self.share * len(ranks))]


def schedule(*, mtbf_s: float, for_s: float, seed: int) -> list[ScheduledKill]:
    """Schedule kills at exponential intervals with this mean; one seed gives one schedule."""
    draw, found, after_s = random.Random(f"{seed} loop"), list[ScheduledKill](), 0.0
    while (after_s := after_s + draw.expovariate(1 / mtbf_s)) < for_s:
        found.append(ScheduledKill(after_s=after_s, share=draw.random()))
    return found


@dataclass
class _Loop:
    """A loop under way."""

    state: CaseState
    is_over: Callable[[], bool]
    kills: list[Kill] = field(default_factory=list)

    def run(self, due: Sequence[ScheduledKill], for_s: float) -> None:
        """Kill ranks until the time is over."""
        self.state.wait(lambda: self.state.events("first_step"), "the first step")
        began_s = time.monotonic()
        for each in due:
            self._wait_until(began_s + each.after_s)
            self._kill(each)
        self._wait_until(began_s + for_s)

    def _wait_until(self, at_s: float) -> None:
        while time.monotonic() < at_s:
            if self.is_over():
                raise MissedInjection("the run ended under the kills")
            time.sleep(_POLL_S)

    def _kill(self, due: ScheduledKill) -> None:
        met, workers = self.state.events("rendezvous")[-1], self.state.workers()
        rank = due.among(list(workers))
        now_t = time.time()
        try:
            self.state.kill(workers[rank])
        except MissedInjection:
            return  # between two generations there is nobody to kill
        self.kills.append(Kill(t=now_t, generation=met["generation"], rank=rank))
        info(f"kill {len(self.kills)}: rank {rank}, generation {met['generation']}")


def run_loop(
    drilled: DrillRecipe, workspace: DrillWorkspace, *, mtbf_s: float, for_s: float, seed: int
) -> KillLoop:
    """Kill random ranks of one run for some time, and measure; writes ``drill.json``.

    Raises:
        ShardyardError: The run did not survive, or there were too few kills to speak of a share.
    """
    endless = replace(drilled, words=(*drilled.words, *_ENDLESS))
    run = RunDir(workspace.runs / "loop")
    make_folder(workspace.runs)
    with tempfile.TemporaryDirectory(prefix="drill-") as scratch:
        commands = Commands(
            workspace=workspace, drilled=endless, run=run, scratch=Path(scratch), faults=""
        )
        scene = CaseState(
            run=run, marked=commands.marked, scratch=commands.scratch, rank=0,
            node=0,
            draw=random.Random(f"{seed} loop"), is_launched=drilled.nodes > 1,
            within_s=workspace.patience_s * 10,
        )  # fmt: skip
        verb = ("launch", "--on", "local", "--yes", "--force") if scene.is_launched else ("train",)
        try:
            with commands.started((*verb, *endless.of(workspace.runs, run.run_id))) as is_over:
                loop = _Loop(state=scene, is_over=is_over)
                loop.run(schedule(mtbf_s=mtbf_s, for_s=for_s, seed=seed), for_s)
        except MissedInjection as why:
            words = commands.ends[-1].last_words if commands.ends else ""
            raise ShardyardError(
                f"the kill loop broke off: {why}. {words} The run is {run.path}."
            ) from why
    found = measure(
        list(read_lines(run.events)), list(read_lines(run.metrics)), loop.kills,
        every=drilled.save_every, seed=seed, mtbf_s=mtbf_s,
    )  # fmt: skip
    write_json(workspace.folder / "drill.json", {"recipe": list(endless.words), **found.to_json()})
    return found


def measure(
    events: Sequence[dict[str, Any]],
    lines: Sequence[dict[str, Any]],
    kills: Sequence[Kill],
    *,
    every: int,
    seed: int,
    mtbf_s: float,
) -> KillLoop:
    """The share that trained between the first kill and the last, and what is simulated of it.

    Args:
        events: Of events.jsonl.
        lines: Of metrics.jsonl.
        every: Steps between two saves.

    Raises:
        ShardyardError: There were too few kills.
    """
    restarts = [found for kill in kills if (found := _restart_s(events, kill.t)) is not None]
    if len(kills) < _FEWEST_KILLS or not restarts:
        raise ShardyardError(
            f"{len(kills)} kills are too few for a share of the time: it is measured from the "
            f"first to the last of at least {_FEWEST_KILLS}. Use a longer --for or a shorter "
            f"--mtbf than {format_seconds(mtbf_s)}."
        )
    steps = counted(lines, events).steps
    inside = range(kills[0].generation + 1, kills[-1].generation + 1)
    steps_s = [line["step_time_s"] for line in steps if line["generation"] in inside]
    step_s = median(steps_s) if steps_s else 0.0
    blocking_s = _median(events, "checkpoint_started", "blocked_s")
    fed = {
        "restart_s": max(0.0, median(restarts) - step_s),
        "blocking_s": blocking_s,
        "lag_s": max(0.0, _median(events, "checkpoint_durable", "seconds") - blocking_s),
    }
    times = [kill.t for kill in kills]
    lives_s = [after - before for before, after in itertools.pairwise(times)]
    lived = simulate_failures(lives_s, interval_s=every * step_s, **fed)
    return KillLoop(
        seed=seed, mtbf_s=mtbf_s, kills=tuple(kills), wall_s=sum(lives_s),
        productive_s=sum(steps_s), step_s=step_s, steps_between_saves=every,
        measured=sum(steps_s) / sum(lives_s), simulated=lived.productive_s / lived.wall_s, **fed,
    )  # fmt: skip


def _restart_s(events: Sequence[dict[str, Any]], kill_t: float) -> float | None:
    """From a kill to the end of the first step after it."""
    after = (e["t"] for e in events if e["kind"] == "first_step" and e["t"] > kill_t)
    return next((t - kill_t for t in after), None)


def _median(events: Sequence[dict[str, Any]], kind: str, key: str) -> float:
    values = [float(event.get(key) or 0.0) for event in events if event["kind"] == kind]
    return median(values) if values else 0.0


if __name__ == "__main__":
    sys.exit(main())
