"""docs/settings.md: every setting and every preset, made from the schema."""

import re

from shardyard.config.schema.json_schema import write_default
from shardyard.config.schema.reference import sections
from shardyard.families.presets import PRESETS


def page() -> str:
    """The whole page."""
    lines = [
        "# Settings",
        "",
        "Every setting of a recipe. Each also accepts its default; an empty one is null. "
        "`shardyard config --schema` "
        "adds the sections of installed [plug-ins](plug-ins.md).",
    ]
    for section in sections():
        lines += ["", f"## {section.name}", ""]
        if section.sentence:
            lines += [section.sentence, ""]
        if section.settings:
            lines += ["| setting | accepts | default | what it does |", "|---|---|---|---|"]
        for setting in section.settings:
            default = write_default(setting.default)
            cells = (
                f"`{setting.name}`",
                _short(setting.accepts, default),
                "" if default == "null" else f"`{default}`",
                setting.sentence.replace("<", "&lt;"),
            )
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Presets",
        "",
        _PRESET_SOURCES,
        "",
        "| `model.preset` | parameters | context |",
    ]
    lines += ["|---|---|---|"]
    for name, preset in PRESETS.items():
        size = f"{preset.shape.parameters:,}" + (" + embeddings" * (preset.shape.vocab_size == 0))
        context = preset.shape.max_position_embeddings
        lines.append(f"| `{name}` | {size} | {context} |")
    return "\n".join(lines) + "\n"


_PRESET_SOURCES = "`shardyard config --presets` prints the source of each: paper and config.json."


_SHORTER = {
    r"a whole number of at least (\S+)": r"integer ≥ \1",
    r"a whole number from (\S+) to (\d+)": r"integer, \1 to \2",
    r"a number of at least (\S+)": r"number ≥ \1",
    r"a number from (\S+) to below (\d+)": r"number, \1 to < \2",
    r"a number from (\S+) to (\d+)": r"number, \1 to \2",
    r"a number above (\d+)": r"number > \1",
    r"a list of (\d+), each": r"list of \1:",
    r"a list, each text": "list of text",
    r"a list, each": "list:",
    r"a name and text, or a whole number, or true or false each": "mapping to any value",
    r"a name and a text each": "mapping to text",
    r"a name and (?:an? )?(.*) each": r"mapping to \1",
}
"""Wording of an error -> the shorter one for a column of a table."""


def _short(accepts: str, default: str) -> str:
    """Type and bounds of a setting as the table shows them, such as ``integer ≥ 1``.

    The word of the default is left out, as its own column has it.
    """
    if default in ("auto", "null"):
        accepts = accepts.removesuffix(f", or {default}")
    for long, short in _SHORTER.items():
        accepts = re.sub(long, short, accepts)
    return accepts.removesuffix(" each").replace("<", "&lt;")
