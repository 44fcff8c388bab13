"""Which files hold pictures, of which class and split they are: what names alone can say.

ImageNet's own tree is named as class folders first (``imagenet.py``).
Class folders are ``CLASS/.../name.jpg`` below data.source, or ``train/CLASS/...`` beside
``val/CLASS/...``. Of tar shards and Parquet files such a word stands anywhere in the name.
"""

import glob
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, NoReturn

from shardyard.config.schema import Recipe
from shardyard.config.sources import DIGITS, is_name
from shardyard.data.images.digits import DIGITS_FILE
from shardyard.data.images.imagenet import as_class_folders, is_imagenet, unpacked
from shardyard.data.spans import SourceFile, shown
from shardyard.data.stores.base import store_of
from shardyard.errors import RequestError

Kind = Literal["folders", "shards", "parquet", "digits"]
Split = Literal["train", "eval"]

PICTURES = frozenset(
    [
        "jpg",
        "jpeg",
        "jpe",
        "jfif",
        "png",
        "webp",
        "gif",
        "tif",
        "tiff",
        "bmp",
        "dib",
        "ppm",
        "pgm",
        "pbm",
        "pnm",
    ]
)
"""Suffixes of pictures, in small letters."""
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(PICTURES, "folders"),
    **dict.fromkeys(("tar", "tar.gz", "tgz"), "shards"),
    "parquet": "parquet",
}
_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    "test": "test",
}
_SHOWN = 4
_WHAT = "class folders (CLASS/name.jpg), tar shards (.tar, .tar.gz) or Parquet files with pictures"


@dataclass(frozen=True)
class Listing:
    """The files of data.source that hold pictures, in a fixed order."""

    kind: Kind
    files: tuple[SourceFile, ...]
    held_out: str | None
    """The word in names that stands for what is held out: val, else test. None: a hash of each
    picture says it."""
    class_part: int
    """Which part of a name in class folders is the class: the first, or the one below train."""

    @property
    def says_splits(self) -> bool:
        """Whether the source itself says what is held out."""
        return self.held_out is not None or self.kind == "digits"

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def split_of(self, file: SourceFile) -> Split | None:
        """Split of a file; None: a hash of each picture says it."""
        if self.held_out is None:
            return None
        return "train" if split_word(file.name, self.kind) == "train" else "eval"

    def class_of(self, file: SourceFile) -> str:
        """Class of a file in a class folder."""
        return PurePosixPath(file.name).parts[self.class_part]


def list_pictures(recipe: Recipe) -> Listing:
    """What data.source names.

    Raises:
        RequestError: Nothing is there, or what is there is of several kinds, or of none.
        AccessError: A place elsewhere may not be looked at.
        CapacityError: It cannot be reached.
    """
    data = recipe.data
    if data.source == DIGITS and is_name(DIGITS):
        stat = DIGITS_FILE.stat()
        file = SourceFile(DIGITS, DIGITS, "csv.gz", stat.st_size, 0)
        return Listing("digits", (file,), None, class_part=0)
    own = [Path(place).expanduser() for place in (data.dir, recipe.run.dir)]
    entries = [data.source] if isinstance(data.source, str) else list(data.source)
    found: dict[str, SourceFile] = {}
    for entry in entries:
        for each in store_of(entry).find(entry, own=own):
            file = SourceFile(
                each.path, each.name, suffix_of(each.name), each.size_bytes, each.version
            )
            found.setdefault(each.path, file)
    files, source = unpacked([*found.values()]), f"data.source={data.source!r}"
    if is_imagenet(files, source):
        files = as_class_folders(files, source, complete=data.images.complete)
    elif not data.images.complete:
        raise RequestError(
            f"data.images.complete={data.images.complete} says which pictures of ImageNet must be "
            f"there, and {source} is not its tree ILSVRC. Leave it out."
        )
    kind = _of_one_kind(files, source)
    if kind == "folders" and any(glob.has_magic(entry) for entry in entries):
        raise RequestError(
            f"data.source={data.source!r} has a wildcard, which leaves open where class folders "
            "begin. Give the folder that holds the class folders, or train and val."
        )
    return _divided(kind, files)


def suffix_of(name: str) -> str:
    """The suffix of a file in small letters, both of .tar.gz; empty: it has none."""
    last = PurePosixPath(name).name.lower()
    return "tar.gz" if last.endswith(".tar.gz") else last.rpartition(".")[2] if "." in last else ""


def split_word(name: str, kind: Kind) -> str | None:
    """train, val or test, if a file's name says one."""
    parts = PurePosixPath(name.lower()).parts
    if kind == "folders":
        return _SPLIT_WORDS.get(parts[0]) if len(parts) >= 3 else None
    words = re.split(r"[^a-z]+", "/".join(parts))
    return next((_SPLIT_WORDS[word] for word in reversed(words) if word in _SPLIT_WORDS), None)


def held_out_word(words: set[str | None]) -> str | None:
    """Which of the words that all names say stands for the held-out split; None: none does."""
    if None in words or "train" not in words:
        return None
    return next((word for word in ("val", "test") if word in words), None)


def _of_one_kind(files: Sequence[SourceFile], source: str) -> Kind:
    """What the files are.

    Raises:
        RequestError: They are of several kinds or of none, or some have no class.
    """
    kinds = Counter(_KINDS[file.format] for file in files if file.format in _KINDS)
    if len(kinds) != 1:
        counted = ", ".join(f"{count} of {kind}" for kind, count in sorted(kinds.items()))
        why = f"holds files of several kinds: {counted}" if kinds else "names no pictures"
        raise RequestError(f"{source} {why}. Give {_WHAT}.")
    (kind,) = kinds
    if kind != "folders":
        return kind  # what stands beside shards (a list of classes, a page about them) is not read
    is_alone = {file.name: "/" not in file.name for file in files}
    strays = [f.name for f in files if is_alone[f.name] and f.format in PICTURES]
    if strays:
        _refuse(source, strays, "lie in no class folder", "Put each into a folder of its class.")
    others = [f.name for f in files if not is_alone[f.name] and f.format not in PICTURES]
    if others:
        what = "in class folders have no suffix of a picture"
        _refuse(source, others, what, f"Take them out, or rename pictures ({_suffixes()}).")
    return kind


def _divided(kind: Kind, files: Sequence[SourceFile]) -> Listing:
    """The files of that kind with what their names say of splits; a test split beside val is left
    out."""
    ours = [file for file in files if _KINDS.get(file.format) == kind]
    words = {split_word(file.name, kind) for file in ours}
    held_out = held_out_word(words)
    if held_out is not None:
        ours = [file for file in ours if split_word(file.name, kind) in ("train", held_out)]
    # A train folder alone is divided by hash, and is no class either.
    is_below = held_out is not None or words == {"train"}
    return Listing(kind, tuple(ours), held_out, class_part=1 if is_below else 0)


def _suffixes() -> str:
    return ", ".join(sorted(PICTURES))


def _refuse(source: str, names: Sequence[str], what: str, remedy: str) -> NoReturn:
    named = ", ".join(shown(name) for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise RequestError(f"{source}: {len(names)} files {what}: {named}{more}. {remedy}")
