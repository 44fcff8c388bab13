"""Read a table of published runs: its columns, its numbers, and all that is wrong with them.

The schema is that of ``groundtruth/measured_runs.csv``. Columns that no row can do without must be
there; any other may be missing and counts as empty in every row.
"""

import csv
import difflib
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardyard.errors import RequestError

REQUIRED = (
    "family", "quality", "framework", "gpu", "num_gpus", "model", "hidden", "layers", "heads",
    "seq_len", "dp", "tp", "pp", "sharding", "act_ckpt", "precision", "micro_batch_size",
    "global_batch_size", "outcome", "mem_gb", "mem_kind", "tokens_per_s_per_gpu",
)  # fmt: skip

COUNTS = (
    "num_gpus", "gpus_per_node", "hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "seq_len",
    "dp", "tp", "pp", "cp", "ep", "vpp", "micro_batch_size", "global_batch_size", "grad_accum",
)  # fmt: skip
QUANTITIES = (
    "gpu_mem_gb", "params_b", "mem_gb", "iter_time_s", "tokens_per_s_per_gpu", "mfu_pct_reported",
)  # fmt: skip

_EMPTY = {"", "-", "na", "n/a", "nan", "none", "null", "?"}
_SHOWN = 10
"""Wrong cells that a message names."""


@dataclass(frozen=True)
class Row:
    """One line of the table; a cell that the source leaves open is empty, or None as a number."""

    line: int
    """Counted from 1, the header's."""
    cells: Mapping[str, str]
    numbers: Mapping[str, float]

    def text(self, *columns: str) -> str:
        """These cells in lower case, joined by blanks."""
        return " ".join(self.cells.get(column, "") for column in columns).lower()

    def raw(self, column: str) -> str:
        """The cell as it is printed."""
        return self.cells.get(column, "")

    def count(self, column: str) -> int | None:
        """A whole number; None if the cell is empty."""
        value = self.numbers.get(column)
        return None if value is None else int(value)

    def quantity(self, column: str) -> float | None:
        """A number; None if the cell is empty."""
        return self.numbers.get(column)


def read_table(path: Path) -> list[Row]:
    """All rows of a table.

    Raises:
        RequestError: The file cannot be read, is empty, lacks columns or holds words where
            numbers belong.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"--table {path} cannot be read as text: {getattr(error, 'strerror', None) or error}. "
            "The benchmark compares with a CSV table of measured runs. Name such a file, for "
            "example benchmarks/groundtruth/measured_runs.csv."
        ) from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    _check_header(path, list(reader.fieldnames or []))
    rows, wrong = [], list[str]()
    for cells in reader:
        clean = {name: (cell or "").strip() for name, cell in cells.items() if name}
        numbers = dict[str, float]()
        for column, value in _numbers(clean):
            if isinstance(value, str):
                wrong.append(f"row {reader.line_num}, {column}={clean[column]!r}: {value}")
            else:
                numbers[column] = value
        rows.append(Row(line=reader.line_num, cells=clean, numbers=numbers))
    if wrong:
        more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        lines = "\n".join(f"  {line}" for line in wrong[:_SHOWN])
        raise RequestError(
            f"--table {path} holds words where numbers belong (rows are counted from the "
            f"header, 1):\n{lines}{more}\nA number that was not measured is an empty cell. "
            "Correct these cells."
        )
    if not rows:
        raise RequestError(
            f"--table {path} has a header and no rows. There is nothing to compare with. "
            "Name a table with measured runs."
        )
    return rows


def _check_header(path: Path, header: list[str]) -> None:
    names = [name.strip() for name in header]
    if not any(names):
        raise RequestError(
            f"--table {path} is empty. Its first line must name the columns. "
            f"Needed are {', '.join(REQUIRED)}."
        )
    missing = [name for name in REQUIRED if name not in names]
    if not missing:
        return
    hints = []
    for name in missing:
        near = difflib.get_close_matches(name, [n for n in names if n not in REQUIRED], n=1)
        hints.append(f"{name} (is {near[0]!r} meant to be it?)" if near else name)
    raise RequestError(
        f"--table {path} lacks {len(missing)} of {len(REQUIRED)} columns: {', '.join(hints)}. "
        "Without them no row says what was run. "
        "Rename or add them as in benchmarks/groundtruth/measured_runs.csv."
    )


def _numbers(cells: Mapping[str, str]) -> Iterator[tuple[str, float | str]]:
    """Column and value, or column and what is wrong with the cell."""
    for column in (*COUNTS, *QUANTITIES):
        cell = cells.get(column, "")
        if cell.lower() in _EMPTY:
            continue
        try:
            value = float(cell.replace(",", ""))
        except ValueError:
            yield column, "no number"
            continue
        if not math.isfinite(value) or value < 0:
            yield column, "no finite number of zero or more"
        elif column in COUNTS and value != int(value):
            yield column, "no whole number"
        elif value or column not in COUNTS:
            yield column, value
