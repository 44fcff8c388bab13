"""The files of a model's folder, so that two nodes can say whether they see the same ones.

A file with the same size, time and inode is the same file of a shared volume. Any other is compared
by its SHA-256, which the list of a store has already and which is read from other folders where
it decides.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardyard.config.model.hub import digests_of, verified_repository

_SUFFIXES = (".json", ".jinja", ".safetensors")
"""Suffixes of the model files that a training reads."""


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """One file, as a node sees it."""

    bytes: int
    mtime_ns: int
    inode: int
    sha256: str | None

    def is_file(self, other: "ModelFile") -> bool:
        """Whether both are one file, seen from two nodes."""
        ours = (self.bytes, self.mtime_ns, self.inode)
        return ours == (other.bytes, other.mtime_ns, other.inode)


ModelFiles = Mapping[str, ModelFile]


def files_of(folder: Path) -> dict[str, ModelFile]:
    """List the files in a model's folder; with digests where a store's list has them.

    Raises:
        RequestError: A file of a store was changed after it was fetched.
    """
    complete = verified_repository(folder)
    listed = {} if complete is None else complete.files
    names = listed or [path.name for path in folder.iterdir() if path.suffix in _SUFFIXES]
    files = {}
    for name in sorted(names):
        state = (folder / name).stat()
        files[name] = ModelFile(
            bytes=state.st_size,
            mtime_ns=state.st_mtime_ns,
            inode=state.st_ino,
            sha256=listed[name].sha256 if name in listed else None,
        )
    return files


def with_digests(folder: Path, files: ModelFiles, names: Iterable[str]) -> dict[str, ModelFile]:
    """The same with the SHA-256 of some files, which are read unless it is known."""
    known = dict(files)
    for name in names:
        if known[name].sha256 is None:
            known[name] = replace(known[name], sha256=digests_of(folder / name).sha256)
    return known


def undecided(local: ModelFiles, node0: ModelFiles) -> list[str]:
    """Files that only their content can tell apart."""
    return [
        name
        for name in local.keys() & node0.keys()
        if local[name].bytes == node0[name].bytes
        and not local[name].is_file(node0[name])
        and None in (local[name].sha256, node0[name].sha256)
    ]


def differences(local: ModelFiles, node0: ModelFiles) -> list[str]:
    """Describe the differences; empty: there are none.

    Args:
        node0: Node 0's.
    """
    found = [f"{name} is missing" for name in sorted(node0.keys() - local.keys())]
    found += [f"{name} is not on node 0" for name in sorted(local.keys() - node0.keys())]
    for name in sorted(local.keys() & node0.keys()):
        our, their = local[name], node0[name]
        if our.bytes != their.bytes:
            found.append(f"{name} has {our.bytes:,} bytes, {their.bytes:,} on node 0")
        elif not our.is_file(their) and our.sha256 != their.sha256:
            digests = f"{str(our.sha256)[:12]}..., {str(their.sha256)[:12]}... on node 0"
            found.append(f"{name} has the SHA-256 {digests}")
    return found


def to_json(files: ModelFiles) -> dict[str, dict[str, Any]]:
    return {name: asdict(file) for name, file in files.items()}


def from_json(content: Any) -> dict[str, ModelFile] | None:
    """None if it is no such list."""
    try:
        files = {str(name): ModelFile(**entry) for name, entry in content.items()}
    except (AttributeError, TypeError):
        return None
    has_form = all(
        isinstance(file.bytes, int) and (file.sha256 is None or isinstance(file.sha256, str))
        for file in files.values()
    )
    return files if has_form else None


# Whether the weights beside which adapters were trained are still the ones in a folder.
#
# No checkpoint of a run with adapters holds its base, so a resume and an export read it from where
# it came from, and must notice another one there.

_SAMPLES, _BYTES = 64, 4096
"""Number and bytes of the samples of each file, evenly spaced.

Trained weights differ nearly everywhere, and reading all of a large base at every start would
take minutes.
"""


def base_digest(folder: Path) -> str | None:
    """Names, sizes and samples of a folder's weights; None: it has none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(max(0, size - _BYTES) * number // (_SAMPLES - 1))
                digest.update(file.read(_BYTES))
    return digest.hexdigest()[:16]
