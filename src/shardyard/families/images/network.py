"""Description of a network that classifies images, before it is built."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from shardyard.errors import RequestError
from shardyard.families.images.class_names import outputs_in

_CLASSES = ("id2label", "label2id", "num_labels", "_num_labels")
"""Keys of a config.json that say its classes."""


@dataclass(frozen=True, kw_only=True)
class ImageNetwork:
    """A network as transformers describes it, for images of one size."""

    model_type: str
    """Its kind: a name of ``registry.KINDS``."""
    config: Mapping[str, Any]
    """Content of its config.json, without its classes."""
    num_classes: int
    size: int
    """Pixels on a side of an image."""
    batch_norm_momentum: float | None = None
    """Share of a step in running statistics, as torch counts it; None: it has no such norms."""
    dropout: float = 0.0
    """Dropout of the features that its head reads."""
    drop_path: float = 0.0
    """Share of samples that lose the branch of its last block."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for resolved.json and fingerprints."""
        return asdict(self)

    def with_classes(self, num_classes: int) -> "ImageNetwork":
        """The same with a head for so many classes."""
        return replace(self, num_classes=num_classes)

    def at_size(self, size: int) -> "ImageNetwork":
        """The same for images of another size."""
        config = dict(self.config)
        if "image_size" in config:
            config["image_size"] = size
        return replace(self, size=size, config=config)


@dataclass(frozen=True, kw_only=True)
class ImageKind:
    """One kind of network: a file next to this one, and a row of ``registry.KINDS``."""

    model_type: str
    presets: Mapping[str, ImageNetwork]
    """Published networks, for ImageNet's 1,000 classes."""
    block_classes: Sequence[str]
    """transformers' classes of its blocks: recomputed, compiled and sharded one by one."""
    branches: Sequence[str]
    """Modules of a block whose output is added to what came in; drop_path drops it."""
    of_config: Callable[[Mapping[str, Any], str], ImageNetwork]
    """From a config.json and what messages call it; raises a RequestError for what is not built."""
    weights: Literal["fan_out", "truncated_normal"]
    """Distribution of initial weights.

    Either normal, by the outputs of a convolution (He et al., arXiv:1502.01852). Or normal, cut
    at two standard deviations, all of one scale (arXiv:2010.11929).
    """
    is_head_by_inputs: bool = False
    """Whether the head is drawn by what goes in, its bias too, as torch does it."""
    has_positions: bool = False
    """Whether a table of positions follows the size of images, so that weights are of one size."""
    last_norm: str | None = None
    """The last batch normalisation of a branch, which may begin at zero."""


def network_of(
    model_type: str, config: Mapping[str, Any], source: str, *, size: Any, **fields: float
) -> ImageNetwork:
    """The network of a config.json.

    Args:
        size: As it says it: a number, or two that are equal.
        fields: Other fields of ``ImageNetwork``.

    Raises:
        RequestError: It is for images that are no squares.
    """
    sides = set(size) if isinstance(size, list | tuple) else {size}
    if len(sides) != 1 or not isinstance(next(iter(sides)), int):
        raise RequestError(
            f"{source}: image_size={size} is not a square, but pictures are cut to squares here. "
            "Use a network for squares."
        )
    return ImageNetwork(
        model_type=model_type,
        config={key: value for key, value in config.items() if key not in _CLASSES},
        num_classes=outputs_in(config),
        size=next(iter(sides)),
        **fields,
    )


def check_supported_values(
    config: Mapping[str, Any], source: str, built: Mapping[str, Sequence[Any]]
) -> None:
    """Reject a config.json that needs parts that are not built.

    Args:
        built: Key -> the values that are; a missing key has the first of them.

    Raises:
        RequestError: It has another value.
    """
    for key, values in built.items():
        if config.get(key, values[0]) not in values:
            named = " or ".join(map(str, values))
            raise RequestError(
                f"{source}: {key}={config[key]!r} is not built. Use a network with {key}={named}."
            )
