"""A plain table of somebody's scaling, as CSV: sizes and one rate in each row.

Columns: ``accelerators``, and one of ``RATES``. ``nodes``, batches, micro-batch, accumulation,
layout, memory, MFU, price, the printed efficiency and the source may be given.
"""

import csv
import difflib
import io
import math
from collections.abc import Mapping
from pathlib import Path

from shardyard.errors import RequestError
from shardyard.report.study.rows import Hold, ScalingSeries, SeriesRow, Settings, SizeRate

RATES = (
    "samples_per_s",
    "tokens_per_s",
    "samples_per_s_per_accelerator",
    "tokens_per_s_per_accelerator",
    "epoch_s",
)
"""One of these is in each row."""

COUNTS = ("nodes", "accelerators", "micro_batch", "accumulation", "global_batch")
QUANTITIES = (*RATES, "memory_gib", "mfu_pct", "usd_per_hour", "epoch_samples")
TEXTS = ("layout", "recompute", "precision", "printed", "source")
COLUMNS = (*COUNTS, *QUANTITIES, *TEXTS)

_EMPTY = {"", "-", "na", "n/a", "nan", "none", "null"}


def read_table(path: Path) -> ScalingSeries:
    """The series of one file, named after it.

    Raises:
        RequestError: The file cannot be read, or a column or a cell is wrong; all are named.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"--table {path} cannot be read as text: {getattr(error, 'strerror', None) or error}. "
            "A study reads a CSV table with a row a size. Name such a file, for example "
            "benchmarks/groundtruth/scaling/s4-bert-large.csv."
        ) from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    _check_header(path, [name.strip() for name in reader.fieldnames or []])
    rows, wrong, sources = list[SeriesRow](), list[str](), list[str]()
    for cells in reader:
        clean = {
            (name or "").strip(): "" if _is_empty(cell) else str(cell).strip()
            for name, cell in cells.items()
            if name is not None
        }
        problems = _cell_errors(clean)
        wrong += [f"row {reader.line_num}: {problem}" for problem in problems]
        if not problems:
            rows.append(_row(clean))
            sources.append(clean.get("source", ""))
    wrong += _clashes(rows)
    if wrong:
        lines = "\n".join(f"  {line}" for line in wrong)
        raise RequestError(
            f"--table {path} cannot be read (rows are counted from the header, 1):\n{lines}\n"
            "A number that is not known is an empty cell. Correct these rows."
        )
    if not rows:
        raise RequestError(f"--table {path} has a header and no rows. Give a row for each size.")
    rows.sort(key=lambda row: row.accelerators)
    source = next((source for source in sources if source), "")
    return ScalingSeries(name=path.stem, rows=tuple(rows), hold=constant_batch(rows), source=source)


def constant_batch(rows: list[SeriesRow]) -> Hold | None:
    """Return the batch that is the same in all rows; None: neither, or unknown."""
    batches = [row.settings.global_batch for row in rows]
    known = [batch for batch in batches if batch is not None]
    if len(known) < len(rows) or len(rows) < 2:
        return None
    each = {batch / row.accelerators for batch, row in zip(known, rows, strict=True)}
    if len(each) == 1:
        return "batch-per-device"
    return "global-batch" if len(set(known)) == 1 else None


def _check_header(path: Path, header: list[str]) -> None:
    if not any(header):
        raise RequestError(
            f"--table {path} is empty. Its first line names the columns: accelerators, one of "
            f"{', '.join(RATES)}, and any of {', '.join(COLUMNS)}. Write it."
        )
    problems = []
    for name in header:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, n=1)
            hint = f"is {near[0]!r} meant?" if near else f"they are {', '.join(COLUMNS)}"
            problems.append(f"{name!r} is not a column of a scaling table; {hint}")
    if "accelerators" not in header:
        problems.append("accelerators is missing: how many devices a size has")
    if not any(name in header for name in RATES):
        problems.append(f"a rate is missing: one of {', '.join(RATES)}")
    if problems:
        raise RequestError(f"--table {path}: {'; '.join(problems)}. Correct its first line.")


def _is_empty(cell: object) -> bool:
    return cell is None or str(cell).strip().lower() in _EMPTY


def _cell_errors(cells: Mapping[str, str]) -> list[str]:
    found = []
    for name in (*COUNTS, *QUANTITIES):
        text = cells.get(name, "")
        if text and _number(text) is None:
            found.append(f"{name}={text!r} is not a number above 0")
        elif text and name in COUNTS and _number(text) != int(_number(text) or 0):
            found.append(f"{name}={text!r} is not a whole number")
    if not cells.get("accelerators"):
        found.append("accelerators is empty")
    rates = [name for name in RATES if cells.get(name)]
    if len(rates) != 1:
        said = " and ".join(rates) or "no rate"
        found.append(f"{said} in one row, and a row has exactly one of {', '.join(RATES)}")
    return found


def _clashes(rows: list[SeriesRow]) -> list[str]:
    """Return sizes that occur twice, and rates of different kinds."""
    sizes = [row.accelerators for row in rows]
    twice = sorted({size for size in sizes if sizes.count(size) > 1})
    found = [f"{size} accelerators are in several rows; give one row a size" for size in twice]
    if len({_kind(row) for row in rows}) > 1:
        found.append("rows have rates of different kinds; give the same column in all of them")
    return found


def _kind(row: SeriesRow) -> tuple[bool, ...]:
    rate = row.rate
    assert rate is not None
    return rate.tokens_per_s is None, rate.samples_per_s is None, rate.epochs_per_s is None


def _row(cells: Mapping[str, str]) -> SeriesRow:
    accelerators = _count(cells, "accelerators")
    assert accelerators is not None
    quantities = {name: _number(cells.get(name, "")) for name in QUANTITIES}
    memory, mfu = quantities["memory_gib"], quantities["mfu_pct"]
    epoch_samples = quantities["epoch_samples"]
    return SeriesRow(
        nodes=_count(cells, "nodes") or accelerators,
        accelerators=accelerators,
        origin="published",
        rate=_rate(quantities, accelerators),
        settings=Settings(
            micro_batch=_count(cells, "micro_batch"),
            accumulation=_count(cells, "accumulation"),
            layout=cells.get("layout", ""),
            recompute=cells.get("recompute", ""),
            precision=cells.get("precision", ""),
            global_batch=_count(cells, "global_batch"),
        ),
        memory_bytes=None if memory is None else round(memory * 2**30),
        mfu=None if mfu is None else mfu / 100,
        epoch_samples=None if epoch_samples is None else round(epoch_samples),
        usd_per_hour=quantities["usd_per_hour"],
        printed=cells.get("printed", ""),
    )


def _rate(quantities: Mapping[str, float | None], accelerators: int) -> SizeRate:
    name = next(name for name in RATES if quantities[name] is not None)
    value = quantities[name]
    assert value is not None
    match name:
        case "samples_per_s":
            return SizeRate(samples_per_s=value)
        case "tokens_per_s":
            return SizeRate(tokens_per_s=value)
        case "samples_per_s_per_accelerator":
            return SizeRate(samples_per_s=value * accelerators)
        case "tokens_per_s_per_accelerator":
            return SizeRate(tokens_per_s=value * accelerators)
        case _:
            return SizeRate(epochs_per_s=1 / value)


def _number(text: str) -> float | None:
    """A finite number above 0, also as ``1,379.76``."""
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _count(cells: Mapping[str, str], name: str) -> int | None:
    number = _number(cells.get(name, ""))
    return None if number is None else int(number)
