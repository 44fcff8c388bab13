"""The documentation of every setting. Run as a program, prints docs/settings.md."""

from typing import Any

from shardyard.config.schema import Section
from shardyard.config.setting import Setting, sections, settings
from shardyard.families.presets import PRESETS


def settings_json() -> list[dict[str, Any]]:
    """Plain values of every setting, for `shardyard config --schema --json`."""
    return [setting_json(setting) for setting in settings().values()]


def setting_json(setting: Setting) -> dict[str, Any]:
    """Plain values of one setting."""
    return {
        "name": setting.name,
        "accepts": setting.accepts,
        "choices": list(setting.choices),
        "default": setting.default,
        "description": setting.sentence,
    }


def write_default(value: Any) -> str:
    """A default as it would be written in a recipe."""
    if value is None:
        return "null"
    if isinstance(value, Section):
        return write_default(value.model_dump(exclude_unset=True))
    if isinstance(value, dict):
        inner = (f"{key}: {write_default(item)}" for key, item in value.items())
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(write_default(item) for item in value)}]"
    return repr(value) if isinstance(value, str) and value != value.strip() else str(value)


def markdown() -> str:
    """docs/settings.md, made from the schema."""
    lines = [
        "# Settings",
        "",
        "Every setting of a recipe. Made from `src/shardyard/config/schema.py` by "
        "`python -m shardyard.config.document > docs/settings.md`; `shardyard config --schema` "
        "shows the same, and the sections that installed packages add ([plug-ins](plug-ins.md)).",
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


if __name__ == "__main__":
    print(markdown(), end="")
