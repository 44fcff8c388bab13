"""Requests for Kubernetes, from overrides of a recipe as a user writes them."""

from dataclasses import replace

from shardyard.config.cluster_choice import chosen_cluster
from shardyard.config.load import dump_recipe, load_recipe
from shardyard.launchers.base import LaunchRequest

IMAGE = "registry.example/train@sha256:" + "0123456789abcdef" * 4
RUN_ID = "demo-20260102-030405-a1b2"


def request_for(*overrides: str, run_id: str = RUN_ID, **changes: object) -> LaunchRequest:
    """A request that renders; overrides come last and win."""
    recipe = load_recipe(
        [],
        [
            "model.preset=llama2-7b",
            "data.source=/data/text",
            "cluster.nodes=2",
            "cluster.instance=p5.48xlarge",
            f"launch.image={IMAGE}",
            "launch.run_dir=/runs",
            "launch.volumes=[{path: /runs, claim: runs}, {path: /data, claim: data}]",
            "launch.kubernetes.context=test",
            *overrides,
        ],
    )
    cluster = chosen_cluster(recipe.cluster)
    devices = recipe.cluster.devices
    count = cluster.devices_per_node if cluster else 1
    request = LaunchRequest(
        run_id=run_id,
        recipe=recipe,
        recipe_text=dump_recipe(recipe),
        nodes=recipe.cluster.nodes,
        devices_per_node=count if devices == "auto" else devices,
        cluster=cluster,
        run_dir=f"/runs/{run_id}",
    )
    return replace(request, **changes)  # type: ignore[arg-type]
