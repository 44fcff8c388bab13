"""Labels of a dataset as numbers: words by their names, numbers as classes or as they are."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shardyard.errors import JsonFileError, RequestError
from shardyard.io.files import read_json_object

MOST_LABELS = 1000
"""Different labels beyond which a column is taken for the wrong one."""

SETTING = "data.labels"


@dataclass(frozen=True, kw_only=True)
class LabelNames:
    """Numbers of the labels of a dataset."""

    names: tuple[str, ...]
    """Names by number; none: labels are numbers to predict (regression)."""
    are_words: bool = False
    """Whether rows hold the names, and not the numbers."""
    of_rows: tuple[str, ...] = ()
    """Names by number in the rows, where the model numbers the same names in another order."""

    @property
    def is_regression(self) -> bool:
        return not self.names

    def number(self, label: Any) -> int | float:
        """Return the number of a row's label."""
        if self.is_regression:
            return float(label)
        if self.are_words:
            return self._numbers[str(label)]
        return self._numbers[self.of_rows[_whole(label)]] if self.of_rows else _whole(label)

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self.names)}


@dataclass(kw_only=True)
class LabelValues:
    """Labels that rows hold, collected row by row."""

    setting: str = "data.source"
    words: set[str] = field(default_factory=set)
    """Different labels that are no numbers."""
    numbers: set[int] = field(default_factory=set)
    """Different whole numbers."""
    has_fractions: bool = False
    """Whether a label is a number that is written with a fraction."""
    not_finite: str | None = None

    def add(self, labels: Iterable[Any]) -> None:
        """Take the labels of a row."""
        for label in labels:
            whole, real = _whole_or_none(label), _real_or_none(label)
            if whole is not None:
                self.numbers.add(whole)
            elif real is not None:
                self.has_fractions = True
                if not math.isfinite(real):
                    self.not_finite = self.not_finite or str(label)
            else:
                self.words.add(str(label))

    def names(
        self,
        *,
        configured: Sequence[str],
        of_files: Sequence[str],
        of_model: Sequence[str],
        problem_type: str | None,
        of_tokens: bool,
    ) -> LabelNames:
        """Decide what the labels are.

        Args:
            configured: ``data.labels``.
            of_files: Names that the files of rows give to numbers; none: they give none.
            of_model: Names in the model's own config.json; none: it has none.
            problem_type: ``task.problem_type``.
            of_tokens: Whether each token has a label, which is always a class.

        Raises:
            RequestError: The labels cannot be what the recipe says.
        """
        if self.not_finite is not None:
            raise RequestError(
                f"a label is {self.not_finite}, which is not a finite number. Fix it."
            )
        asks_regression = problem_type == "regression"
        is_number = self.has_fractions and problem_type is None and not of_tokens
        if not self.words and (asks_regression or is_number):
            return LabelNames(names=())
        if self.words and asks_regression:
            raise RequestError(
                f"task.problem_type=regression, but labels are words such as "
                f"{min(self.words)!r}. Leave it out to predict classes."
            )
        if self.has_fractions and not self.words:
            raise RequestError(
                "labels are numbers with a fraction, which are not classes. Set "
                "task.problem_type=regression, or write whole numbers or words."
            )
        if len(self.words) + len(self.numbers) > MOST_LABELS:
            raise RequestError(
                f"there are more than {MOST_LABELS:,} different labels. Name the column of the "
                "labels: data.keys={label: COLUMN}; to predict a number, set "
                "task.problem_type=regression."
            )
        if self.words:
            found = self._by_word(configured=configured, of_model=of_model)
        else:
            found = self._by_number(configured=configured, of_files=of_files, of_model=of_model)
        if len(found.names) < 2:
            raise RequestError(
                f"all rows have the label {found.names[0]!r}, so there is nothing to tell apart. "
                "Give rows of two labels or more, or check the column with data.keys."
            )
        return found

    def _by_word(self, *, configured: Sequence[str], of_model: Sequence[str]) -> LabelNames:
        words = self.words | {str(number) for number in self.numbers}
        if configured:
            unknown = sorted(words - set(configured))
            if unknown:
                raise RequestError(
                    f"{SETTING}={list(configured)} lacks {unknown[0]!r}, which a row has. Add it, "
                    "or leave the setting out to take the names that the rows have."
                )
            return LabelNames(names=tuple(configured), are_words=True)
        if words <= set(of_model):
            return LabelNames(names=tuple(of_model), are_words=True)
        # as most datasets number them: outside of any entity first
        ordered = sorted(words, key=lambda word: (word != "O", word))
        return LabelNames(names=tuple(ordered), are_words=True)

    def _by_number(
        self, *, configured: Sequence[str], of_files: Sequence[str], of_model: Sequence[str]
    ) -> LabelNames:
        least, largest = min(self.numbers), max(self.numbers)
        if least < 0:
            raise RequestError(
                f"a label is {least}, and classes are numbered from 0. Rows without a label are "
                "often marked so: take them out."
            )
        if largest >= MOST_LABELS:
            raise RequestError(
                f"a label is {largest:,}, and there are at most {MOST_LABELS:,} classes. Name the "
                "column of the labels: data.keys={label: COLUMN}; to predict a number, set "
                "task.problem_type=regression."
            )
        if configured and largest >= len(configured):
            raise RequestError(
                f"{SETTING}={list(configured)} has {len(configured)} names, and a row has label "
                f"{largest}. Give a name to each number, from 0 on."
            )
        if not configured and largest < len(of_files):
            if sorted(of_files) == sorted(of_model):  # its head has learnt them in its own order
                return LabelNames(names=tuple(of_model), of_rows=tuple(of_files))
            return LabelNames(names=tuple(of_files))
        if configured or largest < len(of_model):
            return LabelNames(names=tuple(configured or of_model))
        return LabelNames(names=tuple(f"LABEL_{number}" for number in range(largest + 1)))


def names_of_model(folder: Path | None) -> tuple[str, ...]:
    """Names of the labels in a model's config.json; none: it has none of its own."""
    if folder is None:
        return ()
    try:
        by_number = read_json_object(folder / "config.json").get("id2label") or {}
        names = tuple(str(by_number[str(number)]) for number in range(len(by_number)))
    except (OSError, JsonFileError, KeyError, AttributeError):
        return ()
    return () if all(name.startswith("LABEL_") for name in names) else names


def names_of_classes(features: Any, column: str) -> tuple[str, ...]:
    """Names of the classes of a column, or of the classes in its lists; none: it has none.

    Args:
        features: What ``datasets`` writes about its columns, as JSON.
    """
    feature = features.get(column) if isinstance(features, dict) else None
    for _ in range(2):  # a list of classes is written as a list, or as the feature of a sequence
        if isinstance(feature, list) and len(feature) == 1:
            feature = feature[0]
        elif isinstance(feature, dict) and isinstance(feature.get("feature"), dict | list):
            feature = feature["feature"]
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        return ()
    names = feature.get("names")
    found = tuple(map(str, names)) if isinstance(names, list) else ()
    return found if len(set(found)) == len(found) else ()


def _whole_or_none(label: Any) -> int | None:
    try:
        return None if isinstance(label, float) else _whole(label)
    except ValueError:
        return None


def _whole(label: Any) -> int:
    return int(label)


def _real_or_none(label: Any) -> float | None:
    try:
        return float(label)
    except ValueError:
        return None
