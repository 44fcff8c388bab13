"""Table of launchers and their modules: looked up here, imported on first use."""

from collections.abc import Callable
from typing import Any

from shardyard.plugins import load_entry_point, load_object

# As text, because launchers import the ledger, which reads their forms through this table.
LAUNCHERS: dict[str, str] = {
    "local": "shardyard.launchers.local:LocalLauncher",
    "slurm": "shardyard.launchers.slurm.launcher:SlurmLauncher",
    "kubernetes": "shardyard.launchers.kubernetes.launcher:KubernetesLauncher",
    "aws-batch": "shardyard.launchers.aws_batch.launcher:BatchLauncher",
    "ssh": "shardyard.launchers.ssh.launcher:SshLauncher",
}
"""Name -> module:class, imported on first use; packages add others (``plugins.py``)."""

ALIASES = {"k8s": "kubernetes", "eks": "kubernetes", "batch": "aws-batch"}
"""Other names that people type -> name of the launcher."""


def load_launcher(name: str, validate: Callable[[Any], str]) -> Any:
    """The class of a name, ours or a package's, imported now.

    Args:
        validate: Error of a package's class, to follow its name; empty: it can be used.

    Raises:
        RequestError: There is none, or a package's cannot be used.
    """
    if name in LAUNCHERS:
        return load_object(None, LAUNCHERS[name])
    return load_entry_point("launchers", name, builtin=LAUNCHERS, validate=validate)
