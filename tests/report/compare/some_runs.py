"""Small run folders to compare: what differs between them is said by each test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardyard.report.run_data import RunRecord, read_run
from shardyard.rundir.layout import RunDir
from tests.report.synthetic import BEGAN_T, RunWriter, resolved_run

USD_PER_HOUR = 36.0


def write_run(
    folder: Path,
    run_id: str,
    *,
    steps: int = 120,
    began_t: float = BEGAN_T,
    usd_per_hour: float | None = USD_PER_HOUR,
    rate: Callable[[int], float] | None = None,
    **sections: dict[str, Any],
) -> RunDir:
    """A run of one attempt with an evaluation every 20 steps.

    Args:
        rate: Tokens a second of a step by its number.
        sections: Settings that differ from the usual ones.
    """
    writer = RunWriter(RunDir(folder / run_id), resolved_run(steps=steps, **sections))
    writer.clock_t = began_t
    writer.begin()
    writer.start()
    if usd_per_hour is not None:
        seconds = writer.clock_t - began_t
        writer.event("spent", usd=seconds / 3600 * usd_per_hour, usd_per_hour=usd_per_hour)
    writer.steps(1, steps)
    writer.save(steps)
    writer.finish(steps)
    writer.end(0, "finished")
    for line in writer.lines:
        if rate is not None and "eval" not in line:
            line["tokens_per_s"] = rate(line["step"])
    return writer.write()


def record_of(folder: Path, run_id: str, **given: Any) -> RunRecord:
    """The same, read back."""
    return read_run(write_run(folder, run_id, **given))
