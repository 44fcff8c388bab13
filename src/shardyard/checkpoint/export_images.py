"""Export of a network for images: a folder that AutoModelForImageClassification opens.

Weights and running statistics are in one file, under the names that transformers' save_pretrained
writes; the classes have the names of the data's; preprocessor_config.json says how held-out
pictures were read.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardyard.checkpoint.buffers import buffers_of
from shardyard.checkpoint.ema import judged_name
from shardyard.checkpoint.export_files import CONFIG, BesideWeights
from shardyard.checkpoint.load import load_tensors, read_shapes
from shardyard.config.image_classes import class_names
from shardyard.config.resolved import Resolved
from shardyard.families.images.network import ImageNetwork
from shardyard.models.images import build_network

PREPROCESSOR = "preprocessor_config.json"

_RESAMPLE = {"bilinear": 2, "bicubic": 3}
"""Numbers of Pillow's ``Image.Resampling``, which transformers writes."""


def beside_network(resolved: Resolved) -> BesideWeights:
    """What is known of an export before it is written: whether classes have their names."""
    warnings: tuple[str, ...] = ()
    if class_names(resolved) is None:
        warnings = (
            f"{resolved.data.dir} is gone, and with it the names of the classes: they are called "
            "LABEL_0 and so on. Bring it back and export anew, or edit id2label in config.json.",
        )
    return BesideWeights(copied={}, config=None, has_own_tokenizer=False, warnings=warnings)


def write_network(
    checkpoint: Path, resolved: Resolved, folder: Path, *, dtype: torch.dtype
) -> None:
    """Write weights, config.json and preprocessor_config.json.

    Raises:
        CheckpointError: The checkpoint cannot be read, or is of another network.
        OSError: The file system refused.
    """
    network = resolved.network
    assert network is not None
    with torch.device("meta"):
        built = build_network(network)
    model: Any = built.to_empty(device="cpu").to(dtype)
    tensors: dict[str, Tensor] = {
        f"model.{name}": param.detach() for name, param in model.named_parameters()
    }
    saved = read_shapes(checkpoint)
    wanted = {**tensors, **buffers_of(model)}
    judged = {judged_name(name, saved): each for name, each in wanted.items()}
    load_tensors(checkpoint, judged, allow_extra=True)
    # in memory transformers gives some tensors other names than files have
    model.save_pretrained(folder, max_shard_size="1TB")
    content = _config(network, type(model).__name__, class_names(resolved), dtype)
    _write(folder / CONFIG, content)
    _write(folder / PREPROCESSOR, _preprocessor(resolved))


def _config(
    network: ImageNetwork, architecture: str, names: list[str] | None, dtype: torch.dtype
) -> dict[str, Any]:
    names = names or [f"LABEL_{number}" for number in range(network.num_classes)]
    return {
        **network.config,
        "architectures": [architecture],
        "dtype": str(dtype).removeprefix("torch."),
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _preprocessor(resolved: Resolved) -> dict[str, Any]:
    """As a held-out picture is read: resized, and its middle cut out."""
    images = resolved.recipe.data.images
    size = int(images.size)
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": round(size / images.eval_crop)},
        "resample": _RESAMPLE[images.interpolation],
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(images.mean),
        "image_std": list(images.std),
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
