"""ResNet as a table of operators, from the numbers of its config.json.

He et al. 2016, arXiv:1512.03385, table 1, with the stride of a bottleneck in its 3x3 convolution
(v1.5, as torchvision and NVIDIA train it) unless ``downsample_in_bottleneck`` says otherwise.
"""

from collections.abc import Mapping
from typing import Any

from shardyard.families.images.operators import Operator, Tower

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
    tower.norm("stem.norm", kept=False)  # ReLU keeps its result
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
    """Convolutions beside a shortcut, which is projected where shapes differ."""
    size, channels = tower.size, tower.channels
    stride = max(conv[2] for conv in convs)
    width = convs[-1][0]
    if stride > 1 or channels != width:
        tower.conv("shortcut.conv", width, 1, stride=stride)
        tower.norm("shortcut.norm", kept=False)
        tower.size, tower.channels = size, channels
    for index, (outputs, kernel, step) in enumerate(convs, start=1):
        tower.conv(f"conv{index}", outputs, kernel, stride=step)
        tower.norm(f"norm{index}", kept=False)
        if index < len(convs):
            tower.act(f"act{index}")
    tower.add("add", kept=False)
    tower.act("act")
