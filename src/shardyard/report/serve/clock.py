"""Hours since the start of a run, of each of its steps."""

from bisect import bisect_right

from shardyard.errors import StorageError
from shardyard.report.serve.envelope import Position
from shardyard.rundir.counted_lines import Start, start_of
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir


class StepClock:
    """Time of each step of a run.

    Lines of steps carry no time. Events carry both, and steps between two events are taken
    to be equally long.
    """

    _KINDS = (
        "checkpoint_loaded", "snapshot_restored", "model_ready", "first_step", "evaluated",
        "generated", "checkpoint_started",
    )  # fmt: skip

    def __init__(self, run: RunDir) -> None:
        self.start_t: float | None = None
        self._marks: dict[Start, tuple[list[int], list[float]]] = {}
        loaded: dict[Start, int] = {}
        try:
            for event in read_lines(run.events):
                t, start, kind = event.get("t"), start_of(event), event.get("kind")
                if t is None:
                    continue
                self.start_t = t if self.start_t is None else self.start_t
                step = event.get("step")
                if kind == "model_ready":
                    step = loaded.get(start, 0)
                elif kind in ("checkpoint_loaded", "snapshot_restored") and type(step) is int:
                    loaded[start] = step
                if kind in self._KINDS and type(step) is int:
                    self._add(start, step, t)
        except (OSError, StorageError):
            return

    def _add(self, start: Start, step: int, t: float) -> None:
        steps, times = self._marks.setdefault(start, ([], []))
        if steps and steps[-1] >= step:  # of one step the latest, so that a pause is before a step
            if steps[-1] == step:
                times[-1] = t
            return
        steps.append(step)
        times.append(t)

    def hours(self, position: Position) -> float | None:
        """Return the hours from the run's first event to the end of a step."""
        steps, times = self._marks.get(position.start, ([], []))
        if not steps or self.start_t is None:
            return None
        step = position.step
        index = bisect_right(steps, step)
        if index == 0 or index == len(steps):  # before the first mark, or after the last
            index = min(max(index - 1, 0), len(steps) - 1)
            t = times[index] + (step - steps[index]) * (position.step_time_s or 0.0)
        else:
            low, high = steps[index - 1], steps[index]
            t = times[index - 1] + (times[index] - times[index - 1]) * (step - low) / (high - low)
        return round((float(t) - self.start_t) / 3600, 6)
