"""Tables of labels: a CSV or TSV file with a row for each picture, its file and its class.

The pictures lie next to the table, or in a folder next to it. Each is listed as in class folders:
``CLASS/file``, or ``SPLIT/CLASS/file`` where the table has a column ``split``.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardyard.config.sources import is_remote
from shardyard.config.split_names import KEYWORDS, NamedSplit
from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.errors import SourceError

TABLES = frozenset(["csv", "tsv"])
"""Suffixes of tables of labels."""
_SPLIT = "split"
"""Column that says the split of each picture, if there is one."""
_SHOWN = 4


@dataclass(frozen=True)
class _Row:
    number: int
    """Number of its line in the file, as an editor shows it."""
    image: str
    label: str
    split: NamedSplit | None


def images_in_tables(
    tables: Sequence[SourceFile], *, image_key: str, label_key: str
) -> list[SourceFile]:
    """Return the pictures that the rows of tables name, in the order of the rows.

    Args:
        image_key: Column with the file of each picture, relative to the table or to one of the
            folders next to it.
        label_key: Column with the class.

    Raises:
        SourceError: A table cannot be read, has no such columns, or a row names no picture, no
            class or a picture that another row names.
    """
    images: list[SourceFile] = []
    rows_by_path: dict[str, str] = {}
    for table in tables:
        shown = escape_text(table.path)
        if is_remote(table.path):
            raise SourceError(
                f"{shown}: a table of labels is read from this machine only. Copy it and its "
                "pictures here, or write Parquet files with the pictures in them."
            )
        folders = _ImageFolders(Path(table.path).parent)
        missing = []
        for row in _rows(table, image_key=image_key, label_key=label_key):
            where = f"{shown}, line {row.number}"
            path = folders.find(row.image, where)
            if path is None:
                missing.append(f"{escape_text(row.image)} (line {row.number})")
                continue
            if str(path) in rows_by_path:
                raise SourceError(
                    f"{where}: {escape_text(row.image)} is also in {rows_by_path[str(path)]}. "
                    "Keep one row for each picture."
                )
            rows_by_path[str(path)] = where
            stat = path.stat()
            parts = (row.split, row.label, row.image.lstrip("/"))
            name = "/".join(part for part in parts if part is not None)
            suffix = path.suffix.lower().removeprefix(".")
            images.append(
                SourceFile(str(path), name, suffix, stat.st_size, stat.st_mtime_ns, row.split)
            )
        if missing:
            raise SourceError(_missing(shown, missing, folders))
    if not images:
        raise SourceError(f"{escape_text(tables[0].path)} has no rows below its header.")
    return images


def _missing(table: str, missing: Sequence[str], folders: "_ImageFolders") -> str:
    more = f" and {len(missing) - _SHOWN:,} more" if len(missing) > _SHOWN else ""
    named = f"{len(missing):,} rows name" if len(missing) > 1 else "a row names"
    file = "files that do" if len(missing) > 1 else "a file that does"
    return (
        f"{table}: {named} {file} not exist: {', '.join(missing[:_SHOWN])}{more}. Looked in "
        f"{escape_text(str(folders.folder))} and the folders in it. Correct or remove these rows; "
        "names need their suffix, such as .jpg."
    )


class _ImageFolders:
    """Folders in which the pictures of a table may lie."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._below = sorted(each for each in folder.iterdir() if each.is_dir())

    def find(self, image: str, where: str) -> Path | None:
        """Return the file of a picture; None: there is none.

        Raises:
            SourceError: Several folders have one of that name.
        """
        if (self.folder / image).is_file():
            return self.folder / image
        found = [each / image for each in self._below if (each / image).is_file()]
        if len(found) > 1:
            raise SourceError(
                f"{where}: {escape_text(image)} may be {escape_text(str(found[0]))} or "
                f"{escape_text(str(found[1]))}. Write it with its folder: "
                f"{escape_text(f'{found[0].parent.name}/{image}')}."
            )
        return found[0] if found else None


def _rows(table: SourceFile, *, image_key: str, label_key: str) -> Iterator[_Row]:
    path = escape_text(table.path)
    delimiter = "\t" if table.format == "tsv" else ","
    try:
        with Path(table.path).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            columns = list(reader.fieldnames or ())
            _check_columns(path, columns, image_key=image_key, label_key=label_key)
            for content in reader:
                yield _row(content, reader.line_num, path, image_key=image_key, label_key=label_key)
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8. Convert it: iconv -t utf-8.") from error
    except csv.Error as error:
        raise SourceError(f"{path} is not a table: {error}. Write it again as CSV.") from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}.") from error


def _check_columns(path: str, columns: Sequence[str], *, image_key: str, label_key: str) -> None:
    """Raise if the header lacks a column or has one twice, with the settings for both."""
    wrong = [key for key in (image_key, label_key) if columns.count(key) != 1]
    if not wrong:
        return
    why = ", ".join(f"{'several' if key in columns else 'no'} column {key!r}" for key in wrong)
    shown = escape_text(", ".join(columns)) or "none"
    if len(columns) == 1 and any(each in columns[0] for each in ";\t|"):
        raise SourceError(
            f"{path}: {why} (its header: {shown}). Columns are separated by commas, or by tabs in "
            "a .tsv file. Write it again so."
        )
    others = [each for each in columns if each not in (image_key, label_key, _SPLIT)]
    settings = {image_key: "data.images.image_key", label_key: "data.images.label_key"}
    guess = " ".join(
        f"{settings[key]}={other}" for key, other in zip(wrong, [*others, "COLUMN"], strict=False)
    )
    raise SourceError(f"{path}: {why} (its columns: {shown}). Name the right one: {guess}.")


def _row(
    content: Mapping[str | None, str | list[str] | None],
    number: int,
    path: str,
    *,
    image_key: str,
    label_key: str,
) -> _Row:
    where = f"{path}, line {number}"
    if None in content or None in content.values():
        raise SourceError(f"{where} has another number of columns than the header. Correct it.")
    image, label = (str(content[key]).strip() for key in (image_key, label_key))
    for key, value in ((image_key, image), (label_key, label)):
        if not value:
            raise SourceError(f"{where} has no {escape_text(key)}. Correct or remove the row.")
    if "/" in label or label in (".", ".."):
        raise SourceError(
            f"{where}: {escape_text(label)} cannot name a class: it has a slash, or is a folder. "
            "Write another name."
        )
    if _SPLIT not in content:
        return _Row(number, image, label, None)
    word = str(content[_SPLIT]).strip()
    split = KEYWORDS.get(word.lower())
    if split is None:
        raise SourceError(
            f"{where}: the split {escape_text(word)!r} is none of train, val, validation, dev, "
            "eval and test. Write one of them, or rename the column."
        )
    return _Row(number, image, label, split)
