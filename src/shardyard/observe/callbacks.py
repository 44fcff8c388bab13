"""Callbacks of the user's own (``observe.callbacks``): calls after steps, validations, checkpoints.

They run in a thread of rank 0, so a slow one does not hold a step, and an error in one does not end
the run. What they get is a copy.
"""

import copy
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardyard.config.rules.own_code import CALLBACK
from shardyard.own_code import OwnFunction, load_own
from shardyard.rundir.jsonl import EventWriter

_MOST_WAITING = 10_000
"""Calls that wait, some 10 MB; later ones are dropped while a callback is that far behind."""
_CLOSE_S = 60.0
"""Most seconds that the end of a run waits for calls."""


class Callbacks:
    """Calls functions for each line of metrics and each durable checkpoint, in order."""

    def __init__(self, functions: Sequence[OwnFunction], events: EventWriter | None) -> None:
        self._functions = functions
        self._events = events
        self._calls: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(_MOST_WAITING)
        self._dropped = 0
        self._failed: dict[str, int] = {}
        """Errors of each function, by its import path; the first of each was reported."""
        self._thread = threading.Thread(target=self._run, name="callbacks", daemon=True)
        self._thread.start()

    @staticmethod
    def load(import_paths: Sequence[str], events: EventWriter | None) -> "Callbacks | None":
        """Import the functions; None: there are none.

        Raises:
            RequestError: One cannot be imported.
        """
        found = [load_own("observe.callbacks", path, CALLBACK) for path in import_paths]
        return Callbacks(found, events) if found else None

    def write(self, line: dict[str, Any]) -> None:
        """Call with a line of metrics.jsonl."""
        self._put("evaluation" if "eval" in line else "step", copy.deepcopy(line))

    def saved(self, step: int, folder: Path) -> None:
        """Call with a checkpoint that is durable."""
        self._put("checkpoint", {"step": step, "path": str(folder)})

    def close(self) -> None:
        """Wait for the calls that are due, but not for ever."""
        end_s = time.monotonic() + _CLOSE_S
        with suppress(queue.Full):  # a call that never returns must not hold the end of the run
            self._calls.put(None, timeout=_CLOSE_S)
        self._thread.join(max(0.0, end_s - time.monotonic()))
        waiting = sum(call is not None for call in [*self._calls.queue])
        if self._dropped or waiting:
            self._fail(
                f"calls dropped: {self._dropped + waiting:,}, because they took longer than the "
                "steps. Do less in them, or hand the work to a process of yours."
            )
        for path, errors in self._failed.items():
            if errors > 1:
                self._fail(f"{path} failed {errors:,} times in all.")

    def _put(self, kind: str, values: dict[str, Any]) -> None:
        try:
            self._calls.put_nowait((kind, values))
        except queue.Full:
            self._dropped += 1

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            kind, values = call
            for function in self._functions:
                self._call(function, kind, copy.deepcopy(values))

    def _call(self, function: OwnFunction, kind: str, values: dict[str, Any]) -> None:
        try:
            function(kind, values)
        except Exception as error:  # noqa: BLE001 - of the user's code; the run continues
            path = function.import_path
            self._failed[path] = self._failed.get(path, 0) + 1
            if self._failed[path] == 1:
                self._fail(f"{error} The run continues, and so do the calls.")

    def _fail(self, reason: str) -> None:
        if self._events is not None:
            self._events.write("callback_failed", reason=reason)
