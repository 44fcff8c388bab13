"""YAML as recipes use it: read with line numbers in every complaint, and written back.

Scalars follow YAML 1.2's core schema instead of pyyaml's 1.1, so that ``1e-3`` is a number, ``no``
a word and ``2026-11-21`` a text. Digits may be grouped (``1_000_000``), and a whole number may be
written as ``1e9``.
"""

import re
from contextlib import suppress
from typing import Any

import yaml

from shardyard.errors import RequestError


class InvalidYamlError(RequestError):
    """A text breaks YAML's grammar; its characters are all allowed."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes every text that YAML 1.1 or 1.2 would not read back as text."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    content = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else str(key)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{key} is given twice, on lines {seen[key]} and {line}; keep one",
                key_node.start_mark,
            )
        seen[key] = line
        content[key] = loader.construct_object(value_node, deep=True)
    return content


def _text(_loader: _Loader, node: yaml.ScalarNode) -> str:
    """A character beyond 16 bits that JSON escapes in two halves is one character."""
    text = str(node.value)
    with suppress(UnicodeDecodeError):  # a half without the other is refused by its setting
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    return text


def _float(_loader: _Loader, node: yaml.ScalarNode) -> float | int:
    text = node.value.replace("_", "").lower()
    if text.endswith((".inf", ".nan")):
        return float(text.replace(".", ""))
    number = float(text)
    # 1e9 is how people write large whole numbers; 1.0 stays a float.
    return int(number) if "e" in text and "e-" not in text and number.is_integer() else number


def _int(_loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value.replace("_", ""))


def _bool(_loader: _Loader, node: yaml.ScalarNode) -> bool:
    return str(node.value).lower() == "true"


_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
)
for _tag, _pattern, _first in _SCALARS:
    _full = re.compile(f"^(?:{_pattern})$")
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _full, _first)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:str", _text)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:bool", _bool)


def is_null_word(text: str) -> bool:
    """Whether a scalar that is no text is YAML's null."""
    return text.strip() in ("", "~", "null", "Null", "NULL")


def read_yaml(text: str, *, source: str, is_file: bool = True) -> Any:
    """Return the content of a YAML document: plain values.

    Args:
        source: Name of the text in messages.
        is_file: Whether the text is a file of sections; else the value of one setting.

    Raises:
        InvalidYamlError: Not YAML, or a key is given twice; names line and column.
        RequestError: It cannot be YAML: control characters, no Unicode, or nested too deep; or it
            has too many values.
    """
    try:
        content = yaml.load(text, _Loader)
        count = _count_values(content, {})
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InvalidYamlError(
            f"{source}{place}: {error.problem or error.context}. "
            + (_remedy(text, error, is_file=is_file) or (_FORM if is_file else _ONE_VALUE))
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RequestError(
            f"{source} is not YAML that can be read ({str(error).splitlines()[0]}). "
            "Write it as UTF-8 text without control characters."
        ) from error
    if count > MOST_VALUES:
        raise RequestError(
            f"{source} expands to more than {MOST_VALUES:,} values, by its length or by aliases "
            "(*name) of aliases. Write fewer."
        )
    return content


def _count_values(content: Any, counts: dict[int, int]) -> int:
    """Return the number of values in a text with its aliases written out; each is counted once."""
    if not isinstance(content, dict | list):
        return 1
    if id(content) not in counts:
        counts[id(content)] = MOST_VALUES  # of what holds itself
        inner = content.values() if isinstance(content, dict) else content
        counts[id(content)] = 1 + sum(_count_values(each, counts) for each in inner)
    return counts[id(content)]


MOST_VALUES = 200_000
"""Limit on the values of one text; a model's config with ImageNet-21k's labels has 44,000."""


def key_lines(text: str) -> dict[str, int]:
    """Return the line, from 1, of each key of a document by its dotted name; lists are left out.

    Args:
        text: YAML that ``read_yaml`` has read.
    """
    lines: dict[str, int] = {}
    node = yaml.compose(text, _Loader)
    open_nodes = [("", node)]
    while open_nodes:
        above, node = open_nodes.pop()
        if not isinstance(node, yaml.MappingNode):
            continue
        for key, value in node.value:
            name = f"{above}{key.value}"
            lines[name] = key.start_mark.line + 1
            open_nodes.append((f"{name}.", value))
    return lines


_FORM = "The file must be one YAML mapping of sections, such as `model: {preset: llama-tiny}`."
_ONE_VALUE = "The value must be YAML of one line, such as 3, text, [a, b] or {NAME: text}."


_UNCLOSED = {"while parsing a flow mapping": "{}", "while parsing a flow sequence": "[]"}
"""Context of an error of the parser -> the bracket that it is in."""


def _remedy(text: str, error: yaml.MarkedYAMLError, *, is_file: bool) -> str | None:
    """What to do about tabs, open brackets, and texts that need quotes; None: something else."""
    lines = text.splitlines()
    if error.problem and "'\\t'" in error.problem:
        return "YAML is indented with spaces, not tabs: `sed -i 's/\\t/  /g' FILE`."
    opened = _UNCLOSED.get(error.context or "")
    if opened and error.context_mark:
        line = f" of line {error.context_mark.line + 1}" if is_file else ""
        return f"The {opened[0]}{line} is not closed: add {opened[1]}."
    for mark in (error.problem_mark, error.context_mark):
        rest = lines[mark.line][mark.column :] if mark and mark.line < len(lines) else ""
        if rest[:1] in tuple("*&!@%`") and rest:
            word = rest.split()[0].rstrip(",]}")
            return f'A text that begins with {rest[0]} needs quotes in YAML: "{word}".'
    if error.problem and error.problem.startswith("mapping values"):
        return 'A text that holds a colon and a space needs quotes in YAML: "a: b".'
    return None


def write_yaml(content: dict[str, Any]) -> str:
    """YAML that ``read_yaml`` reads back equal, in the order given."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
