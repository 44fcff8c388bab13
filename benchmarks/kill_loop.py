"""Ranks killed 20 s apart on average: the share of the time that trains, simulated, and torchrun's.

    OMP_NUM_THREADS=1 python -m benchmarks.kill_loop --with-torchrun
        [--seconds 600] [--seeds 1 2 3] [--mtbf 20] [--every 50] [-- SETTING ...]

Each seed is one schedule of kills (exponential). Ours is `benchmarks.killed_run`: a run of
llama-tiny on two processes, without an end, and beside its share the planner's simulation of the
very same lives, fed with what this run took for a restart, a step and a save. Then plain torchrun
trains the same model under the same schedule, with the same interval of checkpoints
(`torchrun_restart.py`); where it has not finished a step for 120 s it hangs, and is ended and
started again. Shares are of the time from the first kill to the last, in steps whose result stands.

The bars: measured within 0.03 of simulated, and at least 0.2 above torchrun. Writes one JSON file;
shares mean something on an idle machine alone.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import torchrun_restart
from benchmarks.killed_run import ScheduledKill, schedule
from benchmarks.real_run import end_by_signals, program, running, write_corpus
from benchmarks.record import write_result
from benchmarks.recovery import asked_of_torchrun
from benchmarks.restart_phases import RECIPE
from benchmarks.torchrun_restart import HUNG_S, Torchrun

APART, ABOVE = 0.03, 0.2
"""Bars: of measured and simulated, and of measured above torchrun."""
_DRILLS_OWN = ("run.steps=", "checkpoint.every=", "elastic.max_restarts=", "data.source=")
_SAVES = 6
"""A drill saves so many times in what `--steps` says."""
_START_S = 600.0
_POLL_S = 0.05


def main() -> int:
    """Measure, print, write the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of each loop")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--mtbf", type=float, default=20.0, help="mean seconds between kills")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--with-torchrun", action="store_true", help="beside each of ours")
    parser.add_argument("--out", type=Path, help="file of the result")
    parser.add_argument("settings", nargs="*", help="of ours")
    args = parser.parse_args()
    end_by_signals()
    loops = [
        measure(
            seed, mtbf_s=args.mtbf, for_s=args.seconds, every=args.every, settings=args.settings,
            with_torchrun=args.with_torchrun,
        )
        for seed in args.seeds
    ]  # fmt: skip
    rows = [row_of(loop) for loop in loops]
    is_met = judge(rows)
    asked = {"mtbf_s": args.mtbf, "seconds": args.seconds, "steps_between_saves": args.every}
    content = {**asked, "settings": args.settings, "is_met": is_met, "rows": rows, "loops": loops}
    write_result("kill-loop", content, args.out)
    for row in rows:
        print(*(f"{key} {value}" for key, value in row.items()), sep="  ")
    print(f"bars: {is_met}")
    return 0 if all(is_met.values()) else 1


def measure(
    seed: int,
    *,
    mtbf_s: float,
    for_s: float,
    every: int,
    settings: Sequence[str] = (),
    with_torchrun: bool = False,
) -> dict[str, Any]:
    """One schedule: what came of it for us, and for torchrun if that is asked for."""
    with tempfile.TemporaryDirectory(prefix="kill-loop-") as scratch:
        folder = Path(scratch)
        write_corpus(folder / "text")
        ours = _ours(folder, seed, mtbf_s=mtbf_s, for_s=for_s, every=every, settings=settings)
        theirs = None
        if with_torchrun:
            torchrun_restart.prepare(folder, **{**asked_of_torchrun(), "every": every})
            due = schedule(mtbf_s=mtbf_s, for_s=for_s, seed=seed)
            theirs = torchrun_under(folder, due, for_s)
        return {"seed": seed, "ours": ours, "torchrun": theirs}


def _ours(
    folder: Path, seed: int, *, mtbf_s: float, for_s: float, every: int, settings: Sequence[str]
) -> dict[str, Any]:
    recipe = [word for word in RECIPE if not word.startswith(_DRILLS_OWN)]
    place = folder / "drill"
    command = program(
        "benchmarks.killed_run", *recipe, f"data.source={folder}/text", *settings,
        "--steps", str(every * _SAVES), "--mtbf", str(mtbf_s), "--for", str(for_s),
        "--seed", str(seed), "--dir", str(place),
    )  # fmt: skip
    with running(folder, command) as process:
        code = process.wait()
    if code != 0:
        words = (folder / "log.txt").read_text(errors="replace")[-2000:]
        raise SystemExit(f"the drill ended with {code}: {words}")
    found: dict[str, Any] = json.loads((place / "drill.json").read_text())
    return found


def torchrun_under(folder: Path, due: Sequence[ScheduledKill], for_s: float) -> dict[str, Any]:
    """Kill torchrun's workers by a schedule that begins with its first step."""
    loop = TorchrunLoop(due)
    while not loop.is_over(for_s):
        with torchrun_restart.started(folder) as torchrun:
            loop.follow(torchrun, for_s)
        if not torchrun.steps():
            words = (torchrun.folder / "log.txt").read_text(errors="replace")[-2000:]
            raise SystemExit(f"torchrun never finished a step: {words}")
    lives = lives_of(torchrun.steps(), loop.kills_t)
    return {
        "share": share_of(lives), "kills": len(loop.kills_t), "hung": loop.hung,
        "ended": loop.ended, "starts": loop.starts, "kills_t": loop.kills_t, "lives": lives,
    }  # fmt: skip


class TorchrunLoop:
    """The schedule under way: one clock over all starts of torchrun."""

    def __init__(self, due: Sequence[ScheduledKill]) -> None:
        self._due = list(due)
        self._began_s: float | None = None
        self.kills_t: list[float] = []
        self.starts = self.hung = self.ended = 0

    def is_over(self, for_s: float) -> bool:
        return self._began_s is not None and time.monotonic() - self._began_s >= for_s

    def follow(self, torchrun: Torchrun, for_s: float) -> None:
        """Kill as is due until the time is over, or it hangs or has ended by itself."""
        self.starts += 1
        seen, since_s = self._progress(torchrun), time.monotonic()
        patience_s = HUNG_S if self._began_s is not None else _START_S
        while not self.is_over(for_s):
            if (now := self._progress(torchrun)) != seen:
                seen, since_s, patience_s = now, time.monotonic(), HUNG_S
                self._began_s = self._began_s or since_s
            if torchrun.process.poll() is not None:
                self.ended += 1
                return
            if time.monotonic() - since_s > patience_s:
                self.hung += 1
                return
            self._kill_what_is_due(torchrun)
            time.sleep(_POLL_S)

    def _kill_what_is_due(self, torchrun: Torchrun) -> None:
        if self._began_s is None or not self._due:
            return
        if time.monotonic() - self._began_s < self._due[0].after_s:
            return
        workers = torchrun.workers()
        now_t, rank = time.time(), self._due.pop(0).among(list(workers))
        if torchrun.kill(workers[rank]):  # between two groups there is nobody to kill
            self.kills_t.append(now_t)

    def _progress(self, torchrun: Torchrun) -> int:
        steps = torchrun.folder / "steps.jsonl"
        return steps.stat().st_size if steps.exists() else 0


def lives_of(steps: Sequence[dict[str, Any]], kills_t: Sequence[float]) -> list[dict[str, float]]:
    """From each kill to the next: the seconds, and those that went into steps whose result stands.

    Args:
        steps: In order; the last line of a step stands.
    """
    standing = {line["step"]: line for line in steps}.values()
    lives = []
    for begun_t, ended_t in pairwise(kills_t):
        trained = [line["seconds"] for line in standing if begun_t < line["t"] <= ended_t]
        lives.append(
            {"wall_s": ended_t - begun_t, "trained_s": sum(trained), "steps": len(trained)}
        )
    return lives


def share_of(lives: Sequence[dict[str, float]]) -> float | None:
    """Of the time from the first kill to the last, what trained; None: fewer than two kills."""
    if not lives:
        return None
    return sum(life["trained_s"] for life in lives) / sum(life["wall_s"] for life in lives)


def row_of(loop: dict[str, Any]) -> dict[str, Any]:
    """The shares of one seed, beside each other."""
    ours, theirs = loop["ours"], loop["torchrun"]
    row = {
        "seed": loop["seed"],
        "kills": len(ours["kills"]),
        "measured": round(ours["measured"], 4),
        "simulated": round(ours["simulated"], 4),
        "apart": round(abs(ours["measured"] - ours["simulated"]), 4),
        "restart_s": round(ours["restart_s"], 3),
    }
    if theirs is not None and theirs["share"] is not None:
        row |= {"torchrun": round(theirs["share"], 4)}
        row |= {"above": round(ours["measured"] - theirs["share"], 4)}
        row |= {"torchrun_kills": theirs["kills"], "torchrun_hung": theirs["hung"]}
        row |= {"torchrun_starts": theirs["starts"]}
    return row


def judge(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Whether every seed meets the bars; that of torchrun only where it ran."""
    is_met = {"simulated": all(row["apart"] <= APART for row in rows)}
    if all("above" in row for row in rows):
        is_met["torchrun"] = all(row["above"] >= ABOVE for row in rows)
    return is_met


if __name__ == "__main__":
    sys.exit(main())
