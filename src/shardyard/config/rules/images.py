"""Check image settings: wrong ones in recipes for images, and any in recipes for text.

Also the class names of a run's images, and the head of a folder's network that fits them.
"""

from collections.abc import Iterable
from pathlib import Path

from shardyard.config.formulas import first_batch, step_samples
from shardyard.config.resolved import Resolved
from shardyard.config.rules.custom_module import check_unsupported_axes
from shardyard.config.schema.data import Images
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row
from shardyard.errors import Problem
from shardyard.families.images.class_names import (
    HeadOrder,
    class_names_in,
    head_order,
    outputs_in,
)
from shardyard.families.images.network import ImageNetwork
from shardyard.families.images.registry import IMAGE_PRESETS, KINDS, operators_of
from shardyard.io.files import read_json_object

_WHAT = "a network for images"

_OF_TEXT = {
    "data": (
        "mixture", "format", "text_key", "keys", "chat_template", "loss_on", "loss_share",
        "tokenizer", "tokenizer_kind", "add_tokens", "add_special_tokens", "bos", "vocab_size",
        "seq_len", "attend_across_documents", "pack", "too_long",
    ),
    "model": ("config", "module", "blocks", "new_embeddings", "router_aux_loss", "router_z_loss"),
    "memory": ("loss_chunk",),
    "task": ("prompt", "prompts", "generate_tokens", "generate_every"),
    "run": ("tokens",),
}  # fmt: skip
"""Settings that do not apply to images, by their sections."""


_OF_NETWORKS = ("drop_path", "batch_norm", "batch_norm_momentum", "zero_last_norm")
"""Settings of ``model`` that only images have."""

_UNSAID = ("auto", False, "micro_batch")


def check_step_batch(recipe: Recipe, *, ranks: int) -> Iterable[Problem]:
    """A step that normalises over all its samples, of which a rank cannot compute all of its own.

    Args:
        ranks: That read samples.
    """
    if recipe.model.batch_norm != "step":
        return
    samples = step_samples(recipe.optim, devices=ranks)
    micro_batch = recipe.optim.micro_batch
    assert isinstance(micro_batch, int), "resolved"
    if micro_batch * ranks < samples:
        text = (
            f"={micro_batch} on {ranks} ranks is less than the {samples} samples of a step, and "
            "with model.batch_norm=step each rank computes all of its own at once. Use at least "
            f"{-(-samples // ranks)}, more ranks, or model.batch_norm=micro_batch."
        )
        yield Problem("optim.micro_batch", text)
    if recipe.model.compile is True:
        text = "=true: blocks that ask other ranks are not compiled. Use model.compile=false, or "
        yield Problem("model.compile", f"{text}model.batch_norm=micro_batch.")


def _check_single_image_batch(recipe: Recipe, network: ImageNetwork) -> Iterable[Problem]:
    """A last micro-batch of one picture, of which a norm sees one number of each feature."""
    optim, micro_batch = recipe.optim, recipe.optim.micro_batch
    if network.batch_norm_momentum is None or recipe.model.batch_norm == "step":
        return
    if not isinstance(micro_batch, int) or optim.batch_per_device is not None:
        return  # of a batch that follows the devices the first step tells
    samples = first_batch(optim)
    if micro_batch != 1 and samples % micro_batch != 1:
        return
    norms = (each for each in operators_of(network) if each.kind == "norm")
    name = next((each.name for each in norms if 2 * each.output_elements == each.buffers), None)
    if name is None:
        return
    text = (
        f"={samples} in micro-batches of {micro_batch} leaves a micro-batch of one picture, and at "
        f"data.images.size={network.size} the batch normalisation {name} sees one number of each "
        "of its features, which has no variance. "
    )
    fitting = next((each for each in range(2, samples + 1) if samples % each != 1), None)
    text += "Use larger pictures" if fitting is None else f"Use optim.micro_batch={fitting}"
    yield Problem("optim.global_batch", f"{text}, or optim.global_batch={max(2, samples - 1)}.")


def check_image_size(recipe: Recipe, network: ImageNetwork, folder: Path | None) -> list[Problem]:
    """Find a size of images for which the weights of a folder have no positions.

    Args:
        network: As its config.json says it.
        folder: That holds its weights; None: it has none.
    """
    size = recipe.data.images.size
    if size in ("auto", network.size) or not KINDS[network.model_type].has_positions:
        return []
    if folder is None or recipe.model.weights == "random":
        return []
    text = (
        f"={size}, but the weights of {folder} have positions for images of {network.size} pixels "
        f"(image_size in config.json). Set data.images.size={network.size}, to which all images "
        "are resized, or model.weights=random to train from the beginning."
    )
    return [Problem("data.images.size", text)]


def check_network(recipe: Recipe, network: ImageNetwork) -> Iterable[Problem]:
    """Yield problems of settings that a network does not support, once it is known."""
    kind, model = KINDS[network.model_type], recipe.model
    if model.batch_norm_momentum != "auto" and network.batch_norm_momentum is None:
        text = f"={model.batch_norm_momentum:g}: a network of type {network.model_type} has no "
        yield Problem("model.batch_norm_momentum", f"{text}batch normalisation. Leave it out.")
    if model.batch_norm == "step" and network.batch_norm_momentum is None:
        text = f"=step: a network of type {network.model_type} has no batch normalisation."
        yield Problem("model.batch_norm", f"{text} Leave it out.")
    yield from _check_single_image_batch(recipe, network)
    layout = recipe.parallel
    if isinstance(layout.dp_replicate, int) and isinstance(layout.dp_shard, int):
        yield from check_step_batch(recipe, ranks=layout.dp_replicate * layout.dp_shard)
    if not model.zero_last_norm:
        return
    if kind.last_norm is None:
        of = " and ".join(name for name, each in KINDS.items() if each.last_norm is not None)
        text = f"=true is built for {of}, and this network is of type {network.model_type}."
        yield Problem("model.zero_last_norm", f"{text} Leave it out.")
    elif model.weights == "load":
        text = "=true is how weights begin, and here they are loaded. Leave it out."
        yield Problem("model.zero_last_norm", text)


def _of_images(recipe: Recipe) -> Iterable[Problem]:
    """Yield problems of image settings in a recipe for text."""
    task = recipe.task.name
    given = recipe.data.images
    for key in sorted(given.model_fields_set):
        if getattr(given, key) != getattr(Images(), key):
            text = f"={getattr(given, key)} is of images, and {task} reads text. Leave it out."
            yield Problem(f"data.images.{key}", text)
    if recipe.task.label_smoothing and not task_row(task).compares_answers:
        text = f"={recipe.task.label_smoothing} is of images, and {task} reads text. "
        yield Problem("task.label_smoothing", f"{text}Leave it out.")
    for key in _OF_NETWORKS:
        if key in recipe.model.model_fields_set and getattr(recipe.model, key) not in _UNSAID:
            text = f"={getattr(recipe.model, key)} is of networks for images, and {task} reads "
            yield Problem(f"model.{key}", f"{text}text. Leave it out.")
    if recipe.model.preset in IMAGE_PRESETS:
        text = f"={recipe.model.preset} is {_WHAT}, and {task} reads text. "
        yield Problem("model.preset", f"{text}Use task.name=image_classification.")


def check_images(recipe: Recipe) -> Iterable[Problem]:
    """Everything of this kind."""
    task = recipe.task.name
    if task_row(task).reads != "images":
        yield from _of_images(recipe)
        return
    for section, keys in _OF_TEXT.items():
        content = getattr(recipe, section)
        for key in sorted(content.model_fields_set & set(keys)):
            value = getattr(content, key)
            if value not in (type(content)().__getattribute__(key), None):
                text = f"={value} is of text, and {task} reads images. Leave it out."
                yield Problem(f"{section}.{key}", text)
    if "source" not in recipe.data.model_fields_set and recipe.data.module is None:
        yield Problem("data.source", "names no images. Give a folder that holds one of each class.")
    if recipe.model.preset is not None and recipe.model.preset not in IMAGE_PRESETS:
        text = (
            f"={recipe.model.preset} is not a network for images. Use {', '.join(IMAGE_PRESETS)}."
        )
        yield Problem("model.preset", text)
    yield from check_unsupported_axes(recipe, _WHAT)
    yield from _check_augmentation(recipe)
    if recipe.optim.lr == "auto":
        text = "=auto is not known for images: it depends on the recipe as a whole. Set "
        text += "optim.lr=1e-3 for adamw, or optim.name=sgd optim.momentum=0.9 optim.lr=0.1, usual "
        yield Problem("optim.lr", f"{text}for a ResNet and 256 images a step.")
    if recipe.model.lora.rank is not None:
        yield Problem("model.lora.rank", f": adapters are not built for {_WHAT}. Leave it out.")
    if recipe.memory.offload in ("activations", "params"):
        text = f"={recipe.memory.offload} is not built for {_WHAT}. Use memory.recompute, or "
        text += "memory.offload=optimizer."
        yield Problem("memory.offload", text)
    if recipe.precision.compute == "fp8":
        text = f"=fp8 is not built for {_WHAT}. Use bf16 or fp32."
        yield Problem("precision.compute", text)


def _check_augmentation(recipe: Recipe) -> Iterable[Problem]:
    """Yield problems of the settings for image augmentation."""
    images = recipe.data.images
    for key, (least, largest) in (
        ("crop_area", images.crop_area),
        ("crop_ratio", images.crop_ratio),
    ):
        if not 0 < least <= largest:
            text = (
                f"=[{least}, {largest}] are not bounds. Give a number above 0, then one at least "
                "as large."
            )
            yield Problem(f"data.images.{key}", text)
    if "rand_augment_magnitude" in images.model_fields_set and not images.rand_augment:
        text = f"={images.rand_augment_magnitude} is of no operation, as data.images.rand_augment "
        text += "is 0. Set that to 2, as is usual, or leave the magnitude out."
        yield Problem("data.images.rand_augment_magnitude", text)
    if images.mixes and recipe.optim.micro_batch == 1:
        text = "=1 leaves no other image to mix with. Give more, or leave out "
        yield Problem("optim.micro_batch", f"{text}data.images.mixup and data.images.cutmix.")


def class_names(resolved: Resolved) -> list[str] | None:
    """Names of the prepared data's classes, in the order of their numbers; None: it is gone."""
    try:
        names: list[str] = read_json_object(Path(resolved.data.dir) / "manifest.json")["classes"]
    except (OSError, ValueError, KeyError):
        return None
    return names


def folder_head(resolved: Resolved) -> HeadOrder | None:
    """Return the order of the head of a run's starting folder; None: there is no such folder."""
    names = class_names(resolved) if resolved.network is not None else None
    if resolved.model_dir is None or names is None:
        return None
    content = read_json_object(Path(resolved.model_dir) / "config.json")
    return head_order(names, class_names_in(content), outputs=outputs_in(content))


def class_notes(resolved: Resolved) -> list[str]:
    """Warn where the head of the folder is reordered, left, or without names."""
    order = folder_head(resolved)
    return [] if order is None or not order.note else [f"{resolved.model_dir}: {order.note}."]
