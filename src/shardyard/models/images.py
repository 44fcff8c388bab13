"""Networks that classify images, as transformers defines them."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification

from shardyard.families.images.network import ImageNetwork
from shardyard.families.images.registry import KINDS


def network_config(network: ImageNetwork) -> Any:
    """transformers' config of a network."""
    content = {key: value for key, value in network.config.items() if key != "model_type"}
    labels = {number: f"LABEL_{number}" for number in range(network.num_classes)}
    return AutoConfig.for_model(
        network.model_type,
        **content,
        id2label=labels,
        label2id={label: number for number, label in labels.items()},
    )


def build_network(network: ImageNetwork) -> nn.Module:
    """A network in fp32, its weights drawn from torch's generator."""
    config = network_config(network)
    built: nn.Module = AutoModelForImageClassification.from_config(config, dtype=torch.float32)
    return built


def blocks_of_network(model: nn.Module, network: ImageNetwork) -> dict[str, nn.Module]:
    """What is recomputed, compiled and sharded one by one, by full name."""
    kind = KINDS[network.model_type].block_class
    return {name: each for name, each in model.named_modules() if type(each).__name__ == kind}
