"""Recognise training, validation and test files by their names, as on the Hugging Face hub.

A keyword counts between separators: ``train-00000-of-00002.parquet``,
``data/wiki_validation.jsonl`` and ``dev/a.jsonl`` have one, ``latest.jsonl`` and ``tests/``
do not. Separators and keywords are those of the ``datasets`` library, with one difference:
files named ``eval`` are validation data where no file is named ``validation``.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, assert_never

NamedSplit = Literal["train", "validation", "eval", "test", "about"]
"""``about``: a file that describes a dataset, next to files of rows with a split."""

ABOUT = re.compile(r"README(\.\w+)?|LICEN[SC]E(\.\w+)?|dataset_infos?\.json|dataset_dict\.json")
"""Names of files that describe a dataset on the hub and are no part of it."""

SAVED = re.compile(r"state\.json|dataset_info\.json")
"""Names of files that ``datasets.save_to_disk`` writes next to its .arrow files."""

KEYWORDS: dict[str, NamedSplit] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("eval", "evaluation"), "eval"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Word in a name, in small letters -> split that it names."""

_SEPARATORS = re.compile(r"[-._ 0-9]+")

Kind = Literal["rows", "text", "code"]
"""Kind of a file by its name: rows (JSON lines, Parquet and the like), running text, or
source code.
"""


def words_in(name: str) -> list[NamedSplit]:
    """Splits that one part of a path names, in the order of its words."""
    words = _SEPARATORS.split(name.lower())
    return [KEYWORDS[word] for word in words if word in KEYWORDS]


def split_in(name: str) -> NamedSplit | None:
    """Split that one part of a path names; of several the last that is not train."""
    found = words_in(name)
    others = [word for word in found if word != "train"]
    return (others or found or [None])[-1]


def splits_of(kinds: Mapping[str, Kind]) -> dict[str, NamedSplit]:
    """Split of each file that its path names; files without one are left out.

    The file's own name decides before its folders, an inner folder before an outer one. Files of
    rows are datasets, so a keyword in their path counts always. Running text is named so next to
    text named train only, but for files of exactly such a name: ``test.txt``. Of source code only
    folders at the top count, next to one named train: a project has ``test_model.py`` and
    ``model/eval/`` that are no splits.

    Args:
        kinds: What each file is, by its path below the entry of data.source, with slashes.
    """
    text_beside_train = _folders_with_train(name for name in kinds if kinds[name] == "text")
    folders = {name.partition("/")[0].lower() for name in kinds if "/" in name}
    code_is_split = any(KEYWORDS.get(folder) == "train" for folder in folders)
    splits: dict[str, NamedSplit] = {}
    for name, kind in kinds.items():
        split: NamedSplit | None
        match kind:
            case "rows":
                split = _innermost(name, None)
            case "text":
                stem, _, suffix = name.rpartition("/")[2].lower().partition(".")
                exact = KEYWORDS.get(stem) if suffix in ("txt", "text") else None
                split = exact or _innermost(name, text_beside_train)
            case "code":
                folder = name.partition("/")[0].lower() if "/" in name else ""
                split = KEYWORDS.get(folder) if code_is_split else None
            case _:
                assert_never(kind)
        if split is not None:
            splits[name] = split
    saved = {name.rpartition("/")[0] for name in kinds if name.lower().endswith(".arrow")}
    for name in kinds:
        folder, _, last = name.rpartition("/")
        if folder in saved and SAVED.fullmatch(last):
            splits[name] = "about"
    if any(kinds[name] == "rows" for name in splits):
        splits |= {name: "about" for name in kinds if ABOUT.fullmatch(name.rpartition("/")[2])}
    return splits


def validation_split_of(splits: Collection[NamedSplit | None]) -> NamedSplit | None:
    """Return the existing split to validate on; None: no split is named for it."""
    return next((each for each in ("validation", "eval") if each in splits), None)


def _folders_with_train(names: Iterable[str]) -> set[str]:
    """Folders that directly hold a file or folder named train."""
    found = set()
    for name in names:
        parts = name.split("/")
        for depth, part in enumerate(parts):
            if split_in(part) == "train":
                found.add("/".join(parts[:depth]))
    return found


def _innermost(name: str, train_siblings: Collection[str] | None) -> NamedSplit | None:
    """Split that the innermost part of a path names.

    Args:
        train_siblings: Folders in which names count; None: everywhere.
    """
    parts = name.split("/")
    for depth in reversed(range(len(parts))):
        split = split_in(parts[depth])
        if split is not None and (
            train_siblings is None or "/".join(parts[:depth]) in train_siblings
        ):
            return split
    return None
