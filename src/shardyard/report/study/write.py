"""From rows to the folder of a study: table.md, table.csv, table.json and study.html."""

from collections.abc import Sequence
from pathlib import Path

from shardyard.io.files import write_json, write_text
from shardyard.log import warn
from shardyard.report.pictures import no_pictures
from shardyard.report.study.page import render
from shardyard.report.study.rows import Series
from shardyard.report.study.table import to_csv, to_json, to_markdown

PAGE, MARKDOWN, CSV, JSON = "study.html", "table.md", "table.csv", "table.json"


def write_study(folder: Path, name: str, series: Sequence[Series], notes: Sequence[str]) -> None:
    """Write all four; each is replaced at once, so that a kill leaves the old ones whole.

    Raises:
        StorageError: The folder cannot be written.
    """
    write_json(folder / JSON, {**to_json(name, series), "notes": list(notes)})
    write_text(folder / CSV, to_csv(series))
    write_text(folder / MARKDOWN, to_markdown(name, series, notes))
    why_none = no_pictures()
    pictures = {} if why_none else _pictures(series)
    text = render(name, series, pictures, no_pictures=why_none, notes=notes)
    write_text(folder / PAGE, text)
    if why_none:
        warn(why_none)


def _pictures(series: Sequence[Series]) -> dict[str, dict[str, str]]:
    from shardyard.report.study.charts import panels  # matplotlib: half a second, not for a refusal

    return {each.name: panels(each, f"s{number}") for number, each in enumerate(series)}
