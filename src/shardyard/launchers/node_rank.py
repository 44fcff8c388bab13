"""Place of a process among the nodes of its job; each launcher's node_rank.py reads its own."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from shardyard.errors import RequestError

# torch's own default for the c10d rendezvous.
PORT = 29400
"""Port of the rendezvous if node 0 has a network address of its own, as pods have."""


@dataclass(frozen=True, kw_only=True)
class NodeAssignment:
    """One node's place; what its launcher's part of the environment says."""

    node_rank: int
    nodes: int
    host: str
    """Address at which node 0 serves the rendezvous, as all nodes can reach it."""
    port: int
    session: str
    """The same on all nodes of one start of the job, and new at each (requeue, retry, restart)."""
    rendezvous: str | None = None
    """Rendezvous to use instead, in the form of elastic.rendezvous; None: the recipe's."""
    is_container: bool = False
    """Its own folders are no other node's, and exit code 143 has the job started again."""
    own_host: str | None = None
    """This node's name, by which the others reach it; None: the launcher knows none."""
    store_moves: bool = False
    """Whether the remaining nodes may continue without node 0; else all are started again."""

    @property
    def endpoint(self) -> str:
        """HOST:PORT of the rendezvous."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_one_machine(self) -> bool:
        """Whether all nodes are this one machine: they meet at its loopback address."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name


class Variables:
    """The environment of a node; what is missing is an error that names it."""

    def __init__(self, word: str, environ: Mapping[str, str]) -> None:
        self._word = word
        self._environ = environ

    def optional(self, name: str) -> str | None:
        return self._environ.get(name) or None

    def text(self, name: str) -> str:
        value = self.optional(name)
        if value is None:
            raise RequestError(
                f"the variable {name} is not set. --place {self._word} reads this node's place "
                "from it. Start this command inside such a job, or say the place yourself with "
                "--place given --node-rank K --nodes N --rendezvous HOST:PORT --session S."
            )
        return value

    def number(self, name: str, default: int | None = None) -> int:
        if default is not None and self.optional(name) is None:
            return default
        value = self.text(name)
        # int() also takes signs, blanks and underscores, which no scheduler writes.
        if not value.isdecimal():
            raise RequestError(
                f"the variable {name}={value!r} is not a number. --place {self._word} reads this "
                "node's place from it. The program that started this command must set it as the "
                "scheduler does."
            )
        return int(value)
