"""The recipe as YAML: each line with where it came from."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardyard.config.schema.recipe import Recipe
from shardyard.importers.configs.rules import Kind, Outcome
from shardyard.io.sanitize import printable
from shardyard.io.yaml import write_yaml

GIVEN = "given on the command line"
_WIDTH = 40
"""Where comments begin, unless a line is longer."""

_KEYED = (
    "launch.env",
    "launch.kubernetes.node_selector",
    "launch.slurm.options",
    "secrets",
)
"""Settings whose value is a mapping, filled key by key."""


def tree_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names -> sections; a name below a mapping's setting is one key, dots and all."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parts, last = _parts(name)
        into = tree
        for part in parts:
            into = into.setdefault(part, {})
        into[last] = value
    return tree


def _parts(name: str) -> list[str]:
    for setting in _KEYED:
        if name.startswith(f"{setting}."):
            return [*setting.split("."), name.removeprefix(f"{setting}.")]
    return name.split(".")


def recipe_text(
    content: Mapping[str, Any],
    origins: Mapping[str, str],
    outcomes: Sequence[Outcome],
    files: Sequence[str],
) -> str:
    """The whole file.

    Args:
        content: Sections as the schema has taken them.
        origins: Dotted name -> where its value came from; others are the command line's.
        files: What was imported.
    """
    lines = [f"# Imported from {', '.join(map(printable, files))}."]
    order = [name for name in Recipe.model_fields if name in content]
    for section in order:
        lines += ["", *_lines(section, content[section], origins, 0, section)]
    left = [each for each in outcomes if each.verdict.kind is Kind.NONE]
    if left:
        lines += ["", "# Without a counterpart:"]
        lines += [f"#   {printable(f'{each.place}: {each.verdict.words}')}" for each in left]
    return "\n".join(lines) + "\n"


def _lines(key: str, value: Any, origins: Mapping[str, str], depth: int, name: str) -> list[str]:
    indent = "  " * depth
    if isinstance(value, dict) and value:
        found = [f"{indent}{_scalar(key)}:"]
        for inner, content in value.items():
            found += _lines(str(inner), content, origins, depth + 1, f"{name}.{inner}")
        return found
    line = f"{indent}{_scalar(key)}: {_flow(value)}"
    return [f"{line.ljust(_WIDTH)}  # {printable(origins.get(name, GIVEN))}"]


def _flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_scalar(key)}: {_flow(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    return _scalar(value, is_inside=True)


def _scalar(value: Any, *, is_inside: bool = False) -> str:
    """As YAML writes it, on one line; a text with a sign of a list is quoted."""
    if isinstance(value, str) and (
        any(sign in value for sign in ",[]{}\n") or (is_inside and not value)
    ):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    text = write_yaml({"x": value}).removeprefix("x:").strip()
    return text if "\n" not in text else '"' + str(value).replace('"', '\\"') + '"'
