"""ResNet: He et al., arXiv:1512.03385, with the stride in the 3x3 convolution (version 1.5)."""

from collections.abc import Mapping
from typing import Any

from shardyard.families.images.network import (
    ImageKind,
    ImageNetwork,
    network_of,
    refuse_other_values,
)

MODEL_TYPE = "resnet"
SIZE = 224

_BASIC, _BOTTLENECK = (64, 128, 256, 512), (256, 512, 1024, 2048)


def _network(
    layer_type: str,
    widths: tuple[int, ...],
    depths: tuple[int, ...],
    *,
    stem: int = 64,
    size: int = SIZE,
) -> ImageNetwork:
    config = {
        "model_type": MODEL_TYPE,
        "layer_type": layer_type,
        "embedding_size": stem,
        "hidden_sizes": list(widths),
        "depths": list(depths),
        "hidden_act": "relu",
        "num_channels": 3,
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    }
    return _of_config(config, "a preset").with_classes(1000).at_size(size)


def _of_config(config: Mapping[str, Any], source: str) -> ImageNetwork:
    refuse_other_values(
        config, source, {"layer_type": ("bottleneck", "basic"), "num_channels": (3,)}
    )
    momentum = 0.1  # torch's own, which no config.json says
    return network_of(MODEL_TYPE, config, source, size=SIZE, batch_norm_momentum=momentum)


RESNET = ImageKind(
    model_type=MODEL_TYPE,
    weights="fan_out",
    is_head_by_inputs=True,
    presets={
        # not published: for images of 32 pixels, in seconds on a CPU
        "resnet-tiny": _network("basic", (32, 64, 128), (1, 1, 1), stem=32, size=32),
        "resnet18": _network("basic", _BASIC, (2, 2, 2, 2)),
        "resnet34": _network("basic", _BASIC, (3, 4, 6, 3)),
        "resnet50": _network("bottleneck", _BOTTLENECK, (3, 4, 6, 3)),
        "resnet101": _network("bottleneck", _BOTTLENECK, (3, 4, 23, 3)),
        "resnet152": _network("bottleneck", _BOTTLENECK, (3, 8, 36, 3)),
    },
    block_classes=("ResNetBasicLayer", "ResNetBottleNeckLayer"),
    branches=("layer",),
    last_norm="layer.-1.normalization",
    of_config=_of_config,
)
