"""sessions/<session>.json: node 0's messages to the other nodes of a job about their attempt.

Only node 0 prepares, which may take long; the others wait for its message. ``{"prepares":
true, "beat": k}`` announces it. ``{"attempt": n, "beat": k, "begins": false}`` makes them
get ready (``node/preflight.py``), and ``"begins": true`` makes them train. The beat changes
as long as node 0 lives. A restarted node thereby distinguishes a message of a live node 0
from a stale one, and no node waits for one that was lost. ``{"ended": words, "exit_code":
n}`` reports that there is no attempt to join.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from shardyard.errors import LostNodeError, RequestError, ShardyardError
from shardyard.io.files import make_folder, read_json_object, write_json
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import is_locked
from shardyard.units import format_seconds

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_BEAT_S = 2.0
_POLL_S = 0.5
_LOST_AFTER_S = 60.0
"""Network file systems may show a new word as late as this."""


@dataclass(frozen=True)
class SessionEnd:
    """Node 0's last word."""

    words: str
    exit_code: int


class Session:
    """One start of a job, seen from one of its nodes."""

    def __init__(self, run_dir: RunDir, name: str) -> None:
        """Raise RequestError if the name is no file name."""
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"the session {name!r} cannot be a file name. It is written into the run's folder. "
                "Use letters, digits, dots, hyphens and underscores, at most 128."
            )
        self._run_dir = run_dir.path
        self._existed = self._run_dir.is_dir()
        self._path = run_dir.session(name)
        self._lease = run_dir.lease

    # -- node 0 -----------------------------------------------------------------------------

    def withdraw(self) -> None:
        """Take back what an earlier start of the same session said."""
        with suppress(FileNotFoundError):
            self._path.unlink()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Tell the others while the block runs that there will be an attempt to join, or an end."""
        is_over = threading.Event()
        with suppress(OSError):  # told by the preparation, which writes into the run's folder too
            make_folder(self._path.parent)

        def keep_beating() -> None:
            for beat in count(1):
                replace_quickly(self._path, {"prepares": True, "beat": beat})
                if is_over.wait(_BEAT_S):
                    return

        thread = threading.Thread(target=keep_beating, name="session", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    @contextmanager
    def announced(self, attempt: int, *, has_started: bool = False) -> Iterator[Callable[[], None]]:
        """Tell the others to join an attempt, again and again until it is over.

        Args:
            has_started: Whether the others train already.

        Yields:
            To be called once all are ready: the others then begin to train.
        """
        is_over, begins = threading.Event(), threading.Event()
        if has_started:
            begins.set()
        write_json(self._path, {"attempt": attempt, "beat": 0, "begins": has_started})
        self._existed = True

        def keep_beating() -> None:
            beat = 0
            while not is_over.is_set():
                wakes = is_over if begins.is_set() else begins
                wakes.wait(_BEAT_S)
                if not is_over.is_set():
                    beat += 1
                    word = {"attempt": attempt, "beat": beat, "begins": begins.is_set()}
                    replace_quickly(self._path, word)

        thread = threading.Thread(target=keep_beating, name="session", daemon=True)
        thread.start()
        try:
            yield begins.set
        finally:
            is_over.set()
            begins.set()  # wakes it
            thread.join()

    def end(self, words: str, exit_code: int, *, is_over: bool = False) -> None:
        """Report to late nodes that there is no attempt to join.

        Args:
            is_over: Whether there will be none: a node 0 that restarts finds the run finished too.
        """
        if self._existed and not self._run_dir.is_dir():
            return  # it vanished: a new one would pass for it
        with suppress(ShardyardError):
            over = {"is_over": True} if is_over else {}
            write_json(self._path, {"ended": words, "exit_code": exit_code, **over})

    def started_attempt(self) -> int | None:
        """The attempt that trains in this session, or did when its node 0 was lost."""
        word = self._read() or {}
        return int(word["attempt"]) if word.get("begins") is True else None

    # -- the other nodes --------------------------------------------------------------------

    def wait(
        self,
        *,
        log: Callable[[str], None],
        log_every_s: float = 30.0,
        give_up_after_s: float = 3600.0,
        believe_end_after_s: float = 300.0,
    ) -> int | SessionEnd:
        """Wait for node 0: return the attempt to join, or the report that there is none.

        Args:
            log: Called now and then to log that this still waits.
            give_up_after_s: Time limit for the first message of node 0.
            believe_end_after_s: Until then, an initial end may be left over from a node 0 that
                restarts, as it may be after its last heartbeat.

        Raises:
            LostNodeError: Node 0 sent no message for too long.
        """
        if (attempt := self.started_attempt()) is not None and is_locked(self._lease):
            return attempt  # whoever said so lives: no need to wait for its next beat
        first, started_s, told_s = self._read(), time.monotonic(), time.monotonic()
        newest, heard_s = first, started_s
        while True:
            content = self._read()
            first = None if content is None else first  # what was left over is gone
            now_s = time.monotonic()
            if content != newest:
                newest, heard_s = content, now_s
            is_new = content != first or now_s - started_s > believe_end_after_s
            if content is not None and "ended" in content and (is_new or content.get("is_over")):
                return SessionEnd(str(content["ended"]), int(content["exit_code"]))
            if content is not None and "attempt" in content and content != first:
                return int(content["attempt"])
            prepares = content is not None and "prepares" in content
            if prepares and now_s - heard_s > believe_end_after_s:
                raise LostNodeError(
                    f"node 0 gave no sign of life for {format_seconds(believe_end_after_s)} in "
                    f"{self._path}, while it prepared the run. Look at the output of node 0, and "
                    "start the job again."
                )
            if not prepares and now_s - started_s > give_up_after_s:
                raise LostNodeError(
                    f"node 0 wrote no {self._path} for {format_seconds(give_up_after_s)}. It "
                    "prepares the data and says when to start. Look at the output of node 0; if it "
                    "did write that file, this node does not see the same run folder: put it on "
                    "storage that all nodes share (launch.run_dir)."
                )
            if now_s - told_s > log_every_s:
                told_s = now_s
                log(f"waiting for node 0 ({now_s - started_s:.0f} s so far)")
            time.sleep(_POLL_S)

    def wait_to_begin(
        self, attempt: int, *, lost_after_s: float = _LOST_AFTER_S
    ) -> SessionEnd | None:
        """Wait until node 0 has heard of all nodes; return None to train, or the session's end.

        Raises:
            LostNodeError: Node 0 sends no heartbeat, or is in another attempt.
        """
        newest, changed_s = self._read(), time.monotonic()
        while True:
            content = self._read()
            if content is not None and "ended" in content:
                return SessionEnd(str(content["ended"]), int(content["exit_code"]))
            if content is not None and content.get("attempt") not in (None, attempt):
                raise LostNodeError(
                    f"node 0 was started again and is in attempt {content['attempt']}, while this "
                    f"node got ready for attempt {attempt}. Start this node again too."
                )
            if content is not None and content.get("begins") is True:
                return None
            if content != newest:
                newest, changed_s = content, time.monotonic()
            if time.monotonic() - changed_s > lost_after_s:
                raise LostNodeError(
                    f"node 0 gave no sign of life for {format_seconds(lost_after_s)} in "
                    f"{self._path}, while this node was ready to train. Look at the output of node "
                    "0, and start the job again."
                )
            time.sleep(_POLL_S / 2)

    def _read(self) -> dict[str, Any] | None:
        try:
            return read_json_object(self._path)
        except (OSError, ValueError):
            return None


def replace_quickly(path: Path, content: dict[str, Any]) -> None:
    """Replace a file like `write_json`, but without a flush: a crash makes heartbeats useless."""
    scratch = path.with_name(f".{path.name}.beat")
    with suppress(OSError):  # a full disk is told by those who write the run's own files
        scratch.write_text(json.dumps(content), encoding="utf-8")
        scratch.replace(path)
