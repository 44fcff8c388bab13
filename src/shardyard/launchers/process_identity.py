"""Identify a process of ours: by its number and start time, its user, and its command line.

A number is given away again, so a process is only signalled once it is known to be the one meant.
"""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """A process that no other is mistaken for, also after its number was given away again."""

    pid: int
    started: str
    """Start time in clock ticks since the boot, or as `ps` shows it."""
    boot: str

    @staticmethod
    def of(pid: int) -> "Identity | None":
        """Return the identity; None: no such process, or it has ended and was not waited for."""
        boot = Path("/proc/sys/kernel/random/boot_id")
        # Without /proc, `ps` gives the start in whole seconds, and there is no boot id to compare.
        if not boot.is_file():
            answer = subprocess.run(
                ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
            )
            started = "-".join(answer.stdout.split())
            return Identity(pid, started, "") if started else None
        try:
            # Field 2, the program's name, may hold blanks and brackets: count from behind it.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        if fields[0] in ("Z", "X"):
            return None
        return Identity(pid, fields[19], boot.read_text().strip())  # field 22 of proc(5)

    @property
    def is_alive(self) -> bool:
        return Identity.of(self.pid) == self


def runs(pid: int, words: Sequence[str]) -> bool:
    """Whether this user started a process whose command line ends with these words."""
    process = Path(f"/proc/{pid}")
    if process.parent.joinpath("self").exists():
        try:
            found = (process / "cmdline").read_bytes().split(b"\0")[:-1]
            owner = process.stat().st_uid
        except OSError:
            return False
        # Only the last words: the interpreter and its options differ between installations.
        return owner == os.geteuid() and found[-len(words) :] == list(map(os.fsencode, words))
    answer = subprocess.run(
        # -ww, because ps cuts long command lines otherwise.
        ["ps", "-ww", "-o", "uid=,command=", "-p", str(pid)],
        capture_output=True, text=True, errors="surrogateescape", check=False,
    )  # fmt: skip
    said_owner, _, command = answer.stdout.strip().partition(" ")
    return said_owner == str(os.geteuid()) and command.endswith(f" {' '.join(words)}")


def find_running(words: Sequence[str]) -> Identity | None:
    """Find this user's process by the end of its command line; None: there is no such process."""
    found = (Identity.of(pid) for pid in process_numbers() if runs(pid, words))
    return next((who for who in found if who is not None), None)


def process_numbers() -> list[int]:
    """Return the numbers of all processes of this machine that this user can see."""
    processes = Path("/proc")
    if processes.joinpath("self").exists():
        return [int(entry.name) for entry in processes.iterdir() if entry.name.isdecimal()]
    answer = subprocess.run(["ps", "-axo", "pid="], capture_output=True, text=True, check=False)
    return [int(word) for word in answer.stdout.split()]
