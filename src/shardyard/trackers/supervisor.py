"""Processes that send a run, kept by the agent's supervisor: started, read, ended.

Training does not depend on them. At the end each has a while to send what is left; then it
is killed. Unsent lines stay in the run's folder, from where they can be sent later.
"""

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

from shardyard.config.rules.observe import services_of
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import StorageError
from shardyard.io.files import FILE_MODE, make_folder, parse_json
from shardyard.log import info, warn
from shardyard.own_processes import python_program
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir
from shardyard.trackers.service import PREFIXES, WORDS, without_user

END_S = 30.0
"""Seconds that the end of a run waits for services with unsent lines."""
_HASTE_S = 5.0
"""Wait for a run without an end of its own: it was stopped before it began, or worse."""
_GRACE_S = 2.0
"""For the process itself to end in."""
_AGAIN_S, _AGAIN_AT_MOST_S = 5.0, 300.0
"""After which a process that has died is started again; each time twice as long."""


@dataclass(frozen=True, kw_only=True)
class UploadResult:
    """Result of sending a run to one service."""

    service: str
    unsent: int | None
    """Lines of metrics.jsonl that it has not; None: not known, it may have some of them."""
    problem: str
    """Why; empty where it has all."""

    @property
    def has_all(self) -> bool:
        return self.unsent == 0 and not self.problem

    def words(self) -> str:
        """Describe the missing lines, and the reason."""
        if self.unsent is None:
            return f"{WORDS[self.service]} may not have all of the run: {self.problem}"
        lines = f"{self.unsent:,} line{'' if self.unsent == 1 else 's'} of metrics.jsonl"
        return f"{WORDS[self.service]} lacks {lines} and the end of the run: {self.problem}"


class Exporters:
    """All services of one attempt."""

    def __init__(self, processes: "list[_Process]") -> None:
        self._processes = processes
        self._until_s = 0.0
        self._is_over = False

    def end(self, within_s: float | None = None) -> None:
        """Have them send what is left, while this process does other things.

        Args:
            within_s: So long at most; None: as long as any end waits.
        """
        if self._is_over:
            return
        self._is_over = True
        wait_s = max(0.0, END_S if within_s is None else within_s)
        self._until_s = time.monotonic() + wait_s
        for process in self._processes:
            process.end(self._until_s)

    def wait(self) -> list[UploadResult]:
        """Return the results, once the processes have ended or their time is over."""
        self.end()
        return [process.wait() for process in self._processes]


@contextmanager
def exporting(
    run: RunDir, attempt: int, recipe: Recipe, environ: Mapping[str, str]
) -> Iterator[Exporters]:
    """Have an attempt sent while the block runs; its end waits for what is not sent, for a while.

    Args:
        environ: Holds the keys of services by the names of their secrets.
    """
    try:
        exporters = Exporters(_started(run, attempt, recipe, environ))
    except (StorageError, OSError) as error:  # never why a run fails
        warn(f"{', '.join(services_of(recipe))}: no results are sent: {error}")
        exporters = Exporters([])
    try:
        yield exporters
    except BaseException:
        exporters.end(_HASTE_S)
        raise
    finally:
        for sent in exporters.wait():
            if not sent.has_all:
                _report_end(run, attempt, sent)


def send_now(
    run: RunDir, attempt: int, recipe: Recipe, environ: Mapping[str, str], *, within_s: float
) -> list[UploadResult]:
    """Send what a run's services have not yet, and wait for it."""
    exporters = Exporters(_started(run, attempt, recipe, environ))
    exporters.end(within_s)
    return exporters.wait()


def environment_for(service: str, recipe: Recipe, environ: Mapping[str, str]) -> dict[str, str]:
    """Return a service's environment, with only the run secrets that carry its prefix."""
    prefix = PREFIXES[service]
    return {
        name: value
        for name, value in environ.items()
        if name not in recipe.secrets or name.startswith(prefix)
    }


def _started(
    run: RunDir, attempt: int, recipe: Recipe, environ: Mapping[str, str]
) -> "list[_Process]":
    return [
        _Process(service, run, attempt, environment_for(service, recipe, environ))
        for service in services_of(recipe)
    ]


def _report_end(run: RunDir, attempt: int, sent: UploadResult) -> None:
    hint = f"`shardyard report {run.handle} --send` sends it later"
    warn(f"observe.{sent.service}: {sent.words()} {hint}")
    _write_event(run, attempt, sent.service, sent.problem, lines=sent.unsent, is_end=True)


def _write_event(
    run: RunDir, attempt: int, service: str, reason: str, *, lines: int | None, is_end: bool
) -> None:
    told = {"service": service, "reason": reason, "lines": lines, "is_end": is_end}
    _write(run, attempt, "not_sent", **told)


def _write(run: RunDir, attempt: int, kind: str, **fields: Any) -> None:
    with suppress(StorageError):  # a full disk is told by the training, which writes there too
        events = EventWriter(run.events, attempt=attempt, generation=0)
        events.write(kind, **fields)
        events.close()


class _Process:
    """Process of one service.

    One that dies is restarted, and continues from the line that the service reports.
    """

    def __init__(self, service: str, run: RunDir, attempt: int, environ: Mapping[str, str]) -> None:
        self._service = service
        self._run = run
        self._attempt = attempt
        # what clients leave there, however they end
        self._scratch = tempfile.TemporaryDirectory(prefix="sy-", ignore_cleanup_errors=True)
        self._environ = {**environ, "TMPDIR": self._scratch.name}
        self._last: dict[str, Any] = {}
        self._address = ""
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._until_s = 0.0
        try:
            self._process = self._start()
        except BaseException:
            self._scratch.cleanup()
            raise
        self._thread = threading.Thread(target=self._keep, name=f"to {service}", daemon=True)
        self._thread.start()

    def end(self, until_s: float) -> None:
        """Have it send what is left, until then on the monotonic clock."""
        with self._lock:
            self._until_s = until_s
            self._is_over.set()
            self._send_end()

    def wait(self) -> UploadResult:
        """Return its last message, once it has ended or its time is over."""
        self._thread.join(max(0.0, self._until_s - time.monotonic()) + _GRACE_S)
        if self._thread.is_alive():
            with self._lock:
                self._process.kill()
            self._thread.join(_GRACE_S)
        self._scratch.cleanup()
        if not self._last:
            words = f"its process ended without a word; {self._log} says why."
            return UploadResult(service=self._service, unsent=None, problem=words)
        return UploadResult(
            service=self._service,
            unsent=self._last["unsent"],
            problem=str(self._last.get("problem", "")),
        )

    @property
    def _log(self) -> str:
        return str(self._run.exporters / f"{self._service}.log")

    def _start(self) -> "subprocess.Popen[bytes]":
        command = python_program("shardyard.trackers", str(self._run.path), self._service)
        with _log_file(self._run, self._service) as log:
            return subprocess.Popen(
                [*command, f"--attempt={self._attempt}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environ,
                start_new_session=True,  # Ctrl-C is for the run, which drains first
            )

    def _send_end(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(OSError, ValueError):  # it has just died, or is told already
            stdin.write(f"{self._until_s}\n".encode())
            stdin.close()

    def _keep(self) -> None:
        """Hear it, and start it again until the end."""
        again_s = _AGAIN_S
        while True:
            self._read_messages()
            code = self._process.wait()
            if self._is_over.is_set():
                return
            words = f"its process ended with exit code {code}; {self._log} says why. It is started"
            self._record_problem(f"{words} again.")
            self._is_over.wait(again_s)
            again_s = min(2 * again_s, _AGAIN_AT_MOST_S)
            try:
                with self._lock:
                    self._process = self._start()
                    if self._is_over.is_set():
                        self._send_end()
            except (StorageError, OSError) as error:  # the end says what is missing
                self._record_problem(str(error))
                return

    def _read_messages(self) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with stdout:
            for line in stdout:
                with suppress(ValueError):
                    self._take(parse_json(line))
        with self._lock, suppress(OSError):
            stdin.close()

    def _take(self, message: dict[str, Any]) -> None:
        if "unsent" in message:
            self._last = message
        elif "address" in message and message["address"] != self._address:
            self._address = message["address"]
            info(f"observe.{self._service}: {self._address}")
            address = without_user(str(self._address))
            _write(self._run, self._attempt, "tracked", service=self._service, address=address)
        elif "problem" in message:
            self._record_problem(str(message["problem"]))

    def _record_problem(self, reason: str) -> None:
        _write_event(self._run, self._attempt, self._service, reason, lines=None, is_end=False)


def _log_file(run: RunDir, service: str) -> IO[bytes]:
    path = run.exporters / f"{service}.log"
    try:
        make_folder(path.parent)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        return os.fdopen(os.open(path, flags, FILE_MODE), "ab")
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}. Check that the run folder is yours and "
            "has room."
        ) from error
