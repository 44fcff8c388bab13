"""Small folders of studies: a run for each size, and the table over them."""

import random
from collections.abc import Mapping
from pathlib import Path

from shardyard.report.run_data import read_run
from shardyard.report.study.measured import measured_row
from shardyard.report.study.page import write_study
from shardyard.report.study.rows import ScalingSeries, SeriesRow, SizeRate
from tests.report.compare.some_runs import write_run
from tests.report.synthetic import BEGAN_T

STEPS = 400


def write_measured(
    folder: Path, name: str, rates: Mapping[int, float], *, seed: int = 0, began_t: float = BEGAN_T
) -> Path:
    """A study of runs whose steps have 1 % of noise.

    Args:
        rates: Accelerators -> tokens a second.
        began_t: Of its first run; each size begins an hour after the one before.
    """
    rng = random.Random(f"{name}-{seed}")
    rows = []
    for number, (size, rate) in enumerate(rates.items()):
        run = write_run(
            folder,
            f"{name}-n{size}",
            steps=STEPS,
            began_t=began_t + 3600 * number,
            rate=lambda _, rate=rate: rate * rng.lognormvariate(0, 0.01),  # type: ignore[misc]
            optim={"lr": 1e-3 if name.startswith("old") else 2e-3},
        )
        record = read_run(run)
        for line in record.steps:
            line["world_size"] = size
        rows.append(
            measured_row(record, SeriesRow(nodes=size, accelerators=size, origin="predicted"))
        )
    write_study(folder / name, name, [ScalingSeries(name=name, rows=tuple(rows))], [])
    return folder / name


def write_published(folder: Path, name: str, rates: Mapping[int, float]) -> Path:
    """A study of one number a size, without runs."""
    rows = tuple(
        SeriesRow(
            nodes=size,
            accelerators=size,
            origin="published",
            rate=SizeRate(tokens_per_s=rate),
        )
        for size, rate in rates.items()
    )
    write_study(folder / name, name, [ScalingSeries(name=name, rows=rows)], [])
    return folder / name
