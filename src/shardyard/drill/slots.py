"""When a rank copies its state into a snapshot, seen from outside of it.

The memory is the agent's (`elastic/agent_memory.py`), and begins with a mark that is taken away
before a copy begins and written last (`checkpoint/snapshots/snapshot_slot.py`).
"""

import os
from contextlib import suppress
from pathlib import Path

from shardyard.config.snapshots import slot_labels

_MARK_BYTES = 8


class SlotWatch:
    """The slots of one rank."""

    def __init__(self, agent: int, local_rank: int) -> None:
        wanted = {f"/memfd:shardyard-{label} (deleted)" for label in slot_labels(local_rank)}
        self._files: list[int] = []
        for link in Path(f"/proc/{agent}/fd").iterdir():
            with suppress(OSError):
                if str(link.readlink()) in wanted:
                    self._files.append(os.open(link, os.O_RDONLY))
        self._has_held = [False] * len(self._files)

    def is_copying(self) -> bool:
        """Whether a slot that held a snapshot holds none now."""
        marks = [any(os.pread(file, _MARK_BYTES, 0)) for file in self._files]
        is_copying = any(had and not has for had, has in zip(self._has_held, marks, strict=True))
        self._has_held = [had or has for had, has in zip(self._has_held, marks, strict=True)]
        return is_copying

    def close(self) -> None:
        for file in self._files:
            os.close(file)
