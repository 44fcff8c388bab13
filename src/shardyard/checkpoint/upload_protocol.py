"""Uploads of checkpoints, as the saver and the training loop know them: without a client."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Uploaded:
    """A checkpoint that is whole in the bucket."""

    step: int
    seconds: float
    """From the end of its save to disk."""
    bytes: int
    to: str
    """Its folder."""
    not_removed: str | None = None
    """Why old checkpoints are still there; None: they are gone."""


@dataclass(frozen=True)
class NotUploaded:
    """A checkpoint that is on disk and not in the bucket."""

    step: int
    reason: str


class UploadQueue(Protocol):
    """Uploads of one run. All ranks make the same calls."""

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Steps whose files are still needed on disk."""

    def accepts(self, step: int, *, is_best: bool) -> bool:
        """Whether rank 0 has a checkpoint uploaded."""

    def add(self, step: int, *, is_best: bool, keep_older: bool = False) -> None:
        """Upload a durable checkpoint in the background."""

    def poll(self) -> list[Uploaded | NotUploaded]:
        """Return what has ended since the last call, on rank 0; elsewhere none."""

    def is_missing(self, step: int) -> bool:
        """Whether a checkpoint on disk is neither in the bucket nor on its way, on rank 0."""
