"""What W&B's client wrote into a file of an offline run, by W&B's own definition of a record.

The file is a log as LevelDB writes them (its log_format.md): blocks of 32 KiB, in each records with
checksum, length and type; W&B puts seven bytes before the first.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEAD = 32 * 1024, 7
_FULL, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """Each record of a file, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, parts = _HEAD, b""
    while place + _HEAD <= len(data):
        if _BLOCK - place % _BLOCK < _HEAD:
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + _HEAD])
        place += _HEAD
        parts += data[place : place + length]
        place += length
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def rows_in(path: Path) -> list[dict[str, Any]]:
    """Rows of a run's history."""
    return [
        {_name(item): json.loads(item.value_json) for item in record.history.item}
        for record in records(path)
        if record.WhichOneof("record_type") == "history"
    ]


def _name(item: Any) -> str:
    return "/".join(item.nested_key) or str(item.key)
