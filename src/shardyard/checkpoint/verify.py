"""The manifest of a checkpoint: size and checksum of every file, and the check against it.

Run as a program, checks checkpoint folders: ``python -m shardyard.checkpoint.verify FOLDER...``;
exit code 1 if one is damaged.
"""

import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from shardyard.checkpoint.buffers import not_finite_in_file
from shardyard.errors import CheckpointError, JsonFileError
from shardyard.io.digests import FileDigest, digest_mismatch
from shardyard.io.files import read_json_object
from shardyard.rundir.layout import step_of_name

MANIFEST = "manifest.json"
VALUES = "values.json"

FORMAT = 2
"""Version of a checkpoint's files. A new one needs a rule in ``load.UPGRADES``.

Since 2, buffers are in it, and what is not finite was never written; so an older one is looked
through for NaN and infinities when it is verified.
"""

_CHUNK_BYTES = 16 * 2**20
"""Written and hashed at a time: long enough that Python's lock is free nearly all the while,
short enough that the bytes are still in the processor's cache when they are hashed."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Written last, so that a folder with a manifest holds all its files."""

    format: int
    step: int
    world_size: int
    """Ranks that wrote the checkpoint; any number can read it."""
    torch: str
    """Version of torch that wrote it."""
    files: Mapping[str, FileDigest]

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(digest.bytes for digest in self.files.values())


@dataclass(frozen=True)
class Damage:
    """One file that is not what the manifest says."""

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


def write_flushed(path: Path, parts: Iterable[memoryview]) -> FileDigest:
    """Write a new file, flush it to disk, and return what it must be from now on.

    The checksum is taken from memory while writing, so what the disk garbles is found later.

    Raises:
        OSError: The file cannot be written.
    """
    checksum = hashlib.sha256()
    size = 0
    with path.open("wb") as file:
        for part in parts:
            for start in range(0, part.nbytes, _CHUNK_BYTES):
                chunk = part[start : start + _CHUNK_BYTES]
                file.write(chunk)
                checksum.update(chunk)
            size += part.nbytes
        # flush() ends in the kernel's cache. fsync() ends on the disk, and reports its errors.
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(size, checksum.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, flushed.

    Raises:
        OSError: The file cannot be written.
    """
    text = json.dumps(asdict(manifest), indent=1) + "\n"
    write_flushed(folder / MANIFEST, [memoryview(text.encode())])


def read_manifest(folder: Path) -> Manifest:
    """Read what a checkpoint must hold.

    Raises:
        CheckpointError: There is no manifest, or it is damaged; the text says only why.
    """
    try:
        return parse_manifest(read_json_object(folder / MANIFEST))
    except FileNotFoundError as error:
        raise CheckpointError("missing, so the checkpoint was never completed") from error
    except JsonFileError as error:
        raise CheckpointError(error.reason) from error


def parse_manifest(content: dict[str, Any]) -> Manifest:
    """Return a manifest from its form in JSON.

    Raises:
        CheckpointError: It is none; the text says only why.
    """
    try:
        return Manifest(
            format=_number(content["format"]),
            step=_number(content["step"]),
            world_size=_number(content["world_size"]),
            torch=str(content["torch"]),
            files={
                _plain_name(name): FileDigest(_number(entry["bytes"]), str(entry["sha256"]))
                for name, entry in content["files"].items()
            },
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"is not a manifest ({type(error).__name__}: {error})") from error


def verify_manifest(folder: Path, files: Collection[str] | None = None) -> list[Damage]:
    """Compare the files of a checkpoint with its manifest; an empty list means sound.

    Args:
        files: The files to read and compare, so that ranks can share the work; None: all.
            What the folder holds beyond the manifest is looked at in any case.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [Damage(MANIFEST, str(error))]
    # All checksums of a copied folder are right, and it would set the run to a wrong step.
    named = step_of_name(folder.name)
    if named is not None and named != manifest.step:
        text = f"is of step {manifest.step}, the folder's name says {named}: it was copied here"
        return [Damage(MANIFEST, text)]
    # torch's reader opens every *.safetensors of the folder, listed or not.
    strangers = {path.name for path in folder.glob("*.safetensors")} - manifest.files.keys()
    found = [Damage(name, "not in the manifest") for name in sorted(strangers)]
    chosen = manifest.files if files is None else files
    for name in sorted(chosen):
        reason = digest_mismatch(folder / name, manifest.files[name])
        if not reason and manifest.format < FORMAT and name.endswith(".safetensors"):
            reason = _not_finite(folder / name)
        if reason:
            found.append(Damage(name, reason))
    return found


def _not_finite(path: Path) -> str | None:
    try:
        found = not_finite_in_file(path)
    except SafetensorError as error:
        return f"is not a safetensors file: {error}"
    more = f" and {len(found) - 1} more tensors" if len(found) > 1 else ""
    return f"{found[0]}{more}, so training cannot continue from it" if found else None


def _number(value: Any) -> int:
    # isinstance() would take JSON's true for 1.
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _plain_name(name: str) -> str:
    """Return a name, or raise ValueError if it would reach out of the folder."""
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a file name")
    return name


def main(folders: list[str]) -> int:
    """Print one line a folder, and one for each damaged file."""
    if not folders:
        print("usage: python -m shardyard.checkpoint.verify FOLDER...", file=sys.stderr)
        return 2
    is_sound = True
    for folder in folders:
        damage = verify_manifest(Path(folder))
        print(f"{folder}: {'damaged' if damage else 'sound'}")
        for entry in damage:
            print(f"  {entry}")
        is_sound = is_sound and not damage
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
