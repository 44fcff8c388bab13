"""Objects that ranks send each other, sealed: who gets between two ranks runs no code in them.

torch sends objects as pickles, over connections that ask for no password.
"""

import pickle
from functools import partial
from typing import Any, BinaryIO

from shardyard.elastic.seal import Seal
from shardyard.torch_private import set_object_pickler

_NAME = "object of a rank"


class _Pickler:
    """Writes one sealed pickle."""

    def __init__(self, seal: Seal, file: BinaryIO) -> None:
        self._seal, self._file = seal, file

    def dump(self, content: Any) -> None:
        self._file.write(self._seal.sealed(_NAME, pickle.dumps(content)))


class _Unpickler:
    """Reader of exactly one sealed pickle."""

    def __init__(self, seal: Seal, file: BinaryIO) -> None:
        self._seal, self._file = seal, file

    def load(self) -> Any:
        return pickle.loads(self._seal.opened(_NAME, self._file.read()))


def seal_objects(seal: Seal) -> None:
    """Have this process send and read objects sealed, in every collective."""
    set_object_pickler(partial(_Pickler, seal), partial(_Unpickler, seal))
