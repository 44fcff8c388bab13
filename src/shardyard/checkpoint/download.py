"""Download of checkpoints that a run has in its bucket and lacks in its folder.

Every rank downloads its share of the files into the run folder, and compares it with the manifest.
Rank 0 then gives the folder its final name, as a save does, so all that reads checkpoints finds it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from shardyard.checkpoint.bucket import RunBucket, step_of_folder
from shardyard.checkpoint.load import raise_on_all
from shardyard.checkpoint.retention import (
    complete_steps,
    mark_best,
    read_pointer,
    remove_leftovers,
    step_name,
)
from shardyard.checkpoint.verify import MANIFEST, Manifest, parse_manifest, write_flushed
from shardyard.errors import CheckpointError, ShardyardError, StorageError
from shardyard.io.digests import digest_mismatch
from shardyard.io.files import parse_json, publish_folder


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint in the bucket that may be downloaded."""

    folder: str
    step: int
    content: bytes
    """Of its manifest."""

    @property
    def manifest(self) -> Manifest:
        return parse_manifest(parse_json(self.content))


@dataclass(frozen=True)
class _Plan:
    """What rank 0 decides for all: newest first."""

    newest: Sequence[_Candidate] = ()
    best: _Candidate | None = None
    problem: ShardyardError | None = None
    damaged: Sequence[str] = ()


def fetch_newer(
    bucket: RunBucket, checkpoints_dir: Path, *, newer_than: int, group: dist.ProcessGroup
) -> list[str]:
    """Download the newest checkpoint of the bucket, if the run folder has none as new.

    The best one comes too, so that later evaluations are compared with it. All ranks call it.

    Args:
        newer_than: Step of a state that is in memory; 0: there is none.

    Returns:
        Notes for the user: what was downloaded, and what is damaged there.

    Raises:
        ShardyardError: The bucket cannot be read, or the run folder cannot be written; the same
            on every rank.
    """
    plans = [_Plan()]
    if dist.get_rank(group) == 0:
        plans = [_plan(bucket, checkpoints_dir, newer_than=newer_than)]
    dist.broadcast_object_list(plans, group=group, group_src=0)
    plan = plans[0]
    if plan.problem is not None:
        raise plan.problem
    notes = list(plan.damaged)
    for each in plan.newest:
        problems = _fetch(bucket, checkpoints_dir, each, group=group)
        if not problems:
            notes.append(f"step {each.step} was downloaded from {bucket.location}/{each.folder}")
            break
        notes.append(f"{each.folder} in the bucket is damaged: {'; '.join(problems)}")
    if plan.best is not None:
        problems = _fetch(bucket, checkpoints_dir, plan.best, group=group)
        if problems:
            notes.append(f"{plan.best.folder} in the bucket is damaged: {'; '.join(problems)}")
        elif dist.get_rank(group) == 0:
            mark_best(checkpoints_dir, plan.best.step)
    return notes


def _plan(bucket: RunBucket, checkpoints_dir: Path, *, newer_than: int) -> _Plan:
    """Rank 0: list the bucket and read the manifests of what may be needed."""
    here = complete_steps(checkpoints_dir)
    newest_here, candidates, damaged = max([*here, newer_than]), list[_Candidate](), list[str]()
    try:
        whole = bucket.checkpoints()
        folders = [each.folder for each in whole if each.step > newest_here]
        for folder in reversed(folders):
            _read(bucket, folder, candidates, damaged)
        best, found = bucket.pointer("best"), list[_Candidate]()
        step = None if best is None else step_of_folder(best)
        is_lacking = read_pointer(checkpoints_dir, "best") is None and step not in here
        taken = [each.folder for each in candidates]
        if candidates and best is not None and is_lacking and best not in taken[:1]:
            _read(bucket, best, found, damaged)
    except ShardyardError as error:
        return _Plan(problem=error)
    return _Plan(candidates, found[0] if found else None, damaged=damaged)


def _read(bucket: RunBucket, folder: str, found: list[_Candidate], damaged: list[str]) -> None:
    try:
        manifest, content = bucket.manifest(folder)
        found.append(_Candidate(folder, manifest.step, content))
    except CheckpointError as error:
        damaged.append(f"{folder} in the bucket is damaged: {error}")


def _fetch(
    bucket: RunBucket, checkpoints_dir: Path, wanted: _Candidate, *, group: dist.ProcessGroup
) -> list[str]:
    """Download one checkpoint; returns what is damaged of it. All ranks call it."""
    rank, scratch = dist.get_rank(group), checkpoints_dir / f"{step_name(wanted.step)}.tmp"
    raise_on_all(_make_folder(scratch) if rank == 0 else None, group)
    share = sorted(wanted.manifest.files)[rank :: dist.get_world_size(group)]
    outcome = _download_share(bucket, scratch, wanted, share)
    outcomes: list[list[str] | ShardyardError] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(outcomes, outcome, group=group)
    for each in outcomes:
        if isinstance(each, ShardyardError):
            raise each
    problems = [problem for each in outcomes if isinstance(each, list) for problem in each]
    is_first = rank == 0 and not problems
    raise_on_all(_complete(checkpoints_dir, scratch, wanted) if is_first else None, group)
    return problems


def _make_folder(scratch: Path) -> ShardyardError | None:
    try:
        scratch.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(scratch.parent)
        scratch.mkdir()
    except OSError as error:
        return _unwritable(scratch, error)
    return None


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path} cannot be written: {error.strerror}. Free some room there, make it writable, or "
        "move the run folder with run.dir, then resume the run."
    )


def _download_share(
    bucket: RunBucket, scratch: Path, wanted: _Candidate, names: Collection[str]
) -> list[str] | ShardyardError:
    problems, files = [], wanted.manifest.files
    for name in names:
        try:
            there = bucket.files(wanted.folder)
            if name not in there:
                problems.append(f"{name}: missing")
                continue
            source = f"{wanted.folder}/{name}"
            bucket.store.download(source, scratch / name, is_stopped=lambda: False)
        except OSError as error:
            return _unwritable(scratch / name, error)
        except ShardyardError as error:
            return error
        if reason := digest_mismatch(scratch / name, files[name]):
            problems.append(f"{name}: {reason}")
    return problems


def _complete(checkpoints_dir: Path, scratch: Path, wanted: _Candidate) -> ShardyardError | None:
    """Rank 0: give the checkpoint its manifest and its name; why that failed, None: it did not."""
    missing = [name for name in wanted.manifest.files if not (scratch / name).is_file()]
    if missing:
        return StorageError(
            f"{scratch / missing[0]} was downloaded by another rank and is not visible here. All "
            "ranks must see one run folder: put run.dir on storage that all nodes share."
        )
    try:
        write_flushed(scratch / MANIFEST, [memoryview(wanted.content)])
        publish_folder(scratch, checkpoints_dir / step_name(wanted.step))
    except OSError as error:
        return _unwritable(checkpoints_dir, error)
    return None
