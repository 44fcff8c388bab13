"""Tables of operators against published counts."""

from typing import Any

import pytest

from shardyard.families.images.efficientnet import efficientnet_operators
from shardyard.families.images.operators import Operator
from shardyard.families.images.resnet import resnet_operators
from shardyard.families.images.vit import vit_operators


def resnet(depths: list[int], kind: str, size: int = 224, **changes: Any) -> tuple[Operator, ...]:
    widths = [64, 128, 256, 512] if kind == "basic" else [256, 512, 1024, 2048]
    config = {
        "num_channels": 3, "embedding_size": 64, "hidden_sizes": widths, "depths": depths,
        "layer_type": kind, "downsample_in_first_stage": False, "downsample_in_bottleneck": False,
    }  # fmt: skip
    return resnet_operators({**config, **changes}, size=size, num_classes=1000)


def efficientnet(width: float, depth: float, size: int) -> tuple[Operator, ...]:
    config = {
        "num_channels": 3, "width_coefficient": width, "depth_coefficient": depth,
        "depth_divisor": 8, "kernel_sizes": [3, 3, 5, 3, 5, 5, 3],
        "out_channels": [16, 24, 40, 80, 112, 192, 320], "strides": [1, 2, 2, 2, 1, 2, 1],
        "num_block_repeats": [1, 2, 2, 3, 3, 4, 1], "expand_ratios": [1, 6, 6, 6, 6, 6, 6],
        "squeeze_expansion_ratio": 0.25,
    }  # fmt: skip
    return efficientnet_operators(config, size=size, num_classes=1000)


def vit(size: int = 224) -> tuple[Operator, ...]:
    config = {
        "num_channels": 3, "hidden_size": 768, "patch_size": 16, "num_hidden_layers": 12,
        "intermediate_size": 3072, "qkv_bias": True,
    }  # fmt: skip
    return vit_operators(config, size=size, num_classes=1000)


# Parameters and multiply-adds (G) as torchvision's weights state them ("num_params", "_ops";
# github.com/pytorch/vision, torchvision/models/resnet.py, efficientnet.py and
# vision_transformer.py). It crops B2 to 288.
PUBLISHED = [
    (resnet([2, 2, 2, 2], "basic"), 11_689_512, 1.814),
    (resnet([3, 4, 6, 3], "basic"), 21_797_672, 3.664),
    (resnet([3, 4, 6, 3], "bottleneck"), 25_557_032, 4.089),
    (resnet([3, 4, 23, 3], "bottleneck"), 44_549_160, 7.801),
    (resnet([3, 8, 36, 3], "bottleneck"), 60_192_808, 11.514),
    (efficientnet(1.0, 1.0, 224), 5_288_548, 0.386),
    (efficientnet(1.0, 1.1, 240), 7_794_184, 0.687),
    (efficientnet(1.1, 1.2, 288), 9_109_994, 1.088),
    (efficientnet(1.2, 1.4, 300), 12_233_232, 1.827),
    (efficientnet(1.4, 1.8, 380), 19_341_616, 4.394),
    (efficientnet(1.6, 2.2, 456), 30_389_784, 10.266),
    (efficientnet(1.8, 2.6, 528), 43_040_704, 19.068),
    (efficientnet(2.0, 3.1, 600), 66_347_960, 37.746),
    (vit(), 86_567_656, 17.564),
]


@pytest.mark.parametrize(("operators", "parameters", "giga_macs"), PUBLISHED)
def test_a_table_has_the_published_size_and_work(
    operators: tuple[Operator, ...], parameters: int, giga_macs: float
) -> None:
    assert sum(row.parameters for row in operators) == parameters
    assert sum(row.flops for row in operators) / 2e9 == pytest.approx(giga_macs, abs=0.0006)


def test_more_pixels_are_more_work_and_no_more_parameters() -> None:
    small, large = resnet([3, 4, 6, 3], "bottleneck"), resnet([3, 4, 6, 3], "bottleneck", size=448)
    assert sum(row.flops for row in large) > 3.9 * sum(row.flops for row in small)
    assert sum(row.parameters for row in large) == sum(row.parameters for row in small)


def test_settings_of_a_resnet_move_its_strides() -> None:
    usual = sum(row.flops for row in resnet([3, 4, 6, 3], "bottleneck"))
    early = resnet([3, 4, 6, 3], "bottleneck", downsample_in_bottleneck=True)
    strided = resnet([3, 4, 6, 3], "bottleneck", downsample_in_first_stage=True)
    assert sum(row.flops for row in early) < 0.96 * usual  # v1, 3.8 G (He et al. 2016, table 1)
    assert sum(row.flops for row in strided) < 0.4 * usual


def test_blocks_are_named_and_the_first_operator_reads_the_image() -> None:
    for operators, blocks in ((resnet([3, 4, 6, 3], "bottleneck"), 16), (vit(), 12)):
        assert len({row.block for row in operators} - {""}) == blocks
        assert [row.is_first for row in operators] == [True] + [False] * (len(operators) - 1)
