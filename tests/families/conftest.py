"""A process group of this process alone, for saving a checkpoint."""

from tests.checkpoint.conftest import alone

__all__ = ["alone"]
