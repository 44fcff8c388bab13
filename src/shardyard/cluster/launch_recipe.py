"""Settings by which a recipe is launched on a cluster: ``launch.yaml`` in its folder."""

from pathlib import Path
from typing import Any

from shardyard.cluster.batch.environment import file_system_of
from shardyard.cluster.batch.queue import block_ends, launch_settings
from shardyard.cluster.batch.stack import SHARED, stack_name
from shardyard.cluster.clients import World, context_of
from shardyard.cluster.part import stack_outputs
from shardyard.launchers.kubernetes.objects import to_yaml


def write_settings(world: World) -> Path:
    """Write the settings that launch a recipe on the cluster, as a file to give next to it.

    Raises:
        ShardyardError: A stack is gone, or AWS does not say when the capacity block ends.
    """
    spec = world.spec
    if spec.kind == "batch":
        outputs = stack_outputs(world, stack_name(spec))
        settings = launch_settings(world, outputs, file_system_of(world))
    else:
        settings = kubernetes_settings(world)
    path = world.folder / "launch.yaml"
    path.write_text(to_yaml((settings,)), encoding="utf-8")
    return path


def kubernetes_settings(world: World) -> dict[str, Any]:
    """Context, namespace, claim and machines of an EKS cluster, as a part of a recipe."""
    spec = world.spec
    place = {"namespace": spec.storage.namespace}
    if context := context_of(world):
        place["context"] = context
    launch: dict[str, Any] = {"kubernetes": place}
    if spec.storage.kind != "none":
        volume = {"path": SHARED, "claim": spec.storage.claim}
        launch |= {"run_dir": f"{SHARED}/runs", "volumes": [volume]}
    cluster: dict[str, Any] = {}
    if spec.nodes.instance is not None:
        cluster["instance"] = spec.nodes.instance
        if spec.capacity.kind != "on-demand":  # on-demand nodes of others may have no label of it
            cluster["capacity"] = spec.nodes.capacity
        if spec.capacity.kind == "block":
            cluster["block_ends"] = block_ends(world)
    return {"cluster": cluster, "launch": launch} if cluster else {"launch": launch}
