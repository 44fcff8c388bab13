"""Find files of pictures, and their class and split, by their names only.

ImageNet's own tree is named as class folders first (``imagenet.py``). Class folders are
``CLASS/.../name.jpg`` below data.source, or ``train/CLASS/...`` next to ``val/CLASS/...``.
In tar shards and Parquet files such a word may be anywhere in the name.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Literal, NoReturn

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.data import Sources
from shardyard.config.schema.recipe import Recipe
from shardyard.config.sources import DIGITS, is_name, is_remote
from shardyard.config.split_names import KEYWORDS, NamedSplit, split_in, validation_split_of
from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.data.images.digits import DIGITS_FILE
from shardyard.data.images.imagenet import as_class_folders, expand_tar, is_imagenet
from shardyard.data.images.label_tables import TABLES, images_in_tables
from shardyard.data.images.tar import InTar
from shardyard.data.stores.base import find_all
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
EVAL_SOURCE = "data.eval_source"
_SHOWN = 4
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
"""A class number in a table of labels; 007 is a name."""
_WHAT = (
    "class folders (CLASS/name.jpg), a CSV file that names pictures and classes, tar shards (.tar, "
    ".tar.gz) or Parquet files with pictures"
)


@dataclass(frozen=True)
class Listing:
    """The files of data.source that hold pictures, in a fixed order."""

    kind: Kind
    files: tuple[SourceFile, ...]
    validation_source: str | None
    """Source of the validation split: a word in names (validation, else eval, else test), or
    data.eval_source. None: a hash of each picture.
    """
    class_part: int
    """Number of the part of a name in class folders that is the class: the first, or the one
    below train.
    """
    chosen: tuple[SourceFile, ...] = ()
    """Files of data.eval_source, which are among ``files`` too."""
    chosen_class_part: int = 0
    """``class_part`` of these."""
    excluded: tuple[SourceFile, ...] = ()
    """Files that their names keep out of the training, and that are not validated on."""
    empty: tuple[str, ...] = ()
    """Class folders that hold no picture."""
    from_tables: bool = False
    """Whether tables of labels name the files, so that whole numbers are numbers of classes."""

    @property
    def has_validation_split(self) -> bool:
        """Whether the source itself says what is held out."""
        return self.validation_source is not None or self.kind == "digits"

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @cached_property
    def _chosen_paths(self) -> frozenset[str]:
        return frozenset(file.path for file in self.chosen)

    def split_of(self, file: SourceFile) -> Split | None:
        """Split of a file; None: a hash of each picture says it."""
        if self.validation_source is None:
            return None
        if self.validation_source == EVAL_SOURCE:
            return "eval" if file.path in self._chosen_paths else "train"
        return "train" if file.named == "train" else "eval"

    def class_of(self, file: SourceFile) -> str:
        """Class of a file in a class folder."""
        part = self.chosen_class_part if file.path in self._chosen_paths else self.class_part
        return PurePosixPath(file.name).parts[part]

    @cached_property
    def classes_are_numbers(self) -> bool:
        """Whether the classes of all files are whole numbers that count classes."""
        if self.kind != "folders":
            return True
        return self.from_tables and all(_NUMBER.fullmatch(self.class_of(f)) for f in self.files)

    def label_of(self, file: SourceFile) -> int | str:
        """Class of a file, as a number where the classes are numbers."""
        name = self.class_of(file)
        return int(name) if self.classes_are_numbers else name

    def with_file_lists(self, metadata: DatasetMetadata) -> DatasetMetadata:
        """Return facts of what was prepared, with the files that its splits come from."""
        validation = [file for file in self.files if self.split_of(file) == "eval"]
        return replace(
            metadata,
            validation_files=self._in_words(validation),
            left_out_files=self._in_words(self.excluded),
            empty_classes=first_names(self.empty),
        )

    def _in_words(self, files: Sequence[SourceFile]) -> str | None:
        if not files:
            return None
        if files[0].path in self._chosen_paths:
            return EVAL_SOURCE
        names = [file.name for file in files]
        if self.kind == "folders":
            names = [*dict.fromkeys(f"{PurePosixPath(name).parts[0]}/" for name in names)]
        return first_names(names)


def first_names(names: Sequence[str]) -> str | None:
    """The first few names; None: there are none."""
    if not names:
        return None
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(escape_text, names[:_SHOWN])) + more


def list_images(recipe: Recipe) -> Listing:
    """List the files that data.source and data.eval_source name.

    Raises:
        RequestError: They name no files, files of several kinds, or of none.
        SourceError: A table of labels cannot be used.
        AccessError: Access to a remote place is denied.
        CapacityError: It cannot be reached.
    """
    data = recipe.data
    if data.eval_source is None:
        return _list(recipe, data.source, "data.source")
    if data.source == DIGITS and is_name(DIGITS):
        raise RequestError(
            f"data.eval_source={data.eval_source!r}, but the digits have validation pictures of "
            "their own. Leave data.eval_source out."
        )
    whole = _list(recipe, data.source, "data.source")
    chosen = _list(recipe, data.eval_source, EVAL_SOURCE)
    if chosen.kind != whole.kind:
        raise RequestError(
            f"data.eval_source={data.eval_source!r} holds pictures as {chosen.kind}, and "
            f"data.source={data.source!r} as {whole.kind}. Give both in the same form."
        )
    validation = tuple(
        file
        for file in chosen.files
        if chosen.validation_source is None or chosen.split_of(file) == "eval"
    )
    paths = {file.path for file in validation}
    training = tuple(
        file
        for file in whole.files
        if file.path not in paths
        and (whole.validation_source is None or whole.split_of(file) == "train")
    )
    if not training:
        raise RequestError(
            f"data.source={data.source!r} has no picture to train on: data.eval_source names all "
            "of them. Validate on other pictures than you train on."
        )
    used = {*paths, *(file.path for file in training)}
    left_out = (*(file for file in whole.files if file.path not in used), *whole.excluded)
    return Listing(
        whole.kind,
        training + validation,
        EVAL_SOURCE,
        class_part=whole.class_part,
        chosen=validation,
        chosen_class_part=chosen.class_part,
        excluded=tuple(file for file in left_out if file.path not in used),
        empty=whole.empty,
        from_tables=whole.from_tables and chosen.from_tables,
    )


def _list(recipe: Recipe, sources: Sources, setting: str) -> Listing:
    """List the files that one of the two settings names; raises as ``list_images``."""
    data = recipe.data
    if sources == DIGITS and is_name(DIGITS):
        stat = DIGITS_FILE.stat()
        file = SourceFile(DIGITS, DIGITS, "csv.gz", stat.st_size, 0)
        return Listing("digits", (file,), None, class_part=0)
    own = [Path(place).expanduser() for place in (data.dir, recipe.run.dir)]
    entries = [sources] if isinstance(sources, str) else list(sources)
    by_path: dict[str, SourceFile] = {}
    has_pattern, asked = False, set()
    for entry, listed in find_all(entries, own=own, setting=setting):
        for each in listed:
            has_pattern = has_pattern or bool(each.pattern)
            if not each.below_entry(entry) or split_in(each.pattern):
                asked.add(each.path)
            file = SourceFile(
                each.path, each.name, suffix_of(each.name), each.size_bytes, each.version
            )
            by_path.setdefault(each.path, file)
    files, source = expand_tar([*by_path.values()]), f"{setting}={sources!r}"
    is_chosen = setting == EVAL_SOURCE
    if is_imagenet(files, source):
        files = as_class_folders(files, source, complete=data.images.complete)
    elif not data.images.complete and not is_chosen:
        raise RequestError(
            f"data.images.complete={data.images.complete} says which pictures of ImageNet must be "
            f"there, and {source} is not its tree ILSVRC. Leave it out."
        )
    if files and all(file.format in TABLES for file in files):
        images = data.images
        files = images_in_tables(files, image_key=images.image_key, label_key=images.label_key)
        listing = _split_by_name("folders", files, source, is_chosen=is_chosen)
        classes = {listing.class_of(file) for file in listing.files}
        if len(classes) == 1 and not is_chosen:
            raise RequestError(
                f"{source}: all its rows have the class {escape_text(classes.pop())}, so there is "
                f"no other class to learn. Set data.images.label_key to the column of the classes."
            )
        return replace(listing, from_tables=True)
    kind = _common_kind(files, source)
    if kind == "folders" and has_pattern:
        raise RequestError(
            f"{source} has a wildcard, which leaves open where class folders "
            "begin. Give the folder that holds the class folders, or train and val."
        )
    ours = [file for file in files if _KINDS.get(file.format) == kind]
    listing = _split_by_name(
        kind, _with_named_splits(kind, ours, asked), source, is_chosen=is_chosen
    )
    if kind == "folders" and listing.validation_source is None and not is_chosen:
        _reject_single_class(listing, files, source)
    return replace(listing, empty=_empty_classes(entries, listing))


def _empty_classes(entries: Sequence[str], listing: Listing) -> tuple[str, ...]:
    """Class folders of this machine without a picture. Elsewhere a folder is what files lie in."""
    if listing.kind != "folders" or any(isinstance(file, InTar) for file in listing.files):
        return ()
    there = {PurePosixPath(file.name).parts[: listing.class_part + 1] for file in listing.files}
    parents = {parts[:-1] for parts in there}
    empty: set[str] = set()
    for entry in entries:
        folder = Path(entry).expanduser()
        if is_remote(entry) or not folder.is_dir():
            continue
        for parent in parents:
            place = folder.joinpath(*parent)
            inside = place.iterdir() if place.is_dir() else ()
            empty |= {
                "/".join((*parent, each.name))
                for each in inside
                if each.is_dir() and each.name[0] != "." and (*parent, each.name) not in there
            }
    return tuple(sorted(empty))


def suffix_of(name: str) -> str:
    """The suffix of a file in small letters, both of .tar.gz; empty: it has none."""
    last = PurePosixPath(name).name.lower()
    return "tar.gz" if last.endswith(".tar.gz") else last.rpartition(".")[2] if "." in last else ""


def split_word(name: str, kind: Kind) -> NamedSplit | None:
    """Split that a file's name names."""
    parts = PurePosixPath(name.lower()).parts
    if kind == "folders":
        return split_in(parts[0]) if len(parts) >= 3 else None
    words = re.split(r"[^a-z]+", "/".join(parts))
    return next((KEYWORDS[word] for word in reversed(words) if word in KEYWORDS), None)


def validation_word(words: set[NamedSplit | None]) -> NamedSplit | None:
    """Return the word of all names that means the validation split; None: none does."""
    if None in words or "train" not in words:
        return None
    return validation_split_of(words) or ("test" if "test" in words else None)


def _common_kind(files: Sequence[SourceFile], source: str) -> Kind:
    """Return the kind of the files.

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
        remedy = "Put each into a folder of its class." + _table_hint(files)
        _raise_request_error(source, strays, "lie in no class folder", remedy)
    others = [f.name for f in files if not is_alone[f.name] and f.format not in PICTURES]
    if others:
        what = "in class folders have no suffix of a picture"
        _raise_request_error(
            source, others, what, f"Take them out, or rename pictures ({_suffixes()})."
        )
    return kind


def _reject_single_class(listing: Listing, files: Sequence[SourceFile], source: str) -> None:
    """Raise where all pictures lie in one folder, which is no class but holds all of them."""
    classes = {listing.class_of(file) for file in listing.files}
    if len(classes) == 1:
        raise RequestError(
            f"{source}: all pictures lie in one class folder, {escape_text(classes.pop())}, so "
            f"there is no other class to learn. Give the folder that holds the class folders."
            f"{_table_hint(files)}"
        )


def _table_hint(files: Sequence[SourceFile]) -> str:
    """Return how to use a table that lies next to pictures; empty: there is none."""
    path = next((file.path for file in files if file.format in TABLES), None)
    if path is None:
        return " Or write a CSV file with the columns image and label, and give that."
    return f" If {escape_text(path)} has the class of each: data.source={escape_text(path)}"


def _with_named_splits(
    kind: Kind, files: Sequence[SourceFile], explicit_paths: Collection[str]
) -> list[SourceFile]:
    """Files with the splits that their names name. Where some shards or Parquet files name one,
    the others are trained on.

    Args:
        explicit_paths: Paths that data.source names itself: trained on where no file is named
            train.
    """
    words = {file.path: split_word(file.name, kind) for file in files}
    if kind != "folders":
        if "train" not in words.values():
            words |= dict.fromkeys(words.keys() & explicit_paths)
        if any(words.values()):
            words = {path: word or "train" for path, word in words.items()}
    return [replace(file, named=words[file.path]) for file in files]


def _split_by_name(
    kind: Kind, files: Sequence[SourceFile], source: str, *, is_chosen: bool
) -> Listing:
    """Divide files by the splits in their names; a test split next to validation is left out.

    Args:
        is_chosen: Whether they are all meant for validation.

    Raises:
        RequestError: Names of splits are next to others, or none is to be trained on.
    """
    words = {file.named for file in files}
    held_out = validation_word(words)
    used = words if held_out is None else {"train", held_out}
    if held_out is None and not is_chosen:
        _reject_ambiguous_splits(kind, files, source)
    # A train folder alone is divided by hash, and is no class either.
    is_below = held_out is not None or words == {"train"} or (is_chosen and None not in words)
    return Listing(
        kind,
        tuple(file for file in files if file.named in used),
        held_out,
        class_part=1 if is_below else 0,
        excluded=tuple(file for file in files if file.named not in used),
    )


def _reject_ambiguous_splits(kind: Kind, files: Sequence[SourceFile], source: str) -> None:
    """Raise where pictures that are named validation or test would be trained on."""
    words = {file.named for file in files}
    if not words - {None, "train"}:
        return
    named = {_named_part(file, kind): None for file in files if file.named is not None}
    if None not in words:
        names = ", ".join(map(escape_text, [*named][:_SHOWN]))
        raise RequestError(
            f"{source} has no pictures to train on: all are named as validation or test data "
            f"({names}). To train on them, name the folder or files themselves in data.source."
        )
    if "train" in words:
        names = ", ".join(map(escape_text, [*named][:_SHOWN]))
        others = {_named_part(file, kind): None for file in files if file.named is None}
        raise RequestError(
            f"{source}: {', '.join(map(escape_text, [*others][:_SHOWN]))} next to {names} names no "
            "split. Move it away, or name what to train on in data.source and what to validate on "
            "in data.eval_source."
        )


def _named_part(file: SourceFile, kind: Kind) -> str:
    return PurePosixPath(file.name).parts[0] if kind == "folders" else file.name


def _suffixes() -> str:
    return ", ".join(sorted(PICTURES))


def _raise_request_error(source: str, names: Sequence[str], what: str, remedy: str) -> NoReturn:
    named = ", ".join(escape_text(name) for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise RequestError(f"{source}: {len(names)} files {what}: {named}{more}. {remedy}")
