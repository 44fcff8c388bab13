"""The kinds of networks that classify images: their presets, and the operators of any network."""

from collections.abc import Callable, Mapping
from typing import Any

from shardyard.families.images.efficientnet import EFFICIENTNET, efficientnet_operators
from shardyard.families.images.network import ImageKind, ImageNetwork
from shardyard.families.images.operators import Operator
from shardyard.families.images.resnet import RESNET, resnet_operators
from shardyard.families.images.vit import VIT, vit_operators

KINDS: dict[str, ImageKind] = {kind.model_type: kind for kind in (RESNET, EFFICIENTNET, VIT)}
"""``model_type`` of config.json -> kind."""

IMAGE_PRESETS: Mapping[str, ImageNetwork] = {
    name: network for kind in KINDS.values() for name, network in kind.presets.items()
}
"""``model.preset`` -> network."""

_TABLES: dict[str, Callable[..., tuple[Operator, ...]]] = {
    "resnet": resnet_operators,
    "efficientnet": efficientnet_operators,
    "vit": vit_operators,
}
"""``model_type`` -> function that lists the operators of a network."""


def is_image_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a network that classifies images."""
    return config.get("model_type") in KINDS


def operators_of(network: ImageNetwork) -> tuple[Operator, ...]:
    """All operators of a network, in the order of the forward pass."""
    return _TABLES[network.model_type](
        network.config, size=network.size, num_classes=network.num_classes
    )
