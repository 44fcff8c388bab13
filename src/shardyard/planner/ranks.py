"""Placement of ranks on nodes, devices and axes, as training will have it.

By the shapes that ``parallel/mesh.py`` builds the meshes of (``config/layout.py``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from shardyard.config.layout import Layout, Shape, context_shape, dense_shape, expert_shape


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of a layout: its ranks are split into groups of ``degree``, ``stride`` apart."""

    name: str
    """Name as in settings; with cp ``dp_shard x cp``, over both of which parameters are split."""
    degree: int
    stride: int

    def coordinate(self, rank: int) -> int:
        """Return the place of a rank in its group, from 0."""
        return rank // self.stride % self.degree

    def group(self, rank: int) -> int:
        """Return the group of a rank; groups count by their first rank."""
        return rank // (self.stride * self.degree) * self.stride + rank % self.stride

    def ranks(self, group: int) -> range:
        """The ranks of a group, in the order of their places."""
        first = group // self.stride * self.stride * self.degree + group % self.stride
        return range(first, first + self.stride * self.degree, self.stride)


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """All ranks of a layout: on which node and device each is, and where on each axis."""

    layout: Layout
    devices_per_node: int

    @property
    def count(self) -> int:
        """All of them."""
        return self.layout.world_size

    @property
    def nodes(self) -> int:
        """Count of the nodes that hold the ranks."""
        return -(-self.count // self.devices_per_node)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Axes that are split, the slowest first."""
        layout = self.layout
        dense, experts = dense_shape(layout), expert_shape(layout)
        shards = "dp_shard x cp" if layout.cp > 1 else "dp_shard"
        found = [_axis(dense, "pp"), _axis(dense, "dp_replicate"), _axis(dense, "fsdp", shards)]
        found.append(_axis(context_shape(layout), "cp"))
        if layout.ep > 1:
            # ep takes its ranks from those that split a copy, so it is an axis of another mesh.
            found += [_axis(experts, "expert_shard"), _axis(experts, "ep")]
        found.append(_axis(dense, "tp"))
        return tuple(axis for axis in found if axis.degree > 1)

    def node(self, rank: int) -> int:
        """The node that a rank is on, from 0."""
        return rank // self.devices_per_node

    def device(self, rank: int) -> int:
        """The device of its node that a rank computes on, from 0."""
        return rank % self.devices_per_node

    def on_node(self, node: int) -> range:
        """The ranks of a node."""
        first = node * self.devices_per_node
        return range(first, min(first + self.devices_per_node, self.count))

    def nodes_of(self, axis: Axis) -> int:
        """Most nodes that one group of an axis is on."""
        each, block = self.devices_per_node, axis.stride * axis.degree
        # Members are at least a node apart, so each is on a node of its own.
        if axis.stride >= each:
            return axis.degree
        # After this many blocks, groups begin at the same places in a node again.
        blocks = min(each, self.count // block)
        firsts = (b * block + first for b in range(blocks) for first in range(axis.stride))
        reach = block - axis.stride
        return max((first + reach) // each - first // each + 1 for first in firsts)

    def to_json(self) -> Iterator[dict[str, Any]]:
        """One object a rank: its node and device, its group and place on each split axis."""
        axes = self.axes
        for rank in range(self.count):
            yield {
                "rank": rank,
                "node": self.node(rank),
                "device": self.device(rank),
                "axes": {
                    axis.name: {"group": axis.group(rank), "place": axis.coordinate(rank)}
                    for axis in axes
                },
            }


def _axis(shape: Shape, name: str, called: str = "") -> Axis:
    degrees = list(shape.values())
    after = list(shape).index(name) + 1
    # The last axis varies fastest, as in torch's DeviceMesh.
    return Axis(name=called or name, degree=shape[name], stride=prod(degrees[after:]))
