"""The kinds of networks that classify images, and their presets."""

from collections.abc import Mapping
from typing import Any

from shardyard.families.images.efficientnet import EFFICIENTNET
from shardyard.families.images.network import ImageKind, ImageNetwork
from shardyard.families.images.resnet import RESNET
from shardyard.families.images.vit import VIT

KINDS: dict[str, ImageKind] = {kind.model_type: kind for kind in (RESNET, EFFICIENTNET, VIT)}
"""``model_type`` of config.json -> kind."""

IMAGE_PRESETS: Mapping[str, ImageNetwork] = {
    name: network for kind in KINDS.values() for name, network in kind.presets.items()
}
"""``model.preset`` -> network."""


def is_image_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a network that classifies images."""
    return config.get("model_type") in KINDS
