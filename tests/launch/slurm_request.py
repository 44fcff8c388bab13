"""Requests to launch on Slurm, as the command line makes them."""

from pathlib import Path

from shardyard.config.load import dump_recipe, load_recipe
from shardyard.hardware.catalogue import instance
from shardyard.hardware.cluster import cluster_of
from shardyard.launch.base import LaunchRequest


def slurm_request(
    *overrides: str, run_dir: str | Path = "/shared/runs/tiny", nodes: int = 2, devices: int = 1
) -> LaunchRequest:
    """A request for CPU nodes, or for those of ``cluster.instance`` if an override names one."""
    recipe = load_recipe(
        [],
        [
            "model.preset=llama-tiny",
            f"cluster.nodes={nodes}",
            *(["cluster.device=cpu"] if not any("cluster." in word for word in overrides) else []),
            *overrides,
        ],
    )
    cluster = None
    if recipe.cluster.instance is not None:
        cluster = cluster_of(instance(recipe.cluster.instance), nodes)
    return LaunchRequest(
        run_id=Path(run_dir).name,
        recipe=recipe,
        recipe_text=dump_recipe(recipe),
        nodes=nodes,
        devices_per_node=cluster.devices_per_node if cluster else devices,
        cluster=cluster,
        run_dir=str(run_dir),
    )
