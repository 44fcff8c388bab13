"""What a run leaves outside of its folder: looked for before it starts and after it ended."""

from pathlib import Path

from shardyard.drill.apart import SHARED_MEMORY, is_apart
from shardyard.drill.facts import Left
from shardyard.drill.scene import Marked, words_of
from shardyard.io.polling import wait_for
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import is_held

_SHARED = Path("/dev/shm")
_CACHES = ("torchinductor_",)
"""Beginnings of what engines keep in the scratch folder on purpose."""
_LEAVING_S = 20.0
"""For processes that end by themselves, and what goes with them."""
_POLL_S = 0.2
_LISTENS = "0A"
"""State of a socket in /proc/net/tcp."""


class Before:
    """What was there before the run."""

    def __init__(self) -> None:
        self._shared = _shared_names()
        self._ports = set(_listening())

    def left(self, run: RunDir, marked: Marked, scratch: Path) -> Left:
        """What is there now and was not, once processes had time to leave."""
        processes = marked.wait_for_end(_LEAVING_S)
        wait_for(
            lambda: not (self._new_names() or _scratch_names(scratch)),
            every_s=_POLL_S, within_s=_POLL_S * 10,
        )  # fmt: skip
        return Left(
            processes=tuple(f"{pid}: {' '.join(words_of(pid))[:120]}" for pid in processes),
            shared_memory=tuple(self._new_names()),
            ports=tuple(sorted(_ports_of(processes) - self._ports)),
            scratch=tuple(_scratch_names(scratch)),
            locks=(run.lease.name,) if is_held(run.lease) else (),
            half_written=tuple(path.name for path in run.checkpoints.glob("*.tmp")),
        )

    def _new_names(self) -> list[str]:
        """In a /dev/shm that others use too, nobody knows whose a name is: none is counted."""
        return sorted(_shared_names() - self._shared) if is_apart() else []


def _shared_names() -> set[str]:
    return {entry.name for entry in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def _scratch_names(scratch: Path) -> list[str]:
    return sorted(entry.name for entry in scratch.iterdir() if not entry.name.startswith(_CACHES))


def _listening() -> dict[int, str]:
    """Port -> inode of each listening socket of TCP."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENS:
                found[int(fields[1].rpartition(":")[2], 16)] = fields[9]
    return found


def _ports_of(pids: list[int]) -> set[int]:
    """Ports on which processes listen; one that nobody holds is closed by the kernel."""
    by_inode = {f"socket:[{inode}]": port for port, inode in _listening().items()}
    found = set()
    for pid in pids:
        try:
            names = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        found |= {by_inode[name] for name in names if name in by_inode}
    return found
