"""What saves cost the steps beside them, from a run's own lines: held up, and slower meanwhile.

A save holds training up while the state is copied off the device; how long that must take is
measured in the same process. The first save also takes the memory that it copies to.
"""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from shardyard.parallel.device import synchronize

BLOCKED = 1.2
"""Bar: seconds held up, of those of one copy off the device; the first save left out."""
SLOWER = 1.05
"""Bar: a step while a save is written, of one beside none."""
_CHUNK = 2**28


def copy_rate(device: torch.device) -> float:
    """Bytes per second from the device into pinned memory that was touched before."""
    copied = _CHUNK if device.type == "cpu" else 16 * _CHUNK
    source = torch.ones(_CHUNK, dtype=torch.uint8, device=device)
    target = torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=device.type != "cpu")
    target.copy_(source)
    synchronize(device)
    began = time.monotonic()
    for _ in range(copied // _CHUNK):
        target.copy_(source, non_blocking=True)
    synchronize(device)
    return copied / (time.monotonic() - began)


def saving(
    steps: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]], bytes_per_s: float
) -> dict[str, Any]:
    """What each save took, and the steps while one was written beside the others.

    Args:
        steps: Lines of metrics.jsonl, without those of the warm-up.
        events: Lines of events.jsonl.
        bytes_per_s: ``copy_rate``.
    """
    blocked = {e["step"]: e["blocked_s"] for e in events if e["kind"] == "checkpoint_started"}
    durable = [event for event in events if event["kind"] == "checkpoint_durable"]
    saves = [
        {
            "step": event["step"],
            "bytes": event["bytes"],
            "blocked_s": blocked[event["step"]],
            "times_a_copy": blocked[event["step"]] / (event["bytes"] / bytes_per_s),
            "written_s": event["seconds"] - blocked[event["step"]],
        }
        for event in durable
    ]
    during = {
        step for save in saves for step in _whole_steps(steps, save["step"], save["written_s"])
    }
    beside = [line["step_time_s"] for line in steps if line["step"] in during]
    alone = [line["step_time_s"] for line in steps if line["step"] not in during]
    later = [save["times_a_copy"] for save in saves[1:]]
    found: dict[str, Any] = {
        "copy_bytes_per_s": bytes_per_s,
        "saves": saves,
        "times_a_copy": median(later) if later else None,
        "steps_beside": len(beside),
        "slower": median(beside) / median(alone) if beside and alone else None,
    }
    found["is_met"] = {
        "blocked": found["times_a_copy"] and found["times_a_copy"] <= BLOCKED,
        "slower": found["slower"] and found["slower"] <= SLOWER,
    }
    return found


def _whole_steps(steps: Sequence[dict[str, Any]], saved: int, written_s: float) -> list[int]:
    """Steps after a save that ended before it was written."""
    found, at_s = [], 0.0
    for line in steps:
        if line["step"] > saved:
            at_s += line["step_time_s"]
            if at_s > written_s:
                break
            found.append(line["step"])
    return found
