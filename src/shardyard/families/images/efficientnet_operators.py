"""EfficientNet as a table of operators, from the numbers of its config.json.

Tan & Le 2019, arXiv:1905.11946, table 1, scaled as in section 3.3; squeeze-and-excitation at a
quarter of a block's input; widths are rounded as in the authors' code (tensorflow/tpu,
models/official/efficientnet/efficientnet_model.py, round_filters).
"""

import math
from collections.abc import Mapping
from typing import Any

from shardyard.families.images.operators import Operator, Tower

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
    tower.norm("depthwise.norm", kept=True)  # SiLU needs its input
    tower.act("depthwise.act")
    tower.squeeze_excite("se", max(1, int(inputs * squeeze)))
    tower.conv("project.conv", channels, 1)
    tower.norm("project.norm", kept=is_first)
    if not is_first:
        tower.add("add", kept=True)


def _conv_norm_act(tower: Tower, name: str, channels: int, kernel: int, *, stride: int = 1) -> None:
    tower.conv(f"{name}.conv", channels, kernel, stride=stride)
    tower.norm(f"{name}.norm", kept=True)  # SiLU needs its input
    tower.act(f"{name}.act")


def _rounded(config: Mapping[str, Any], channels: int) -> int:
    """Scaled, to a multiple of the divisor, and never down by more than a tenth."""
    divisor, scaled = config["depth_divisor"], channels * config["width_coefficient"]
    nearest: int = max(divisor, int(scaled + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * scaled else nearest
