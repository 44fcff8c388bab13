"""Export a checkpoint as a Hugging Face folder: weights here, the rest in ``export_files.py``.

Run as a program: ``python -m shardyard.checkpoint.export RUN_DIR --to DIR [--step latest]``. Only
the model's tensors are read, some rows of one at a time, so a model of any size passes through the
same memory. ``complete.json``, written last, says what every file must be.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, assert_never

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from shardyard.checkpoint.buffers import buffer_name, inference_name, is_buffer
from shardyard.checkpoint.export_files import (
    ExportFiles,
    copy_files,
    find_export_files,
    write_export_files,
)
from shardyard.checkpoint.export_formats import (
    InferenceTensors,
    Merged,
    adapter_shapes,
    adapter_warnings,
    check_adapters_nonzero,
    has_adapters,
    image_export_files,
    write_adapter_config,
    write_generic,
    write_network,
)
from shardyard.checkpoint.export_formats import planned as planned_adapters
from shardyard.checkpoint.load import SelectedCheckpoint, load_tensors, read_shapes
from shardyard.checkpoint.retention import step_name
from shardyard.checkpoint.safetensors_writer import write_tensors
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.checkpoint.verify import MANIFEST, read_manifest
from shardyard.config.resolved import Resolved
from shardyard.config.rules.custom_module import is_generic
from shardyard.errors import (
    CheckpointError,
    DataError,
    RequestError,
    ShardyardError,
    StorageError,
)
from shardyard.families.file_tensors import ParameterPiece, file_tensors, whole_shape
from shardyard.families.shape import ModelShape
from shardyard.io.digests import (
    FolderDigests,
    digest_file,
    find_damage,
    read_digests,
    write_digests,
)
from shardyard.io.files import publish_folder
from shardyard.models.build import build_on_meta
from shardyard.rundir.attempt_files import latest_resolved
from shardyard.rundir.contracts import sentence
from shardyard.rundir.layout import RunDir
from shardyard.rundir.script import check_has_recipe
from shardyard.tasks.labels import label_fields_of
from shardyard.units import format_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

MAX_SHARD_BYTES = 5 * 10**9
"""Size of one weights file, unless a single tensor is larger. Source: the default of
transformers' ``save_pretrained`` up to version 4."""

ROWS_BYTES = 2**24
"""Bytes of a tensor that are in memory at once, unless a single row or expert is larger."""

BUFFERS_FILE = "buffers.safetensors"
"""File for buffers of a module of the user's own; its parameters are in model.safetensors."""

_PREFIX = "model."


Form = Literal["weights", "adapter", "merged"]
"""Form of an export: weights as trained, only adapters in PEFT's format, or adapters merged."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Content of the export folder."""

    complete: FolderDigests
    existed: bool
    """An earlier call had written it; every file was read and held to its SHA-256."""


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """Plan of the files to write; building it writes no files."""

    checkpoint: Path
    to: Path
    dtype: torch.dtype
    files: dict[str, dict[str, tuple[ParameterPiece, ...]]]
    """Name of each weights file -> its tensors, and what of our parameters each is made of."""
    extra_files: ExportFiles
    """Config, tokenizer and other files of the model."""
    form: Form

    @property
    def provenance(self) -> dict[str, Any]:
        """Inputs that decide every byte of the weights, as in ``complete.json``."""
        return {
            "step": read_manifest(self.checkpoint).step,
            # The manifest has the SHA-256 of every file, so its own covers all bytes of the state.
            "checkpoint_sha256": digest_file(self.checkpoint / MANIFEST).sha256,
            "dtype": str(self.dtype).removeprefix("torch."),
            **({} if self.form == "weights" else {"form": self.form}),
        }

    @property
    def parameters(self) -> int:
        return sum(
            math.prod(whole_shape(pieces))
            for tensors in self.files.values()
            for pieces in tensors.values()
        )

    @property
    def bytes(self) -> int:
        """Size of all weights."""
        return self.parameters * self.dtype.itemsize


def plan_export(
    checkpoint_dir: Path,
    resolved: Resolved,
    to: Path,
    *,
    dtype: torch.dtype | None = None,
    merged: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ExportPlan:
    """Decide which tensors go into which file.

    Args:
        dtype: Dtype of the weights written; None: as the trained ones were saved.
        merged: Whether adapters become a part of their base; else only adapters are written.

    Raises:
        CheckpointError: The checkpoint does not hold the tensors of this model, or adapters that
            have no effect.
        RequestError: There are no adapters to merge, or PEFT has no such adapters.
    """
    form = _form(resolved, merged=merged)
    saved = {
        name.removeprefix(_PREFIX): (shape, dtype)
        for name, (shape, dtype) in read_shapes(checkpoint_dir).items()
        if name.startswith(_PREFIX)
    }
    held = wanted = {name: shape for name, (shape, _) in saved.items()}
    if form != "weights":
        wanted = adapter_shapes(resolved)
    elif resolved.shape is not None:
        wanted = _shapes_of(resolved.shape)
    _check_same_model(checkpoint_dir, wanted, held)
    # Frozen weights may be in 16 bits next to fp32 master weights, which must not be rounded.
    chosen_dtype = dtype or max(
        (each for _, each in saved.values()), key=lambda each: each.itemsize
    )
    if form == "adapter":
        files = planned_adapters(resolved, wanted)
    else:
        shapes = wanted if resolved.shape is None else _shapes_of(resolved.shape)
        files = _deal(_tensors(shapes, resolved), max_shard_bytes // chosen_dtype.itemsize)
    if form != "weights":
        # Last, as it reads tensors: the checks above need the files' headers only.
        check_adapters_nonzero(checkpoint_dir, wanted)
    find = find_export_files if resolved.network is None else image_export_files
    extra = find(resolved)
    if form == "adapter":
        warnings = (*extra.warnings, *adapter_warnings(resolved, extra.config))
        extra = replace(extra, warnings=warnings)
    return ExportPlan(
        checkpoint=checkpoint_dir,
        to=to,
        dtype=chosen_dtype,
        files=files,
        extra_files=extra,
        form=form,
    )


def _check_same_model(
    checkpoint_dir: Path, expected: Mapping[str, torch.Size], saved: Mapping[str, torch.Size]
) -> None:
    if expected == saved:
        return
    differing = sorted(
        name for name in {*expected, *saved} if expected.get(name) != saved.get(name)
    )
    raise CheckpointError(
        f"{checkpoint_dir} does not hold the model of this run: {len(differing)} tensors "
        f"differ in name or shape, the first is {differing[0]}. The checkpoint was written "
        "with another recipe; export it from the run folder it was written in."
    )


def _form(resolved: Resolved, *, merged: bool) -> Form:
    if has_adapters(resolved):
        return "merged" if merged else "adapter"
    if merged:
        raise RequestError(
            "--merged: this run trained no adapters (model.lora), so its weights are whole "
            "already. Leave it out."
        )
    return "weights"


def _shapes_of(shape: ModelShape) -> dict[str, torch.Size]:
    return {name: param.shape for name, param in build_on_meta(shape).named_parameters()}


def export(
    checkpoint_dir: Path,
    resolved: Resolved,
    to: Path,
    *,
    dtype: torch.dtype | None = None,
    merged: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ExportPlan:
    """Plan an export and write it."""
    plan = plan_export(
        checkpoint_dir, resolved, to, dtype=dtype, merged=merged, max_shard_bytes=max_shard_bytes
    )
    write_export(plan, resolved)
    return plan


def write_export(plan: ExportPlan, resolved: Resolved) -> Exported:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` opens, or PEFT.

    The folder appears under its name once it is whole. The same export made again finds it there.

    Raises:
        RequestError: The folder exists and holds something else.
        CheckpointError: The checkpoint cannot be read.
        StorageError: The folder cannot be written.
    """
    to, made_of = plan.to, plan.provenance
    there = find_export(to, made_of)
    if there is not None:
        return Exported(complete=there, existed=True)
    # In the same folder: a rename does not work across file systems.
    scratch = to.absolute().with_name(f".{to.absolute().name}.export.tmp")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        _write(plan, resolved, scratch)
        complete = write_digests(scratch, made_of)
        publish_folder(scratch, to)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{to} cannot be written: {error}. The export needs about {format_bytes(plan.bytes)}. "
            "Check that the place is writable and has room (`df -h`), or give another --to; the "
            "checkpoint is untouched."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Exported(complete=complete, existed=False)


def find_export(to: Path, provenance: dict[str, Any]) -> FolderDigests | None:
    """Return the same export if it exists, every file of it checked; None: the folder is free.

    Raises:
        RequestError: The folder holds something else, or the export is damaged.
    """
    if not to.exists() or (to.is_dir() and next(to.iterdir(), None) is None):
        return None
    try:
        complete = read_digests(to)
    except DataError:
        complete = None
    if complete is None or complete.provenance != provenance:
        raise RequestError(
            f"--to {to} exists and is not an empty folder; an export would mix with what is there."
            " Give another folder, or remove that one."
        )
    damage = find_damage(to, complete)
    if damage:
        raise RequestError(
            f"--to {to} holds this export, but it was changed since: {'; '.join(damage)}. Remove "
            "the folder and export again, or give another one."
        )
    return complete


def _tensors(
    shapes: Mapping[str, torch.Size], resolved: Resolved
) -> dict[str, tuple[ParameterPiece, ...]]:
    """Return the files' tensors by name; for a module of the user's own, its parameters."""
    if resolved.shape is None:
        return {name: (ParameterPiece(name, tuple(shape)),) for name, shape in shapes.items()}
    return file_tensors(shapes, resolved.shape.family)


def _deal(
    tensors: Mapping[str, tuple[ParameterPiece, ...]], max_elements: int
) -> dict[str, dict[str, tuple[ParameterPiece, ...]]]:
    """Fill one file after the other, in the model's order."""
    groups: list[dict[str, tuple[ParameterPiece, ...]]] = [{}]
    used = 0
    for name, pieces in tensors.items():
        elements = math.prod(whole_shape(pieces))
        if groups[-1] and used + elements > max_elements:
            groups.append({})
            used = 0
        groups[-1][name] = pieces
        used += elements
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


Rows = Callable[[str, int, int], Tensor]
"""From the name of a parameter, a row and a number of rows to their values as they are written."""


def _rows_of(read: Rows, pieces: Sequence[ParameterPiece], itemsize: int) -> Iterator[Tensor]:
    """The rows of a tensor of the files, some at a time; of a transposed one all at once."""
    if pieces[0].is_transposed:
        yield _transposed(read, pieces)
        return
    for piece in pieces:
        if piece.expert is not None:
            yield read(piece.parameter, piece.expert, 1)
            continue
        rows, *others = piece.shape
        at_once = max(1, ROWS_BYTES // (math.prod(others) * itemsize))
        for start in range(0, rows, at_once):
            yield read(piece.parameter, start, min(at_once, rows - start))


def _transposed(read: Rows, pieces: Sequence[ParameterPiece]) -> Tensor:
    # A row of the file is a column of the parameter, so none is complete before all are read.
    whole = torch.cat([read(piece.parameter, 0, piece.shape[0]) for piece in pieces])
    return whole.mT.contiguous()


def _parameters(plan: ExportPlan, resolved: Resolved) -> Rows:
    saved = InferenceTensors(plan.checkpoint, resolved.recipe.optim)

    def read(name: str, start: int, rows: int) -> Tensor:
        return saved.rows(f"{_PREFIX}{name}", start, rows, plan.dtype)

    match plan.form:
        case "weights" | "adapter":
            return read
        case "merged":
            return _merged(saved, resolved, plan.dtype)
        case _:
            assert_never(plan.form)


def _merged(saved: InferenceTensors, resolved: Resolved, dtype: torch.dtype) -> Rows:
    """Return the rows of weights with their adapters merged, one whole weight at a time."""

    def whole(name: str) -> Tensor:
        # The sum with the base is made in fp32 and rounded once, by `converted` below.
        return saved.rows(f"{_PREFIX}{name}", 0, None, torch.float32)

    merged = Merged(resolved, whole)

    # The rows of one weight are asked for in turn. Keeping one bounds memory for any model.
    @lru_cache(maxsize=1)
    def converted(name: str) -> Tensor:
        return merged(name).to(dtype)

    return lambda name, start, rows: converted(name)[start : start + rows]


def _write(plan: ExportPlan, resolved: Resolved, folder: Path) -> None:
    if is_generic(resolved.recipe):
        saved = InferenceTensors(plan.checkpoint, resolved.recipe.optim)
        write_generic(
            plan.checkpoint, plan.extra_files, folder,
            task=resolved.recipe.task.name, label_fields=label_fields_of(resolved),
            dtype=plan.dtype, weights=saved,
        )  # fmt: skip
    elif resolved.network is not None:
        write_network(plan.checkpoint, resolved, folder, dtype=plan.dtype)
    else:
        _write_tensors(plan, resolved, folder)


def _write_tensors(plan: ExportPlan, resolved: Resolved, folder: Path) -> None:
    read = _parameters(plan, resolved)
    for file, tensors in plan.files.items():
        shapes = {name: whole_shape(pieces) for name, pieces in tensors.items()}
        made = (_rows_of(read, pieces, plan.dtype.itemsize) for pieces in tensors.values())
        write_tensors(folder / file, shapes, plan.dtype, tensor_rows=made)
    if len(plan.files) > 1:
        index = {
            "metadata": {"total_size": plan.bytes, "total_parameters": plan.parameters},
            "weight_map": {name: file for file, tensors in plan.files.items() for name in tensors},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    if plan.form == "adapter":
        write_adapter_config(resolved, folder)
        copy_files(plan.extra_files.tokenizer_files, folder)
    elif resolved.shape is None:
        _write_buffers(plan.checkpoint, folder)
        copy_files(plan.extra_files.copied, folder)
    else:
        write_export_files(plan.extra_files, folder, shape=resolved.shape, dtype=plan.dtype)


def _write_buffers(checkpoint: Path, folder: Path) -> None:
    """Buffers of a module of the user's own, by its names and as they were saved."""
    shapes = read_shapes(checkpoint)
    tensors: dict[str, Tensor] = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in shapes.items()
        if is_buffer(name)
    }
    if tensors:
        judged = {inference_name(name, shapes): each for name, each in tensors.items()}
        load_tensors(checkpoint, judged, allow_extra=True)
        named = {buffer_name(name): tensor for name, tensor in tensors.items()}
        save_file(named, folder / BUFFERS_FILE, metadata={"format": "pt"})


def _describe(
    plan: ExportPlan, chosen: SelectedCheckpoint, exported: Exported | None
) -> dict[str, Any]:
    manifest = read_manifest(plan.checkpoint)
    return {
        "step": chosen.step,
        "checkpoint": str(plan.checkpoint),
        "to": str(plan.to),
        "parameters": plan.parameters,
        "bytes": plan.bytes,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "form": plan.form,
        "files": list(plan.files),
        "tokenizer": plan.extra_files.has_tokenizer,
        "copied": sorted(plan.extra_files.copied),
        "verified": {"files": len(manifest.files), "bytes": manifest.bytes},
        "complete": None
        if exported is None
        else {
            "files": len(exported.complete.files),
            "bytes": exported.complete.bytes,
            "sha256": exported.complete.sha256,
            "was_there": exported.existed,
        },
    }


def _latest_resolved(run_dir: RunDir) -> Resolved:
    if not run_dir.attempts():
        raise RequestError(
            f"{run_dir.path} is not a run folder, as it has no attempts/. Give the path or id of a "
            "run."
        )
    check_has_recipe(
        run_dir,
        verb="`export`",
        instead="Call shardyard.export(model, FOLDER) in the script, for a transformers model.",
    )
    newest = latest_resolved(run_dir)
    for torn in newest.torn:
        print(f"warning: {torn}. The attempt before it is taken.", file=sys.stderr)
    if newest.resolved is None:
        raise RequestError(
            f"{run_dir.path} has no attempt whose resolved.json can be read, so what the model is "
            f"is not known. `shardyard resume {run_dir.handle}` writes it again from "
            f"{run_dir.recipe.name}; then export."
        )
    return newest.resolved


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shardyard.checkpoint.export")
    parser.add_argument("run_dir", type=Path)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--to", type=Path)
    where.add_argument("--into", type=Path, help="a folder for exports, each named by its content")
    parser.add_argument("--step", default="latest", help="a number, latest or best")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as saved")
    parser.add_argument("--merged", action="store_true", help="adapters become a part of the base")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--answer", action="store_true", help="in one line of JSON, errors too")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Export and print what was written; returns the exit code."""
    asked = _parse(argv)
    try:
        told = _export(asked)
    except ShardyardError as error:
        if asked.answer:
            print(json.dumps(error.to_json()))
        else:
            print(f"error: {error.described}", file=sys.stderr)
        return error.exit_code
    if asked.answer:
        print(json.dumps(told))
    else:
        print(json.dumps(told, indent=1) if asked.json else sentence(told))
    return 0


def _export(args: argparse.Namespace) -> dict[str, Any]:
    run_dir, dtype = RunDir(args.run_dir.resolve()), DTYPES.get(args.dtype)
    resolved = _latest_resolved(run_dir)
    chosen = choose_checkpoint(run_dir, args.step)
    if chosen.note is not None:
        print(f"warning: {chosen.note}. The newest sound one is exported.", file=sys.stderr)
    for damaged in chosen.damaged:
        print(f"warning: {damaged}. An older one is exported.", file=sys.stderr)
    to, merged = args.to or args.into, args.merged
    plan = plan_export(chosen.path, resolved, to, dtype=dtype, merged=merged)
    if args.into is not None:
        name = f"{step_name(chosen.step)}-{str(plan.dtype).removeprefix('torch.')}"
        name += "" if plan.form == "weights" else f"-{plan.form}"
        plan = replace(plan, to=args.into / name)
    if args.dry_run:
        # It raises where the export itself would, so that a dry run fails for the same reasons.
        find_export(plan.to, plan.provenance)
    exported = None if args.dry_run else write_export(plan, resolved)
    for warning in plan.extra_files.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return _describe(plan, chosen, exported)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
