"""EfficientNet: Tan and Le, arXiv:1905.11946, table 1 and compound scaling.

Sizes and dropout of the eight are those of the authors' code (tensorflow/tpu,
models/official/efficientnet/efficientnet_builder.py); ``depthwise_padding`` is transformers' own,
of its conversion script: blocks whose input has an odd size, at the size that a preset is for.
"""

import math
from collections.abc import Mapping
from typing import Any

from shardyard.families.images.network import (
    ImageKind,
    ImageNetwork,
    check_supported_values,
    network_of,
)
from shardyard.families.images.operators import Operator, Tower

MODEL_TYPE = "efficientnet"

_DIVISOR = 8
_FEATURES = 1280


def _network(
    width: float, depth: float, size: int, dropout: float, padded: tuple[int, ...] = ()
) -> ImageNetwork:
    features = max(_DIVISOR, int(_FEATURES * width + _DIVISOR / 2) // _DIVISOR * _DIVISOR)
    config = {
        "model_type": MODEL_TYPE,
        "num_channels": 3,
        "image_size": size,
        "width_coefficient": width,
        "depth_coefficient": depth,
        "depth_divisor": _DIVISOR,
        "kernel_sizes": [3, 3, 5, 3, 5, 5, 3],
        "in_channels": [32, 16, 24, 40, 80, 112, 192],
        "out_channels": [16, 24, 40, 80, 112, 192, 320],
        "depthwise_padding": list(padded),
        "strides": [1, 2, 2, 2, 1, 2, 1],
        "num_block_repeats": [1, 2, 2, 3, 3, 4, 1],
        "expand_ratios": [1, 6, 6, 6, 6, 6, 6],
        "squeeze_expansion_ratio": 0.25,
        "hidden_act": "swish",
        "hidden_dim": features,
        "pooling_type": "mean",
        "initializer_range": 0.02,
        "batch_norm_eps": 0.001,
        "batch_norm_momentum": 0.99,
        "dropout_rate": dropout,
        "drop_connect_rate": 0.2,
    }
    return _of_config(config, "a preset").with_classes(1000)


def _of_config(config: Mapping[str, Any], source: str) -> ImageNetwork:
    check_supported_values(config, source, {"pooling_type": ("mean",), "num_channels": (3,)})
    return network_of(
        MODEL_TYPE,
        config,
        source,
        size=config.get("image_size", 600),
        # in transformers the share of the past that stays, as TensorFlow has it; torch's is the
        # share of the new
        batch_norm_momentum=round(1.0 - config.get("batch_norm_momentum", 0.99), 10),
        dropout=config.get("dropout_rate", 0.5),
        drop_path=config.get("drop_connect_rate", 0.2),
    )


EFFICIENTNET = ImageKind(
    model_type=MODEL_TYPE,
    weights="fan_out",
    presets={
        "efficientnet-b0": _network(1.0, 1.0, 224, 0.2),
        "efficientnet-b1": _network(1.0, 1.1, 240, 0.2, (16,)),
        "efficientnet-b2": _network(1.1, 1.2, 260, 0.3, (5, 8, 16)),
        "efficientnet-b3": _network(1.2, 1.4, 300, 0.3, (5, 18)),
        "efficientnet-b4": _network(1.4, 1.8, 380, 0.4, (6,)),
        "efficientnet-b5": _network(1.6, 2.2, 456, 0.4, (13, 27)),
        "efficientnet-b6": _network(1.8, 2.6, 528, 0.5, (31,)),
        "efficientnet-b7": _network(2.0, 3.1, 600, 0.5, (18,)),
    },
    block_classes=("EfficientNetBlock",),
    branches=("projection.dropout",),
    of_config=_of_config,
)


# EfficientNet as a table of operators, from the numbers of its config.json.
#
# Tan & Le 2019, arXiv:1905.11946, table 1, scaled as in section 3.3; squeeze-and-excitation at a
# quarter of a block's input; widths are rounded as in the authors' code (tensorflow/tpu,
# models/official/efficientnet/efficientnet_model.py, round_filters).

_STEM, _HEAD = 32, 1280
"""Channels of the first and the last convolution, before scaling."""


def efficientnet_operators(
    config: Mapping[str, Any], *, size: int, num_classes: int
) -> tuple[Operator, ...]:
    """All operators, in the order of the forward pass.

    Args:
        config: Content of config.json, with transformers' names.
        size: Pixels on a side.
    """
    tower = Tower(size, config["num_channels"])
    _conv_norm_act(tower, "stem", _rounded(config, _STEM), 3, stride=2)
    stages = zip(
        config["out_channels"], config["kernel_sizes"], config["strides"],
        config["expand_ratios"], config["num_block_repeats"], strict=True,
    )  # fmt: skip
    for stage, (channels, kernel, first_stride, expansion, repeats) in enumerate(stages, start=1):
        for index in range(math.ceil(repeats * config["depth_coefficient"])):
            with tower.block(f"stage{stage}.block{index + 1}"):
                _mbconv(
                    tower, _rounded(config, channels), kernel, expansion=expansion,
                    stride=1 if index else first_stride, is_first=not index,
                    squeeze=config["squeeze_expansion_ratio"],
                )  # fmt: skip
    _conv_norm_act(tower, "head", _rounded(config, _HEAD), 1)
    tower.classifier(num_classes)
    return tuple(tower.operators)


def _mbconv(
    tower: Tower, channels: int, kernel: int, *, expansion: int, stride: int, is_first: bool,
    squeeze: float,
) -> None:  # fmt: skip
    """Expand, filter each channel, weigh channels, project."""
    inputs = tower.channels
    if expansion > 1:
        _conv_norm_act(tower, "expand", expansion * inputs, 1)
    tower.depthwise("depthwise.conv", kernel, stride=stride)
    tower.norm("depthwise.norm", saved=True)  # SiLU needs its input
    tower.act("depthwise.act")
    tower.squeeze_excite("se", max(1, int(inputs * squeeze)))
    tower.conv("project.conv", channels, 1)
    tower.norm("project.norm", saved=is_first)
    if not is_first:
        tower.add("add", saved=True)


def _conv_norm_act(tower: Tower, name: str, channels: int, kernel: int, *, stride: int = 1) -> None:
    tower.conv(f"{name}.conv", channels, kernel, stride=stride)
    tower.norm(f"{name}.norm", saved=True)  # SiLU needs its input
    tower.act(f"{name}.act")


def _rounded(config: Mapping[str, Any], channels: int) -> int:
    """Scaled, to a multiple of the divisor, and never down by more than a tenth."""
    divisor, scaled = config["depth_divisor"], channels * config["width_coefficient"]
    nearest: int = max(divisor, int(scaled + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * scaled else nearest
