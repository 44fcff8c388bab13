"""confusion.json of a run: which classes the last validation took for which others."""

from dataclasses import asdict, dataclass

from shardyard.errors import StorageError
from shardyard.io.files import parse_json, read_plain, write_json
from shardyard.rundir.layout import RunDir

_MOST_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """Confusions of an evaluation; of many classes, those that are confused most."""

    step: int
    classes: int
    """Number of all classes."""
    predictions: int
    right: int
    names: list[str]
    """Classes of the matrix: all of a few, else those in most confusions, in their order."""
    matrix: list[list[int]]
    """A row for each true class, a column for each predicted one."""
    pairs: list[tuple[str, str, int]]
    """True class, predicted class and number of the most frequent confusions, in that order."""


def write_confusion(run: RunDir, confusion: Confusion) -> None:
    """Write the file at once.

    Raises:
        StorageError: The run folder cannot be written.
    """
    write_json(run.confusion, asdict(confusion))


def read_confusion(run: RunDir) -> Confusion | None:
    """Return what was written; None: there is no such file, or it is of another form."""
    if run.confusion.is_symlink():  # a page that is handed on shows no other file of this machine
        return None
    try:
        content = parse_json(read_plain(run.confusion, limit_bytes=_MOST_BYTES))
        numbers = {key: int(content[key]) for key in ("step", "classes", "predictions", "right")}
        names = [str(name) for name in content["names"]]
        matrix = [[int(count) for count in row] for row in content["matrix"]]
        pairs = [(str(true), str(guess), int(count)) for true, guess, count in content["pairs"]]
    except (OSError, StorageError, ValueError, TypeError, KeyError):
        return None
    if len(matrix) != len(names) or any(len(row) != len(names) for row in matrix):
        return None
    return Confusion(**numbers, names=names, matrix=matrix, pairs=pairs)
