"""How often the run fails: as its plan expects, corrected by what it has met so far."""

import json
from contextlib import suppress

import torch.distributed as dist

from shardyard.rundir.layout import RunDir
from shardyard.rundir.lines import LOSSES, read_lines

UNKNOWN_MTBF_S = 86_400.0
"""Where no plan tells how often such machines fail. Assumed: once a day."""


def mtbf_so_far(run_dir: RunDir, attempt: int, *, group: dist.ProcessGroup) -> float:
    """Seconds between failures, as rank 0 reads them in the run folder. All ranks call it."""
    found = [0.0]
    if dist.get_rank() == 0:
        found = [measured_mtbf_s(run_dir, attempt)]
    dist.broadcast_object_list(found, group=group, group_src=0)
    return found[0]


def measured_mtbf_s(run_dir: RunDir, attempt: int) -> float:
    """What was expected counts as one failure seen after so long; each real one is one more."""
    begun_t: dict[int, float] = {}
    ended_t: dict[int, float] = {}
    lost: set[tuple[int, int]] = set()
    for event in read_lines(run_dir.events):
        number, t = event["attempt"], event["t"]
        begun_t.setdefault(number, t)
        ended_t[number] = t
        if event["kind"] in LOSSES:
            lost.add((number, event["generation"]))
    trained_s = sum(ended_t[number] - begun_t[number] for number in begun_t)
    return (_expected_s(run_dir, attempt) + trained_s) / (1 + len(lost))


def _expected_s(run_dir: RunDir, attempt: int) -> float:
    with suppress(OSError, ValueError, LookupError, TypeError):
        content = json.loads(run_dir.plan(attempt).read_text(encoding="utf-8"))
        plan = content["phases"][0] if content.get("phases") else content
        return float(plan["failures"]["mtbf"]["seconds"])
    return UNKNOWN_MTBF_S
