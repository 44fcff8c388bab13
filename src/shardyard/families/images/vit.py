"""Vision Transformer: Dosovitskiy et al., arXiv:2010.11929, without a pooler, as transformers."""

from collections.abc import Mapping
from typing import Any

from shardyard.families.images.network import (
    ImageKind,
    ImageNetwork,
    check_supported_values,
    network_of,
)
from shardyard.families.images.operators import Kind, Operator, Tower

MODEL_TYPE = "vit"


def _of_config(config: Mapping[str, Any], source: str) -> ImageNetwork:
    none = (0.0,)
    check_supported_values(
        config,
        source,
        {"num_channels": (3,), "hidden_dropout_prob": none, "attention_probs_dropout_prob": none},
    )
    return network_of(MODEL_TYPE, config, source, size=config.get("image_size", 224))


_B16 = {
    "model_type": MODEL_TYPE,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-6,  # of the paper's own code; transformers' default is 1e-12
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "qkv_bias": True,
}

VIT = ImageKind(
    model_type=MODEL_TYPE,
    weights="truncated_normal",
    presets={"vit-b16": _of_config(_B16, "a preset").with_classes(1000)},
    block_classes=("ViTLayer",),
    branches=("attention", "mlp"),
    of_config=_of_config,
    has_positions=True,
)


# ViT as a table of operators, from the numbers of its config.json.
#
# Dosovitskiy et al. 2021, arXiv:2010.11929, section 3.1: patches as tokens, a token for the class,
# pre-norm blocks, the class read from its token.


def vit_operators(
    config: Mapping[str, Any], *, size: int, num_classes: int
) -> tuple[Operator, ...]:
    """All operators, in the order of the forward pass.

    Args:
        config: Content of config.json, with transformers' names.
        size: Pixels on a side.
    """
    tower = Tower(size, config["num_channels"])
    hidden, patch = config["hidden_size"], config["patch_size"]
    tower.conv("patches", hidden, patch, stride=patch, bias=True)
    tokens = _Tokens(tower, count=tower.size**2 + 1)
    # the class's own token and all positions are counted with what adds them
    tokens.elementwise(
        "positions", "add", hidden, saved=True, parameters=hidden * (tokens.count + 1)
    )
    for index in range(config["num_hidden_layers"]):
        with tower.block(f"block{index + 1}"):
            _block(tokens, config)
    tokens.norm("norm", hidden)
    tokens.count = 1
    tokens.linear("classifier", num_classes, hidden, saved=True)
    return tuple(tower.operators)


class _Tokens:
    """Rows for a sequence of tokens, pushed onto a tower."""

    def __init__(self, tower: Tower, *, count: int) -> None:
        self.tower, self.count = tower, count

    def linear(
        self, name: str, outputs: int, inputs: int, *, saved: bool, bias: bool = True
    ) -> None:
        """A product on every token."""
        self.tower.push(
            Operator(
                name=name, kind="linear", parameters=inputs * outputs + outputs * bias,
                flops=2 * inputs * outputs * self.count, input_elements=self.count * inputs,
                output_elements=self.count * outputs,
                saved_elements=self.count * outputs if saved else 0,
                matrix=(self.count, outputs, inputs),
            )
        )  # fmt: skip

    def norm(self, name: str, width: int) -> None:
        """Layer normalisation: the products after it need its output."""
        self.elementwise(name, "norm", width, saved=True, parameters=2 * width)

    def elementwise(
        self, name: str, kind: Kind, width: int, *, saved: bool, parameters: int = 0
    ) -> None:
        """An operator that memory bounds."""
        elements = self.count * width
        self.tower.push(
            Operator(
                name=name, kind=kind, parameters=parameters, input_elements=elements,
                output_elements=elements, saved_elements=elements if saved else 0,
            )
        )  # fmt: skip

    def attention(self, width: int) -> None:
        """All pairs of tokens: scores, and their product with the values."""
        self.tower.push(
            Operator(
                name="attention", kind="attention", flops=4 * self.count**2 * width,
                input_elements=3 * self.count * width, output_elements=self.count * width,
                saved_elements=self.count * width,
            )
        )  # fmt: skip


def _block(tokens: _Tokens, config: Mapping[str, Any]) -> None:
    hidden, inside = config["hidden_size"], config["intermediate_size"]
    tokens.norm("norm1", hidden)
    for name in ("query", "key", "value"):
        tokens.linear(name, hidden, hidden, saved=True, bias=config["qkv_bias"])
    tokens.attention(hidden)
    tokens.linear("output", hidden, hidden, saved=False)
    tokens.elementwise("add1", "add", hidden, saved=True)
    tokens.norm("norm2", hidden)
    tokens.linear("up", inside, hidden, saved=True)
    tokens.elementwise("act", "act", inside, saved=True)
    tokens.linear("down", hidden, inside, saved=False)
    tokens.elementwise("add2", "add", hidden, saved=True)
