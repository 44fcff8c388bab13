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
        {"t": BEGAN_T + 2, "kind": "first_step", **place, "step": 1, "seconds": 0.5},
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


def add_settings(run: RunDir, settings: dict[str, Any], attempt: int = 0) -> None:
    """The resolved settings of an attempt."""
    run.attempt(attempt).mkdir(parents=True)
    entries = {name: {"value": value, "reason": "given"} for name, value in settings.items()}
    run.resolved(attempt).write_text(json.dumps({"settings": entries}))


def add_log(run: RunDir, *, rank: int, text: str, attempt: int = 0) -> None:
    """The log of a rank."""
    run.log(attempt, rank).parent.mkdir(parents=True, exist_ok=True)
    run.log(attempt, rank).write_text(text)


def add_telemetry(run: RunDir, *, steps: int, node: int = 0) -> None:
    """Telemetry of two devices, a line every 10 steps: 80 and 100 % in use."""
    run.telemetry.mkdir(exist_ok=True)
    head = {"t": BEGAN_T, "node": "n", "attempt": 0, "cores": 2, "names": ["a", "b"],
            "memory_bytes": [1, 1]}  # fmt: skip
    lines: list[dict[str, Any]] = [head]
    for step in range(10, steps + 1, 10):
        lines.append({
            "t": BEGAN_T + 2 + step, "devices": {"utilisation": [0.8, 1.0]},
            "ranks": {"step": [step, step]},
        })  # fmt: skip
    run.telemetry_of(node).write_text("".join(json.dumps(each) + "\n" for each in lines))
