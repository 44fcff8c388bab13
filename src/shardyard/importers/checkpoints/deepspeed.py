"""DeepSpeed's folders: ZeRO 1, 2 and 3, and no ZeRO.

Source: what DeepSpeed 0.19 writes (runtime/engine.py, runtime/zero/), read as its zero_to_fp32.py
does. fp32 master weights lie in the optimizer's files, flat: one stretch a rank and group of
parameters; with ZeRO 3 a share of each parameter.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardyard.errors import CheckpointError
from shardyard.importers.checkpoints.pickles import PickledObject, load
from shardyard.importers.checkpoints.tensors import Shape, SourceCheckpoint, TensorChunk, TensorView
from shardyard.io.digests import ITEM_BYTES

LATEST = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_FLAT = ("fp32_flat_groups", "single_partition_of_fp32_groups")
"""Keys of the master weights in the optimizer's files: ZeRO 3; ZeRO 1 and 2."""

_Group = Mapping[str, Any]
"""Name of each parameter of a group -> its shape."""


def find(folder: Path) -> Path | None:
    """The folder with the files: this one, or the newest that its ``latest`` names; else None."""
    if any(_MODEL.fullmatch(path.name) for path in folder.glob("*_states.pt")):
        return folder
    latest = folder / LATEST
    if not latest.is_file():
        return None
    name = latest.read_text(errors="replace").strip()
    if not re.fullmatch(r"[\w.-]{1,200}", name) or name in (".", ".."):
        return None
    below = folder / name
    return below if any(below.glob("*mp_rank_*_model_states.pt")) else None


def read(folder: Path) -> SourceCheckpoint:
    """Return the content of the folder of one step.

    Raises:
        CheckpointError: It is damaged, incomplete, or of a kind that is not supported.
        OSError: A file cannot be read.
    """
    models, optimizers = _files(folder, _MODEL), _files(folder, _OPTIMIZER)
    first: dict[str, Any] = load(models[0])
    parallel = first.get("mp_world_size") if isinstance(first, dict) else None
    layers = sorted(path.name for path in folder.glob("layer_*_states.pt"))
    if layers or parallel not in (None, 1) or any(_split_by_tensor(path) for path in models):
        ranks = sorted(path.name for path in models if _split_by_tensor(path))
        what = f"mp_world_size={parallel}" if parallel not in (None, 1) else [*layers, *ranks][0]
        raise CheckpointError(
            f"{folder} was split by tensor, pipeline or expert parallelism ({what}), which only "
            "its model's own code can undo. Save the model's state dict from there, whole."
        )
    if not isinstance(first, dict) or not isinstance(first.get("module"), dict):
        raise CheckpointError(f"{models[0]} is not a file of DeepSpeed's model states.")
    held = _read_masters(folder, optimizers)
    if held is None or "param_shapes" not in first:
        whole = {
            name: each for name, each in first["module"].items() if isinstance(each, TensorView)
        }
        remark = "no fp32 master weights are there: those of the model itself are taken"
        return _checkpoint(folder, first, whole, "DeepSpeed", (remark,))
    groups = [dict(group) for group in first["param_shapes"]]
    if held.stage == 3:
        tensors = dict(_unflatten_stage_3(held, groups))
        beside = _frozen(folder, models, first)
    else:
        tensors = dict(_unflatten_stage_1_2(held, groups))
        beside = {
            name: each
            for name, each in first["module"].items()
            if isinstance(each, TensorView) and name not in tensors
        }  # buffers, what is frozen, and other names of shared parameters
    shared = {
        str(name): tensors[str(source)]
        for name, source in dict(first.get("shared_params") or {}).items()
        if str(source) in tensors
    }
    return _checkpoint(folder, first, beside | shared | tensors, f"DeepSpeed ZeRO {held.stage}")


def _checkpoint(
    folder: Path,
    first: Mapping[str, Any],
    tensors: Mapping[str, TensorView],
    words: str,
    notes: tuple[str, ...] = (),
) -> SourceCheckpoint:
    step = first.get("global_steps")
    beside = [name for name in ("optimizer", "lr_scheduler", "data_sampler") if first.get(name)]
    if any(folder.glob("*_optim_states.pt")) and "optimizer" not in beside:
        beside.insert(0, "optimizer")
    return SourceCheckpoint(
        format=f"{words} ({first.get('ds_version', 'no version said')})",
        path=folder,
        tensors=tensors,
        step=step if type(step) is int else None,
        other_state=tuple(beside),
        notes=notes,
    )


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """By rank; none may be missing between the first and the last."""
    found = {}
    for path in folder.glob("*_states.pt"):
        matched = pattern.fullmatch(path.name)
        if matched:
            found[int(matched[1] or 0), int(matched[2])] = path
    ranks = {rank for rank, _ in found}
    if ranks and ranks != set(range(len(ranks))):
        missing = min(set(range(max(ranks))) - ranks)
        raise CheckpointError(
            f"{folder} has no file of rank {missing}, but of {max(ranks)}. Copy the files of all "
            "nodes into one folder."
        )
    return [found[key] for key in sorted(found)]


def _split_by_tensor(path: Path) -> bool:
    matched = _MODEL.fullmatch(path.name)
    return matched is not None and int(matched[2]) > 0


@dataclass(frozen=True, kw_only=True)
class _Masters:
    """fp32 master weights as ranks hold them."""

    stage: int
    folder: Path
    flat: Sequence[Sequence[TensorView]]
    """Flat tensors of each rank, one per group."""


def _read_masters(folder: Path, files: Sequence[Path]) -> _Masters | None:
    """None: there are none."""
    flat, stages, ranks = [], set(), set()
    for path in files:
        content = load(path)
        state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
        key = next((each for each in _FLAT if isinstance(state, dict) and each in state), None)
        if not isinstance(state, dict) or key is None:
            return None
        stages.add(_stage(state.get("zero_stage")))
        count = state.get("partition_count")
        ranks.add(max(count) if isinstance(count, list | tuple) else count)
        flat.append([each for each in state[key] if isinstance(each, TensorView)])
    if not flat:
        return None
    if len(stages) != 1 or ranks != {len(files)}:
        raise CheckpointError(
            f"{folder} has optimizer states of {len(files)} ranks, and they say there were "
            f"{', '.join(map(str, sorted(ranks, key=str)))}. Copy the files of all nodes into one "
            "folder, and only those of one step."
        )
    return _Masters(stage=stages.pop(), folder=folder, flat=flat)


def _stage(raw_stage: Any) -> int:
    value = (
        raw_stage.args[0] if isinstance(raw_stage, PickledObject) and raw_stage.args else raw_stage
    )
    if value not in (1, 2, 3):
        raise CheckpointError(f"ZeRO stage {value!r} is not known here (1, 2 and 3 are).")
    return int(value)


def _unflatten_stage_1_2(
    masters: _Masters, groups: Sequence[_Group]
) -> Iterator[tuple[str, TensorView]]:
    """ZeRO 1 and 2: the stretches of all ranks are a group, its parameters one behind the other."""
    for number, group in enumerate(groups):
        runs = [_run(rank[number], masters) for rank in masters.flat]
        start = 0
        for name, shape in group.items():
            sizes = _sizes(name, shape)
            yield str(name), _flat_slice(name, sizes, runs, start, masters.folder)
            start += math.prod(sizes)


def _unflatten_stage_3(
    masters: _Masters, groups: Sequence[_Group]
) -> Iterator[tuple[str, TensorView]]:
    """ZeRO 3: of each parameter a share, the same on all ranks, with the rest of the last empty."""
    ranks = len(masters.flat)
    start = 0
    for name, shape in {name: size for group in groups for name, size in group.items()}.items():
        sizes = _sizes(name, shape)
        share = -(-math.prod(sizes) // ranks)
        pieces: list[TensorChunk] = []
        for number, flats in enumerate(masters.flat):
            size = min(share, math.prod(sizes) - number * share)
            if size > 0:
                runs = [_run(each, masters) for each in flats]
                part = _flat_slice(name, (size,), runs, start, masters.folder)
                at = number * share
                pieces += [replace(each, at=(each.at[0] + at,)) for each in part.pieces]
        yield str(name), TensorView(dtype="F32", shape=sizes, pieces=tuple(pieces), is_flat=True)
        start += share


def _run(flat: TensorView, masters: _Masters) -> TensorChunk:
    (piece,) = flat.pieces
    if flat.dtype != "F32" or len(flat.shape) != 1 or piece.stride is not None:
        raise CheckpointError(f"{masters.folder}: master weights are {flat.shape} in {flat.dtype}.")
    return piece


def _flat_slice(
    name: object, shape: Shape, runs: Sequence[TensorChunk], start: int, folder: Path
) -> TensorView:
    """Elements from ``start`` on of runs that lie one behind the other."""
    pieces = []
    wanted, done, begin = math.prod(shape), 0, 0
    for run in runs:
        first = max(start + done, begin)
        count = min(start + wanted, begin + run.elements) - first
        if count > 0:
            byte = run.first_byte + (first - begin) * ITEM_BYTES["F32"]
            pieces.append(TensorChunk(file=run.file, first_byte=byte, shape=(count,), at=(done,)))
            done += count
        begin += run.elements
    if done != wanted:
        raise CheckpointError(
            f"{folder} ends within {name}: its ranks hold {begin:,} elements. A file of another "
            "step, or of another run, may be among them."
        )
    return TensorView(dtype="F32", shape=shape, pieces=tuple(pieces), is_flat=True)


def _sizes(name: object, shape: Any) -> Shape:
    if not isinstance(shape, tuple) or any(type(size) is not int for size in shape):
        raise CheckpointError(f"the shape of {name} is {shape!r}.")
    return shape


def _frozen(
    folder: Path, models: Sequence[Path], first: Mapping[str, Any]
) -> dict[str, TensorView]:
    """Return ZeRO 3's tensors next to master weights: buffers, and shares of frozen parameters."""
    names = [str(name) for name in first.get("buffer_names") or ()]
    found = {
        name: first["module"][name]
        for name in names
        if isinstance(first["module"].get(name), TensorView)
    }
    shapes = dict(first.get("frozen_param_shapes") or {})
    if not shapes:
        return found
    fragments = [load(path).get("frozen_param_fragments") or {} for path in models]
    for name, shape in shapes.items():
        sizes, at, pieces = _sizes(name, shape), 0, []
        for each in fragments:
            part = each.get(name)
            if not isinstance(part, TensorView):
                raise CheckpointError(f"{folder}: a rank has no share of {name}, which is frozen.")
            size = min(part.elements, math.prod(sizes) - at)
            pieces.append(replace(part.pieces[0], shape=(size,), at=(at,)))
            at += size
        dtype = fragments[0][name].dtype
        found[str(name)] = TensorView(dtype=dtype, shape=sizes, pieces=tuple(pieces), is_flat=True)
    return found
