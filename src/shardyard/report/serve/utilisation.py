"""Curve of the mean utilisation of a run's devices, from telemetry."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from shardyard.errors import StorageError
from shardyard.report.serve.envelope import Position, short
from shardyard.rundir.layout import RunDir
from shardyard.rundir.telemetry import TelemetrySample, nodes_with_telemetry, read_downsampled

UTILISATION = "utilisation"
"""Mean utilisation of the devices, from telemetry."""
HOURS = "hours"
"""Hours since the run's first event."""
_MOST_SAMPLES, _MOST_NODES = 320, 16


def device_samples(run: RunDir) -> list[tuple[float, int | None, float]]:
    """Time, step and mean utilisation of the devices, in order of time."""
    files = list(nodes_with_telemetry(run).values())
    files = files[:: -(-len(files) // _MOST_NODES) or 1]  # of many nodes some, evenly picked
    found = []
    for path in files:
        try:
            samples = read_downsampled(path, most=_MOST_SAMPLES // len(files))
        except (OSError, StorageError):
            continue
        found += [point for sample in samples if (point := _device_sample(sample))]
    found.sort(key=lambda point: point[0])
    size = len(files)
    groups = [found[k : k + size] for k in range(0, len(found), max(1, size))]
    return [(g[-1][0], g[-1][1], sum(each[2] for each in g) / len(g)) for g in groups]


def _device_sample(sample: TelemetrySample) -> tuple[float, int | None, float] | None:
    values = [each for each in sample.devices.get(UTILISATION, ()) if each is not None]
    steps = [int(step) for step in sample.ranks.get("step", ()) if step is not None]
    if not values:
        return None
    return sample.t, max(steps, default=None), sum(values) / len(values)


def utilisation_curve(
    samples: Sequence[tuple[float, int | None, float]],
    x: str,
    positions: Sequence[Position],
    start_t: float | None,
) -> dict[str, list[Any]]:
    """Return points of the curve.

    Args:
        samples: Time, step and utilisation.
        x: Axis.
        positions: Steps of the run on all axes.
        start_t: Time of the run's first event, in unix seconds.
    """
    if not samples:
        return {"x": [], "y": []}
    if x == HOURS:
        first_t = samples[0][0] if start_t is None else start_t
        hours = [round((t - first_t) / 3600, 6) for t, _, _ in samples]
        return {"x": hours, "y": [short(value) for _, _, value in samples]}
    points = [(step, value) for _, step, value in samples if step is not None]
    # of lost steps, and of samples within one step, the last counts
    kept = [
        point for point, least in zip(points, _least_after(points), strict=True) if point[0] < least
    ]
    if x == "step":
        return {"x": [step for step, _ in kept], "y": [short(value) for _, value in kept]}
    on_axis = [(position.step, getattr(position, x)) for position in positions]
    steps = [step for step, at in on_axis if at is not None]
    xs = [at for _, at in on_axis if at is not None]
    points_at = [(_between(steps, xs, step), value) for step, value in kept]
    return {
        "x": [at for at, _ in points_at if at is not None],
        "y": [short(value) for at, value in points_at if at is not None],
    }


def _least_after(points: Sequence[tuple[int, float]]) -> list[float]:
    """For each point, the least step of the points after it."""
    found: list[float] = [float("inf")]
    for step, _ in reversed(points[1:]):
        found.append(min(found[-1], step))
    return found[::-1]


def _between(xs: Sequence[float], ys: Sequence[float], x: float) -> float | None:
    """Value at a position between known ones; beyond them, that of the nearest."""
    if not xs:
        return None
    index = bisect_left(xs, x)
    if index == len(xs) or xs[index] == x or index == 0:
        return ys[min(index, len(xs) - 1)]
    low, high = xs[index - 1], xs[index]
    return ys[index - 1] + (ys[index] - ys[index - 1]) * (x - low) / (high - low)
