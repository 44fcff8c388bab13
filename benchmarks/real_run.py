"""A run as a user starts it, on some text: a process, killed with all its children."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def write_corpus(folder: Path) -> None:
    """This package's own source as text: real, small and always there."""
    folder.mkdir()
    source = Path(__file__).parents[1] / "src" / "shardyard"
    for index, file in enumerate(sorted(source.rglob("*.py"))):
        (folder / f"{index:03d}.txt").write_text(file.read_text() or "# empty\n")


def start(folder: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start a verb; what it says goes into log.txt."""
    command = [sys.executable, "-m", "shardyard", *arguments]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process and all that descend from it, again until none is left."""
    family = {process.pid}
    while True:
        family |= _descendants(family)
        alive = [pid for pid in family if _is_alive(pid)]
        if not alive:
            break
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.poll()
    process.wait()


def _descendants(family: set[int]) -> set[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields is not None:
                parents[int(entry.name)] = int(fields[1])
    found: set[int] = set()
    while new := {pid for pid, parent in parents.items() if parent in family | found} - found:
        found |= new
    return found - family


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the name: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _is_alive(pid: int) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z"
