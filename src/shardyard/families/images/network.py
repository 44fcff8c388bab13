"""What is known of a network that classifies images, before it is built."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for resolved.json and fingerprints."""
        return asdict(self)

    def with_classes(self, num_classes: int) -> "ImageNetwork":
        """The same with a head for so many classes."""
        return replace(self, num_classes=num_classes)


@dataclass(frozen=True, kw_only=True)
class ImageKind:
    """One kind of network: a file beside this one, and a row of ``registry.KINDS``."""

    model_type: str
    presets: Mapping[str, ImageNetwork]
    """As they were published, of ImageNet's 1,000 classes."""
    block_class: str
    """transformers' class of its blocks: recomputed, compiled and sharded one by one."""
    of_config: Callable[[Mapping[str, Any], str], ImageNetwork]
    """From a config.json and what messages call it; raises a RequestError for what is not built."""
