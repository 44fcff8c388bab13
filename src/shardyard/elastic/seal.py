"""Seal of an attempt on values of its store and on objects that its ranks send each other.

torch's store has no password, an etcd is shared by many, and torch sends objects as pickles over
connections that ask for no password. So each value and object carries an HMAC-SHA256 of its name
and content under the secret of the attempt. One without it is never used, so whoever gets between
two ranks runs no code in them.
"""

import hmac
import pickle
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # built in C++

from shardyard.errors import AccessError
from shardyard.torch_private import set_object_pickler


class UntrustedValueError(AccessError):
    """A value that no node of this attempt wrote."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the value {name} was not written by a node of this run, and was not used. Another "
            "program can reach the port at which the agents meet. Let only the nodes of the run "
            "reach it (docs/network.md), then run `shardyard resume`."
        )


@dataclass(frozen=True)
class Seal:
    """Marks values as written by a holder of the secret."""

    secret: bytes = field(repr=False)

    def derived(self, purpose: str) -> bytes:
        """Derive another secret for one purpose; it does not reveal this one."""
        return self._mac("purpose", purpose.encode())

    def sealed(self, name: str, content: bytes) -> bytes:
        """Seal a value for this name only."""
        return self._mac(name, content).hex().encode() + b" " + content

    def opened(self, name: str, value: bytes) -> bytes:
        """The content of a value.

        Raises:
            UntrustedValueError: It was not sealed under this name with this secret.
        """
        mark, _, content = value.partition(b" ")
        # In constant time, so that timing does not reveal how much of a forged mark is right.
        if not hmac.compare_digest(mark, self._mac(name, content).hex().encode()):
            raise UntrustedValueError(name)
        return content

    def _mac(self, name: str, content: bytes) -> bytes:
        written = name.encode()
        # The length separates name and content: ab and c are not sealed like a and bc.
        return hmac.digest(self.secret, len(written).to_bytes(8) + written + content, "sha256")


class SealedStore:
    """A store of torch whose values are sealed; its counters (``add``) are not.

    Has what torch's agent and ours call of a store.
    """

    def __init__(self, store: Any, prefix: str, seal: Seal) -> None:
        """Args:
        prefix: Begins the name of each key; a value is of no use under another.
        """
        self._store: Any = PrefixStore(prefix, store)
        self._prefix, self._seal = prefix, seal

    @property
    def timeout(self) -> Any:
        return self._store.timeout

    def set_timeout(self, timeout: Any) -> None:
        self._store.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._sealed(key, value))

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        pairs = zip(keys, values, strict=True)
        self._store.multi_set(keys, [self._sealed(key, value) for key, value in pairs])

    def get(self, key: str) -> bytes:
        """Wait for a value.

        Raises:
            UntrustedValueError: Another than this run wrote it.
        """
        return self._seal.opened(self._name(key), self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = zip(keys, self._store.multi_get(keys), strict=True)
        return [self._seal.opened(self._name(key), value) for key, value in found]

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait(keys, *timeout)

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _sealed(self, key: str, value: str | bytes) -> str:
        content = value.encode() if isinstance(value, str) else value
        return self._seal.sealed(self._name(key), content).decode()


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
