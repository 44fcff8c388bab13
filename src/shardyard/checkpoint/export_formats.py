"""Exports beyond families of language models: LoRA adapters, image networks, other models."""

import json
from collections.abc import Callable, Container, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, assert_never

import torch
import transformers
from torch import Size, Tensor, nn
from torch.utils import swap_tensors
from transformers import AutoConfig

from shardyard.checkpoint.buffers import buffers_of, inference_name
from shardyard.checkpoint.export_files import CONFIG, ExportFiles, changed_config, copy_files
from shardyard.checkpoint.load import SavedTensors, load_tensors, read_shapes
from shardyard.config.adapter_files import PREFIX, WEIGHTS
from shardyard.config.model.files import base_digest
from shardyard.config.model.source import model_folder
from shardyard.config.optimizers import UNAVERAGED, OptimizerSettings, evaluation_share
from shardyard.config.resolved import Resolved
from shardyard.config.rules.images import class_names
from shardyard.config.tasks import task_row
from shardyard.config.weight_files import ADAPTER
from shardyard.errors import CheckpointError, RequestError
from shardyard.families.file_tensors import ParameterPiece
from shardyard.families.images.network import ImageNetwork
from shardyard.families.lora import (
    A,
    B,
    is_adapter,
    peft_targets,
    scale_of,
    targets_of,
    tied_head,
    trained_modules,
)
from shardyard.families.shape import ModelShape
from shardyard.io.files import read_json_object
from shardyard.models.build import build_on_meta, fill_weights
from shardyard.models.images import build_network
from shardyard.models.lora import add_adapters


class InferenceTensors:
    """Tensors of a checkpoint for a model that is to be used: averages where there are such."""

    def __init__(self, checkpoint: Path, optim: OptimizerSettings) -> None:
        """Open a checkpoint.

        Args:
            optim: The run's, which says whether its optimizer averages its steps.

        Raises:
            CheckpointError: A file is unreadable, or shards are missing.
        """
        self._saved = SavedTensors.in_folder(checkpoint)
        self._shapes = {name: shape for name, (shape, _) in self._saved.shapes().items()}
        self._share = evaluation_share(optim)

    def rows(self, name: str, start: int, rows: int | None, dtype: torch.dtype) -> Tensor:
        """Some rows of a tensor, from one on; None: all the others.

        Args:
            name: Of the tensor that is trained on, in a checkpoint.
        """
        saved_as = inference_name(name, self._shapes)
        rows = self._shapes[saved_as][0] - start if rows is None else rows
        if self._share is None or not self.is_derived(name):
            return self._saved.rows(saved_as, start, rows, dtype)
        trained = self._saved.rows(saved_as, start, rows, torch.float32)
        other = self._saved.rows(_unaveraged(name), start, rows, torch.float32)
        return trained.lerp_(other, self._share).to(dtype)

    def is_derived(self, name: str) -> bool:
        """Whether a tensor to be used is none that is saved, but follows from two."""
        return self._share is not None and _unaveraged(name) in self._shapes


def _unaveraged(name: str) -> str:
    return f"optim.{UNAVERAGED}.{name.removeprefix('model.')}"


def write_generic(
    checkpoint: Path,
    files: ExportFiles,
    folder: Path,
    *,
    task: str,
    label_fields: Mapping[str, Any],
    dtype: torch.dtype,
    weights: InferenceTensors,
) -> None:
    """Write weights, config.json, and the files of the model's own folder.

    Args:
        task: Name of the run's task, which says which head the model has.
        label_fields: Fields of config.json for the labels of that head.
        weights: The checkpoint's, as they are to be used.

    Raises:
        RequestError: That folder is gone, and with it what the model is.
        CheckpointError: The checkpoint cannot be read, or is of another model.
    """
    if files.config is None:
        raise RequestError(
            f"{checkpoint} holds weights of a model of no family here, whose config.json lies in "
            "the folder that it came from, which is gone. Bring it back and export once more."
        )
    model_class: Any = getattr(transformers, str(task_row(task).auto_class))
    saved, about = read_shapes(checkpoint), {**files.config, **label_fields}
    config: Any = AutoConfig.for_model(**about)
    rows = _rows_of_table(model_class, config, {name: shape for name, (shape, _) in saved.items()})
    if rows is not None and rows != config.get_text_config().vocab_size:  # tokens were added
        config.get_text_config().vocab_size = rows
        about = {**about, "vocab_size": rows}
    if _has_own_head(model_class, config, saved):  # its folder held another head
        config.tie_word_embeddings = False
        about = {**about, "tie_word_embeddings": False}
    model: Any = model_class.from_config(config, dtype=dtype)
    tensors: dict[str, Tensor] = {
        f"model.{name}": param.detach() for name, param in model.named_parameters()
    }
    wanted = {**tensors, **buffers_of(model)}
    judged = {inference_name(name, saved): each for name, each in wanted.items()}
    load_tensors(checkpoint, judged, allow_extra=True)
    for name, param in tensors.items():
        if weights.is_derived(name):
            param.copy_(weights.rows(name, 0, None, dtype))
    model.save_pretrained(folder)
    content = changed_config(about, architecture=type(model).__name__, dtype=dtype, ends={})
    (folder / CONFIG).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    copy_files(files.copied, folder)


def _rows_of_table(model_class: Any, config: Any, saved: Mapping[str, Size]) -> int | None:
    """Return the rows of the embedding in a checkpoint; None: it has none of that name."""
    with torch.device("meta"):
        model: Any = model_class.from_config(config)
    table = model.get_input_embeddings().weight
    name = next(name for name, each in model.named_parameters() if each is table)
    return saved[f"model.{name}"][0] if f"model.{name}" in saved else None


def _has_own_head(model_class: Any, config: Any, saved: Container[str]) -> bool:
    """Check whether a checkpoint has the head of a tied model next to its table."""
    with torch.device("meta"):
        model: Any = model_class.from_config(config)
    pairs = model.all_tied_weights_keys.items()
    return any(f"model.{head}" in saved and f"model.{table}" in saved for head, table in pairs)


# A run with adapters (LoRA) exports PEFT's folder, or whole weights with the adapters merged.
#
# A checkpoint of such a run holds only adapters. PEFT's folder needs nothing else. Merged weights
# need the base, which is read from its source again, or drawn again from the seed.


def has_adapters(resolved: Resolved) -> bool:
    """Check whether a run trained adapters next to a base."""
    return resolved.recipe.model.lora.rank is not None


def adapter_shapes(resolved: Resolved) -> dict[str, Size]:
    """The matrices of all adapters, and of modules that are trained next to them, by our names."""
    model, shape = build_on_meta(_shape(resolved)), _shape(resolved)
    lora = resolved.recipe.model.lora
    add_adapters(model, shape, lora)
    trained = trained_modules(shape, lora.modules_to_save)
    return {
        name: each.shape
        for name, each in model.named_parameters()
        if is_adapter(name) or name in trained
    }


def check_adapters_nonzero(checkpoint: Path, shapes: Mapping[str, Size]) -> None:
    """Raise if every adapter is as it began, and the export would be the base.

    Raises:
        CheckpointError: B of all of them is zero.
    """
    saved, number = SavedTensors.in_folder(checkpoint), 0
    for name, shape in shapes.items():
        if name.endswith(f".{B}.weight"):
            # B begins as zero and A at random, so only B shows whether anything was learnt.
            up = torch.empty(shape)
            saved.fill({f"model.{name}": up}, allow_extra=True)
            number += 1
            if up.any():
                return
    raise CheckpointError(
        f"the adapters in {checkpoint} have no effect: {B} of all {number} of them is zero, as at "
        "the beginning, so the export would be the base. Every step was skipped, or its learning "
        "rate was zero: see loss, skipped steps and lr in metrics.jsonl, fix optim.lr or "
        "optim.warmup_steps, and train on."
    )


# --- PEFT's folder --------------------------------------------------------------------------------


def planned(
    resolved: Resolved, shapes: Mapping[str, Size]
) -> dict[str, dict[str, tuple[ParameterPiece, ...]]]:
    """The one file of weights: PEFT's names, and our matrix for each.

    Raises:
        RequestError: A target is a part of a matrix of the files.
    """
    targets = targets_of(_shape(resolved), resolved.recipe.model.lora.targets)
    for target in (each for found in targets.values() for each in found):
        fused = target.row.fused
        if fused is not None:
            raise RequestError(
                f"{target.module} has an adapter of its own, but is a part of {fused.module} in "
                "Hugging Face's model, where PEFT has one adapter for all parts. Export the "
                "weights of the whole model with --merged."
            )
    pieces: dict[str, tuple[ParameterPiece, ...]] = {
        f"{PREFIX}{name}": (ParameterPiece(name, tuple(s)),) for name, s in shapes.items()
    }
    tied = tied_head(_shape(resolved), shapes)
    if tied is not None:  # PEFT's file has it twice
        head, table = tied
        pieces[f"{PREFIX}{head}"] = pieces[f"{PREFIX}{table}"]
    return {WEIGHTS: pieces}


def write_adapter_config(resolved: Resolved, folder: Path) -> None:
    """Write PEFT's adapter_config.json. Source: ``LoraConfig`` of peft 0.21.

    Raises:
        OSError: The file cannot be written.
    """
    shape, model = _shape(resolved), resolved.recipe.model
    lora = model.lora
    targets = chain.from_iterable(targets_of(shape, lora.targets).values())
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": _peft_task(shape),
        "base_model_name_or_path": model.hub or model.path,
        "revision": resolved.model_commit,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": peft_targets(shape, lora.targets),
        "bias": "none",
        "fan_in_fan_out": any(each.row.is_transposed for each in targets),
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    trained = trained_modules(shape, lora.modules_to_save)
    if trained:
        content["modules_to_save"] = sorted({name.rpartition(".")[0] for name in trained})
        content["ensure_weight_tying"] = shape.tie_word_embeddings
    (folder / ADAPTER).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _peft_task(shape: ModelShape) -> str | None:
    """Return PEFT's name of what a model does. None: it has none for a masked language model."""
    match shape.label_head:
        case "samples":
            return "SEQ_CLS"
        case "tokens":
            return "TOKEN_CLS"
        case None:
            return "CAUSAL_LM" if shape.is_causal else None
        case _:
            assert_never(shape.label_head)


def adapter_warnings(resolved: Resolved, config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Say how PEFT opens an adapter whose head is over other labels than its base's.

    Args:
        config: The base's config.json.
    """
    shape = _shape(resolved)
    labels_of_base = len((config or {}).get("id2label") or ("LABEL_0", "LABEL_1"))
    if shape.label_head is None or config is None or labels_of_base == shape.num_labels:
        return ()
    return (
        f"the head has {shape.num_labels} labels, and config.json of the base says "
        f"{labels_of_base}. Open the adapter with from_pretrained(FOLDER, num_labels="
        f"{shape.num_labels}).",
    )


# --- merged weights -------------------------------------------------------------------------------


class Merged:
    """Weights of the base with scale B A added to the targets, in fp32, one at a time."""

    def __init__(self, resolved: Resolved, read: Callable[[str], Tensor]) -> None:
        """Args:
            read: From the name of a matrix of an adapter to its values in fp32.

        Raises:
            RequestError: The base is gone, or another one is there.
        """
        lora = resolved.recipe.model.lora
        assert lora.rank is not None
        self._folder = _base(resolved)
        self._seed = resolved.recipe.run.seed
        self._new_embeddings = resolved.recipe.model.new_embeddings
        self._scale = scale_of(rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora)
        self._adapters = adapter_shapes(resolved).keys()
        self._model = build_on_meta(_shape(resolved))
        self._family = _shape(resolved).family
        self._read = read

    def __call__(self, name: str) -> Tensor:
        """A parameter of the model."""
        if name in self._adapters:  # trained as a whole
            return self._read(name)
        param = self._model.get_parameter(name)
        filled = nn.Parameter(torch.empty(param.shape), requires_grad=False)
        swap: Callable[..., None] = swap_tensors
        swap(param, filled)  # only what has storage is filled
        fill_weights(
            self._model, folder=self._folder, seed=self._seed, family=self._family,
            new_embeddings=self._new_embeddings,
        )  # fmt: skip
        swap(param, filled)
        weight = filled.detach()
        module = name.removesuffix(".weight")
        down, up = f"{module}.{A}.weight", f"{module}.{B}.weight"
        if down in self._adapters:
            # W + s B A (LoRA). s is alpha / r, and alpha / sqrt(r) for rsLoRA (arXiv:2312.03732).
            weight += self._scale * (self._read(up) @ self._read(down))
        return weight


def _base(resolved: Resolved) -> Path | None:
    """The folder of the base's weights, the same as while adapters were trained; None: drawn."""
    if resolved.model_dir is None:
        return None
    model, folder = resolved.recipe.model, Path(resolved.model_dir)
    if not folder.is_dir():  # the run was on other machines
        folder = model_folder(model, commit=resolved.model_commit) or folder
    if base_digest(folder) != resolved.base_digest:
        raise RequestError(
            f"{folder} holds other weights than those under which the adapters were trained, so "
            f"--merged would add them to another model. Bring those of {model.hub or model.path} "
            "back, or export only the adapters, without --merged."
        )
    return folder


def _shape(resolved: Resolved) -> ModelShape:
    assert resolved.shape is not None, "rejected for a module of the user's own"
    return resolved.shape


# A network for images is exported as a folder that AutoModelForImageClassification opens.
#
# Weights and running statistics are in one file, under the names that transformers' save_pretrained
# writes. The classes have the names of the data's. preprocessor_config.json describes how
# validation images were read, as other crops would give other scores.

PREPROCESSOR = "preprocessor_config.json"

_RESAMPLE = {"bilinear": 2, "bicubic": 3}
"""Numbers of Pillow's ``Image.Resampling``, which transformers writes."""


def _own_image_type(resolved: Resolved) -> str | None:
    """Return the type of the images of the user's own dataset; None: they were image files."""
    if resolved.data.item_kind is None:
        return None
    try:
        content = read_json_object(Path(resolved.data.dir) / "manifest.json")
        return str(content["shapes"]["image"][0])
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # gone


def image_export_files(resolved: Resolved) -> ExportFiles:
    """Check, before an export is written, whether its classes have their names."""
    warnings: tuple[str, ...] = ()
    own = _own_image_type(resolved)
    if own is not None:
        what = "resizes and crops" if own == "uint8" else "normalizes, resizes and crops"
        warnings = (
            f"your dataset {what} its images, which {PREPROCESSOR} cannot say: do the same before "
            "you use the exported model.",
        )
    if class_names(resolved) is None:
        warnings = (
            *warnings,
            f"{resolved.data.dir} is gone, and with it the names of the classes: they are called "
            "LABEL_0 and so on. Bring it back and export again, or edit id2label in config.json.",
        )
    return ExportFiles(copied={}, config=None, has_own_tokenizer=False, warnings=warnings)


def write_network(
    checkpoint: Path, resolved: Resolved, folder: Path, *, dtype: torch.dtype
) -> None:
    """Write weights, config.json and preprocessor_config.json.

    Raises:
        CheckpointError: The checkpoint cannot be read, or is of another network.
        OSError: A file cannot be written.
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
    judged = {inference_name(name, saved): each for name, each in wanted.items()}
    load_tensors(checkpoint, judged, allow_extra=True)
    # in memory transformers gives some tensors other names than files have
    model.save_pretrained(folder, max_shard_size="1TB")
    content = _config(network, type(model).__name__, class_names(resolved), dtype)
    _write(folder / CONFIG, content)
    preprocessor = _preprocessor(resolved)
    if preprocessor is not None:
        _write(folder / PREPROCESSOR, preprocessor)


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


def _preprocessor(resolved: Resolved) -> dict[str, Any] | None:
    """Return the config that reads an image as in validation: resized, then center-cropped.

    Of the user's own dataset only the normalization of bytes is known; None: not even that.
    """
    images = resolved.recipe.data.images
    size = int(images.size)
    own = _own_image_type(resolved)
    if own is not None and own != "uint8":
        return None
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": own is None,
        # Validation crops this share of the shorter edge, so the edge is larger by its inverse.
        "size": {"shortest_edge": round(size / images.eval_crop)},
        "resample": _RESAMPLE[images.interpolation],
        "do_center_crop": own is None,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(images.mean),
        "image_std": list(images.std),
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
