"""Which files of docs/ are made from the code, wholly or in part, and how they read now."""

from collections.abc import Callable, Iterator
from pathlib import Path

from docs.generate import (
    architecture,
    charts,
    errors,
    from_ddp,
    hardware,
    kubernetes,
    launchers,
    monitoring,
    settings,
    slurm,
    terminal,
    verbs,
)

DOCS = Path(__file__).parents[1]
MARK = "<!-- table by `make docs` -->"

WHOLE: dict[str, Callable[[], str]] = {
    "architecture.svg": architecture.drawing,
    "predicted-and-measured.svg": charts.predicted,
    "recovery.svg": charts.recovery,
    "terminal.svg": terminal.animation,
    "verbs.md": verbs.page,
    "errors.md": errors.page,
    "hardware.md": hardware.page,
    "hardware-sources.csv": hardware.sources,
    "settings.md": settings.page,
    **{f"monitoring/{name}": make for name, make in monitoring.FILES.items()},
}
TABLES: dict[str, Callable[[], str]] = {
    "launch.md": launchers.table,
    "launch-kubernetes.md": kubernetes.table,
    "launch-slurm.md": slurm.table,
    "monitoring.md": monitoring.table,
}
"""File below docs/ -> what makes it, or the table below its mark."""
SEVERAL: dict[str, Callable[[], dict[str, str]]] = {"from-ddp.md": from_ddp.tables}
"""File below docs/ -> its tables by name, each below a mark with that name."""
ALL = (*WHOLE, *TABLES, *SEVERAL)


def made(name: str) -> str:
    """What a page of ``ALL`` has to hold."""
    if name in WHOLE:
        return WHOLE[name]()
    page = (DOCS / name).read_text()
    if name in TABLES:
        return with_table(page, TABLES[name]())
    for title, table in SEVERAL[name]().items():
        page = with_table(page, table, mark=MARK.replace("table", f"table {title}", 1))
    return page


def with_table(page: str, table: str, *, mark: str = MARK) -> str:
    """A page whose table below the mark is another.

    Raises:
        ValueError: The page has not one mark.
    """
    before, found, after = page.partition(f"{mark}\n\n")
    if not found or mark in after:
        raise ValueError(f"a page has the line {mark} once")
    rest = list(_behind_table(after.splitlines(keepends=True)))
    return "".join([before, found, table, *rest])


def _behind_table(lines: list[str]) -> Iterator[str]:
    is_over = False
    for line in lines:
        is_over = is_over or not line.startswith("|")
        if is_over:
            yield line
