"""Storage for torch.distributed.checkpoint.save: shards by rank, the files, the commit.

The files have the format of torch's own ``HuggingFaceStorageWriter(save_distributed=True)``:
one safetensors file a rank with the place of each shard in its header. Its reader opens them.
Two things are ours, because a save runs alongside training steps. Tensors go to the file
straight from host memory, with Python's lock free; torch's writer first builds the whole file
as one bytes object. The plan is kept while the layout stays the same. A save then exchanges a
few hundred bytes per rank instead of the description of every shard.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from shardyard.checkpoint.buffers import check_buffers_equal, check_finite, digests, is_buffer
from shardyard.checkpoint.retention import (
    clear,
    complete_steps,
    mark_best,
    mark_latest,
    prune,
    read_pointer,
    remove_leftovers,
    step_name,
)
from shardyard.checkpoint.safetensors_writer import content_of, header
from shardyard.checkpoint.upload_protocol import UploadQueue
from shardyard.checkpoint.verify import FORMAT, VALUES, Manifest, write_flushed, write_manifest
from shardyard.errors import StorageError
from shardyard.io.digests import FileDigest
from shardyard.io.files import flush_folder
from shardyard.models.local_shard import shard_bounds
from shardyard.units import format_bytes


class ShardPlanner(SavePlanner):
    """Decides which rank writes which shard, and remembers it while the layout stays the same."""

    def __init__(self) -> None:
        self._layout: dict[str, tuple[Any, ...]] = {}
        self._local = SavePlan([])
        self._is_new = True
        self._shards: dict[str, Tensor] = {}
        self._whole_buffers: list[str] = []
        """Names of the buffers that each rank holds all of."""
        self._plans_by_rank: list[SavePlan] = []  # rank 0 only
        self._final = SavePlan([])
        self.total_bytes = 0
        """Bytes of all shards together; known to rank 0."""

    @property
    def shards(self) -> dict[str, Tensor]:
        """This rank's part of the state, copies of what another rank writes included."""
        return self._shards

    def describe(self, tensors: dict[str, Tensor], shards: dict[str, Tensor]) -> None:
        """Take the next state to save: ``shards`` is this rank's part of ``tensors``."""
        layout = {name: _layout_key(tensor) for name, tensor in tensors.items()}
        self._shards = shards
        self._whole_buffers = [
            name
            for name, tensor in tensors.items()
            if is_buffer(name) and not isinstance(tensor, DTensor)
        ]
        if layout == self._layout:
            return
        plan = create_default_local_save_plan(tensors, is_coordinator=False)
        placed = [_placed(item, tensors[item.index.fqn]) for item in plan.items]
        # an empty shard of a tensor that is not empty has no bytes and no place
        items = [item for item in placed if shards[item.index.fqn].numel() or not _size(item)]
        self._layout, self._local, self._is_new = layout, SavePlan(items), True

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Skip the setup, as ``describe`` has been called."""

    def create_local_plan(self) -> SavePlan:
        """Return this rank's shards, or an unusable plan that means "as last time"."""
        plan = self._local if self._is_new else SavePlan([], usable=False)
        held = {name: self._shards[name] for name in self._whole_buffers}
        # The digests travel with the plan, so comparing buffers costs no collective of its own.
        return replace(plan, planner_data=digests(held))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Deal shards that several ranks hold to one of them each.

        Raises:
            CheckpointError: Ranks hold one buffer with different values.
        """
        check_buffers_equal([plan.planner_data for plan in all_plans])
        if not any(plan.usable for plan in all_plans):
            return all_plans, Metadata({})
        # A rank sends its plan only when its layout changed. The others' plans are those of before.
        known = self._plans_by_rank or all_plans
        self._plans_by_rank = [
            new if new.usable else old for new, old in zip(all_plans, known, strict=True)
        ]
        dealer = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        plans, metadata = dealer.create_global_plan(self._plans_by_rank)
        self.total_bytes = sum(_item_bytes(item) for plan in plans for item in plan.items)
        del metadata  # it would be sent to every rank; the files' headers hold all of it
        return plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """This rank's part of the global plan."""
        if new_plan.usable:
            self._final, self._is_new = new_plan, False
        # The bytes of all ranks (prepare_global_plan) also come with a plan that is not usable.
        return replace(self._final, storage_data=new_plan.storage_data)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The host copy of a shard."""
        return self._shards[write_item.index.fqn]


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """One checkpoint to be written."""

    checkpoints_dir: Path
    step: int
    values_json: str
    keep_last: int | None
    """Newest checkpoints that stay; None: all."""
    is_best: bool
    world_size: int
    started: float
    """``time.monotonic()`` at the beginning of the save."""

    @property
    def folder(self) -> Path:
        return self.checkpoints_dir / step_name(self.step)

    @property
    def scratch(self) -> Path:
        """Folder in which files are written until all of them are on disk."""
        return self.folder.with_name(f"{self.folder.name}.tmp")


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint: every rank its file, then rank 0 the commit."""

    def __init__(
        self, request: SaveRequest, planner: ShardPlanner, uploads: UploadQueue | None = None
    ) -> None:
        self._request = request
        self._planner = planner
        self._uploads = uploads
        self._rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Skip the reset, as a writer is used once."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Never asked for by name."""
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
        """Rank 0 makes the scratch folder; others write into it after the plan has come back."""
        self._rank = kwargs["rank"]
        if is_coordinator:
            try:
                # A folder's flush covers the names in it. Its own name needs that of its parent.
                if not self._request.checkpoints_dir.is_dir():
                    self._request.checkpoints_dir.mkdir(parents=True)
                    flush_folder(self._request.checkpoints_dir.parent)
                # A killed save of this step may have left its scratch folder: mkdir would fail.
                remove_leftovers(self._request.checkpoints_dir)
                self._request.scratch.mkdir()
            except OSError as error:
                raise self._storage_error(error, needed_bytes=0) from error

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank how much all of them write, for the message of a full disk."""
        return [replace(plan, storage_data=self._planner.total_bytes) for plan in plans]

    def write_data(
        self,
        plan: SavePlan,
        planner: SavePlanner,  # noqa: ARG002 (it is self._planner)
    ) -> Future[list[WriteResult]]:
        """Write and flush this rank's file, if the state that it holds is finite.

        The check covers all of the state, also what another rank writes. Copies may differ once a
        device has failed, and training continues with each of them.
        """
        results = []
        check_finite(self._planner.shards)
        if plan.items:
            name = f"rank-{self._rank:05d}.safetensors"
            shards = {
                item.index.fqn: (self._planner.resolve_data(item), _offsets(item))
                for item in plan.items
            }
            try:
                digest = write_flushed(self._request.scratch / name, _safetensors(shards))
            except OSError as error:
                raise self._storage_error(error, needed_bytes=plan.storage_data) from error
            results.append(WriteResult(MetadataIndex(name), digest.bytes, digest))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0, once all files are on disk: make the checkpoint durable, then the pointers."""
        files = {part.index.fqn: part.storage_data for rank in results for part in rank}
        try:
            metadata.storage_data = self._commit(files)
        except OSError as error:
            raise self._storage_error(error, needed_bytes=self._planner.total_bytes) from error

    def _commit(self, files: dict[str, FileDigest]) -> tuple[float, int, str | None, bool]:
        """Returns seconds until durable, bytes, which old ones could not go, if it is uploaded."""
        order = self._request
        # Each thing is on disk before the next refers to it: files, manifest, their names in the
        # scratch folder, its final name, that name in the parent folder, the pointer.
        values = memoryview(order.values_json.encode())
        files[VALUES] = write_flushed(order.scratch / VALUES, [values])
        manifest = Manifest(
            format=FORMAT,
            step=order.step,
            world_size=order.world_size,
            torch=torch.__version__,
            files=files,
        )
        write_manifest(order.scratch, manifest)
        flush_folder(order.scratch)
        # A step is reached again after a loss, and rename() fails onto a folder that has files.
        if order.folder.exists():
            self._clear_the_way()
        order.scratch.rename(order.folder)
        flush_folder(order.checkpoints_dir)
        mark_latest(order.checkpoints_dir, order.step)
        # The checkpoint survives a crash from here on, whatever happens to what follows.
        seconds = time.monotonic() - order.started
        if order.is_best:
            mark_best(order.checkpoints_dir, order.step)
        # Rank 0 decides for all ranks: each of them knows only how far its own uploads are.
        uploads = self._uploads
        is_uploaded = uploads is not None and uploads.accepts(order.step, is_best=order.is_best)
        # Removal comes last: it reads `best`, which may just have moved to this checkpoint.
        not_removed: str | None = None
        if order.keep_last is not None:
            keep = () if uploads is None else uploads.unfinished
            not_removed = prune(order.checkpoints_dir, order.keep_last, keep=keep).not_removed
        return seconds, manifest.bytes, not_removed, is_uploaded

    def _clear_the_way(self) -> None:
        """Remove an older checkpoint of the same step, once ``latest`` names it no more."""
        order = self._request
        older = [step for step in complete_steps(order.checkpoints_dir) if step < order.step]
        if read_pointer(order.checkpoints_dir, "latest") == order.step:
            if older:
                mark_latest(order.checkpoints_dir, older[-1])
            else:
                (order.checkpoints_dir / "latest").unlink()
        # unlink() by itself is not durable: after a crash `latest` could name the removed folder.
        flush_folder(order.checkpoints_dir)
        clear(order.folder)

    def _storage_error(self, error: OSError, *, needed_bytes: int) -> StorageError:
        order = self._request
        previous = read_pointer(order.checkpoints_dir, "latest")
        return StorageError(
            f"{order.folder} cannot be saved: rank {self._rank} got "
            f"{os.strerror(error.errno or errno.EIO)!r}"
            f"{f' for {error.filename}' if error.filename else ''}. "
            f"{_remedy(error, order.checkpoints_dir, needed_bytes)} "
            + (
                f"The checkpoint of step {previous} is intact; "
                if previous is not None
                else "It has not saved a checkpoint yet; "
            )
            + "resume the run once this is fixed."
        )


def _remedy(error: OSError, folder: Path, needed_bytes: int) -> str:
    # A quota (EDQUOT) can be used up while the disk has room. The remedies are the same.
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needs = f"A checkpoint needs about {format_bytes(needed_bytes)}" if needed_bytes else ""
        free = format_bytes(shutil.disk_usage(folder).free) if folder.is_dir() else "nothing"
        return (
            f"{needs or 'A checkpoint needs more'} in addition to those kept, and {free} is free "
            "there now. Free some room, keep fewer with checkpoint.keep_last, or move the run "
            "folder."
        )
    # Rank 0 has made the folder, so a rank that does not find it has another file system there.
    if error.errno == errno.ENOENT:
        return (
            "All ranks must see one run folder: put run.dir on storage that all nodes share, and "
            "remove no file from it during the run."
        )
    return "Check that the storage is mounted, healthy and writable."


def _layout_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor that the plan depends on."""
    mesh = getattr(tensor, "device_mesh", None)
    return (tensor.shape, tensor.dtype, getattr(tensor, "placements", None), mesh)


def _safetensors(shards: dict[str, tuple[Tensor, list[int]]]) -> Iterator[memoryview]:
    """The pieces of a safetensors file: length of the header, header, tensors."""
    places = {name: {"saved_offsets": offsets} for name, (_, offsets) in shards.items()}
    # the three keys that torch's HuggingFaceStorageWriter writes and its reader looks for
    custom = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
    # wide elements first: then every tensor is aligned to its element
    ordered = sorted(shards, key=lambda name: (-shards[name][0].itemsize, name))
    tensors = {name: shards[name][0] for name in ordered}
    shapes = {name: (each.dtype, each.shape) for name, each in tensors.items()}
    yield memoryview(header(shapes, custom))
    for each in tensors.values():
        yield content_of(each)


def _placed(item: WriteItem, tensor: Tensor) -> WriteItem:
    """The item with our own arithmetic in the place of torch's (``shard_bounds``)."""
    if not isinstance(tensor, DTensor):
        return item
    assert item.tensor_data is not None
    # torch 2.13 lets shards overlap where two mesh axes split a dimension that neither divides.
    offsets, sizes = (torch.Size(each) for each in shard_bounds(tensor))
    return replace(
        item,
        index=MetadataIndex(item.index.fqn, offsets, item.index.index),
        tensor_data=replace(item.tensor_data, chunk=ChunkStorageMetadata(offsets, sizes)),
    )


def _offsets(item: WriteItem) -> list[int]:
    assert item.tensor_data is not None, item
    return list(item.tensor_data.chunk.offsets)


def _size(item: WriteItem) -> int:
    """Elements of the whole tensor that a shard belongs to."""
    assert item.tensor_data is not None, item
    return item.tensor_data.size.numel()


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None, item
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
