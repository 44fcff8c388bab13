"""The state of torch's rendezvous in a store that anybody may write who reaches its port.

torch keeps it there as a pickle, by which any writer runs code in every agent. Here it is JSON,
sealed and numbered. What is not sealed, or older than what was seen before, is not used: the next
write puts the newest known state in its place.
"""

import json
import logging
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from shardyard.elastic.rendezvous.state import empty_state, from_json, to_json
from shardyard.elastic.seal import Seal, UntrustedValueError
from shardyard.io.files import parse_json

_NOTHING = "nothing"
"""A store waits for a missing value, so there is always one."""

_FOREIGN = (
    "a program that is not a node of this run changed what the agents keep at their port; it is "
    "not used and is replaced. Let only the nodes of the run reach that port (docs/network.md)."
)

log = logging.getLogger(__name__)


class StoreBackend(RendezvousBackend):
    """Keeps a sealed state in a TCPStore."""

    def __init__(self, store: Any, rendezvous_id: str, seal: Seal) -> None:
        self._store, self._seal = store, seal
        self._key = f"shardyard/meeting/{rendezvous_id}"
        self._latest, self._number = empty_state(), 0
        self._has_warned = False

    @property
    def name(self) -> str:
        return "sealed-store"

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and, as its token, the text it was read from."""
        return self._read(self._text())

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Write the state if no other node has; return the current one, and if we wrote it."""
        content = {"number": self._number + 1, "state": parse_json(to_json(state, signs=True))}
        written = self._seal.sealed(self._key, json.dumps(content).encode())
        is_ours = self._swap(token or _NOTHING, written) == written
        return (*self._read(written if is_ours else self._text()), is_ours)

    def _text(self) -> bytes:
        # Not get(), which would wait for a key that another program has removed.
        return self._swap("", _NOTHING)

    def _swap(self, expected: Any, written: str | bytes) -> bytes:
        try:
            return bytes(self._store.compare_set(self._key, expected, written))
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the store of the agents does not answer") from error

    def _read(self, text: bytes) -> tuple[bytes, Token]:
        # Empty is normal only before the first state; later another program has emptied it.
        if text != _NOTHING.encode() or self._number:
            try:
                content = parse_json(self._seal.opened(self._key, text))
                # A validly sealed but older state is a replay.
                if content["number"] < self._number:
                    raise UntrustedValueError(self._key)
                self._latest = from_json(json.dumps(content["state"]).encode())
                self._number = content["number"]
            except UntrustedValueError:
                if not self._has_warned:
                    log.warning(_FOREIGN)
                self._has_warned = True
        return self._latest, text
