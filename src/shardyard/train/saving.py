"""Opening and ending of what saves a run: its saver, the interval, and uploads to a bucket."""

import torch.distributed as dist

from shardyard.checkpoint.bucket import RunBucket
from shardyard.checkpoint.bucket_lease import BucketLease, owner_of
from shardyard.checkpoint.load import raise_on_all
from shardyard.checkpoint.retention import complete_steps
from shardyard.checkpoint.save import Saver
from shardyard.checkpoint.snapshots.take import Snapshots
from shardyard.checkpoint.uploads import Uploads
from shardyard.config.resolved import Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import ShardyardError
from shardyard.io.object_store import parse_location
from shardyard.rundir.layout import RunDir


def open_saver(
    run_dir: RunDir, recipe: Recipe, group: dist.ProcessGroup, snapshots: Snapshots | None,
    uploads: Uploads | None,
) -> Saver:  # fmt: skip
    """Return the writer of the run's checkpoints."""
    return Saver(
        run_dir.checkpoints,
        group=group,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        keep_last=recipe.checkpoint.keep_last,
        staging=snapshots,
        uploads=uploads,
    )


def open_uploads(run_dir: RunDir, resolved: Resolved, group: dist.ProcessGroup) -> Uploads | None:
    """Try the bucket of ``checkpoint.to``, and take the run's place in it. All ranks call it.

    Raises:
        RequestError: There is no such bucket, or another training of this run saves there.
        AccessError: Credentials or rights are missing.
        LostError: It cannot be reached.
    """
    recipe = resolved.recipe
    if recipe.checkpoint.to is None:
        return None
    rank = dist.get_rank(group)
    error, bucket, lease = None, None, None
    try:
        bucket = RunBucket(parse_location(recipe.checkpoint.to), run_dir.run_id)
        # Every rank, as credentials may be missing on one node.
        bucket.probe(rank)
    except ShardyardError as found:
        error = found
    _raise_first(error, group)
    assert bucket is not None
    try:
        if rank == 0:
            lease = BucketLease(bucket.store, owner_of(run_dir))
            _tidy(bucket, run_dir, resolved)
    except ShardyardError as found:
        error = found
        if lease is not None:
            lease.close()
    raise_on_all(error, group)
    return Uploads(
        bucket,
        run_dir.checkpoints,
        rank=rank,
        lease=lease,
        keep_last=recipe.checkpoint.keep_last,
    )


def _raise_first(error: ShardyardError | None, group: dist.ProcessGroup) -> None:
    """Raise the error of the lowest rank that has one, on all ranks."""
    errors: list[ShardyardError | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    for each in errors:
        if each is not None:
            raise each


def _tidy(bucket: RunBucket, run_dir: RunDir, resolved: Resolved) -> None:
    """Rank 0: remove what killed uploads left, and hide what a resume goes back before."""
    bucket.remove_leftovers()
    back_to, here = resolved.back_to, complete_steps(run_dir.checkpoints)
    # A restart within the attempt may have newer ones again, which are its own.
    if back_to is not None and here[-1:] == [back_to.step]:
        bucket.put_aside_after(back_to.step)
