"""docs/settings.md: every setting and every preset, made from the schema."""

from shardyard.config.schema.json_schema import write_default
from shardyard.config.schema.reference import sections
from shardyard.families.presets import PRESETS


def page() -> str:
    """The whole page."""
    lines = [
        "# Settings",
        "",
        "Every setting of a recipe. Made from `src/shardyard/config/schema/recipe.py` by "
        "`make docs`; "
        "`shardyard config --schema` shows the same, and the sections that installed packages add "
        "([plug-ins](plug-ins.md)).",
    ]
    for section in sections():
        lines += ["", f"## {section.name}", ""]
        if section.sentence:
            lines += [section.sentence, ""]
        if section.settings:
            lines += ["| setting | accepts | default | what it does |", "|---|---|---|---|"]
        for setting in section.settings:
            cells = (
                f"`{setting.name}`",
                setting.accepts,
                f"`{write_default(setting.default)}`",
                setting.sentence.replace("<", "&lt;"),
            )
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Presets", "", "| `model.preset` | parameters | context | source |"]
    lines += ["|---|---|---|---|"]
    for name, preset in PRESETS.items():
        size = f"{preset.shape.parameters:,}" + (" + embeddings" * (preset.shape.vocab_size == 0))
        context = preset.shape.max_position_embeddings
        lines.append(f"| `{name}` | {size} | {context} | {preset.source} |")
    return "\n".join(lines) + "\n"
