"""Sandbox of a drill: namespaces, small disks, and a skewed clock.

Its leftovers there are then seen exactly, and it cannot hit anything outside. When its first
process ends, the kernel ends all the others.
"""

import ctypes
import datetime
import mmap
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

_NEWNS, _NEWUSER, _NEWPID, _NEWIPC = 0x00020000, 0x10000000, 0x20000000, 0x08000000  # sched.h
_NEWNET = 0x40000000
SHARED_MEMORY = Path("/dev/shm")
_INSIDE = "SHARDYARD_DRILL_APART"


_REFUSALS = (
    ("/proc/sys/user/max_user_namespaces", "0", "user.max_user_namespaces is 0"),
    ("/proc/sys/kernel/unprivileged_userns_clone", "0",
     "kernel.unprivileged_userns_clone is 0"),
    ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1",
     "kernel.apparmor_restrict_unprivileged_userns is 1"),
)  # fmt: skip
"""Files of the kernel, their content where users may make no namespace, and the words."""


def is_in_namespaces() -> bool:
    """Whether this process is in such namespaces."""
    return os.environ.get(_INSIDE) == "1"


def no_namespaces_reason() -> str:
    """Return why this machine denies such namespaces to this user; empty if it allows them."""
    if sys.platform != "linux":
        return "namespaces exist only on Linux"
    if os.geteuid() == 0 or is_in_namespaces():
        return ""
    return next((why for file, refusal, why in _REFUSALS if _holds(Path(file), refusal)), "")


def _holds(file: Path, text: str) -> bool:
    try:
        return file.read_text().strip() == text
    except OSError:
        return False


def enter_namespaces() -> str:
    """Continue in namespaces of one's own; call before any thread is started.

    Returns in a process that is inside; the calling process waits for it and ends as it ends.

    Returns:
        Why it continues outside; empty: it is inside.
    """
    if why := no_namespaces_reason():
        return why
    try:
        _leave_mounts_and_memory()
        _call("unshare", _NEWPID)  # of the next child
    except (OSError, subprocess.CalledProcessError) as error:
        return f"this machine allows no namespaces ({error})"
    first = os.fork()
    if first:
        _end_as(first)
    _run("mount", "-t", "proc", "proc", "/proc")
    worker = os.fork()
    if worker:
        _end_as(worker, reaps=True)
    os.environ[_INSIDE] = "1"
    return ""


def unshare_network() -> None:
    """Put this process into an empty network of its own.

    Raises:
        OSError: The machine does not allow it.
    """
    _call("unshare", _NEWNET)


def _leave_mounts_and_memory() -> None:
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEWNS | _NEWIPC | (0 if user == 0 else _NEWUSER))
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"),
                           ("gid_map", f"0 {group} 1")):  # fmt: skip
            Path(f"/proc/self/{name}").write_text(text)
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "tmpfs", "tmpfs", str(SHARED_MEMORY))


def _end_as(child: int, *, reaps: bool = False) -> NoReturn:
    """Wait for a child, pass on the wish to stop, and end with its exit code.

    Args:
        reaps: Whether to wait for orphans too, as the first process of a namespace has to.
    """

    def pass_on(number: int, _frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM):  # a second one from a terminal does no harm
        signal.signal(number, pass_on)
    while True:
        ended, status = os.wait() if reaps else os.waitpid(child, 0)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, stdin=subprocess.DEVNULL)


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# A wall clock that a drill sets, in each Python process of a node: no clock of the machine moves.
#
# Nothing on Linux gives a few processes a wall clock of their own. What agents and ranks could
# compare between nodes is what Python tells them, so that is moved: ``time.time`` and
# ``datetime.now``, those of torch's Python code included. A process takes it up at its start, by a
# ``sitecustomize`` in a folder of its PYTHONPATH.

_VARIABLE = "SHARDYARD_DRILL_CLOCK"
_SECONDS = struct.Struct("<d")
_START = "from shardyard.drill.sandbox import take_up; take_up()\n"


class SkewedClock:
    """The clock of the processes that are started with its environment; right until it is moved.

    Args:
        folder: For its files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "seconds"
        (folder / "sitecustomize.py").write_text(_START)
        self.move(0.0)

    def move(self, seconds: float) -> None:
        """Set it so far from the true time, also for processes that run."""
        self._file.touch()
        with self._file.open("r+b") as file:  # in place: they have it mapped
            file.write(_SECONDS.pack(seconds))

    @property
    def environment(self) -> dict[str, str]:
        paths = (str(self._folder), os.environ.get("PYTHONPATH", ""))
        return {_VARIABLE: str(self._file), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def take_up(environment: Mapping[str, str] = os.environ) -> None:
    """Have this process go by the clock of its environment."""
    with Path(environment[_VARIABLE]).open("rb") as file:
        told = mmap.mmap(file.fileno(), _SECONDS.size, access=mmap.ACCESS_READ)
    true_time, true_time_ns, true_datetime = time.time, time.time_ns, datetime.datetime

    def seconds() -> float:
        return float(_SECONDS.unpack_from(told)[0])

    class OfDatetimes(type):
        """Metaclass that counts true datetimes as instances of the moved class."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, true_datetime)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, true_datetime)

    class Moved(true_datetime, metaclass=OfDatetimes):  # type: ignore[misc,valid-type]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz) + datetime.timedelta(seconds=seconds())

        @classmethod
        def utcnow(cls) -> Any:
            return super().utcnow() + datetime.timedelta(seconds=seconds())

    time.time = lambda: true_time() + seconds()
    time.time_ns = lambda: true_time_ns() + int(seconds() * 1e9)
    Moved.__name__ = Moved.__qualname__ = true_datetime.__name__
    Moved.__module__ = true_datetime.__module__  # pickled as what other processes know
    datetime.datetime = Moved  # type: ignore[misc]


# File systems of a case's own, in memory, that can be full at a moment: in namespaces alone.
#
# A file system in memory is full once its size is what is used of it, so nothing has to be written.

_ROOM = "50%"
"""Share of the machine's memory: the usual size; memory is taken only when it is used."""
_ATTEMPTS = 100
"""Attempts to fill a file system to which a run continues to write."""


def mount_own(folder: Path) -> None:
    """Put an empty file system over a folder, which stays writable by whom it was."""
    folder.mkdir(parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)  # else everybody's, as /tmp is
    _mount("-t", "tmpfs", "-o", f"size={_ROOM},mode={mode:o}", "tmpfs", str(folder))


def fill(folder: Path) -> None:
    """Leave no room there, and what is there as it is.

    Raises:
        subprocess.CalledProcessError: It was written to faster than it could be filled.
    """
    for attempt in range(_ATTEMPTS):
        found = os.statvfs(folder)
        used_bytes = max(1, found.f_blocks - found.f_bfree) * found.f_frsize
        try:
            _mount("-o", f"remount,size={used_bytes}", str(folder))
        except subprocess.CalledProcessError:  # more is used by now, and none may be lost
            if attempt + 1 == _ATTEMPTS:
                raise
        else:
            return


def restore_size(folder: Path) -> None:
    """Restore the original size."""
    _mount("-o", f"remount,size={_ROOM}", str(folder))


def unmount(folder: Path) -> None:
    """Take it away, with all that is in it."""
    subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)
