"""One thing that is done to a cluster, a program or a call of AWS: shown before, or done."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardyard.cluster.reach import in_cluster
from shardyard.cluster.world import World

_INSIDE = ("kubectl", "helm")
"""Programs that speak to the cluster of a kubeconfig."""


@dataclass(frozen=True, kw_only=True)
class Act:
    """Either a program or a call."""

    argv: tuple[str, ...] = ()
    """Of kubectl and helm without ``--kubeconfig``."""
    service: str = ""
    call: str = ""
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def words(self, world: World) -> str:
        """The command that does it; of a call, that of AWS's command line."""
        if self.argv:
            return shlex.join(self._whole(world))
        words = ["aws", self.service, self.call.replace("_", "-"), "--region", world.given.region]
        for name, value in self.params.items():
            text = value if isinstance(value, str) else json.dumps(value)
            words += [f"--{_with_hyphens(name)}", text]
        return shlex.join(words)

    def do(self, world: World) -> None:
        """Do it, in the cluster itself only where the kubeconfig is this cluster's."""
        if not self.argv:
            world.ask(self.service, self.call, **self.params)
        elif self.argv[0] in _INSIDE:
            in_cluster(world, self.argv)
        else:
            world.run(self._whole(world))

    def _whole(self, world: World) -> list[str]:
        kubeconfig = str(world.kubeconfig)
        return [*self.argv, *(("--kubeconfig", kubeconfig) if self.argv[0] in _INSIDE else ())]


def program(*argv: str) -> Act:
    """A program and its arguments."""
    return Act(argv=argv)


def _with_hyphens(name: str) -> str:
    """``stack-name`` of ``StackName``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()
