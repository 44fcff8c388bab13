"""Cluster that a recipe names: an EC2 type, a file, or none (then it is this machine)."""

from dataclasses import replace
from pathlib import Path

from shardyard.config.schema import recipe as schema
from shardyard.errors import RequestError
from shardyard.hardware.catalogue import instance, rate_of
from shardyard.hardware.cluster import ClusterHardware, cluster_of, with_efa
from shardyard.hardware.cluster_file import read_cluster_file


def chosen_cluster(settings: schema.Cluster) -> ClusterHardware | None:
    """Return the cluster of ``cluster.instance`` or ``cluster.file``; None where neither is set.

    Its price is that of its kind of rental (``cluster.capacity``), or the recipe's. Where
    ``cluster.devices`` asks for fewer devices than a node has, the others are idle.

    Raises:
        RequestError: It is not known, cannot be, or has fewer devices than are asked for.
    """
    if settings.instance is not None:
        machine = instance(settings.instance)
        rate = rate_of(machine, (settings.capacity or "on-demand").partition(":")[0])
        cluster = replace(
            cluster_of(machine, settings.nodes),
            usd_per_node_hour=rate.usd_per_hour,
            price_source=rate.source,
        )
    elif settings.file is not None:
        cluster = read_cluster_file(Path(settings.file), settings.nodes)
    else:
        return None
    if settings.usd_per_node_hour is not None:
        cluster = replace(
            cluster,
            usd_per_node_hour=settings.usd_per_node_hour,
            price_source="cluster.usd_per_node_hour",
        )
    devices = settings.devices
    if settings.device == "cpu" or devices in ("auto", cluster.devices_per_node):
        return cluster
    assert isinstance(devices, int)
    if devices > cluster.devices_per_node:
        raise RequestError(
            f"cluster.devices={devices} but a node of {cluster.name} has "
            f"{cluster.devices_per_node} x {cluster.accelerator.name}. Each rank needs a device of "
            f"its own. Use at most {cluster.devices_per_node}, or more cluster.nodes."
        )
    return replace(cluster, devices_per_node=devices)


def devices_of_node(settings: schema.Cluster) -> int | None:
    """Ranks of a node, where the recipe says it without a look at the machine."""
    if settings.devices != "auto":
        return settings.devices
    if settings.device == "cpu":
        return 1
    try:
        chosen = chosen_cluster(settings)
    except RequestError:
        return None  # another check says what is wrong with it
    return None if chosen is None else chosen.devices_per_node


def joined_cluster(recipe: schema.Recipe) -> ClusterHardware | None:
    """Return the cluster of ``chosen_cluster``, with the network that ``launch`` requests.

    Raises:
        RequestError: As ``chosen_cluster``.
    """
    cluster, asked = chosen_cluster(recipe.cluster), recipe.launch.kubernetes.efa
    if cluster is None or recipe.cluster.instance is None or asked == "auto":
        return cluster
    machine = instance(recipe.cluster.instance)
    return cluster if asked >= machine.efa_count else with_efa(cluster, machine, asked)
