"""Requests to launch on AWS Batch, for tests."""

from shardyard.config.load import dump_recipe, load_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.hardware.catalogue import instance
from shardyard.hardware.cluster import cluster_of
from shardyard.launchers.base import LaunchRequest

ROLE = "arn:aws:iam::123456789012:role/shardyard-job"
EXECUTION_ROLE = "arn:aws:iam::123456789012:role/shardyard-execution"
SETTINGS = (
    "launch.image=123456789012.dkr.ecr.us-east-1.amazonaws.com/shardyard@sha256:" + 64 * "0",
    "launch.aws_batch.region=us-east-1",
    "launch.aws_batch.queue=trainers",
    f"launch.aws_batch.job_role={ROLE}",
    f"launch.aws_batch.execution_role={EXECUTION_ROLE}",
    "launch.volumes=[{path: /runs, efs: fs-0123456789abcdef0}]",
    "launch.run_dir=/runs",
)


def batch_recipe(*overrides: str) -> Recipe:
    """A recipe with all that Batch needs."""
    return load_recipe([], [*SETTINGS, *overrides])


def batch_request(*overrides: str, run_id: str = "llama-1", run_dir: str = "") -> LaunchRequest:
    """A request; `cluster.instance=` and `cluster.nodes=` are read from the recipe."""
    recipe = batch_recipe(*overrides)
    name, nodes = recipe.cluster.instance, recipe.cluster.nodes
    machine = None if name is None else instance(name)
    return LaunchRequest(
        run_id=run_id,
        recipe=recipe,
        recipe_text=dump_recipe(recipe),
        nodes=nodes,
        devices_per_node=1 if machine is None else machine.count,
        cluster=None if machine is None else cluster_of(machine, nodes),
        run_dir=run_dir or f"/runs/{run_id}",
    )
