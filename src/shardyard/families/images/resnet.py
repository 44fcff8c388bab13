"""ResNet: He et al., arXiv:1512.03385, with the stride in the 3x3 convolution (version 1.5)."""

from collections.abc import Mapping
from typing import Any

from shardyard.families.images.network import ImageKind, ImageNetwork

MODEL_TYPE = "resnet"
SIZE = 224

_BASIC, _BOTTLENECK = (64, 128, 256, 512), (256, 512, 1024, 2048)


def _network(layer_type: str, widths: tuple[int, ...], depths: tuple[int, ...]) -> ImageNetwork:
    config = {
        "model_type": MODEL_TYPE,
        "layer_type": layer_type,
        "embedding_size": 64,
        "hidden_sizes": list(widths),
        "depths": list(depths),
        "hidden_act": "relu",
        "num_channels": 3,
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    }
    return ImageNetwork(model_type=MODEL_TYPE, config=config, num_classes=1000, size=SIZE)


def _of_config(config: Mapping[str, Any], source: str) -> ImageNetwork:  # noqa: ARG001
    classes = config.get("id2label") or {}
    kept = {key: value for key, value in config.items() if key not in ("id2label", "label2id")}
    return ImageNetwork(
        model_type=MODEL_TYPE, config=kept, num_classes=len(classes) or 1000, size=SIZE
    )


RESNET = ImageKind(
    model_type=MODEL_TYPE,
    presets={
        "resnet18": _network("basic", _BASIC, (2, 2, 2, 2)),
        "resnet34": _network("basic", _BASIC, (3, 4, 6, 3)),
        "resnet50": _network("bottleneck", _BOTTLENECK, (3, 4, 6, 3)),
        "resnet101": _network("bottleneck", _BOTTLENECK, (3, 4, 23, 3)),
        "resnet152": _network("bottleneck", _BOTTLENECK, (3, 8, 36, 3)),
    },
    block_class="ResNetStage",
    of_config=_of_config,
)
