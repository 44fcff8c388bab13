"""attempts/<n>/store.json: where the agents of an attempt meet since node 0 was lost."""

from dataclasses import asdict, dataclass
from pathlib import Path

from shardyard.io.files import read_json_object, write_json
from shardyard.rundir.layout import RunDir


@dataclass(frozen=True, kw_only=True)
class StorePlace:
    """Which node serves the store, and where."""

    moves: int
    """How often the store has moved in this attempt; 0: node 0 serves it, nothing is written."""
    node_rank: int
    endpoint: str
    """HOST:PORT."""


def read_store_place(run: RunDir, attempt: int) -> StorePlace | None:
    """None: the store has never moved."""
    try:
        return StorePlace(**read_json_object(_path(run, attempt)))
    except (OSError, ValueError, TypeError):
        return None


def write_store_place(run: RunDir, attempt: int, place: StorePlace) -> None:
    """Tell all nodes.

    Raises:
        StorageError: The run's folder cannot be written.
    """
    write_json(_path(run, attempt), asdict(place))


def _path(run: RunDir, attempt: int) -> Path:
    return run.attempt(attempt) / "store.json"
