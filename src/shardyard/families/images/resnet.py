"""ResNet: He et al., arXiv:1512.03385, with the stride in the 3x3 convolution (version 1.5)."""

from collections.abc import Mapping
from typing import Any

from shardyard.families.images.network import (
    ImageKind,
    ImageNetwork,
    check_supported_values,
    network_of,
)
from shardyard.families.images.operators import Operator, Tower

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
    check_supported_values(
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


# ResNet as a table of operators, from the numbers of its config.json.
#
# He et al. 2016, arXiv:1512.03385, table 1, with the stride of a bottleneck in its 3x3 convolution
# (v1.5, as torchvision and NVIDIA train it) unless ``downsample_in_bottleneck`` says otherwise.

_REDUCTION = 4
"""Width of a bottleneck's outside against its inside (transformers' ResNetBottleNeckLayer)."""

Conv = tuple[int, int, int]
"""Channels, kernel and stride."""


def resnet_operators(
    config: Mapping[str, Any], *, size: int, num_classes: int
) -> tuple[Operator, ...]:
    """All operators, in the order of the forward pass.

    Args:
        config: Content of config.json, with transformers' names.
        size: Pixels on a side.
    """
    tower = Tower(size, config["num_channels"])
    tower.conv("stem.conv", config["embedding_size"], 7, stride=2)
    tower.norm("stem.norm", saved=False)  # ReLU keeps its result
    tower.act("stem.act")
    tower.max_pool("stem.pool")
    is_first_strided = config["downsample_in_first_stage"]
    for stage, (width, depth) in enumerate(
        zip(config["hidden_sizes"], config["depths"], strict=True)
    ):
        for index in range(depth):
            stride = 2 if not index and (stage or is_first_strided) else 1
            with tower.block(f"stage{stage + 1}.block{index + 1}"):
                _residual_block(tower, _branch(config, width, stride))
    tower.classifier(num_classes)
    return tuple(tower.operators)


def _branch(config: Mapping[str, Any], width: int, stride: int) -> tuple[Conv, ...]:
    if config["layer_type"] == "basic":
        return (width, 3, stride), (width, 3, 1)
    inside = width // _REDUCTION
    early, late = (stride, 1) if config["downsample_in_bottleneck"] else (1, stride)
    return (inside, 1, early), (inside, 3, late), (width, 1, 1)


def _residual_block(tower: Tower, convs: tuple[Conv, ...]) -> None:
    """Add convolutions next to a shortcut, which is projected where shapes differ."""
    size, channels = tower.size, tower.channels
    stride = max(conv[2] for conv in convs)
    width = convs[-1][0]
    if stride > 1 or channels != width:
        tower.conv("shortcut.conv", width, 1, stride=stride)
        tower.norm("shortcut.norm", saved=False)
        tower.size, tower.channels = size, channels
    for index, (outputs, kernel, step) in enumerate(convs, start=1):
        tower.conv(f"conv{index}", outputs, kernel, stride=step)
        tower.norm(f"norm{index}", saved=False)
        if index < len(convs):
            tower.act(f"act{index}")
    tower.add("add", saved=False)
    tower.act("act")
