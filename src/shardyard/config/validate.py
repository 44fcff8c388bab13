"""Check any recipe against the names, types and bounds of the schema and of plug-ins.

A tree of plain values goes in, as it was read from a file or given as a dict. A recipe
comes out, and a problem for each setting that is wrong. ``config/rules/check.py`` checks
settings together.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import PathLike, fspath
from typing import Any

from pydantic import ValidationError

from shardyard.config.other_names import (
    INSTANCE_WITH,
    NOT_BUILT,
    QLORA,
    Meaning,
    meaning_in_lookups,
    meaning_of,
    near_meaning,
)
from shardyard.config.schema.base import NAME_WORDS, Section, section_key
from shardyard.config.schema.launch import OF_QUEUES
from shardyard.config.schema.plugin_sections import (
    SECTIONS,
    described_at,
    plug_in_at,
    settings_class_at,
)
from shardyard.config.schema.recipe import Recipe
from shardyard.config.schema.reference import UNNAMED_BOUND, Setting, sections, settings
from shardyard.config.secrets import HIDDEN, find_credential, show
from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.plugins import WORDS, installed

_REPLACED = {
    "run.target_loss": "run.target names the metric that is to be reached. Write "
    "`run: {target: {loss: 2.5}}`, or run.target.loss=2.5 as an override.",
    "elastic.straggler": (
        "elastic.leave_out_for names the verdicts for which a node is left out. Write "
        "elastic.leave_out_for=[slow_rank] for leave_out, and leave it out for report."
    ),
} | dict.fromkeys(
    (f"launch.aws_batch.{name}" for name in OF_QUEUES),
    "it is the queue's. `shardyard cluster create kind=batch` makes one; docs/verbs/cluster.md.",
)
"""Setting of before -> what takes its place, in words."""

_CHOICE_ELSEWHERE = {
    "parallel.strategy": {
        "fsdp": "FULL_SHARD",
        "fsdp2": "FULL_SHARD",
        "hsdp": "HYBRID_SHARD",
        "ddp": "NO_SHARD",
        "zero": "ZERO_3",
    },
    "data.pack": {"true": "whole", "packed": "whole", "packing": "whole", "concat": "stream"},
    "cluster.device": {"gpu": "cuda", "nvidia": "cuda"},
}
"""Setting -> other trainers' word for one of its choices, in lower case -> the choice."""

_TEXTS = ("text", "a name ", "an id ")
"""First words of the description of a setting that accepts any text."""


def recipe_of(tree: Mapping[str, Any]) -> Recipe:
    """The recipe of a dict.

    Raises:
        RecipeError: Unknown keys, wrong types or values out of bounds; all of them.
    """
    errors: list[Problem] = []
    known = recognized_settings(to_plain(tree), errors)
    recipe, wrong = validate_types(known)
    if errors or wrong:
        raise RecipeError([*errors, *wrong])
    return recipe


def validate_types(tree: dict[str, Any]) -> tuple[Recipe, list[Problem]]:
    """The recipe of all settings whose values are valid, and a problem for each one that is not.

    Args:
        tree: Settings with names that are known; those that are not valid are taken out of it.
    """
    wrong = _check_types(Recipe, tree)
    for section in SECTIONS:
        for key in list(tree.get(section, ())):
            wrong += _check_plug_in_types(f"{section}.{key}", tree)
    for problem in wrong:
        _drop(tree, problem)
    for number, phase in enumerate(tree.get("phases", ()), 1):
        for problem in _check_types(Recipe, phase):
            _drop(phase, problem)
            wrong.append(Problem(f"phases.{number}.{problem.path}", problem.text))
    return Recipe.model_validate(tree), wrong


def _drop(tree: dict[str, Any], problem: Problem) -> None:
    """Take a setting that is not valid out of a tree; of a list all items."""
    *above, key = problem.path.partition("[")[0].split(".")
    _inside(tree, above).pop(key, None)


def to_plain(value: Any) -> Any:
    """A value as a file could hold it: of a section what was given, of a path its text."""
    match value:
        case Section():
            # what Python let pass is looked at afterwards, as of a file
            return to_plain(value.model_dump(exclude_unset=True, warnings=False))
        case Mapping():
            return {str(key): to_plain(item) for key, item in value.items()}
        case list() | tuple():
            return [to_plain(item) for item in value]
        case PathLike():
            return fspath(value)
        case float() if value.is_integer() and abs(value) >= 1e6:
            return int(value)  # 1e9 is how people write large whole numbers, in YAML too
        case _:
            return value


def recognized_settings(
    tree: dict[str, Any], errors: list[Problem], *, of_run: bool = False
) -> dict[str, Any]:
    """The part of a tree whose names the schema knows; what is unknown becomes a problem."""
    known = {section.name for section in sections()}
    recognized: dict[str, Any] = {}
    for section, content in tree.items():
        if section not in known:
            errors.append(_unknown_section(section, content, known))
        elif section == "secrets" and isinstance(content, dict):
            recognized[section] = content
        elif section == "phases":
            recognized[section] = _recognized_phases(content, errors, of_run=of_run)
        else:
            recognized[section] = _recognized_keys(section, content, errors, of_run=of_run)
    return recognized


def _recognized_phases(
    content: Any, errors: list[Problem], *, of_run: bool
) -> list[dict[str, Any]]:
    """The settings of each phase that the schema knows."""
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        text = "is a list of settings. Write `phases: [{run: {steps: 100}}, {run: {steps: 50}}]`."
        errors.append(Problem("phases", text))
        return []
    found = []
    for number, phase in enumerate(content, 1):
        inside: list[Problem] = []
        found.append(recognized_settings(phase, inside, of_run=of_run))
        errors += [Problem(f"phases.{number}.{each.path}", each.text) for each in inside]
    return found


def _recognized_keys(
    section: str, content: Any, errors: list[Problem], *, of_run: bool
) -> dict[str, Any]:
    """The settings in a section, or in a section of a section, that the schema knows."""
    if content is None:
        return {}  # a section whose settings are all commented out
    if not isinstance(content, dict):
        *above, key = section.split(".")
        shown = _as_yaml([*above, key, "setting"])
        start = f"{section}."
        parts = [name.removeprefix(start) for name in settings() if name.startswith(start)]
        names = dict.fromkeys(part.partition(".")[0] for part in parts)
        text = f"holds {kind_of(content)}, not settings. Write `{shown}`."
        if names:
            text += f" Its settings: {', '.join(names)}."
        if isinstance(content, str) and (pair := re.match(r"(\w+):(\S.*)", content)):
            text = f"{pair[0]!r} has no space after its colon. Write `{pair[1]}: {pair[2]}`."
        errors.append(Problem(section, text))
        return {}
    found, known = {}, _settings_in(section)
    for key, value in content.items():
        name = f"{section}.{key}"
        if "." in str(key) and (name in known or settings_below(name)):
            text = f"in a file write it as `{_as_yaml(name.split('.'))}`."
            errors.append(Problem(name, text))
        elif name in known:
            found[key] = value
        elif any(setting.startswith(f"{name}.") for setting in known):
            found[key] = _recognized_keys(name, value, errors, of_run=of_run)
        elif section in SECTIONS and isinstance(value, dict):
            found[key] = _of_plug_in(name, value, errors, of_run=of_run)
        elif name in _REPLACED:
            errors.append(Problem(name, f"this setting was replaced: {_REPLACED[name]}"))
        elif key in NOT_BUILT:
            errors.append(Problem(name, f"unknown setting: {QLORA}"))
        else:
            near = _suggest(key, section, value)
            inside = [setting for setting in known if setting.startswith(f"{section}.")]
            names = dict.fromkeys(
                setting.removeprefix(f"{section}.").partition(".")[0] for setting in inside
            )
            hint = near or f"{section} has: {', '.join(names)}."
            errors.append(Problem(name, f"unknown setting. {hint}"))
    return found


def _of_plug_in(
    path: str, content: dict[str, Any], errors: list[Problem], *, of_run: bool
) -> dict[str, Any]:
    """Apply ``_recognized_keys`` to a subsection that is not ours: a package's or unknown."""
    try:
        if described_at(path) is not None:
            return _recognized_keys(path, content, errors, of_run=of_run)
        plug_in = plug_in_at(path)
    except RequestError as error:
        if not of_run:
            errors.append(Problem(path, str(error)))
        return content if of_run else {}
    if of_run:
        return content
    text = _no_section(path)
    if plug_in is not None:
        text = f"{plug_in.what} has no settings. Leave them out."
    errors.append(Problem(path, text))
    return {}


def _no_section(path: str) -> str:
    """Describe that neither we nor a package have this subsection, and which was meant."""
    section, _, key = path.partition(".")
    group = SECTIONS[section]
    ours = [name.split(".")[1] for name in settings() if name.startswith(f"{section}.")]
    near = difflib.get_close_matches(key, [*ours, *map(section_key, installed(group))], n=1)
    hint = f"Did you mean {section}.{near[0]}?" if near else "Install one, or leave this out."
    return f"unknown setting, and no installed package adds a {WORDS[group]} of this name. {hint}"


def _settings_in(section: str) -> dict[str, Setting]:
    """The settings that a section may hold, by their dotted names: a package's, or all of ours."""
    with suppress(RequestError):  # told where the section is read
        described = described_at(section)
        if described is not None:
            return {setting.name: setting for setting in described.settings}
    return settings()


def setting_named(name: str) -> Setting | None:
    """A setting by its dotted name, ours or a package's."""
    own, path = settings().get(name), name.split(".")
    return own if own is not None or len(path) < 3 else _settings_in(".".join(path[:2])).get(name)


def _as_yaml(parts: Sequence[str]) -> str:
    """``[optim, lr]`` as it is written in a file: ``optim: {lr: value}``."""
    *above, text = [*parts[:-1], f"{parts[-1]}: value"]
    for part in reversed(above):
        text = f"{part}: {{{text}}}"
    return text


def _unknown_section(section: str, content: Any, valid_sections: set[str]) -> Problem:
    if section in settings() or ("." in section and settings_below(section)):
        return Problem(section, f"in a file write it as `{_as_yaml(section.split('.'))}`.")
    if section in NOT_BUILT:
        return Problem(section, f"unknown section: {QLORA}")
    near = difflib.get_close_matches(section, sorted(valid_sections), n=1, cutoff=0.6)
    inside = content if isinstance(content, dict) else {}
    names = set() if not near else {each.split(".")[1] for each in settings_below(near[0])}
    if near and (inside.keys() <= names if inside else _meaning_by_name(section, content) is None):
        hint: str | None = f"Did you mean {near[0]}?"
    else:
        hint = _suggest_inside(section, inside) if inside else _suggest(section, None, content)
        hint = hint or (f"Did you mean {near[0]}?" if near else None)
    ending = hint or f"Sections are: {', '.join(sorted(valid_sections))}."
    return Problem(section, f"unknown section. {ending}")


def _suggest_inside(section: str, content: dict[str, Any]) -> str | None:
    """Meaning of the keys of an unknown section, the first five of them."""
    found = [_meaning(f"{section}.{key}", None, value) for key, value in content.items()]
    known = [each for each in found if each is not None][:5]
    overrides = " ".join(each.overrides for each in known if each.settings)
    words = dict.fromkeys(each.words for each in known if not each.settings)
    hints = [f"Did you mean {overrides}?"] if overrides else []
    return " ".join([*hints, *words]) or None


def settings_below(section: str) -> list[str]:
    """Dotted names of the settings of a section."""
    return [name for name in settings() if name.startswith(f"{section}.")]


def _suggest(key: str, section: str | None, value: Any) -> str | None:
    """A sentence on what an unknown key of a file means; None: it is not known."""
    found = _meaning(key, section, value)
    if found is None or not found.settings:
        return None if found is None else found.words
    is_whole = section is None or found.is_translated
    named = found.overrides if is_whole else next(iter(found.settings))
    return f"Did you mean {named}?"


def _meaning(key: str, section: str | None, value: Any) -> Meaning | None:
    """The setting that somebody meant by an unknown key: by its meaning, then by its spelling.

    A credential in the value is not shown.
    """
    if find_credential(str(value)):
        value = HIDDEN
    return (
        _meaning_by_name(key, value, section)
        or _as_meaning(_nearest_inside(key, section), value)
        or near_meaning(key, value)
        or _as_meaning(_nearest_name(key, section), value)
        # whoever writes a part of one of our sections does not write another trainer's file
        or (None if "." in (section or "") else meaning_in_lookups(key, value, by_pattern=True))
    )


def _meaning_by_name(key: str, value: Any, section: str | None = None) -> Meaning | None:
    """The meaning of a key that is spelt right: with all of its sections, then without."""
    for name in dict.fromkeys((key, key.rpartition(".")[2])):
        found = (
            meaning_of(name, value)
            or _as_meaning(_same_leaf(name, section), value)
            or meaning_in_lookups(name, value, by_pattern=False)
        )
        if found is not None:
            return found
    return None


def _as_meaning(name: str | None, value: Any) -> Meaning | None:
    return None if name is None else Meaning(settings={name: value})


def _leaves(section: str | None) -> dict[str, str]:
    """Setting -> its last part, of the section's and all others."""
    names = {**_settings_in(section or ""), **settings()}
    return {name: name.rpartition(".")[2] for name in names}


def _same_leaf(key: str, section: str | None) -> str | None:
    """A setting elsewhere with this last part; of a part of a section, in that section."""
    top = f"{section.partition('.')[0]}." if section and "." in section else ""
    found = (name for name, leaf in _leaves(section).items() if leaf == key)
    return next((name for name in found if name.startswith(top)), None)


def _nearest_inside(key: str, section: str | None) -> str | None:
    """A setting of the section that is spelt almost so."""
    inside = {
        leaf: name for name, leaf in _leaves(section).items() if name.startswith(f"{section}.")
    }
    near = difflib.get_close_matches(key, inside, n=1, cutoff=0.75)
    return inside[near[0]] if near else None


def _nearest_name(key: str, section: str | None) -> str | None:
    """A setting of another section that is spelt almost so."""
    leaves = _leaves(section)
    wanted = f"{section}.{key}" if section else key
    # not in its own section: there the section's name alone would make them alike
    first = wanted.partition(".")[0]
    others = [name for name in leaves if not name.startswith(f"{first}.")]
    near = difflib.get_close_matches(wanted, others if section else list(leaves.values()), n=1)
    return next((name for name, leaf in leaves.items() if near and near[0] in (name, leaf)), None)


def override_hint(key: str, text: str, value: Any) -> str | None:
    """A sentence on the override somebody meant by ``key=text``; None: no setting is near.

    A credential in the text is not shown.

    Args:
        value: As YAML reads the text; True where there is none.
    """
    found = _meaning(key, None, value)
    if found is None or not found.settings:
        return None if found is None else found.words
    if not found.is_translated:
        shown = HIDDEN if find_credential(text) else text or "VALUE"
        return f"Did you mean {' '.join(f'{name}={shown}' for name in found.settings)}?"
    return f"Did you mean {found.overrides}?"


def _check_plug_in_types(path: str, merged: dict[str, Any]) -> list[Problem]:
    """Return problems as ``_check_types`` does, for the section of a plug-in."""
    with suppress(RequestError):  # told already, or of a run
        kind = settings_class_at(path)
        if kind is not None:
            return _check_types(kind, _inside(merged, path.split(".")), at=path)
    return []


def _check_types(kind: type[Section], tree: dict[str, Any], *, at: str = "") -> list[Problem]:
    """One problem for each wrong setting, in our words: value, what is accepted, what it is for.

    Args:
        at: Dotted name of the section; empty: the whole recipe.
    """
    try:
        kind.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
    else:
        return []
    above = tuple(at.split(".")) if at else ()
    errors: dict[str, Problem] = {}
    for detail in details:
        path = _setting_at((*above, *detail["loc"]))
        setting = setting_named(path)
        own_words = detail.get("ctx", {}).get("error")
        if own_words is not None:  # a validator of a package's section
            errors.setdefault(path, Problem(path, str(own_words)))
        elif setting is None:  # secrets, whose values are never shown
            text = "a secret is a name and a text. Put the text in quotes."
            errors.setdefault(path, Problem(path, text))
        else:
            *inside, key = path.split(".")[len(above) :]
            value = _inside(tree, inside)[key]
            problem = _invalid_item(path, detail, value, setting) or Problem(
                path, _too_large(value, detail, setting) or _invalid_value(value, setting)
            )
            errors.setdefault(problem.path, problem)
    return list(errors.values())


def _invalid_item(path: str, detail: Any, value: Any, setting: Setting) -> Problem | None:
    """The wrong part of an item of a list, as ``data.mixture[0].name``; None: not one part."""
    key = path.rpartition(".")[2]
    loc: tuple[int | str, ...] = detail["loc"]
    below = loc[loc.index(key) + 1 :] if key in loc else loc[:0]
    if not isinstance(value, list) or len(below) < 2:
        return None
    position, field = below[0], below[1]
    item = value[position] if isinstance(position, int) else None
    if not isinstance(item, dict) or field not in item:
        return None
    reason = detail["msg"][:1].lower() + detail["msg"][1:]
    text = f"={show(item[field])} is wrong: {reason}. {path} is {setting.accepts}."
    return Problem(f"{path}[{position}].{field}", text)


def _setting_at(location: tuple[int | str, ...]) -> str:
    """The setting that an error of pydantic is in: it may name an item or a member of a union."""
    parts = [str(part) for part in location]
    for end in range(len(parts), 1, -1):
        if setting_named(".".join(parts[:end])) is not None:
            return ".".join(parts[:end])
    return ".".join(parts[:2])


def _inside(tree: dict[str, Any], sections: Sequence[str]) -> dict[str, Any]:
    for section in sections:
        tree = tree[section]
    return tree


def _invalid_value(value: Any, setting: Setting) -> str:
    wanted = setting.accepts
    near = difflib.get_close_matches(str(value), setting.choices, n=1) or [
        word for word in setting.choices if str(value).lower() == word.lower()
    ]
    other = _CHOICE_ELSEWHERE.get(setting.name, {}).get(str(value).lower())
    near = [other] if other else near
    remedy = f" Did you mean {near[0]}?" if near else ""
    if not near and isinstance(value, int | float) and wanted.startswith(_TEXTS):
        remedy = f' Put it in quotes: "{value}".'
    remedy = remedy or _other_form(value, setting)
    if not near and "a time with its unit" in wanted and _is_number(str(value)):
        remedy = f" Did you mean {value}min?"
    if not near and isinstance(value, str) and _is_number(value) and "number" in wanted:
        remedy = " Write it without quotes."
    if not near and isinstance(value, str) and wanted.startswith(NAME_WORDS):
        name = re.sub(r"[^a-z0-9]+", "-", value.lower())[:40].strip("-")
        remedy = f" Did you mean {name}?" if name else ""
    return f"={show(value)} is not {wanted}.{remedy} ({setting.sentence})"


def _other_form(value: Any, setting: Setting) -> str:
    """The sentence with the form that a text should have; empty where none is likely."""
    if not isinstance(value, str):
        return ""
    if setting.name == "cluster.device" and value.lower() in INSTANCE_WITH:
        return f" Did you mean cluster.instance={INSTANCE_WITH[value.lower()]}?"
    if setting.name == "cluster.nodes" and re.fullmatch(r"\d+(,\d+)+", value):
        return f" To compare sizes: `shardyard study RECIPE --nodes {value} --predict`."
    if setting.accepts.startswith("a list") and re.fullmatch(r"[\w.:/*-]+", value):
        return f" Did you mean {setting.name}=[{value}]?"
    if value.endswith("%") and _is_number(value[:-1]) and setting.accepts.startswith("a number"):
        return f" Did you mean {float(value[:-1]) / 100:g}?"
    return ""


def _too_large(value: Any, detail: Any, setting: Setting) -> str | None:
    """Describe a value above a bound that the setting's words do not name; None: another error."""
    context = detail.get("ctx", {})
    high = context.get("le", context.get("lt", 0))
    if not detail["type"].startswith("less_than") or high < UNNAMED_BOUND:
        return None
    least = "below" if "lt" in context else "at most"
    return f"={show(value)} is too large. It must be {least} {high:,}. ({setting.sentence})"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def kind_of(value: Any) -> str:
    kinds = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "no usable value")
