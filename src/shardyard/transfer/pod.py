"""A run's files inside a pod, read through exec: argument lists only, no shell there or here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardyard.errors import DataError, LostError
from shardyard.launchers.kubernetes.exec import CommandError, LostConnectionError
from shardyard.launchers.kubernetes.logs import lines_of
from shardyard.own_processes import ISOLATED
from shardyard.transfer.download import RemoteListing, read_listing


class Exec(Protocol):
    """Runs a command in one container: ``Api.exec`` of a pod that is known."""

    def __call__(self, command: Sequence[str]) -> Iterator[bytes]: ...


@dataclass(frozen=True, kw_only=True)
class PodSource:
    """Files below a folder of a container."""

    exec: Exec
    folder: str
    """Absolute path of the folder in the container."""

    def read(self, name: str, offset: int) -> Iterator[bytes]:
        # Of coreutils and busybox; counts from 1, and seeks where the file can
        command = ["tail", "-c", f"+{offset + 1}", "--", f"{self.folder}/{name}"]
        try:
            yield from self.exec(command)
        except LostConnectionError as error:
            raise _lost(error) from error
        except CommandError as error:
            raise DataError(
                f"{name} cannot be read on the pod: {error.words}. A running run may have removed "
                "it; repeat the command to take what is there now."
            ) from error

    def list(self, step: str) -> RemoteListing:
        """Files of the run that is in the folder, the checkpoint of a step among them, verified.

        Raises:
            LostError: The connection broke.
            ShardyardError: What the far side answered.
        """
        command = ["python", *ISOLATED, "shardyard.checkpoint.select", self.folder, "--step", step]
        try:
            return read_listing(lines_of(self.exec(command)))
        except LostConnectionError as error:
            raise _lost(error) from error
        except CommandError as error:
            raise DataError(
                f"the files of {self.folder} cannot be listed there: {error.words}. The image must "
                "hold this version of shardyard (`shardyard image build`)."
            ) from error


def _lost(error: LostConnectionError) -> LostError:
    words = str(error).rstrip(".")
    return LostError(
        f"{words}. Complete files are kept. Repeat the command: it continues from there."
    )
