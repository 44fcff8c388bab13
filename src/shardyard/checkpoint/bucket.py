"""Checkpoints of one run in a bucket: a folder each, whole once its manifest is there.

::

    PREFIX/RUN/lease.json                          who may write here
    PREFIX/RUN/step-00000500-3fa9c1d2/rank-*.safetensors, values.json, manifest.json
    PREFIX/RUN/latest, PREFIX/RUN/best             names of folders

The eight digits behind the step are those of the manifest's SHA-256. A step that is trained again
gets another folder, so no object is ever overwritten by other content, and an object of the right
name and size is the right one. Only rank 0 writes manifests and pointers, and removes.
"""

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from shardyard.checkpoint.retention import step_name
from shardyard.checkpoint.verify import MANIFEST, VALUES, Manifest, parse_manifest
from shardyard.errors import CheckpointError
from shardyard.io.files import parse_json
from shardyard.io.object_store import ObjectStore, S3Location, StoredObject

REPLACED_MANIFEST = "manifest.replaced.json"
"""Manifest of a checkpoint that a resume went back before: no reader takes it for one."""

_FOLDER = re.compile(r"step-(\d{8})-[0-9a-f]{8}", re.ASCII)
_FAILED = ".failed"
_OWN_FILE = re.compile(
    rf"rank-\d{{5}}(\.safetensors|{re.escape(_FAILED)})|{VALUES}|{REPLACED_MANIFEST}", re.ASCII
)
"""Names in the folder of a checkpoint that an upload writes before the manifest."""
_RESUME = "resume the run"


@dataclass(frozen=True)
class BucketCheckpoint:
    """A whole checkpoint in the bucket."""

    folder: str
    """Name of its folder, below the run's."""
    step: int
    modified_t: float


def folder_name(step: int, manifest: bytes) -> str:
    """Name of a checkpoint's folder in the bucket."""
    return f"{step_name(step)}-{hashlib.sha256(manifest).hexdigest()[:8]}"


def step_of_folder(name: str) -> int | None:
    """The step of a checkpoint's folder in the bucket; None for any other name."""
    found = _FOLDER.fullmatch(name)
    return int(found[1]) if found else None


class RunBucket:
    """The checkpoints of one run in a bucket.

    Args:
        to: Value of ``checkpoint.to``.
    """

    def __init__(self, to: S3Location, run_id: str) -> None:
        self.location = to.below(run_id)
        self.store = ObjectStore(self.location, retry_hint=_RESUME)

    def probe(self, rank: int) -> None:
        """Write and remove an object, before hours go into what is to be stored.

        Raises:
            ShardyardError: That does not work; says why.
        """
        name = f"probe-{rank:05d}"
        self.store.write(name, b"shardyard tries whether it can write and remove here\n")
        self.store.delete([name])

    def checkpoints(self) -> list[BucketCheckpoint]:
        """Return whole checkpoints by rising step; of one step, the one that counts comes last."""
        pointed = {self.pointer("latest"), self.pointer("best")}
        found = [
            BucketCheckpoint(folder, step, each.modified_t)
            for each in self.store.list("step-")
            for folder, _, file in [each.name.partition("/")]
            if file == MANIFEST and (step := step_of_folder(folder)) is not None
        ]
        return sorted(found, key=lambda each: (each.step, each.folder in pointed, each.modified_t))

    def manifest(self, folder: str) -> tuple[Manifest, bytes]:
        """Return what a checkpoint must hold, and the very bytes that say so.

        Raises:
            CheckpointError: It is gone, or no manifest; the text says only why.
        """
        found = self.store.read(f"{folder}/{MANIFEST}")
        if found is None:
            raise CheckpointError(f"{MANIFEST} is gone")
        step = step_of_folder(folder)
        if step is None or folder_name(step, found[0]) != folder:
            raise CheckpointError(f"{MANIFEST} is not the one that the folder is named after")
        try:
            return parse_manifest(parse_json(found[0])), found[0]
        except ValueError as error:
            raise CheckpointError(f"{MANIFEST} is not JSON ({error})") from error

    def pointer(self, name: str) -> str | None:
        """Return the folder that ``latest`` or ``best`` names."""
        found = self.store.read(name)
        text = "" if found is None else found[0].decode(errors="replace").strip()
        return text if step_of_folder(text) is not None else None

    def is_whole(self, folder: str) -> bool:
        """Whether a checkpoint is complete in the bucket."""
        return any(each.name == f"{folder}/{MANIFEST}" for each in self.store.list(f"{folder}/man"))

    def files(self, folder: str) -> dict[str, int]:
        """Return name and bytes of the objects in a checkpoint's folder."""
        start = f"{folder}/"
        return {each.name.removeprefix(start): each.bytes for each in self.store.list(start)}

    def write_failure(self, folder: str, rank: int, reason: str) -> None:
        """Let rank 0 know that it need not wait for this rank's file."""
        self.store.write(f"{folder}/rank-{rank:05d}{_FAILED}", reason.encode())

    def forget_failure(self, folder: str, rank: int, there: Collection[str]) -> None:
        """Take back what an earlier try of this rank said."""
        name = f"rank-{rank:05d}{_FAILED}"
        if name in there:
            self.store.delete([f"{folder}/{name}"])

    def take_failures(self, folder: str, there: Collection[str]) -> list[str]:
        """Return what ranks said of their failures, and remove it: the next try begins anew."""
        names = sorted(name for name in there if name.endswith(_FAILED))
        contents = [(name, self.store.read(f"{folder}/{name}")) for name in names]
        self.store.delete(f"{folder}/{name}" for name in names)
        return [
            f"{name.removesuffix(_FAILED)}: {found[0].decode(errors='replace')}"
            for name, found in contents
            if found is not None
        ]

    def commit(self, folder: str, manifest: bytes, *, is_best: bool) -> None:
        """Make a checkpoint visible, all of whose files are there; then the pointers to it."""
        self.store.write(f"{folder}/{MANIFEST}", manifest)
        # The checkpoint is whole from here on; the pointers name nothing that is not.
        self.store.write("latest", f"{folder}\n".encode())
        if is_best:
            self.store.write("best", f"{folder}\n".encode())

    def prune(self, keep_last: int, *, latest: str) -> None:
        """Remove old checkpoints by the rules of the run folder."""
        best, newest = self.pointer("best"), step_of_folder(latest)
        assert newest is not None, latest
        passed = [each for each in self.checkpoints() if each.step <= newest]
        kept = set(sorted({each.step for each in passed})[-keep_last:])
        by_step = {each.step: each.folder for each in passed}  # of one step the last counts
        for each in passed:
            is_kept = each.step in kept and each.folder == by_step[each.step]
            if not is_kept and each.folder not in (latest, best):
                self._remove(each.folder)
        for folder in self._folders(holding=REPLACED_MANIFEST):
            if (step_of_folder(folder) or 0) <= newest:
                self.remove_leftover(folder)

    def _remove(self, folder: str) -> None:
        """Remove a checkpoint: the manifest first, so that a kill leaves none that looks whole."""
        manifest, _ = self.manifest(folder)
        self.store.delete([f"{folder}/{MANIFEST}"])
        self.store.delete(f"{folder}/{name}" for name in manifest.files)

    def remove_leftover(self, folder: str) -> None:
        """Remove what an upload wrote that was not completed."""
        names = [name for name in self.files(folder) if _OWN_FILE.fullmatch(name)]
        self.store.delete(f"{folder}/{name}" for name in names)

    def remove_leftovers(self) -> None:
        """Remove what killed uploads left: parts, and folders without a manifest."""
        self.store.abort_unfinished()
        objects = list(self.store.list("step-"))
        whole = _folders_with(objects, (MANIFEST, REPLACED_MANIFEST))
        for folder in sorted(_folders_with(objects) - whole):
            self.remove_leftover(folder)

    def put_aside_after(self, step: int) -> list[int]:
        """Hide the checkpoints after a step, for a resume from it; returns their steps."""
        newer = [each for each in self.checkpoints() if each.step > step]
        for each in reversed(newer):
            _, content = self.manifest(each.folder)
            self.store.write(f"{each.folder}/{REPLACED_MANIFEST}", content)
            self.store.delete([f"{each.folder}/{MANIFEST}"])
        best = self.pointer("best")
        if best is not None and (step_of_folder(best) or 0) > step:
            self.store.delete(["best"])
        return [each.step for each in newer]

    def _folders(self, *, holding: str) -> set[str]:
        return _folders_with(self.store.list("step-"), (holding,))


def _folders_with(objects: Iterable[StoredObject], files: Collection[str] = ()) -> set[str]:
    """Folders of checkpoints that hold one of these files; without any: all."""
    split = (each.name.partition("/") for each in objects)
    return {
        folder
        for folder, _, file in split
        if step_of_folder(folder) is not None and (not files or file in files)
    }
