"""Folders of runs as runs leave them, quickly made in any number."""

import json
from pathlib import Path
from typing import Any

from shardyard.rundir.jsonl import METRIC_KEYS
from shardyard.rundir.layout import RunDir

BEGAN_T = 1_795_000_000.0


def line(step: int, **more: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "step": step, "loss": 3.0 + 5.0 / step, "tokens": 4096 * step, "samples": 16 * step,
        "tokens_per_s": 6600.0, "step_time_s": 0.62, "attempt": 0, "generation": 0,
    }  # fmt: skip
    return {**dict.fromkeys(METRIC_KEYS), **usual, **more}


def make_run(
    folder: Path, name: str, *, steps: int, end: str | None = "finished", every: int = 0
) -> RunDir:
    """One that has ended so, or was lost.

    Args:
        every: Steps between evaluations; 0: none.
    """
    run = RunDir(folder / name)
    run.path.mkdir(parents=True)
    run.recipe.write_text("model: {preset: llama-tiny}\n")
    place = {"attempt": 0, "generation": 0}
    events: list[dict[str, Any]] = [
        {"t": BEGAN_T, "kind": "run_started", **place},
        {"t": BEGAN_T + 1, "kind": "attempt_started", **place, "workers": [], "world_size": 2},
    ]
    if end == "finished":
        events.append({"t": BEGAN_T + 9, "kind": "run_finished", **place, "step": steps})
    if end is not None:
        code = 0 if end == "finished" else 1
        events.append({"t": BEGAN_T + 9, "kind": "attempt_ended", **place, "outcome": end,
                       "exit_code": code, "reason": "rank 1 <b>was</b> lost"})  # fmt: skip
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    rows = []
    for step in range(1, steps + 1):
        rows.append(json.dumps(line(step)))
        if every and step % every == 0:
            rows.append(json.dumps({"step": step, "eval": {"loss": 4.0 + 5.0 / step}}))
    run.metrics.write_text("".join(f"{row}\n" for row in rows))
    return run
