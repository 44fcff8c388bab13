"""Divide the files of a source into training and validation, by data.eval_source or their names."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.data import Data
from shardyard.config.schema.recipe import Recipe
from shardyard.config.split_names import split_in, validation_split_of
from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.data.formats import kind_of
from shardyard.data.sources import list_files
from shardyard.errors import RequestError

_SHOWN = 4


@dataclass(frozen=True)
class Corpus:
    """The files of one source, divided."""

    files: tuple[SourceFile, ...]
    """Files that are read, for training and for validation, in a fixed order."""
    excluded: tuple[SourceFile, ...] = ()
    """Files that their names keep out of the training, and that are not validated on."""
    explicit: tuple[SourceFile, ...] = ()
    """Files that are trained on though named test or validation: data.source names them."""
    eval_set: str | None = None
    """Name of the set of data.eval_sets that the files are; None: they are none."""

    @property
    def setting(self) -> str:
        """Setting that names the files, for messages."""
        return "data.source" if self.eval_set is None else f"data.eval_sets.{self.eval_set}"

    @property
    def validation(self) -> tuple[SourceFile, ...]:
        """Files that are validated on; none: a hash of each document decides."""
        return tuple(file for file in self.files if file.split == "eval")

    def with_file_lists(self, metadata: DatasetMetadata) -> DatasetMetadata:
        """Return the facts of the prepared data, with the files that its splits come from."""
        return replace(
            metadata,
            validation_files=_first_names(self.validation),
            left_out_files=_first_names(self.excluded),
            asked_files=_first_names(self.explicit),
        )


def find_corpus(recipe: Recipe, *, eval_set: str | None = None) -> Corpus:
    """The files of a recipe's text.

    Args:
        eval_set: Name of the set of data.eval_sets that data.source is here: it has no training
            files. None: it is none.

    Raises:
        RequestError: As ``list_files``; or no file to train on is left; or data.eval_fraction
            contradicts what the files are named.
        SourceError: All files are empty.
        AccessError: A place elsewhere may not be looked at.
        CapacityError: It cannot be reached.
    """
    data = recipe.data
    own = [Path(place).expanduser() for place in (data.dir, recipe.run.dir)]
    if eval_set is not None:
        setting = Corpus((), eval_set=eval_set).setting
        files = _of_validation(list_files(data.source, data.format, own=own, setting=setting))
        return Corpus(tuple(replace(file, split="eval") for file in files), eval_set=eval_set)
    files = list_files(data.source, data.format, own=own)
    if data.eval_source is None:
        return split_by_name(files, data)
    chosen = list_files(data.eval_source, data.format, own=own, setting="data.eval_source")
    return with_validation(files, _of_validation(chosen), data)


def split_by_name(files: Sequence[SourceFile], data: Data) -> Corpus:
    """Files divided by their names.

    Raises:
        RequestError: As ``find_corpus``.
    """
    held_out = validation_split_of({file.named for file in files})
    if data.eval_fraction == 0:
        held_out = None
    training = [file for file in files if file.named in (None, "train")]
    validation = [file for file in files if held_out is not None and file.named == held_out]
    if validation and data.eval_fraction != Data().eval_fraction:
        raise RequestError(
            f"data.eval_fraction={data.eval_fraction}, but data.source={data.source!r} has files "
            f"for validation: {_first_names(validation)}. Leave data.eval_fraction out to validate "
            "on them, or name the files to train on in data.source."
        )
    return _corpus(files, training, validation, data)


def with_validation(
    files: Sequence[SourceFile], validation: Sequence[SourceFile], data: Data
) -> Corpus:
    """Files to train on, without those that are validated on.

    Raises:
        RequestError: No file to train on is left.
    """
    paths = {file.path for file in validation}
    training = [f for f in files if f.named in (None, "train") and f.path not in paths]
    return _corpus([*files, *validation], training, validation, data)


def _corpus(
    files: Sequence[SourceFile],
    training: Sequence[SourceFile],
    validation: Sequence[SourceFile],
    data: Data,
) -> Corpus:
    used = {file.path for file in (*training, *validation)}
    left_out = [file for file in files if file.path not in used]
    if not training:
        left_out = left_out or [file for file in validation if data.eval_source is None]
        if not left_out:
            raise RequestError(
                f"data.source={data.source!r} has no file to train on: data.eval_source names all "
                "of them. Validate on other data than you train on."
            )
        names, entry = _first_names(left_out), escape_text(left_out[0].path)
        raise RequestError(
            f"data.source={data.source!r} has no file to train on: all are named as validation or "
            f"test data ({names}). To train on one of them, name the file itself: "
            f"data.source={entry}"
        )
    split: Literal["train"] | None = "train" if validation else None
    return Corpus(
        files=(
            *(replace(file, split=split) for file in training),
            *(replace(file, split="eval") for file in validation),
        ),
        excluded=tuple({file.path: file for file in left_out}.values()),
        explicit=tuple(
            file for file in training if file.named is None and _is_named_validation(file)
        ),
    )


def _is_named_validation(file: SourceFile) -> bool:
    """Whether a file of rows is named as validation or test data."""
    is_rows = kind_of(file.name, file.format) == "rows"
    return is_rows and split_in(file.path.rpartition("/")[2]) not in (None, "train")


def _of_validation(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Files of data.eval_source; of several named splits the first of validation, eval, test."""
    splits = {file.named for file in files}
    best = next((each for each in ("validation", "eval", "test") if each in splits), "train")
    return [file for file in files if file.named in (None, best)]


def _first_names(files: Sequence[SourceFile]) -> str | None:
    if not files:
        return None
    names = ", ".join(escape_text(file.name) for file in files[:_SHOWN])
    return names if len(files) <= _SHOWN else f"{names} and {len(files) - _SHOWN} more"
