"""ImageNet as its makers hand it out: the tree ``ILSVRC``, without class folders in ``val``.

    ILSVRC/Data/CLS-LOC/train/n01440764/n01440764_18.JPEG
    ILSVRC/Data/CLS-LOC/val/ILSVRC2012_val_00000001.JPEG
    ILSVRC/Annotations/CLS-LOC/val/ILSVRC2012_val_00000001.xml     or LOC_val_solution.csv
    ILSVRC/ImageSets/CLS-LOC/train_cls.txt, val.txt                what there should be

Files keep their places. They are named as class folders would name them, so that no other
code has to know of this layout. Boxes, lists and the pictures of ``test``, which have no
labels, are left out. A tar file of the tree is read as the tree.
"""

import csv
import io
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Literal, NamedTuple, NoReturn
from xml.parsers import expat

from shardyard.config.run_length import IMAGENET
from shardyard.config.sources import is_remote
from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.data.images.tar import InTar, content_of, members
from shardyard.data.stores.base import open_file
from shardyard.errors import RequestError, SourceError

WHOLE = IMAGENET
"""Pictures of each split."""
CLASSES = 1_000

_PICTURE = re.compile(r"(?:.*/)?Data/CLS-LOC/(train|val)/(?:(n\d{8})/)?([^/]+)\.JPEG", re.DOTALL)
_BOXES = re.compile(r"(?:.*/)?Annotations/CLS-LOC/val/([^/]+)\.xml", re.DOTALL)
_SOLUTION = "LOC_val_solution.csv"
_LIST = re.compile(r"(?:.*/)?ImageSets/CLS-LOC/(train|val)(?:_cls)?\.txt", re.DOTALL)
_FLAT = re.compile(r"(?:.*/)?val/ILSVRC2012_val_\d{8}\.JPEG", re.DOTALL)
_CLASS = re.compile(r"n\d{8}")
_AT_ONCE = 32
"""Annotations that are asked for side by side: 50,000 small files."""
_MOST_BYTES = 2**20
"""Most bytes of an annotation; usual ones have about 1,000."""
_SHOWN = 4


class _Flat(NamedTuple):
    """A picture that lies in no folder of its class."""

    file: SourceFile
    split: str
    stem: str


def expand_tar(files: Sequence[SourceFile]) -> list[SourceFile]:
    """The files of the tree where they lie in one tar file; else the files as they are.

    Raises:
        RequestError: The tar file cannot be read from anywhere in it.
        SourceError: It is damaged.
    """
    if len(files) != 1 or files[0].format not in ("tar", "tar.gz"):
        return list(files)
    (tar,) = files
    if not _begins_with_tree(tar):
        return [tar]
    if is_remote(tar.path) or tar.format == "tar.gz":
        how = "is compressed" if tar.format == "tar.gz" else "lies elsewhere"
        raise RequestError(
            f"{escape_text(tar.path)} is ImageNet in one tar file, which {how}: its 1.3 million "
            "pictures are read in another order than in the file. Unpack it, and name the folder."
        )
    return list(_listed(tar))


def _begins_with_tree(tar: SourceFile) -> bool:
    mode: Literal["r|", "r|gz"] = "r|gz" if tar.format == "tar.gz" else "r|"
    try:
        with open_file(tar) as opened, tarfile.open(fileobj=opened, mode=mode) as members_of:
            first = members_of.next()
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error):
        return False  # told where it is read
    return first is not None and PurePosixPath(first.name).parts[:1] == ("ILSVRC",)


@lru_cache(maxsize=1)
def _listed(tar: SourceFile) -> tuple[InTar, ...]:
    with open_file(tar) as opened:
        return tuple(
            InTar(
                f"{tar.path}, member {member.name}",
                member.name.removeprefix("./"),
                member.name.rpartition(".")[2].lower(),
                member.size,
                tar.version,
                tar=tar,
                offset=member.offset,
            )
            for member in members(opened, tar.path)
        )


def is_imagenet(files: Sequence[SourceFile], source: str) -> bool:
    """Whether files lie as in the tree ``ILSVRC``.

    Raises:
        RequestError: A part of it was named, without what says the classes of ``val``.
    """
    if any(_PICTURE.fullmatch(file.name) for file in files):
        return True
    if any(_FLAT.fullmatch(file.name) for file in files):
        raise RequestError(
            f"{source} has the pictures of ImageNet's val in one folder, and what says their "
            "classes lies elsewhere. Name the folder ILSVRC, with Data and Annotations in it."
        )
    return False


def as_class_folders(
    files: Sequence[SourceFile], source: str, *, complete: bool
) -> list[SourceFile]:
    """The pictures of train and val, named ``train/CLASS/name`` and ``val/CLASS/name``.

    Args:
        source: For messages.
        complete: Whether all pictures of ImageNet have to be there.

    Raises:
        SourceError: Pictures are missing, or one has no class.
    """
    named, flat = _divided(files)
    if complete:
        _check_complete(named, flat, files, source)
    of_train = [each.file.name for each in flat if each.split == "train"]
    if of_train:
        _raise_source_error(
            source, of_train, "of train lie in no folder of a class", "Unpack train again."
        )
    classes = _classes(files) if flat else {}
    lacking = [each.file.name for each in flat if each.stem not in classes]
    if lacking:
        what = f"of val have no class: neither {_SOLUTION} nor Annotations/CLS-LOC/val says it"
        _raise_source_error(source, lacking, what, "Copy the annotations too.")
    named += (_named(each.file, each.split, classes[each.stem], each.stem) for each in flat)
    return named


def _divided(files: Sequence[SourceFile]) -> tuple[list[SourceFile], list[_Flat]]:
    """Pictures in folders of their class, by their new names; and the others."""
    named, flat = [], []
    for file in files:
        found = _PICTURE.fullmatch(file.name)
        if found is None:
            continue
        split, folder, stem = found.groups()
        if folder is None:
            flat.append(_Flat(file, split, stem))
        else:
            named.append(_named(file, split, folder, stem))
    return named, flat


def _named(file: SourceFile, split: str, folder: str, stem: str) -> SourceFile:
    return replace(file, name=f"{split}/{folder}/{stem}.JPEG")


# --- what there should be ------------------------------------------------------------------------


def _lists(files: Sequence[SourceFile]) -> dict[str, set[str]]:
    """Names of all pictures by split, from the tree's own lists; none where these are missing."""
    found = {}
    for file in files:
        matched = _LIST.fullmatch(file.name)
        if matched is not None:
            lines = content_of(file).decode(errors="replace").splitlines()
            found[matched[1]] = {PurePosixPath(line.split()[0]).name for line in lines if line}
    return found


def _check_complete(
    named: Sequence[SourceFile], flat: Sequence[_Flat], files: Sequence[SourceFile], source: str
) -> None:
    found = Counter(each.split for each in flat)
    found.update(file.name.partition("/")[0] for file in named)
    classes = {file.name.split("/")[1] for file in named if file.name.startswith("train/")}
    if dict(found) == WHOLE and len(classes) == CLASSES:
        return
    there = " and ".join(f"{found[split]:,} of {n:,} in {split}" for split, n in WHOLE.items())
    names = {PurePosixPath(file.name).stem for file in named} | {each.stem for each in flat}
    missing = sorted(_missing(names, _lists(files)))
    said = f": missing are {_first_names(missing)}" if missing else ""
    raise SourceError(
        f"{source} is ImageNet with {there} and {len(classes):,} of {CLASSES:,} classes{said}. "
        "Copy what is missing again, or train on what there is with data.images.complete=false."
    )


def _missing(existing: Collection[str], lists: Mapping[str, Collection[str]]) -> Iterator[str]:
    """Names of pictures, as far as it can be known which they are; of all splits they differ."""
    for split in WHOLE:
        wanted = set(lists.get(split, ()))
        if split == "val" and not wanted:
            wanted = {f"ILSVRC2012_val_{number:08d}" for number in range(1, WHOLE[split] + 1)}
        yield from (f"{split}/{stem}.JPEG" for stem in wanted.difference(existing))


# --- classes of val ------------------------------------------------------------------------------


def _classes(files: Sequence[SourceFile]) -> dict[str, str]:
    """Class by name of picture."""
    for file in files:
        if PurePosixPath(file.name).name == _SOLUTION:
            return _of_solution(file)
    return _of_boxes(tuple(file for file in files if _BOXES.fullmatch(file.name)))


def _of_solution(file: SourceFile) -> dict[str, str]:
    """``ILSVRC2012_val_00048981,n03995372 85 1 499 272``, with a line of titles."""
    rows = csv.reader(io.StringIO(content_of(file).decode(errors="replace")))
    found = {}
    for number, row in enumerate(rows, 1):
        if number == 1 or not row:
            continue
        words = row[1].split() if len(row) == 2 else []
        found[row[0]] = _one_class(words[::5], f"{escape_text(file.path)}, line {number}")
    return found


@lru_cache(maxsize=1)
def _of_boxes(files: tuple[SourceFile, ...]) -> dict[str, str]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        classes = list(pool.map(_of_annotation, files))
    return {PurePosixPath(file.name).stem: name for file, name in zip(files, classes, strict=True)}


def _of_annotation(file: SourceFile) -> str:
    where = escape_text(file.path)
    if file.size_bytes > _MOST_BYTES:
        raise SourceError(
            f"{where} is not an annotation: it has {file.size_bytes:,} bytes. {_AGAIN}"
        )
    try:
        return _one_class(_object_names(content_of(file)), where)
    except expat.ExpatError as error:
        raise SourceError(f"{where} is not XML: {error}. {_AGAIN}") from error


_AGAIN = "Copy it again."


def _object_names(content: bytes) -> list[str]:
    """Return the texts of annotation/object/name.

    A document type is rejected: only it could name other files, or grow without bound.
    """
    path: list[str] = []
    names: list[str] = []
    parser = expat.ParserCreate()

    def start(name: str, _: dict[str, str]) -> None:
        path.append(name)
        if path == ["annotation", "object", "name"]:
            names.append("")

    def text(part: str) -> None:
        if path == ["annotation", "object", "name"]:
            names[-1] += part

    def reject_doctype(*_: object) -> None:
        raise expat.ExpatError("it declares a document type, which no annotation does")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: path.pop()
    parser.CharacterDataHandler = text
    parser.StartDoctypeDeclHandler = reject_doctype
    parser.Parse(content, True)
    return [name.strip() for name in names]


def _one_class(names: Sequence[str], where: str) -> str:
    """The class that all boxes of a picture have.

    Raises:
        SourceError: There is none, or there are several.
    """
    found = set(names)
    if len(found) == 1 and _CLASS.fullmatch(name := found.pop()):
        return name
    said = ", ".join(sorted(escape_text(name)[:40] for name in set(names))) or "nothing"
    raise SourceError(f"{where} says {said}, not one class such as n01440764. {_AGAIN}")


def _raise_source_error(source: str, names: Sequence[str], what: str, remedy: str) -> NoReturn:
    raise SourceError(f"{source}: {len(names):,} pictures {what}: {_first_names(names)}. {remedy}")


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{', '.join(escape_text(name) for name in names[:_SHOWN])}{more}"
