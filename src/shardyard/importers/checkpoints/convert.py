"""A checkpoint of another tool becomes a Hugging Face folder: recognised, checked, written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.errors import CheckpointError, RequestError
from shardyard.importers.checkpoints import dcp, deepspeed, megatron, pickles
from shardyard.importers.checkpoints.hf_writer import DTYPES, split_into_shards, write_folder
from shardyard.importers.checkpoints.reference_model import (
    CONFIG,
    ModelWeights,
    ReferenceModel,
    find_model,
    read_reference_model,
    shape_in,
)
from shardyard.importers.checkpoints.tensors import STEPS, SourceCheckpoint
from shardyard.io.digests import ITEM_BYTES
from shardyard.io.files import read_json
from shardyard.units import format_bytes, format_count

SAVED = (".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of files written by torch.save."""

_NOT_OF_WEIGHTS = ("hidden_dropout", "max_position_embeddings")
"""Fields of a shape that change no output of the weights."""

_BELOW = ("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin", "pytorch_model.bin")
"""Names that Trainer and accelerate write into a folder of theirs."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """The folder to write; it is not written yet."""

    checkpoint: SourceCheckpoint
    model: ModelWeights
    like: ReferenceModel
    dtype: str | None

    @property
    def parameters(self) -> int:
        return sum(each.elements for each in self.model.tensors.values())

    @property
    def bytes(self) -> int:
        """Return the size of all weights, as they will be written."""
        tensors = self.model.tensors.values()
        return sum(each.elements * ITEM_BYTES[self.dtype or each.dtype] for each in tensors)

    @property
    def step_summary(self) -> str:
        """The step, in words."""
        step = self.checkpoint.step
        return "which does not say after which step" if step is None else f"saved at step {step}"

    @property
    def size_summary(self) -> str:
        """Return the size of the weights, in words."""
        kinds = ", ".join(self.to_json()["dtypes"])
        return f"{format_count(self.parameters)} parameters, {format_bytes(self.bytes)} in {kinds}"

    @property
    def skipped(self) -> tuple[str, ...]:
        """Return the contents of the checkpoint that the folder will not have."""
        left = {word: count for word, count in self.model.unused.items() if word not in STEPS}
        found = [f"{word} ({count} tensors)" for word, count in left.items()]
        found += [word for word in self.checkpoint.other_state if word not in left]
        return tuple(found)

    @property
    def missing_state(self) -> tuple[str, ...]:
        """Return what the folder lacks to continue the training, in sentences."""
        names = [*self.model.unused, *self.checkpoint.other_state]
        has_optimizer = any(name.startswith("optim") for name in names)
        lines = [f"not taken: {', '.join(self.skipped)}"] if self.skipped else []
        if not has_optimizer:
            lines.append("the checkpoint holds no state of an optimizer")
        return (*lines, "a training that starts from the folder begins with a new optimizer")

    def to_json(self) -> dict[str, Any]:
        """For programs, and for ``imported.json``."""
        kinds = {self.dtype or each.dtype for each in self.model.tensors.values()}
        words = {kind: word for word, kind in DTYPES.items()}
        return {
            "format": self.checkpoint.format,
            "checkpoint": str(self.checkpoint.path),
            "step": self.checkpoint.step,
            "tensors": len(self.model.tensors),
            "parameters": self.parameters,
            "bytes": self.bytes,
            "dtypes": sorted(words.get(kind, kind) for kind in kinds),
            "files": list(split_into_shards(self.model.tensors, self.dtype)),
            "not_taken": list(self.skipped),
            "remarks": list(self.checkpoint.notes),
        }


def is_checkpoint(path: Path) -> bool:
    """Whether it is to be read as a checkpoint, not as a configuration."""
    return path.is_dir() or path.suffix in SAVED


def plan_import(
    path: Path,
    like: Path,
    *,
    prefix: str | None = None,
    dtype: str | None = None,
    without: tuple[str, ...] = (),
) -> Import:
    """Read the content of a checkpoint, and compare it with the model; no weights are read.

    Args:
        like: A Hugging Face folder of the same model.
        prefix: Prefix of the model's names; None: it is found.
        dtype: float32, bfloat16 or float16; None: as they were saved.
        without: Arguments of a Megatron checkpoint to ignore.

    Raises:
        CheckpointError: It is damaged, or not of that model.
        RequestError: It is of no kind that is known.
    """
    model_like = read_reference_model(like)
    _check_same_model(path, model_like)
    try:
        checkpoint = read_checkpoint(path, model_like, without=without)
        model = find_model(checkpoint, model_like, prefix=prefix)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return Import(
        checkpoint=checkpoint, model=model, like=model_like, dtype=dtype and DTYPES[dtype]
    )


def _check_same_model(path: Path, like: ReferenceModel) -> None:
    """Raise if a config.json next to the checkpoint (Trainer writes one) is of another model."""
    try:
        config = read_json(path / CONFIG)
    except (OSError, ValueError):
        return
    own = shape_in(config, path) if isinstance(config, dict) else None
    if own is None or like.shape is None:
        return
    here = {**own.to_dict(), "head_dim": own.head_width}
    there = {**like.shape.to_dict(), "head_dim": like.shape.head_width}
    wrong = [
        f"{key} is {value!r}, there {there[key]!r}"
        for key, value in here.items()
        if value != there[key] and key not in _NOT_OF_WEIGHTS
    ]
    if wrong:
        raise CheckpointError(
            f"{path / CONFIG} is not of the model of {like.folder}: {', '.join(wrong)}. Give "
            f"--like {path} if the checkpoint's own is right."
        )


def read_checkpoint(
    path: Path, like: ReferenceModel, *, without: tuple[str, ...] = ()
) -> SourceCheckpoint:
    """Recognise a checkpoint by its files.

    Args:
        without: Arguments of a Megatron checkpoint that are not looked at.

    Raises:
        CheckpointError: It is damaged.
        RequestError: It is of no kind that is known.
        OSError: A file cannot be read.
    """
    iteration = megatron.find(path) if path.is_dir() else None
    if without and iteration is None:
        raise RequestError(
            f"--without {without[0]}: only a Megatron checkpoint has arguments, and {path} is of "
            "another kind."
        )
    if path.is_file():
        return pickles.read_state_dict(path)
    if not path.exists():
        raise RequestError(f"{path} is not there. Name a checkpoint's folder, or its file.")
    if (path / dcp.METADATA).is_file():
        return dcp.read(path)
    stepped = deepspeed.find(path)
    if stepped is not None:
        return deepspeed.read(stepped)
    if iteration is not None:
        return megatron.read(iteration, like, without=without)
    below = [path / name for name in _BELOW if (path / name).exists()]
    if len(below) == 1:
        return read_checkpoint(below[0], like)
    raise RequestError(f"{path} is not a checkpoint of a known format. {_describe_format(path)}")


def _describe_format(path: Path) -> str:
    if (path / CONFIG).is_file() and any(path.glob("*.safetensors")):
        return f"It is a Hugging Face folder already: model.path={path} trains from it."
    inner = sorted(
        each.name for each in path.iterdir() if each.is_dir() and (each / dcp.METADATA).is_file()
    )
    if inner:
        return f"Below it are some: {', '.join(inner[:5])}. Name one of them."
    return (
        "Known are: a file of torch.save (.pt, .bin), a folder of torch.distributed.checkpoint "
        "(with .metadata), DeepSpeed's (global_step*), Megatron's (mp_rank_*), and what Trainer "
        "and accelerate write."
    )


def run_import(planned: Import, to: Path, on_progress: Callable[[int], None]) -> dict[str, Any]:
    """Write the folder.

    Returns:
        Content of its ``imported.json``.

    Raises:
        RequestError: The folder exists already.
        CheckpointError: A file of the checkpoint is shorter than it said.
    """
    origin = planned.to_json()
    write_folder(
        to,
        planned.model.tensors,
        planned.like,
        origin,
        dtype=planned.dtype,
        on_progress=on_progress,
    )
    return origin
