"""Recomputes the headline numbers of a run without the package: an independent second count.

It reads metrics.jsonl and events.jsonl, and of each attempt's manifest the second it started.
"""

import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

Line = dict[str, Any]


def recompute(run: Path) -> dict[str, Any]:
    """Numbers by the names that the report's JSON has for them."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "eval" not in line]
    kept = _kept(lines, events)
    spans = _spans(run, events)
    running_s = sum(end - start for start, end in spans)
    trained_s = sum(line["step_time_s"] for line in kept)
    usual, ranks = _usual(kept)
    return {
        "steps_done": kept[-1]["step"],
        "trained_s": trained_s,
        "running_s": running_s,
        "between_s": sum(after[0] - before[1] for before, after in pairwise(spans)),
        "wall_s": spans[-1][1] - spans[0][0],
        "effective_share": trained_s / running_s,
        "step_time_s": median(line["step_time_s"] for line in usual),
        "tokens_per_s": median(line["new_tokens"] / line["step_time_s"] for line in usual),
        "main_ranks": ranks,
        "main_steps": sum(line["world_size"] == ranks for line in kept),
        "peak_memory_bytes": max(_peaks(lines, events)),
        "ranks": [
            list(dict.fromkeys(line["world_size"] for line in lines if line["attempt"] == number))
            for number in range(len(spans))
        ],
        "steps": [
            sum(line["attempt"] == number for line in kept) for number in range(len(spans))
        ],
    }  # fmt: skip


def _start(line: Line) -> tuple[int, int]:
    return line["attempt"], line["generation"]


def _kept(lines: list[Line], events: list[Line]) -> list[Line]:
    """Steps that no later start of the processes undid, with the tokens that each read."""
    loaded = ("checkpoint_loaded", "snapshot_restored")
    begun = {_start(e): 0 for e in events if e["kind"] == "model_ready"}
    begun |= {_start(e): e["step"] for e in events if e["kind"] in loaded}
    kept: dict[int, Line] = {}
    for start in sorted(begun):
        kept = {step: line for step, line in kept.items() if step <= begun[start]}
        kept |= {line["step"]: line for line in lines if _start(line) == start}
    ordered = [kept[step] for step in sorted(kept)]
    before = 0
    for line in ordered:
        line["new_tokens"], before = line["tokens"] - before, line["tokens"]
    return ordered


def _spans(run: Path, events: list[Line]) -> list[tuple[float, float]]:
    """Start and end of each attempt, in unix seconds."""
    spans = []
    for number in sorted({event["attempt"] for event in events}):
        own = [event for event in events if event["attempt"] == number]
        manifest = json.loads((run / "attempts" / str(number) / "manifest.json").read_text())
        starts = [event["t"] for event in own] + [manifest["started_at"]]
        starts += [event["t"] - event["seconds"] for event in own if event["kind"] == "rendezvous"]
        ends = [event["t"] for event in own if event["kind"] == "attempt_ended"]
        spans.append((min(starts), ends[-1]))
    return spans


def _usual(kept: list[Line]) -> tuple[list[Line], int]:
    """Steps on the number of ranks with most steps, without the first of each start."""
    counts: dict[int, int] = {}
    for line in kept:
        counts[line["world_size"]] = counts.get(line["world_size"], 0) + 1
    ranks = max(counts, key=counts.__getitem__)
    firsts: dict[tuple[int, int], int] = {}
    for line in kept:
        firsts.setdefault(_start(line), line["step"])
    own = [line for line in kept if line["world_size"] == ranks]
    return [line for line in own if line["step"] not in firsts.values()], ranks


def _peaks(lines: list[Line], events: list[Line]) -> list[int]:
    peaks = [line["peak_memory_bytes"] for line in lines]
    for event in events:
        peaks += [row["peak_bytes"] for row in event.get("memory_by_rank", ())]
        peaks += event.get("peak_bytes_by_rank", ())
    return peaks
