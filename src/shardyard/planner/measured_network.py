"""A measured table of all-reduces: read, checked, and turned into the link that explains it.

The link has the rate and latency with which the model of ``planner/collectives.py`` passes through
the table, so it is used like a catalogue's and needs no second model.
"""

import csv
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from shardyard.errors import JsonFileError, RequestError
from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.links import START_S, Link
from shardyard.io.files import read_json
from shardyard.planner import collectives
from shardyard.planner.collectives import Group

# Users paste the table of nccl-tests together with the log that it is in.
#
# Logs of pods, mpirun or srun put a prefix before each line (time, pod name, rank), and NCCL writes
# lines between the rows. So a row is recognised by its own form.

_NUMBER = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"
_HALF = rf"\s+({_NUMBER})\s+({_NUMBER})\s+({_NUMBER})\s+({_NUMBER}|N/A)"

# Columns: size, count, type, redop, root (not before version 2.11), then out of place and in place:
# time in us, algorithm and bus bandwidth in GB/s, number of wrong values (before 2.11: an error).
# The look-behind keeps the tail of a number in a log's prefix from counting as the size.
_ROW = re.compile(
    rf"(?<![\w.+-])(\d+)\s+(\d+)\s+([a-z]\w*)\s+([a-z]\w*)(?:\s+-?\d+)?{_HALF}{_HALF}\s*$"
)
# The gap is bounded: a long line without a match must not cost quadratic time.
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+.{0,200}?\bPid\s+\d+\s+on\s+(\S+)\s+device\s+\d+")
_PROGRAM = re.compile(
    r"\b(all_gather|all_reduce|alltoall|broadcast|gather|hypercube|reduce|reduce_scatter|scatter"
    r"|sendrecv)_perf\b"
)
_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)")

_OPERATIONS = ("sum", "prod", "max", "min", "avg", "mulsum")


@dataclass(frozen=True, kw_only=True)
class NcclRow:
    """One size; times in us, bandwidths in GB/s, out of place and in place."""

    size_bytes: int
    count: int
    type: str
    redop: str
    out_time_us: float
    out_algbw_gbs: float
    out_busbw_gbs: float
    in_time_us: float
    in_algbw_gbs: float
    in_busbw_gbs: float


@dataclass(frozen=True, kw_only=True)
class NcclTable:
    """Output of one run of nccl-tests."""

    rows: tuple[NcclRow, ...]
    ranks: int | None
    """Count of ranks that its header lists. None if the header was not copied."""
    ranks_per_node: int | None
    programs: tuple[str, ...]
    """Collectives whose program the text names."""
    incorrect_values: int

    @property
    def average_busbw_gbs(self) -> float:
        """Average that nccl-tests prints: of all rows, out of place and in place."""
        both = [value for row in self.rows for value in (row.out_busbw_gbs, row.in_busbw_gbs)]
        return sum(both) / len(both)

    def errors(self) -> list[str]:
        """Why no link follows from it; empty: it can be used."""
        found = []
        others = sorted(set(self.programs) - {"all_reduce"})
        operations = sorted({row.redop for row in self.rows} - set(_OPERATIONS))
        if others or operations:
            what = ", ".join(f"{name}_perf" for name in others) or f"redop {', '.join(operations)}"
            found.append(f"it is of {what}, and a link is fitted to all-reduces")
        if self.incorrect_values:
            found.append(
                f"{self.incorrect_values} values came out wrong: measurements on broken links or "
                "memory do not hold for working ones"
            )
        return found


def is_of_table(line: str) -> bool:
    """Whether a line is a row, or a comment above or below rows, without a prefix."""
    return line.startswith("#") or _ROW.match(line.lstrip()) is not None


def read_nccl_table(text: str) -> NcclTable | None:
    """The rows of a text, in their order; None: it holds none.

    Of several tables, each below the name of its program, only the all-reduces where there are any.
    """
    rows: list[NcclRow] = []
    ranks: dict[int, str] = {}
    wrong = 0
    lines = _of_all_reduce(text.splitlines())
    for line in lines:
        if found := _ROW.search(line):
            size, count, kind, redop, *numbers = found.groups()
            out_time, out_algbw, out_busbw, _, in_time, in_algbw, in_busbw, _ = numbers
            rows.append(
                NcclRow(
                    size_bytes=int(size), count=int(count), type=kind, redop=redop,
                    out_time_us=float(out_time), out_algbw_gbs=float(out_algbw),
                    out_busbw_gbs=float(out_busbw), in_time_us=float(in_time),
                    in_algbw_gbs=float(in_algbw), in_busbw_gbs=float(in_busbw),
                )
            )  # fmt: skip
        elif found := _RANK.search(line):
            ranks[int(found[1])] = found[2]
        elif found := _BOUNDS.search(line):
            wrong += int(found[1])
    if not rows:
        return None
    return NcclTable(
        rows=tuple(rows),
        ranks=len(ranks) or None,
        ranks_per_node=max(Counter(ranks.values()).values()) if ranks else None,
        programs=tuple(sorted(set(_PROGRAM.findall("\n".join(lines))))),
        incorrect_values=wrong,
    )


def _of_all_reduce(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines below the name of all_reduce_perf, up to another name; all if none is named.

    Lines above the first name are that program's too.
    """
    begins = [
        (number, found[1]) for number, line in enumerate(lines) if (found := _PROGRAM.search(line))
    ]
    if "all_reduce" not in {name for _, name in begins}:
        return lines
    begins[0] = (0, begins[0][1])
    ends = [number for number, _ in begins[1:]] + [len(lines)]
    return [
        line
        for (begin, name), end in zip(begins, ends, strict=True)
        if name == "all_reduce"
        for line in lines[begin:end]
    ]


LEAST_BYTES = 64 * 1024
"""Rows below this are not fitted: they show how a library starts, not what training sends."""

LEAST_ROWS = 3
"""Rows below which neither a rate nor a latency is concluded."""

OUTLIER = 0.1
"""Relative error from which a row counts less, so that one bad row does not tilt the line."""

CSV_HINT = (
    "Give what all_reduce_perf of nccl-tests prints, as in a log; or a CSV in nccl-tests' columns "
    "size_bytes, out_time_us, out_algbw_gbs, out_busbw_gbs; or size_bytes, out_time_us, ranks and "
    "ranks_per_node."
)
JSON_HINT = (
    'Give {"kind": "collectives", "collective": "all_reduce", "ranks": ..., "ranks_per_node": ..., '
    '"rows": [{"size_bytes": ..., "time_s": ...}]}.'
)


@dataclass(frozen=True, kw_only=True)
class CollectiveTable:
    """Measured all-reduces of one group, smallest first."""

    source: str
    """Name of the file."""
    ranks: int
    ranks_per_node: int | None
    """None: as many as a node of the cluster has devices."""
    rows: tuple[tuple[float, float], ...]
    """Bytes of the tensor on each rank, seconds."""

    @staticmethod
    def read(path: Path) -> "CollectiveTable":
        """Read what nccl-tests print, a CSV in its columns, or JSON of kind ``collectives``.

        Where the number of ranks is not said, it follows from nccl-tests' own ratio of bus to
        algorithm bandwidth.

        Raises:
            RequestError: The file cannot be used; all reasons are listed.
        """
        if path.suffix == ".json":
            return _from_json(path)
        try:
            printed = read_nccl_table(path.read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{path} cannot be read as text: {error}. {CSV_HINT}") from error
        return _from_csv(path) if printed is None else _from_printed(printed, path)

    def group(self, cluster: ClusterHardware) -> Group:
        """The group that was measured, in nodes like the cluster's."""
        per_node = self.ranks_per_node or cluster.devices_per_node
        return Group(size=self.ranks, per_node=min(per_node, self.ranks))


def fit_link(table: CollectiveTable, *, cluster: ClusterHardware) -> Link:
    """The link that brings the model nearest to the table.

    A group inside one node gives the link inside; a larger one the link between nodes, with the
    cluster's hops inside. The rate is what a datasheet would have to say: the share of it that
    collectives reach gives what was measured.

    Raises:
        RequestError: Too few rows are large enough, or time does not grow with size.
    """
    rows = [row for row in table.rows if row[0] >= LEAST_BYTES]
    if len(rows) < LEAST_ROWS:
        raise RequestError(
            f"{table.source} has {len(rows)} rows of at least {LEAST_BYTES:,} bytes. A rate and a "
            f"latency need {LEAST_ROWS} of them. Measure up to 1 GiB, doubling the size."
        )
    start_s, s_per_byte = _fit_line(rows)
    if s_per_byte <= 0:
        raise RequestError(
            f"{table.source}: the time does not grow with the size from {rows[0][0]:,.0f} to "
            f"{rows[-1][0]:,.0f} bytes. No rate follows from that. Measure up to 1 GiB."
        )
    group = table.group(cluster)
    bus_bytes_per_s = 2 * (group.size - 1) / group.size / s_per_byte
    # An all-reduce goes through its hops twice, once to sum and once to hand out.
    hops_s = max(0.0, start_s - START_S) / 2
    if group.nodes == 1:
        link = cluster.inside
        share = collectives.inside_bytes_per_s(link) / link.bytes_per_s
        hop_s = hops_s / (group.size - 1)
    else:
        link, share = cluster.between, collectives.BETWEEN_SHARE * group.per_node
        # Small sums over several nodes take the tree: a chain in the node, then a hop a doubling.
        chain_s = (group.per_node - 1) * collectives.hop_s(cluster.inside)
        hop_s = max(0.0, hops_s - chain_s) / (group.nodes - 1).bit_length()
    return Link(
        name=f"{link.name}, measured",
        bytes_per_s=bus_bytes_per_s / share,
        latency_s=collectives.latency_with(hop_s),
        source=f"measured, {table.source}, {table.ranks} ranks",
    )


def _fit_line(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds at no bytes, and per byte: least squares of relative errors, outliers weighing less.

    Source: Huber 1964, Robust Estimation of a Location Parameter, by reweighting.
    """
    weights = [1.0] * len(rows)
    start = slope = 0.0
    for _ in range(20):
        # Times differ by orders of magnitude: by absolute errors only the largest would count.
        terms = [(w / t**2, n, t) for w, (n, t) in zip(weights, rows, strict=True)]
        total = sum(w for w, _, _ in terms)
        mean_n = sum(w * n for w, n, _ in terms) / total
        mean_t = sum(w * t for w, _, t in terms) / total
        spread = sum(w * (n - mean_n) ** 2 for w, n, _ in terms)
        slope = sum(w * (n - mean_n) * (t - mean_t) for w, n, t in terms) / spread
        start = mean_t - slope * mean_n
        errors = [abs(start + slope * n - t) / t for n, t in rows]
        weights = [1.0 if error <= OUTLIER else OUTLIER / error for error in errors]
    return start, slope


def _from_printed(table: NcclTable, path: Path) -> CollectiveTable:
    rows = [(float(row.size_bytes), row.out_time_us * 1e-6) for row in table.rows]
    raise_if_invalid(path, [*table.errors(), *_check_rows(rows)], CSV_HINT)
    ranks = _ranks([vars(row) for row in table.rows], path)
    if table.ranks not in (None, ranks):
        what = f"its header lists {table.ranks} ranks, and its bandwidths are those of {ranks}"
        raise_if_invalid(
            path, [what], "Give the log of one run of all_reduce_perf, with its whole table."
        )
    return CollectiveTable(
        source=path.name, ranks=ranks, ranks_per_node=table.ranks_per_node, rows=tuple(rows)
    )


def _from_csv(path: Path) -> CollectiveTable:
    try:
        # A byte order mark of a spreadsheet would become part of the first column's name.
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            lines = list(reader)
            columns = reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RequestError(f"{path} cannot be read as CSV: {error}. {CSV_HINT}") from error
    needed = ["size_bytes", "out_time_us"]
    needed += [] if "ranks" in columns else ["out_algbw_gbs", "out_busbw_gbs"]
    raise_if_invalid(
        path, [f"no column {name!r}" for name in needed if name not in columns], CSV_HINT
    )
    numbers, problems = _numbers(lines, needed)
    rows = [(row["size_bytes"], row["out_time_us"] * 1e-6) for row in numbers]
    problems += _check_rows(rows)
    raise_if_invalid(path, problems, CSV_HINT)
    ranks = _one_value(lines, "ranks", path) if "ranks" in columns else _ranks(numbers, path)
    per_node = _one_value(lines, "ranks_per_node", path) if "ranks_per_node" in columns else None
    return CollectiveTable(source=path.name, ranks=ranks, ranks_per_node=per_node, rows=tuple(rows))


def _from_json(path: Path) -> CollectiveTable:
    content = read_object(path)
    problems = [
        f"{key}={content.get(key)!r} is not {only!r}"
        for key, only in (("kind", "collectives"), ("collective", "all_reduce"))
        if content.get(key) != only
    ]
    problems += [
        f"{key}={content.get(key)!r} is not a number of at least {least}"
        for key, least in (("ranks", 2), ("ranks_per_node", 1))
        if not isinstance(content.get(key), int) or content[key] < least
    ]
    found = content.get("rows")
    lines = found if isinstance(found, list) else []
    numbers, wrong = _numbers(lines, ["size_bytes", "time_s"])
    rows = [(row["size_bytes"], row["time_s"]) for row in numbers]
    raise_if_invalid(path, [*problems, *wrong, *_check_rows(rows)], JSON_HINT)
    return CollectiveTable(
        source=path.name,
        ranks=content["ranks"],
        ranks_per_node=content["ranks_per_node"],
        rows=tuple(rows),
    )


def _numbers(
    lines: Sequence[Any], names: Sequence[str]
) -> tuple[list[dict[str, float]], list[str]]:
    """The named values of each row, and what is no number (nan in its place)."""
    numbers, problems = [], []
    for index, line in enumerate(lines, start=1):
        values = line if isinstance(line, Mapping) else {}
        numbers.append({name: number(values.get(name)) for name in names})
        problems += [
            f"row {index}: {name}={values.get(name)!r} is not a number"
            for name, value in numbers[-1].items()
            if math.isnan(value)
        ]
    return numbers, problems


def _check_rows(rows: Sequence[tuple[float, float]]) -> list[str]:
    """List what is wrong with sizes and times; values that are no numbers are skipped."""
    if not rows:
        return ["no rows"]
    problems = [
        f"row {index}: a time of {time_s:g} s is not above 0"
        for index, (_, time_s) in enumerate(rows, start=1)
        if time_s <= 0
    ]
    return problems + [
        f"row {index}: size {after:,.0f} comes after {before:,.0f}, sizes must grow"
        for index, ((before, _), (after, _)) in enumerate(pairwise(rows), start=2)
        if after <= before
    ]


def _one_value(lines: Sequence[Mapping[str, str]], name: str, path: Path) -> int:
    """The value of a column that is the same in all rows."""
    values = {line[name] for line in lines}
    text = str(values.pop()) if len(values) == 1 else ""
    if not text.isdigit() or int(text) < 1:
        raise_if_invalid(
            path, [f"column {name!r} is not the same whole number in all rows"], CSV_HINT
        )
    return int(text)


def _ranks(numbers: Sequence[Mapping[str, float]], path: Path) -> int:
    """Compute the ranks n of an all-reduce: bus over algorithm bandwidth is 2 (n - 1) / n.

    Both are printed to a hundredth of a GB/s, so the sizes of large groups are
    indistinguishable.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    # The highest bandwidth loses the smallest share to the rounding.
    best = max(numbers, key=lambda row: row["out_algbw_gbs"])
    algorithm, bus = best["out_algbw_gbs"], best["out_busbw_gbs"]
    ratio = bus / algorithm if algorithm > 0 else 0.0
    # Two ranks give 1 and infinitely many give 2; 0.9 leaves room for the rounding.
    ranks = 2 / (2 - ratio) if 0.9 < ratio < 2 else 0.0
    # d ranks / d ratio is ranks^2 / 2, and both values are off by up to 0.005 GB/s.
    doubt = ranks**2 / 2 * (1 + ratio) * 0.005 / algorithm if ranks else 1.0
    # From a doubt of 0.5 on, two whole numbers would be equally likely.
    if doubt > 0.4 or abs(ranks - round(ranks)) > doubt + 0.01:
        what = f"bus over algorithm bandwidth is {ratio:.3f}, from which no number of ranks follows"
        hint = "See that the table is of all_reduce_perf, or add columns ranks and ranks_per_node."
        raise_if_invalid(path, [what], hint)
    return round(ranks)


def number(value: Any) -> float:
    """A finite number, given as one or as text; anything else is nan."""
    # JSON's true is an int in Python, and would be read as 1.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        found = float(value)
    except ValueError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        RequestError: It cannot be read, or holds something else.
    """
    try:
        content = read_json(path)
    except (FileNotFoundError, JsonFileError) as error:
        reason = getattr(error, "reason", "does not exist")
        raise RequestError(
            f"{path} {reason}. What was measured must be whole. Check the path, or measure again."
        ) from error
    if not isinstance(content, dict):
        _raise(path, ["it does not hold an object"], JSON_HINT)
    return content


def raise_if_invalid(path: Path, errors: Sequence[str], hint: str) -> None:
    """Raise a RequestError that lists the problems, if there are any."""
    if errors:
        _raise(path, errors, hint)


def _raise(path: Path, errors: Sequence[str], hint: str) -> NoReturn:
    count = "1 problem" if len(errors) == 1 else f"{len(errors)} problems"
    lines = "\n".join(f"  {problem}" for problem in errors)
    raise RequestError(f"{path} has {count} and was not used:\n{lines}\n{hint}")
