"""Versions that a cluster serves: it would drop or reject fields and kinds of another one."""

from shardyard.errors import RequestError
from shardyard.launchers.kubernetes.api import PLURALS, Api
from shardyard.launchers.kubernetes.prerequisites import install_command, install_hint
from shardyard.launchers.kubernetes.targets import Schema

OLDEST = {"jobset": (1, 28), "trainjob": (1, 31), "pytorchjob": (1, 28)}
"""Kubernetes of each target. Sources: the pod index label, which logs are found by, is of 1.28;
installation pages of Kubeflow Trainer (1.31) and of the training operator (1.28)."""


def require_served(api: Api, kind: str) -> None:
    """Raise unless the cluster serves a kind in the version that is rendered.

    Raises:
        RequestError: Its controller is missing, or of another version.
    """
    if api.serves(kind):
        return
    version = PLURALS[kind][0]
    others = api.versions_of(kind)
    if others:
        raise RequestError(
            f"context {api.context!r}: the cluster serves {kind} as {', '.join(others)}, not as "
            f"{version}. Its controller is of another version, and is shared with whoever uses it. "
            f"Have whoever keeps it replace it: {install_command(kind, api.context)}"
        )
    raise RequestError(
        f"context {api.context!r}: the cluster does not serve {kind} ({version}). "
        f"{install_hint(kind, api.context)}"
    )


def trainjob_schema(api: Api) -> Schema:
    """Return the version whose fields the cluster's TrainJob has.

    They differ under one API version.

    Raises:
        RequestError: The fields are of no known version.
    """
    fields = api.fields_of_spec("TrainJob")
    # The API version is the same in all of them, so a field's name has to tell.
    if "runtimePatches" in fields:
        return "2.3"
    if "podTemplateOverrides" in fields:
        return "2.1"
    if "podSpecOverrides" in fields:
        return "2.0"
    raise RequestError(
        f"context {api.context!r}: the cluster's TrainJob has neither runtimePatches (Kubeflow "
        "Trainer 2.2, 2.3) nor podTemplateOverrides (2.1) nor podSpecOverrides (2.0). Another "
        "version's fields would be dropped or refused. Have whoever keeps it replace it: "
        f"{install_command('TrainJob', api.context)}"
    )
