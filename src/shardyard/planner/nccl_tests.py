"""The table that nccl-tests print, found in whatever log it was copied from.

A log of a pod, of mpirun or of srun has prefixes before each line (times, names of pods, ranks) and
lines of NCCL between the rows; a row is known by its own form.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_NUMBER = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"
_HALF = rf"\s+({_NUMBER})\s+({_NUMBER})\s+({_NUMBER})\s+({_NUMBER}|N/A)"

# size, count, type, redop, root (not in versions before 2.11), then out of place and in place:
# time in us, algorithm and bus bandwidth in GB/s, number of wrong values (before 2.11: an error).
_ROW = re.compile(
    rf"(?<![\w.+-])(\d+)\s+(\d+)\s+([a-z]\w*)\s+([a-z]\w*)(?:\s+-?\d+)?{_HALF}{_HALF}\s*$"
)
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+.{0,200}?\bPid\s+\d+\s+on\s+(\S+)\s+device\s+\d+")
_PROGRAM = re.compile(
    r"\b(all_gather|all_reduce|alltoall|broadcast|gather|hypercube|reduce|reduce_scatter|scatter"
    r"|sendrecv)_perf\b"
)
_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)")

_OPERATIONS = ("sum", "prod", "max", "min", "avg", "mulsum")


@dataclass(frozen=True, kw_only=True)
class Row:
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
    """What one run of nccl-tests printed."""

    rows: tuple[Row, ...]
    ranks: int | None
    """As its header lists them; None: it was not copied."""
    ranks_per_node: int | None
    programs: tuple[str, ...]
    """Collectives whose program the text names."""
    wrong_values: int

    @property
    def average_busbw_gbs(self) -> float:
        """As nccl-tests print it: of all rows, out of place and in place."""
        both = [value for row in self.rows for value in (row.out_busbw_gbs, row.in_busbw_gbs)]
        return sum(both) / len(both)

    def problems(self) -> list[str]:
        """Why no link follows from it; empty: it can be used."""
        found = []
        others = sorted(set(self.programs) - {"all_reduce"})
        operations = sorted({row.redop for row in self.rows} - set(_OPERATIONS))
        if others or operations:
            what = ", ".join(f"{name}_perf" for name in others) or f"redop {', '.join(operations)}"
            found.append(f"it is of {what}, and a link is fitted to all-reduces")
        if self.wrong_values:
            found.append(
                f"{self.wrong_values} values came out wrong: what is measured on broken links or "
                "memory says nothing about sound ones"
            )
        return found


def is_of_table(line: str) -> bool:
    """Whether a line is a row, or a comment above or below rows, without a prefix."""
    return line.startswith("#") or _ROW.match(line.lstrip()) is not None


def read_nccl_table(text: str) -> NcclTable | None:
    """The rows of a text, in their order; None: it holds none.

    Of several tables, each below the name of its program, only the all-reduces where there are any.
    """
    rows: list[Row] = []
    ranks: dict[int, str] = {}
    wrong = 0
    lines = _of_all_reduce(text.splitlines())
    for line in lines:
        if found := _ROW.search(line):
            size, count, kind, redop, *numbers = found.groups()
            out_time, out_algbw, out_busbw, _, in_time, in_algbw, in_busbw, _ = numbers
            rows.append(
                Row(
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
        wrong_values=wrong,
    )


def _of_all_reduce(lines: Sequence[str]) -> Sequence[str]:
    """The lines below the name of all_reduce_perf, up to another name; all where none is named.

    What stands above the first name is that program's too.
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
