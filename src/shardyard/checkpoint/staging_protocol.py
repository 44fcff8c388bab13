"""Protocols of memory for a rank's state: for one save, or for longer than the process lives."""

import mmap
from typing import Any, Protocol

from torch import Tensor


class Staging(Protocol):
    """Memory to which a save copies the state, before it writes."""

    def take_for_save(
        self, step: int, tensors: dict[str, Tensor], values_json: str
    ) -> dict[str, Tensor]:
        """Copy this rank's shards; on return the originals may change.

        Returns:
            Contiguous CPU tensors, valid until the next call.
        """


class PersistentStaging(Staging, Protocol):
    """A place for the state that outlives this process."""

    def is_due(self, step: int) -> bool:
        """Whether to copy the state after this step; call it once a step."""

    def take(self, step: int, tensors: dict[str, Tensor], values: dict[str, Any]) -> float:
        """Copy the state there; returns the seconds that training stood still."""

    def close(self) -> None:
        """End background work."""


class MemoryProvider(Protocol):
    """Gives memory that outlives this process."""

    def __call__(self, label: str, size_bytes: int | None = None, /) -> mmap.mmap | None:
        """Return the piece of this label, grown to a size; None: it has no owner, or is empty."""
