"""A drill in namespaces of its own: its processes, its /dev/shm, its mounts are nobody else's.

What it leaves there is then seen exactly, nothing outside can be hit, and when its first process
ends, the kernel ends all the others.
"""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

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
"""Files of the kernel, what stands in them where a user may make no namespace, and the words."""


def is_apart() -> bool:
    """Whether this process is in such namespaces."""
    return os.environ.get(_INSIDE) == "1"


def why_not_apart() -> str:
    """Why this machine allows no such namespaces to this user, as far as it says; or nothing."""
    if sys.platform != "linux":
        return "there are namespaces on Linux alone"
    if os.geteuid() == 0 or is_apart():
        return ""
    return next((why for file, refusal, why in _REFUSALS if _holds(Path(file), refusal)), "")


def _holds(file: Path, text: str) -> bool:
    try:
        return file.read_text().strip() == text
    except OSError:
        return False


def enter() -> str:
    """Go on in namespaces of one's own; call before any thread is started.

    Returns in a process that is inside; the one that called waits for it and ends as it ends.

    Returns:
        Why it goes on outside; empty: it is inside.
    """
    if why := why_not_apart():
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
    """Put this process into a network of its own, in which there is nothing.

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
