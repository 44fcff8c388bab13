"""Every setting as a reader sees it, from the schema: type, bounds, default, one sentence.

The sentences are the docstrings below the settings in ``config/schema/recipe.py`` and its
sections. They are parsed from the source on first use.
"""

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from shardyard.config.optimizers import OPTIMIZERS, OptimizerName, readers_of
from shardyard.config.schema.base import Section as Fields
from shardyard.config.schema.recipe import Recipe
from shardyard.units import format_list


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting as a reader sees it."""

    name: str
    """Dotted name."""
    accepts: str
    """Type and bounds in words: ``a whole number of at least 1, or auto``."""
    choices: tuple[str, ...]
    """The words it accepts, where it accepts words."""
    default: Any
    sentence: str
    accepts_text: bool = False
    """Whether any text may be its value, and no number can be."""
    accepts_list: bool = False


@dataclass(frozen=True, kw_only=True)
class SettingSection:
    """One section with its settings."""

    name: str
    sentence: str
    settings: tuple[Setting, ...]


@cache
def sections() -> tuple[SettingSection, ...]:
    """All sections of a recipe in the order of the schema; ``secrets`` is one without settings."""
    found = []
    for name, field in Recipe.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Fields):
            found.append(section_of(name, kind))
        else:
            sentence = _sentences(Recipe)[name]
            found.append(
                SettingSection(name=name, sentence="", settings=(_describe(name, field, sentence),))
            )
    return tuple(found)


def section_of(name: str, kind: type[Fields]) -> SettingSection:
    """One section: ours, or one that a package adds under a dotted name."""
    sentence = inspect.getdoc(kind) or ""
    return SettingSection(name=name, sentence=sentence, settings=tuple(_settings_of(name, kind)))


@cache
def settings() -> dict[str, Setting]:
    """Dotted name -> setting."""
    return {setting.name: setting for section in sections() for setting in section.settings}


def accepts(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Type and bounds of a setting in words."""
    parts = [_one(member, limits) for member, limits in _members(annotation, metadata)]
    return ", or ".join(parts)


def _settings_of(name: str, section: type[Fields]) -> Iterator[Setting]:
    """The settings of a section, and of the sections in it, by their full dotted names."""
    for key, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Fields):
            yield from _settings_of(f"{name}.{key}", kind)
        else:
            dotted = f"{name}.{field.alias or key}"
            sentence = " ".join([_sentences(section).get(key, ""), *_by_optimizer(dotted)])
            yield _describe(dotted, field, sentence)


def _by_optimizer(setting: str) -> list[str]:
    """Return the sentences that the optimizers' rows add to a setting of the schema."""
    section, _, key = setting.rpartition(".")
    if section != "optim":
        return []
    match key:
        case "lr":
            known = [name for name, row in OPTIMIZERS.items() if row.knows_lr]
            return [f"auto is known for {format_list(known)}."]
        case "weight_decay":
            decays = {name: f"{row.weight_decay:g}" for name, row in OPTIMIZERS.items()}
            return [f"auto: {_by_value(decays)}."]
        case "betas":
            betas = {name: str(list(row.betas)) for name, row in OPTIMIZERS.items() if row.betas}
            return [f"Default: {_by_value(betas)}; others have none."]
        case _:
            readers = readers_of(key)
            published = [
                f"{row.momentum:g} for {name}"
                for name, row in OPTIMIZERS.items()
                if key == "momentum" and row.momentum
            ]
            default = [f"Default: {', '.join(published)}."] if published else []
            return [f"Only for {format_list(readers)}.", *default] if readers else []


def _by_value(values: Mapping[OptimizerName, str]) -> str:
    """``0.1 for adamw and muon, 0 for sgd``."""
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return ", ".join(f"{value} for {format_list(each)}" for value, each in names.items())


def _describe(name: str, field: FieldInfo, sentence: str) -> Setting:
    kinds = {get_origin(member) or member for member, _ in _members(field.annotation)}
    return Setting(
        name=name,
        accepts=accepts(field.annotation, (field,)),
        choices=tuple(_choices(field.annotation)),
        default=field.get_default(call_default_factory=True),
        sentence=sentence,
        accepts_text=str in kinds and not kinds & {int, float, bool},
        accepts_list=tuple in kinds,
    )


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module as written; the schema is parsed once, as every verb waits for it."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:  # a package that comes without its source
        return {}
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


@cache
def _sentences(model: type) -> dict[str, str]:
    """Attribute -> the docstring below it, from the source of its class."""
    written = _classes(model.__module__).get(model.__name__)
    body = [] if written is None else written.body
    found = {}
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        found[statement.target.id] = text
    return found


def _members(annotation: Any, metadata: tuple[Any, ...] = ()) -> list[tuple[Any, tuple[Any, ...]]]:
    """Members of a union, each with its own limits."""
    if get_origin(annotation) is Annotated:
        inner, *limits = get_args(annotation)
        return _members(inner, (*metadata, *limits))
    if get_origin(annotation) in (Union, UnionType):
        return [pair for member in get_args(annotation) for pair in _members(member, metadata)]
    return [(annotation, metadata)]


def _choices(annotation: Any) -> list[str]:
    return [
        str(word)
        for member, _ in _members(annotation)
        if get_origin(member) is Literal
        for word in get_args(member)
    ]


def _one(member: Any, limits: tuple[Any, ...]) -> str:
    """One member of a union in words."""
    bounds = _bounds(limits)
    if "description" in bounds:
        return str(bounds["description"])
    if member is NoneType:
        return "null"
    if member is bool:
        return "true or false"
    if member in (int, float):
        return _number("a whole number" if member is int else "a number", bounds)
    if get_origin(member) is Literal:
        return _any_of([str(word) for word in get_args(member)])
    if get_origin(member) is tuple:
        items = get_args(member)
        item = accepts(items[0])
        return (
            f"a list, each {item}" if items[-1] is ... else f"a list of {len(items)}, each {item}"
        )
    if get_origin(member) is dict:
        _, value = get_args(member)
        words = accepts(value)
        return f"a name and {'a text' if words == 'text' else words} each"
    if isinstance(member, type) and issubclass(member, Fields):
        return f"settings of its own ({', '.join(member.model_fields)})"
    return "text"


UNNAMED_BOUND = 2**31
"""From here on an upper bound is where a type of numbers ends, and the words leave it out."""


def _number(kind: str, bounds: dict[str, Any]) -> str:
    low, high = bounds.get("ge"), bounds.get("le", bounds.get("lt"))
    if low is not None and high is not None:
        if high >= UNNAMED_BOUND:
            return f"{kind} of at least {low}"
        return f"{kind} from {low} to {'below ' if 'lt' in bounds else ''}{high}"
    if low is not None:
        return f"{kind} of at least {low}"
    if "gt" not in bounds:
        return kind
    end = "" if high is None else f" and {'below' if 'lt' in bounds else 'at most'} {high}"
    return f"{kind} above {bounds['gt']}{end}"


def _bounds(limits: tuple[Any, ...]) -> dict[str, Any]:
    """``ge``, ``gt``, ``le``, ``lt`` and ``description`` of pydantic's metadata."""
    bounds: dict[str, Any] = {}
    for limit in limits:
        parts = [*limit.metadata, limit] if isinstance(limit, FieldInfo) else [limit]
        for part in parts:
            for key in ("ge", "gt", "le", "lt", "description"):
                value = getattr(part, key, None)
                if value is not None:
                    bounds[key] = value
    return bounds


def _any_of(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
