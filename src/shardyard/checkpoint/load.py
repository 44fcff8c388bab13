"""Load a checkpoint into any layout: choose the newest sound one, then read a rank's part.

Unpickling is never used: tensors come from safetensors files, everything else from JSON. torch's
reader opens only ``*.safetensors``, and the planner here rejects every item that is no tensor.
"""

import io
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.futures import Future

from shardyard.checkpoint.buffers import is_buffer
from shardyard.checkpoint.retention import (
    SET_ASIDE,
    complete_steps,
    mark_latest,
    pointer_problem,
    read_pointer,
    set_aside,
    step_name,
)
from shardyard.checkpoint.verify import (
    FORMAT,
    VALUES,
    Damage,
    read_manifest,
    verify_manifest,
)
from shardyard.errors import (
    CheckpointError,
    JsonFileError,
    LostRankError,
    ShardyardError,
    StorageError,
)
from shardyard.io.files import read_json_object
from shardyard.models.local_shard import shard_bounds

UPGRADES: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: lambda values: values}
"""Format version -> rule that turns its values into those of the next version."""

_FIRST_WITH_BUFFERS = 2
"""The first format that holds them."""


class Damaged(NamedTuple):
    """A checkpoint that cannot be trusted; in JSON ``[step, [reason, ...]]``."""

    step: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{step_name(self.step)} is damaged: {'; '.join(self.reasons)}"


@dataclass(frozen=True)
class SelectedCheckpoint:
    """The checkpoint to load."""

    step: int
    path: Path
    damaged: tuple[Damaged, ...]
    """Newer damaged ones that were passed over, newest first; to be reported loudly."""
    note: str | None = None
    """Reason why ``latest`` could not be followed; to be reported loudly, too."""


def select_sound_checkpoint(
    checkpoints_dir: Path,
    *,
    group: dist.ProcessGroup,
    rank: int,
    world_size: int,
    timeout_s: float,
) -> SelectedCheckpoint | None:
    """Find the newest sound checkpoint, every rank reading its share of the files.

    Every folder with its final name counts, newer than ``latest`` too: a folder gets that name
    only after all its files are on disk, so if the run was killed between the name and the
    pointer, the newer one is whole and saves work. Afterwards ``latest`` names the chosen one,
    and newer damaged ones are renamed to ``step-N.damaged``: the run will not come back to them,
    and retention must not count them.

    Args:
        group: A gloo group of all ranks.
        timeout_s: Seconds to wait for all ranks to arrive.

    Returns:
        None if there is no checkpoint at all.

    Raises:
        CheckpointError: A rank did not arrive, or there are checkpoints but none is sound.
    """
    wait_for_all_ranks(group, timeout_s)

    def verify_together(folder: Path) -> list[Damage]:
        return _verify_share(folder, group, rank=rank, world_size=world_size)

    # One list for all: each candidate below costs a collective, which all ranks must enter.
    steps = agreed_steps(checkpoints_dir, group)
    chosen = find_sound(checkpoints_dir, steps, verify=verify_together)
    if chosen is not None:
        _record_selection_on_rank0(checkpoints_dir, chosen, group)
    return chosen


def agreed_steps(checkpoints_dir: Path, group: dist.ProcessGroup) -> list[int]:
    """Steps of which there are checkpoints, rising, as rank 0 sees them. All ranks call it."""
    steps = [complete_steps(checkpoints_dir)]
    dist.broadcast_object_list(steps, group=group, group_src=0)
    return steps[0]


def find_sound(
    checkpoints_dir: Path,
    steps: Sequence[int] | None = None,
    *,
    verify: Callable[[Path], list[Damage]] = verify_manifest,
) -> SelectedCheckpoint | None:
    """Return the newest sound checkpoint and the damaged ones before it; files stay unchanged.

    Raises:
        CheckpointError: There are checkpoints but none is sound.
    """
    damaged: list[Damaged] = []
    found = complete_steps(checkpoints_dir) if steps is None else steps
    for step in reversed(found):
        path = checkpoints_dir / step_name(step)
        damage = verify(path)
        if not damage:
            note = pointer_problem(checkpoints_dir, "latest")
            return SelectedCheckpoint(step, path, tuple(damaged), note)
        damaged.append(Damaged(step, tuple(str(entry) for entry in damage)))
    if not damaged:
        return None
    listed = "\n".join(f"  {entry}" for entry in damaged)
    raise CheckpointError(
        f"{checkpoints_dir} holds no sound checkpoint:\n{listed}\n"
        "Loading one would train on garbage. Bring one back from a copy, or start a new run."
    )


def load_tensors(
    path: Path,
    tensors: dict[str, Tensor],
    *,
    of_others: Collection[str] = (),
    allow_extra: bool = False,
) -> list[str]:
    """Fill tensors in place from a checkpoint; each rank reads only what it holds.

    Works for any layout: another world size, other axes, plain tensors. Values are converted to
    the dtype of the tensor. No communication: each rank reports what it cannot read.

    Args:
        tensors: Tensors and DTensors by the names they were saved under.
        of_others: Names that other ranks read: those of other pipeline stages.
        allow_extra: Whether the checkpoint may hold further names.

    Returns:
        Names of buffers that a checkpoint of format 1 lacks: they keep the values they have.

    Raises:
        CheckpointError: A name is missing or extra, a shape differs, or a file is unreadable.
    """
    return SavedTensors.in_folder(path).fill(tensors, of_others=of_others, allow_extra=allow_extra)


class Reader(Protocol):
    """Reads shards from where they are kept."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Give the planner what the plan asks for."""


class SavedTensors:
    """The tensors of a saved state, whose headers were read once.

    Args:
        where: It is kept, for messages: a folder, or words.
    """

    def __init__(
        self,
        where: Path | str,
        version: int,
        reader: Reader,
        saved: Mapping[str, TensorStorageMetadata],
    ) -> None:
        self._where = where
        self._version = version
        self._reader = reader
        self._saved = saved

    @classmethod
    def in_folder(cls, path: Path) -> "SavedTensors":
        """Open the tensors of a checkpoint.

        Raises:
            CheckpointError: A file is unreadable, or shards are missing.
        """
        version = _check_format(path)
        reader = HuggingFaceStorageReader(str(path))
        return cls(path, version, reader, _read_metadata(path, reader))

    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return shapes and dtypes like ``read_shapes``."""
        return _shapes(self._saved)

    def fill(
        self, tensors: dict[str, Tensor], *, of_others: Collection[str] = (), allow_extra: bool
    ) -> list[str]:
        """Fill tensors like ``load_tensors``."""
        saved, lacked = self._saved, list[str]()
        if self._version < _FIRST_WITH_BUFFERS:
            lacked = [name for name in tensors if is_buffer(name) and name not in saved]
            tensors = {name: each for name, each in tensors.items() if not is_buffer(name)}
            of_others = [name for name in of_others if not is_buffer(name)]
        _compare(self._where, saved, tensors, of_others=of_others, allow_extra=allow_extra)
        self._read(TensorsOnlyPlanner(), tensors)
        return lacked

    def rows(self, name: str, start: int, rows: int, dtype: torch.dtype) -> Tensor:
        """Some rows of a tensor, from one on."""
        size = self._saved[name].size
        tensor = torch.empty((rows, *size[1:]), dtype=dtype)
        self._read(_RowsPlanner(start), {name: tensor})
        return tensor

    def _read(self, planner: "TensorsOnlyPlanner", tensors: dict[str, Tensor]) -> None:
        planner.set_up_planner(dict(tensors), Metadata(dict(self._saved), storage_data=None))
        plan = planner.create_local_plan()
        try:
            # Parameters are leaves, and autograd rejects a change in place to one that it tracks.
            with torch.no_grad():
                self._reader.read_data(planner.finish_plan(plan), planner).wait()
        except (SafetensorError, OSError) as error:
            raise _unreadable(self._where, error) from error


def read_shapes(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Global shape and dtype of every tensor in a checkpoint, by name.

    Raises:
        CheckpointError: A file is unreadable or shards are missing.
    """
    return _shapes(_read_metadata(path, HuggingFaceStorageReader(str(path))))


def _shapes(
    saved: Mapping[str, TensorStorageMetadata],
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (entry.size, entry.properties.dtype) for name, entry in saved.items()}


def read_values(
    path: Path,
    *,
    upgrades: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = UPGRADES,
) -> dict[str, Any]:
    """Return the values saved next to the tensors, in the current format version.

    Raises:
        CheckpointError: The file is unreadable, or of a version that cannot be upgraded.
    """
    version = _check_format(path, upgrades)
    try:
        values = read_json_object(path / VALUES)
    except (OSError, ValueError) as error:
        raise _unreadable(path / VALUES, error) from error
    while version < FORMAT:
        values = upgrades[version](values)
        version += 1
    return values


class TensorsOnlyPlanner(DefaultLoadPlanner):
    """torch's planner, without its way to unpickle what is no tensor.

    Where a rank's part lies is our own arithmetic (``shard_bounds``).
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        """Plan this rank's reads."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, tensor in self.state_dict.items():
            if isinstance(tensor, DTensor):
                offsets, sizes = (torch.Size(each) for each in shard_bounds(tensor))
            else:
                offsets, sizes = torch.Size([0] * tensor.dim()), tensor.shape
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata), name
            chunk = ChunkStorageMetadata(offsets, sizes)
            found = create_read_items_for_chunk_list(name, saved, [chunk])
            # Without this, elements that no shard covers would silently keep what was there before.
            assert sum(math.prod(item.lengths) for item in found) == math.prod(sizes), name
            items += found
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:  # noqa: ARG002
        raise CheckpointError(
            f"{read_item.storage_index.fqn} is not a tensor. A checkpoint holds tensors and JSON "
            "only; anything else could run code when it is read and is not opened."
        )


class _RowsPlanner(TensorsOnlyPlanner):
    """Reads some rows of whole tensors, from one on."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self._start = start

    def create_local_plan(self) -> LoadPlan:
        """Plan to read as many rows as each tensor has."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, tensor in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata), name
            offsets = torch.Size([self._start, *[0] * (tensor.dim() - 1)])
            chunk = ChunkStorageMetadata(offsets, tensor.shape)
            items += create_read_items_for_chunk_list(name, saved, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the destination tensor; torch's own method would expect it to begin at 0."""
        tensor: Tensor = self.state_dict[index.fqn]
        return tensor


def wait_for_all_ranks(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Wait for all ranks; name those that stay away."""
    try:
        # Without wait_all_ranks the error names the first missing rank and leaves out the others.
        dist.monitored_barrier(group, timedelta(seconds=timeout_s), wait_all_ranks=True)
    except RuntimeError as error:
        # Only rank 0 learns who is missing: the others wait only for rank 0.
        absent = re.search(r"Ranks? ([\d, ]+) failed to pass", str(error))
        who = (
            f"rank {absent[1].strip()} did not arrive"
            if absent
            else "rank 0 did not arrive, or gave up on another rank; its log names that one"
        )
        raise LostRankError(
            f"before loading a checkpoint all ranks meet, and {who} within {timeout_s:g} s. "
            "That process is dead, hanging, or still starting; see its log, then resume the run. "
            "If the nodes start slowly, raise elastic.collective_timeout_s."
        ) from error


def raise_on_all(error: ShardyardError | None, group: dist.ProcessGroup) -> None:
    """Raise on every rank what rank 0 came to; the others would wait for it otherwise."""
    errors = [error]
    dist.broadcast_object_list(errors, group=group, group_src=0)
    if errors[0] is not None:
        raise errors[0]


def _verify_share(
    folder: Path, group: dist.ProcessGroup, *, rank: int, world_size: int
) -> list[Damage]:
    """Every rank checks its share of the files; all of them return all the damage."""
    try:
        share = sorted(read_manifest(folder).files)[rank::world_size]
    except CheckpointError:
        share = []  # the check says the same of the manifest
    by_rank: list[list[Damage]] = [[] for _ in range(world_size)]
    dist.all_gather_object(by_rank, verify_manifest(folder, share), group=group)
    # Every rank finds damage of the manifest, and files that it does not list. Once is enough.
    return list(dict.fromkeys(damage for found in by_rank for damage in found))


def _record_selection_on_rank0(
    checkpoints_dir: Path, chosen: SelectedCheckpoint, group: dist.ProcessGroup
) -> None:
    problem: list[str | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            _record_selection(checkpoints_dir, chosen)
        except StorageError as error:
            problem = [str(error)]
    # The others learn of a failure here. They would wait in the next collective otherwise.
    dist.broadcast_object_list(problem, group=group, group_src=0)
    if problem[0] is not None:
        raise StorageError(problem[0])


def _record_selection(checkpoints_dir: Path, chosen: SelectedCheckpoint) -> None:
    """Rank 0: let the folder say what was decided; the pointer first, so it never dangles."""
    if read_pointer(checkpoints_dir, "latest") != chosen.step:
        mark_latest(checkpoints_dir, chosen.step)
    for entry in chosen.damaged:
        try:
            set_aside(checkpoints_dir, entry.step)
        except OSError as error:
            raise StorageError(
                f"{checkpoints_dir / step_name(entry.step)} is damaged and cannot be renamed to "
                f"{step_name(entry.step)}{SET_ASIDE}: {error.strerror}. Make the run folder "
                "writable, or remove that checkpoint yourself, then resume."
            ) from error


def _check_format(
    path: Path, upgrades: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = UPGRADES
) -> int:
    """Returns the version that the checkpoint has."""
    try:
        version = read_manifest(path).format
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} is not an intact checkpoint: manifest.json {error}. Use another one; `python "
            "-m shardyard.checkpoint.verify` checks them."
        ) from error
    if version > FORMAT:
        raise CheckpointError(
            f"{path} has format version {version}, this shardyard reads up to {FORMAT}. It was "
            "written by a newer version; install that one."
        )
    missing = [number for number in range(version, FORMAT) if number not in upgrades]
    if missing:
        raise CheckpointError(
            f"{path} has format version {version}, and this version cannot convert it from "
            f"{missing[0]} to {missing[0] + 1}. Open it with the version of shardyard that wrote "
            "it."
        )
    return version


def _read_metadata(
    path: Path, reader: HuggingFaceStorageReader
) -> dict[str, TensorStorageMetadata]:
    """Name, shape and shards of every tensor, from the headers of all files."""
    try:
        metadata = reader.read_metadata()
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise _unreadable(path, error) from error
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    saved: dict[str, TensorStorageMetadata] = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), name
        # torch makes the metadata of the files that it finds, so it does not miss one that is gone.
        held = sum(chunk.sizes.numel() for chunk in entry.chunks)
        if held != entry.size.numel():
            raise CheckpointError(
                f"{path} holds {held:,} of the {entry.size.numel():,} elements of {name}. A file "
                "is missing; `python -m shardyard.checkpoint.verify` says which."
            )
        saved[name] = entry
    return saved


def _compare(
    where: Path | str,
    saved: Mapping[str, TensorStorageMetadata],
    tensors: Mapping[str, Tensor],
    *,
    of_others: Collection[str],
    allow_extra: bool,
) -> None:
    """Reject a checkpoint of something else before a single tensor is changed."""
    wanted = tensors.keys() | set(of_others)
    missing = sorted(wanted - saved.keys())
    extra = [] if allow_extra else sorted(saved.keys() - wanted)
    reshaped = [
        f"{name} has shape {list(saved[name].size)} there and {list(tensor.shape)} here"
        for name, tensor in sorted(tensors.items())
        if name in saved and saved[name].size != tensor.shape
    ]
    problems = [
        *([f"it lacks {_some(missing)}"] if missing else []),
        *([f"it also holds {_some(extra)}"] if extra else []),
        *([_some(reshaped)] if reshaped else []),
    ]
    if problems:
        raise CheckpointError(
            f"{where} is of another model or optimizer: {'; '.join(problems)}. No tensor was "
            "loaded. Resume with the model and optimizer of the run, or start a new run."
        )


def _some(names: Sequence[str]) -> str:
    """The first few of a long list."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _unreadable(path: Path | str, error: Exception) -> CheckpointError:
    why = error.reason if isinstance(error, JsonFileError) else f"cannot be read: {error}"
    return CheckpointError(
        f"{path} {why}. `python -m shardyard.checkpoint.verify` says which file "
        "is damaged; use another checkpoint."
    )
