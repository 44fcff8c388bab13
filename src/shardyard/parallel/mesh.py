"""The device mesh: which rank is where on each axis."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardyard.config.legality import Layout


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """A mesh with the axes dp_replicate and dp_shard; neighbours in rank share dp_shard.

    Ranks of a node are neighbours, so gathers stay inside a node as far as the degree allows and
    only gradients cross nodes.
    """
    return init_device_mesh(
        device_type,
        (layout.dp_replicate, layout.dp_shard),
        mesh_dim_names=("dp_replicate", "dp_shard"),
    )
