"""Networks for images: their presets, and what a config.json means."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from shardyard.errors import RequestError
from shardyard.families.images.registry import IMAGE_PRESETS, KINDS
from shardyard.models.images import (
    blocks_of_network,
    build_network,
    fill_network,
    network_config,
)

PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "efficientnet-b0": 5_288_548,
    "efficientnet-b1": 7_794_184,
    "efficientnet-b2": 9_109_994,
    "efficientnet-b3": 12_233_232,
    "efficientnet-b4": 19_341_616,
    "efficientnet-b5": 30_389_784,
    "efficientnet-b6": 43_040_704,
    "efficientnet-b7": 66_347_960,
    "vit-b16": 86_567_656,
}
"""Parameters. Source: torchvision's table of weights,
https://docs.pytorch.org/vision/stable/models.html."""

TINY: dict[str, dict[str, Any]] = {
    "resnet": {
        "layer_type": "basic", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2],
    },
    "efficientnet": {
        "image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320,
    },
    "vit": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "image_size": 32, "patch_size": 8,
    },
}  # fmt: skip


def tiny(kind: str, classes: int = 4) -> nn.Module:
    network = KINDS[kind].of_config({"model_type": kind, **TINY[kind]}, "tiny")
    return build_network(network.with_classes(classes))


def test_every_published_network_is_there() -> None:
    assert set(PUBLISHED) == set(IMAGE_PRESETS) - {"resnet-tiny"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.heavy if count > 9e6 else ())
        for name, count in PUBLISHED.items()
    ],
)
def test_a_preset_has_as_many_parameters_as_torchvisions(name: str) -> None:
    with torch.device("meta"):
        model = build_network(IMAGE_PRESETS[name])
    assert sum(param.numel() for param in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_comes_out_as_it_went_in(kind: str, tmp_path: Path) -> None:
    names = {0: "cat", 1: "dog", 2: "hen"}
    labels = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    AutoConfig.for_model(kind, **TINY[kind], **labels).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    network = KINDS[kind].of_config(written, "config.json")
    assert network.num_classes == 3
    assert {**network.config, "id2label": written["id2label"]} == {
        key: value for key, value in written.items() if key != "label2id"
    }
    ours = network_config(network).to_dict()
    theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
    differing = {key for key in theirs if ours.get(key) != theirs[key]}
    # the names of classes are the data's
    assert differing <= {"id2label", "label2id", "_name_or_path"}


@pytest.mark.parametrize(
    ("kind", "key", "value", "words"),
    [
        ("resnet", "layer_type", "dense", "layer_type='dense' is not built"),
        ("resnet", "num_channels", 1, "num_channels=1 is not built. Use a network with num_channe"),
        ("efficientnet", "pooling_type", "max", "Use a network with pooling_type=mean."),
        ("efficientnet", "image_size", [224, 160], r"image_size=\[224, 160\] is not a square"),
        ("vit", "hidden_dropout_prob", 0.1, "hidden_dropout_prob=0.1 is not built"),
        ("vit", "attention_probs_dropout_prob", 0.1, "with attention_probs_dropout_prob=0.0"),
    ],
)
def test_what_is_not_built_is_refused(kind: str, key: str, value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        KINDS[kind].of_config({"model_type": kind, **TINY[kind], key: value}, "config.json")


def test_a_config_without_classes_has_the_two_of_transformers() -> None:
    network = KINDS["resnet"].of_config({"model_type": "resnet", **TINY["resnet"]}, "config.json")
    assert network.num_classes == 2


@pytest.mark.parametrize("kind", KINDS)
def test_weights_begin_as_published_whatever_was_drawn_before(kind: str) -> None:
    network = KINDS[kind].of_config({"model_type": kind, **TINY[kind]}, "tiny").with_classes(4)
    first, second = tiny(kind), tiny(kind)
    for model in (first, second):
        torch.rand(7)
        for param in model.parameters():
            nn.init.constant_(param, torch.nan)
        fill_network(model, network, seed=5)
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.isfinite(one).all() and torch.equal(one, other), name
    assert len(blocks_of_network(first, network)) >= 2
    for name, module in first.named_modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 1000:
            out = module.kernel_size[0] ** 2 * module.out_channels / module.groups
            std = 0.88 * 0.02 if kind == "vit" else (2 / out) ** 0.5
            assert float(module.weight.detach().std()) == pytest.approx(std, rel=0.1), name
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            assert (module.weight == 1).all() and (module.bias == 0).all(), name


def test_the_last_norm_of_each_branch_may_begin_at_zero() -> None:
    network = KINDS["resnet"].of_config({"model_type": "resnet", **TINY["resnet"]}, "tiny")
    model = build_network(network)
    fill_network(model, network, seed=0, zero_last_norm=True)
    zero = [name for name, param in model.named_parameters() if not param.any()]
    weights = [name for name in zero if name.endswith("weight")]
    assert [name.split("resnet.encoder.")[1] for name in weights] == [
        "stages.0.layers.0.layer.1.normalization.weight",
        "stages.1.layers.0.layer.1.normalization.weight",
        "stages.1.layers.1.layer.1.normalization.weight",
    ]
