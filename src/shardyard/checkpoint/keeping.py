"""Where a rank's state is kept: for the time of a save, or so that it outlives the process."""

import mmap
from typing import Any, Protocol

from torch import Tensor


class Staging(Protocol):
    """Where a save copies the state to, before it writes."""

    def take_for_save(
        self, step: int, tensors: dict[str, Tensor], values_json: str
    ) -> dict[str, Tensor]:
        """Copy this rank's shards; on return the originals may change.

        Returns:
            Contiguous CPU tensors, valid until the next call.
        """


class Keeping(Staging, Protocol):
    """A place for the state that outlives this process."""

    def is_due(self, step: int) -> bool:
        """Whether to copy the state after this step; call it once a step."""

    def take(self, step: int, tensors: dict[str, Tensor], values: dict[str, Any]) -> float:
        """Copy the state there; returns the seconds that training stood still."""

    def close(self) -> None:
        """End what goes on in the background."""


class Memory(Protocol):
    """Gives memory that outlives this process."""

    def __call__(self, label: str, size_bytes: int | None = None, /) -> mmap.mmap | None:
        """The piece of this label, grown to a size; None: nobody owns one, or it is empty."""
