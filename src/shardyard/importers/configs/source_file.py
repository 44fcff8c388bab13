"""A file of a source, read: its values by dotted path, each with its line.

JSON, TOML and YAML become their leaves; everything else is a text, which ``shell.py`` reads.
"""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from shardyard.errors import RequestError, StorageError
from shardyard.file_faults import broken_link_on_path
from shardyard.importers.configs.rules import ConfigEntry
from shardyard.io.files import read_user_file
from shardyard.io.yaml import read_yaml

MOST_BYTES = 4_000_000
"""A configuration is a few kB; what is larger is something else, given by mistake."""
MOST_VALUES = 20_000
"""Values of a configuration; DeepSpeed and the Trainer have a few hundred."""


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """One file as it was read."""

    name: str
    text: str
    content: dict[str, Any] | None
    """The mapping at its top; None: it is a text of another kind, such as a script."""
    lines: dict[str, int]
    """Path of a value -> its line, from 1."""

    def entries(self) -> list[ConfigEntry]:
        """All values of the mapping."""
        return [
            ConfigEntry(path=path, value=value, line=self.lines.get(path))
            for path, value in leaves(self.content or {})
        ]


def read_files(path: Path) -> list[ConfigFile]:
    """The documents of a file: one, or several where it is a YAML stream.

    Raises:
        RequestError: It cannot be read, or breaks the grammar of what it is.
    """
    files = _documents(path)
    try:
        for file in files:
            _check_size(str(path), file.content)
    except RecursionError as error:
        raise RequestError(f"{path} is nested too deep. Give a configuration file.") from error
    return files


def _too_many(name: str) -> str:
    return (
        f"{name} holds more than {MOST_VALUES:,} values, and no configuration of a job has so "
        "many. Give the file that configures the job."
    )


def _check_size(name: str, content: Any) -> None:
    if sum(1 for _ in islice(leaves(content or {}), MOST_VALUES + 1)) > MOST_VALUES:
        raise RequestError(_too_many(name))


def _documents(path: Path) -> list[ConfigFile]:
    text = _text(path)
    name = str(path)
    start = text.lstrip()[:1]
    if start == "{":
        return [_json(name, text)]
    toml = _toml(text)
    if toml is not None:
        _check_size(name, toml)
        return [ConfigFile(name=name, text=text, content=toml, lines=_key_lines(text, toml, "="))]
    return _yaml(name, text)


def leaves(content: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of all that is no mapping and no list of mappings."""
    is_nested_list = isinstance(content, list) and any(
        isinstance(each, dict | list) for each in content
    )
    if isinstance(content, dict) and content:
        for key, value in content.items():
            yield from leaves(value, f"{at}.{key}" if at else str(key))
    elif is_nested_list:
        for number, value in enumerate(content):
            yield from leaves(value, f"{at}.{number}" if at else str(number))
    else:
        yield at, content


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            raise RequestError(f"{path} is a folder. Give the files in it that count.")
        return read_user_file(path, limit_bytes=MOST_BYTES).decode()
    except FileNotFoundError as error:
        link = broken_link_on_path(path) or " does not exist. Give a file of your job."
        raise RequestError(f"{path}{link}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text. Give a configuration file.") from error
    except StorageError as error:
        raise RequestError(f"{error} Give the file that configures the job.") from error


def _json(name: str, text: str) -> ConfigFile:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) > MOST_VALUES:
            raise RequestError(_too_many(name))
        counts = Counter(key for key, _ in pairs)
        twice = sorted(key for key, count in counts.items() if count > 1)
        if twice:
            raise RequestError(f"{name}: {twice[0]} is given twice. Keep one.")
        return dict(pairs)

    try:
        content = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{name}, line {error.lineno}, column {error.colno}: {error.msg}. It begins as JSON; "
            "write it as JSON."
        ) from error
    except RecursionError as error:
        raise RequestError(f"{name} is nested too deep. Give a configuration file.") from error
    except ValueError as error:  # a number of thousands of digits
        raise RequestError(f"{name} holds a number that is too long. Shorten it.") from error
    _check_size(name, content)
    return ConfigFile(name=name, text=text, content=content, lines=_key_lines(text, content, ":"))


def _toml(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text) or None
    except (ValueError, RecursionError):  # wrong, nested too deep, or a number too long
        return None


def _yaml(name: str, text: str) -> list[ConfigFile]:
    """YAML mappings; a text that is none of these is one file without content."""
    found, first_line = [], 0
    documents = re.split(r"^---(?=\s|$)[^\n]*$", text, flags=re.MULTILINE)
    for document in documents:
        try:
            content = read_yaml(document, source=name)
        except RequestError:
            if _is_probably_yaml(text):
                raise
            return [ConfigFile(name=name, text=text, content=None, lines={})]
        if isinstance(content, dict):
            lines = {path: line + first_line for path, line in _yaml_lines(document)}
            found.append(ConfigFile(name=name, text=document, content=content, lines=lines))
        elif content is not None:
            return [ConfigFile(name=name, text=text, content=None, lines={})]
        first_line += document.count("\n")
    return found or [ConfigFile(name=name, text=text, content=None, lines={})]


def _is_probably_yaml(text: str) -> bool:
    """Whether most of a broken text is meant as YAML, rather than a script."""
    lines = [line for line in text.splitlines() if line.strip() and line.strip()[0] != "#"]
    keys = [line for line in lines if re.match(r"\s*(- )?[\w./-]+:(\s|$)", line)]
    return not text.startswith("#!") and 2 * len(keys) > len(lines)


def _yaml_lines(text: str) -> Iterator[tuple[str, int]]:
    root = yaml.compose(text, yaml.SafeLoader)  # its aliases were counted by read_yaml

    def walk(node: Any, at: str) -> Iterator[tuple[str, int]]:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                path = f"{at}.{key.value}" if at else str(key.value)
                yield path, key.start_mark.line + 1
                yield from walk(value, path)
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                path = f"{at}.{number}" if at else str(number)
                yield path, value.start_mark.line + 1
                yield from walk(value, path)

    return walk(root, "")


def _key_lines(text: str, content: Any, sign: str) -> dict[str, int]:
    """Lines of keys in a text that holds them in the order of its content."""
    lines: dict[str, int] = {}
    position = line = counted = 0
    for path, _ in leaves(content):
        keys = [part for part in path.split(".") if not part.isdigit()]
        if not keys:
            continue
        pattern = re.compile(rf"(?<![\w-])\"?{re.escape(keys[-1])}\"?\s*{sign}")
        match = pattern.search(text, position)
        if match:
            position = match.end()
            line += text.count("\n", counted, match.start())
            counted = match.start()
            lines[path] = line + 1
    return lines
