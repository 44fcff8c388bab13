"""The operators of any network for images, by the type in its config.json."""

from collections.abc import Callable

from shardyard.families.images.efficientnet import efficientnet_operators
from shardyard.families.images.network import ImageNetwork
from shardyard.families.images.operators import Operator
from shardyard.families.images.resnet import resnet_operators
from shardyard.families.images.vit import vit_operators

_TABLES: dict[str, Callable[..., tuple[Operator, ...]]] = {
    "resnet": resnet_operators,
    "efficientnet": efficientnet_operators,
    "vit": vit_operators,
}


def operators_of(network: ImageNetwork) -> tuple[Operator, ...]:
    """All operators of a network, in the order of the forward pass."""
    return _TABLES[network.model_type](
        network.config, size=network.size, num_classes=network.num_classes
    )
