"""Load a recipe from files, dicts or objects, and overrides; report all misfits at once.

Precedence: defaults < site files < sources from left to right < ``section.key=value`` overrides.
``config/validate.py`` says what a setting may be; ``config/rules/check.py`` checks them
together.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from shardyard.config.limits import beyond_limits
from shardyard.config.origins import forget_origins, put_below
from shardyard.config.schema.launch import OF_QUEUES
from shardyard.config.schema.recipe import Recipe
from shardyard.config.schema.reference import Setting, settings
from shardyard.config.site import read_site
from shardyard.config.validate import (
    kind_of,
    override_hint,
    recognized_settings,
    setting_named,
    to_plain,
    validate_types,
)
from shardyard.errors import Problem, RecipeError, RequestError, StorageError
from shardyard.families.images.registry import IMAGE_PRESETS
from shardyard.families.presets import preset_named
from shardyard.file_faults import broken_link_on_path
from shardyard.io.files import read_user_file
from shardyard.io.yaml import InvalidYamlError, is_null_word, read_yaml, write_yaml

Source: TypeAlias = str | Path | Mapping[str, Any] | Recipe
"""A recipe, or a part of one: a YAML file, sections as a dict, or an object that was built."""

Sources: TypeAlias = Source | Sequence[Source]
"""One, or several of which later ones win setting by setting."""


def load_recipe(
    sources: Sources = (),
    overrides: Sequence[str] = (),
    *,
    of_run: bool = False,
    with_site: bool = False,
) -> Recipe:
    """One recipe from wherever it is written; an object is looked at as a file is.

    Args:
        sources: YAML files, each a mapping of sections; dicts of sections, which may hold paths and
            sections built in Python; recipes, of which only what was given counts.
        overrides: ``section.key=value``, the value as YAML, a text as it is; they win over sources.
        of_run: Whether the files are what a run was asked, maybe by an earlier version or with
            other packages: settings of before are then read as those that took their place, and
            sections of plug-ins that are not here are let pass.
        with_site: Whether the site files of this machine and user are below the sources.

    Raises:
        RequestError: A file cannot be read or is no YAML mapping, or a source is something else.
        RecipeError: Unknown keys, wrong types or values out of bounds; all of them.
    """
    recipe, problems = read_settings(sources, overrides, of_run=of_run, with_site=with_site)
    if problems:
        raise RecipeError(problems, name_of(sources))
    return recipe


def read_settings(
    sources: Sources,
    overrides: Sequence[str],
    *,
    of_run: bool = False,
    with_site: bool = False,
) -> tuple[Recipe, list[Problem]]:
    """The recipe of all settings that are valid, and a problem for each one that is not.

    Args:
        of_run: As for ``load_recipe``, like ``with_site``.

    Raises:
        RequestError: As ``load_recipe``.
    """
    errors: list[Problem] = []
    merged: dict[str, Any] = {}
    for source in _each(sources):
        content = _content(source)
        if of_run:
            _rename_of_before(content)
        tree = recognized_settings(content, errors, of_run=of_run)
        forget_origins(merged, tree)
        _merge(merged, tree)
    for override in overrides:
        number, override = _phase_of(override)
        tree = recognized_settings(_read_override(override, errors), errors, of_run=of_run)
        into = merged if number is None else _phase(merged, number, override, errors)
        forget_origins(into, tree)
        with_keys = _setting_with_keys(override.partition("=")[0])
        if with_keys is not None:
            errors += _make_mapping(into, with_keys)
        _merge(into, tree, by_key=(*_BY_KEY, with_keys))
    if with_site:
        site = read_site()
        errors += site.problems
        put_below(merged, site.settings, site.origins)
    recipe, wrong = validate_types(merged)
    if with_site:
        wrong = [*wrong, *beyond_limits(recipe, site.limits)]
    return recipe, [*errors, *wrong]


def name_of(sources: Sources) -> str:
    """Return the name of a recipe in messages: its files."""
    files = [source for source in _each(sources) if isinstance(source, str | Path)]
    return ", ".join(map(str, files)) or "recipe"


def _each(sources: Sources) -> Sequence[Source]:
    if isinstance(sources, Sequence) and not isinstance(sources, str):
        return sources
    return (sources,)


def _content(source: Source) -> dict[str, Any]:
    """Sections and settings as they were given."""
    match source:
        case str() | Path():
            return _read(Path(source))
        case Recipe() | Mapping():
            content: dict[str, Any] = to_plain(source)
            return content
        case _:
            raise RequestError(
                f"{source!r} is {type(source).__name__}, not a recipe. Give the path of a YAML "
                "file, a dict of sections such as {'model': {'preset': 'llama-tiny'}}, or a "
                "shardyard.config.schema.recipe.Recipe."
            )


def _rename_of_before(content: dict[str, Any]) -> None:
    """In place, what ``_REPLACED`` names."""
    run = content.get("run")
    if isinstance(run, dict) and "target_loss" in run:
        loss = run.pop("target_loss")
        run.setdefault("target", None if loss is None else {"loss": loss})
    elastic = content.get("elastic")
    if isinstance(elastic, dict) and "straggler" in elastic:
        is_asked = elastic.pop("straggler") == "leave_out"
        elastic.setdefault("leave_out_for", ["slow_rank"] if is_asked else [])
    launch = content.get("launch")
    aws_batch = launch.get("aws_batch") if isinstance(launch, dict) else None
    if isinstance(aws_batch, dict):
        for name in OF_QUEUES:
            aws_batch.pop(name, None)


def dump_recipe(recipe: Recipe) -> str:
    """YAML of what was given, without defaults; ``load_recipe`` reads an equal recipe from it."""
    given = recipe.model_dump(mode="json", exclude_unset=True)
    return write_yaml({name: content for name, content in given.items() if content})


def is_override(argument: str) -> bool:
    """Whether a command-line argument is ``section.key=value`` rather than a file."""
    name, equals, _ = argument.partition("=")
    _, name = _phase_of(name)
    return bool(equals) and all(part.isidentifier() for part in name.split("."))


def _phase_of(override: str) -> tuple[int | None, str]:
    """``phases.2.optim.lr=1e-4`` -> (2, ``optim.lr=1e-4``); any other override as it is."""
    found = re.match(r"phases\.([0-9]+)\.", override)
    return (None, override) if found is None else (int(found[1]), override[found.end() :])


def _phase(
    merged: dict[str, Any], number: int, override: str, errors: list[Problem]
) -> dict[str, Any]:
    """The settings of a phase, counted from 1, to be changed."""
    phases: list[dict[str, Any]] = merged.get("phases", [])
    if 1 <= number <= len(phases):
        return phases[number - 1]
    text = f"={override}: the run has {len(phases) or 'no'} phases, counted from 1."
    errors.append(Problem(f"phases.{number}", text))
    return {}


_MOST_BYTES = 8 * 2**20
"""Most bytes of a recipe; one with the config.json of a model is a few MB at most."""


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.is_dir():
            raise IsADirectoryError
        text = read_user_file(file, limit_bytes=_MOST_BYTES).decode()
    except FileNotFoundError as error:
        link = broken_link_on_path(file)
        why = f"{file} does not exist. {_suggest_file(file)}" if link is None else f"{file}{link}"
        raise RequestError(f"recipe {why}") from error
    except IsADirectoryError as error:
        if (file / "config.json").is_file():
            text = f"recipe {file} is a model folder. Did you mean model.path={file}?"
            raise RequestError(text) from error
        inside = _yaml_files(file)
        hint = f" It holds {', '.join(inside[:5])}." if inside else ""
        data = "" if inside else f" To train on its files: data.source={file}."
        raise RequestError(f"recipe {file} is a folder.{hint} Give a YAML file.{data}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"recipe {file} is not UTF-8 text. Give a YAML file.") from error
    except StorageError as error:
        link = broken_link_on_path(file)
        why = f"{error} Give a YAML file." if link is None else f"{file}{link}"
        raise RequestError(f"recipe {why}") from error
    content = read_yaml(text, source=f"recipe {file}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise RequestError(
            f"recipe {file} holds {kind_of(content)} at the top, not sections. "
            "Write sections with settings, such as `model: {preset: llama-tiny}`."
        )
    return content


def _suggest_file(file: Path) -> str:
    """Suggest what the name of a missing file was meant to be."""
    name = str(file).partition("=")[0].strip()
    if name in settings():
        return f"An override is one word without spaces: {name}=VALUE."
    if (entry := re.match(r"([a-z_]+(?:\.[a-z_]+)+)[.\[][0-9]+\b", name)) is not None:
        return f"An override cannot change an entry of a list. Set the list: '{entry[1]}=[...]'."
    if preset_named(name) is not None or name in IMAGE_PRESETS:
        return f"Did you mean model.preset={name}?"
    near = difflib.get_close_matches(file.name, _yaml_files(file.parent), n=1, cutoff=0.5)
    if near:
        return f"Did you mean {file.parent / near[0]}?"
    if file.name == "launch.yaml" and file.parent.parent.name == "clusters":
        return "`shardyard cluster create` writes it, once the cluster is ready."
    example = Path("examples") / f"{file.stem}.yaml"
    if not file.suffix and example.is_file():
        return f"Did you mean {example}?"
    if not file.is_absolute() and not file.parent.is_dir():
        if not file.suffix.startswith(".y") and len(file.parts) == 2:
            return f"Did you mean model.hub={file}?"
        return (
            f"Folder {file.parent} does not exist in {Path.cwd()}. Change to the folder that has "
            "it, or give the whole path of a YAML file."
        )
    return "Give a YAML file."


def _yaml_files(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))


def _read_override(override: str, errors: list[Problem]) -> dict[str, Any]:
    """``optim.lr=3e-4`` -> ``{"optim": {"lr": 0.0003}}``."""
    name, _, text = override.partition("=")
    setting = setting_named(name)
    if setting is not None and setting.accepts_text:
        value: Any = _as_written(text, setting)
    else:
        value = read_yaml(text, source=f"override {name}", is_file=False)
    if name == "phases" or (name == "secrets" and isinstance(value, dict)):
        return {name: value}
    if "." not in name:
        hint = override_hint(name, text, value if text else True)
        if hint is None or hint.startswith("Did you mean"):
            hint = (
                f"an override names section and setting. {hint or f'Write SECTION.{name}=VALUE.'}"
            )
        else:
            hint = f"unknown setting. {hint}"
        errors.append(Problem(name, hint))
        return {}
    for part in reversed(name.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def _as_written(text: str, setting: Setting) -> Any:
    """Return the value of a text setting: the text as written, not as YAML would read it.

    ``*.jsonl``, ``#1`` and ``1e3`` mean themselves. null, a list where one is accepted, and a text
    in quotes of its own mean what YAML says.

    Raises:
        RequestError: It holds control characters, or is no Unicode.
    """
    try:
        value = read_yaml(text, source=f"override {setting.name}", is_file=False)
    except InvalidYamlError:
        return text
    first = text.lstrip()[:1]
    is_quoted = isinstance(value, str) and first in ("'", '"')
    is_list = isinstance(value, list) and setting.accepts_list and first == "["
    is_null = value is None and is_null_word(text)
    return value if is_quoted or is_list or is_null else text


_BY_KEY = ("secrets", "run.tags")


def _setting_with_keys(name: str) -> str | None:
    """``launch.env.A`` -> ``launch.env``: the setting of which an override sets one key."""
    parts = name.split(".")
    above = (".".join(parts[:end]) for end in range(2, len(parts) + 1))
    found = next((each for each in above if setting_named(each) is not None), name)
    return None if found == name else found


def _make_mapping(into: dict[str, Any], name: str) -> list[Problem]:
    """Make room, in place, for a key of a setting; a problem if it has a value without keys."""
    *above, last = name.split(".")
    for part in above:
        into = into.get(part) or {}
    value = into.get(last)
    if value is None:
        into.pop(last, None)
    if value is None or isinstance(value, dict):
        return []
    return [Problem(name, f"={value!r} has no keys. Set {name} as a whole.")]


def _merge(
    into: dict[str, Any],
    tree: dict[str, Any],
    *,
    by_key: Sequence[str | None] = _BY_KEY,
    at: str = "",
) -> None:
    """Setting by setting; the value of a setting is replaced whole, also where it is a mapping.

    Only those of ``by_key`` are merged.
    """
    for key, content in tree.items():
        name = f"{at}{key}"
        is_setting = name not in by_key and setting_named(name) is not None
        if is_setting or not isinstance(content, dict) or not isinstance(into.get(key, {}), dict):
            into[key] = content
        else:
            _merge(into.setdefault(key, {}), content, by_key=by_key, at=f"{name}.")
