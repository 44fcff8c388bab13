"""All objects of a request, in the order in which they are created."""

import re
from typing import Any

import yaml

from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes.names import (
    check_labels,
    check_namespaced,
    job_name,
    side_job_name,
)
from shardyard.launchers.kubernetes.patches import with_patches
from shardyard.launchers.kubernetes.pod import config_map, metadata
from shardyard.launchers.kubernetes.policies import network_policy, pod_group, uses_volcano
from shardyard.launchers.kubernetes.targets import (
    jobset,
    node_range,
    pytorchjob,
    runtime,
    side_job,
    trainjob,
)


def render_objects(request: LaunchRequest) -> tuple[dict[str, Any], ...]:
    """Return the recipe's ConfigMap, the network policy, a TrainJob's runtime, and last the job.

    A side job is a plain Job, for every target. The recipe's patches are applied.

    Raises:
        RequestError: Names are too long, a patch does not apply, or the recipe asks what the
            target cannot do.
    """
    return with_patches(request, _objects(request))


def _objects(request: LaunchRequest) -> tuple[dict[str, Any], ...]:
    check_namespaced(request.recipe)
    check_labels(request.recipe)
    if request.side is not None:
        name = side_job_name(request.run_id, request.side_suffix)
        config = config_map(request, name)
        return (config, side_job(request, name, config=config["metadata"]["name"]))
    target = request.recipe.launch.kubernetes.target
    # The name must leave room for the highest index that a scaled job can get.
    most = node_range(request)[1] if target == "pytorchjob" else request.nodes
    name = job_name(request.run_id, request.submission, target=target, nodes=most)
    config = config_map(request, name)
    config_name = config["metadata"]["name"]
    # Volcano starts the job with as few pods as it may shrink to; the rest may come later.
    fewest = node_range(request)[0] if target == "pytorchjob" else request.nodes
    meta = metadata(request, name, job=name)
    # Named like the ConfigMap, since tear-down finds both in the ledger by that name.
    policy = network_policy(request, metadata(request, config_name, job=name), name)
    group = [pod_group(request, meta, members=fewest)] if uses_volcano(request) else []
    match target:
        case "jobset":
            return (config, policy, *group, jobset(request, name, config=config_name))
        case "trainjob":
            return (config, policy, runtime(request), trainjob(request, name, config=config_name))
        case "pytorchjob":
            return (config, policy, *group, pytorchjob(request, name, config=config_name))


def to_yaml(objects: tuple[dict[str, Any], ...]) -> str:
    """A stream that `kubectl create -f -` takes."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    """No anchors, and texts of several lines as they read."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


_NO_TEXT_FOR_SOME = re.compile(
    r"[yYnN]|[-+]?(?:0x[0-9a-f_]*|0[ob][0-7_]*|\.?[0-9][0-9_.:e+-]*)", re.IGNORECASE
)
"""Texts kubectl's parser, unlike pyyaml's, may read as a boolean or number: ``y``, ``1e3``."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if _NO_TEXT_FOR_SOME.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
