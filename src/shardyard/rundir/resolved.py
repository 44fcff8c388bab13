"""attempts/<n>/resolved.json: the resolved recipe of an attempt, each value with its reason."""

import json
from pathlib import Path

from shardyard.config.resolved import Resolved
from shardyard.errors import RequestError
from shardyard.rundir.layout import write_json


def read_resolved(path: Path) -> Resolved:
    """Read attempts/<n>/resolved.json.

    Raises:
        RequestError: The file is missing or is not what ``write_resolved`` writes.
    """
    try:
        return Resolved.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{path} cannot be read ({error}). It is written at the start of an attempt; "
            "resume the run to make a new attempt."
        ) from error


def write_resolved(path: Path, resolved: Resolved) -> None:
    """Write attempts/<n>/resolved.json at once."""
    write_json(path, resolved.to_json())
