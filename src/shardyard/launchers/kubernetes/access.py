"""Access to a cluster before a launch: the context of the kubeconfig, and the user's rights."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shardyard.config.schema.launch import Kubernetes
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import Problem, RequestError, ShardyardError
from shardyard.launchers.kubernetes.api import PLURALS, Api
from shardyard.launchers.kubernetes.names import TARGETS

_CONTEXT = "launch.kubernetes.context"


def context_errors(recipe: Recipe, kubeconfig: Path | None) -> list[Problem]:
    """Return why the kubeconfig has no usable context; asks no cluster."""
    try:
        _api(recipe, kubeconfig)
    except RequestError as error:
        path, _, text = str(error).partition(_CONTEXT)
        if path:  # the client's package is missing
            return [Problem("--on kubernetes", str(error))]
        return [Problem(_CONTEXT, text.strip())]
    return []


def permission_errors(recipe: Recipe, kubeconfig: Path | None) -> list[Problem]:
    """Return the rights that the user lacks; asks the cluster, and is empty without an answer."""
    with suppress(ShardyardError):
        api = _api(recipe, kubeconfig)
        lacking = missing_rights(api, needed_rights(recipe.launch.kubernetes))
        if lacking:
            text = (
                f"={api.namespace}: in context {api.context!r} you may not {', '.join(lacking)}. "
                "Have an administrator grant it; docs/launch-kubernetes.md has the role."
            )
            return [Problem("launch.kubernetes.namespace", text)]
    return []


def needed_rights(settings: Kubernetes) -> list[tuple[str, str, str]]:
    """Return the verbs, resources and API groups that each launch needs."""
    version, plural, _ = PLURALS[TARGETS[settings.target].kind]
    group = version.partition("/")[0]
    wanted = [
        *((verb, plural, group) for verb in ("create", "get", "patch", "delete")),
        *((verb, "configmaps", "") for verb in ("create", "get", "patch", "delete")),
        ("list", "pods", ""),
        ("get", "pods/log", ""),
    ]
    if settings.scheduler == "volcano":
        wanted += [(verb, "podgroups", "scheduling.volcano.sh") for verb in ("create", "delete")]
    return wanted


def missing_rights(api: Api, required: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return the verbs and resources that are not allowed.

    Args:
        required: Verbs, resources and their API groups.
    """
    return [
        f"{verb} {resource}"
        for verb, resource, group in required
        if not api.may(verb, resource, group=group)
    ]


def _api(recipe: Recipe, kubeconfig: Path | None) -> Api:
    settings = recipe.launch.kubernetes
    return Api(settings.context, settings.namespace, kubeconfig)
