"""Paths of a recipe: one list of their settings, from which every check of paths derives."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import shardyard
from shardyard.cli.completion import overrides
from shardyard.config.load import load_recipe
from shardyard.config.paths import (
    PATHS,
    NodePaths,
    check_existing_paths,
    check_mounted_paths,
    check_readable_paths,
    make_paths_absolute,
    paths_of,
)
from shardyard.config.schema.base import Section
from shardyard.config.schema.recipe import Recipe
from shardyard.config.schema.reference import Setting, section_of
from shardyard.doctor.paths import check_paths

_NAMED_AS_PATH = re.compile(r"(^|_)(dirs?|paths?|files?|folders?|sources?)$")
_CALLED_PATH = re.compile(r"\b(paths?|folders?|files?|globs?)\b", re.IGNORECASE)
_NO_PATHS = {
    "run.name": "a name, by default that of a file",
    "model.preset": "a name; what is at model.path has its shape",
    "data.format": "a format of files",
    "checkpoint.to": "an address in a bucket",
    "launch.volumes.efs": "an id",
    "launch.volumes.access_point": "an id",
}
"""Settings that accept text, speak of files and are no path -> what they are."""

_SRC = Path(shardyard.__file__).parent
FAR = NodePaths(launcher="far", shares_filesystem=False)
NEAR = NodePaths(launcher="near", shares_filesystem=True)

_BY_NAME = ("data.eval_sets", "data.eval_tasks")
"""Settings that have paths by names of the user's own."""

OF_RUN = sorted(name for name, row in PATHS.items() if row.opened_by == "run")
OPENED = sorted(name for name, row in PATHS.items() if row.opened_by is not None)


def _sections(name: str, kind: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    yield name, kind
    for key, field in kind.model_fields.items():
        for member in _members(field.annotation):
            if isinstance(member, type) and issubclass(member, Section):
                yield from _sections(f"{name}.{key}", member)


def _members(annotation: Any) -> list[Any]:
    """All types that an annotation names, also those of a list's parts."""
    parts = get_args(annotation)
    return [found for part in parts for found in _members(part)] if parts else [annotation]


def _settings() -> dict[str, Setting]:
    """Every setting of the schema that accepts text, or a list, by its dotted name."""
    described = (
        setting
        for name, kind in _sections("", Recipe)
        for setting in section_of(name, kind).settings
    )
    return {
        setting.name.removeprefix("."): setting
        for setting in described
        if setting.accepts_text or setting.accepts_list or setting.name[1:] in _BY_NAME
    }


def test_every_setting_that_is_a_path_is_listed() -> None:
    found = {
        name
        for name, setting in _settings().items()
        if _NAMED_AS_PATH.search(name.rpartition(".")[2]) or _CALLED_PATH.search(setting.sentence)
    }
    assert found - set(PATHS) == set(_NO_PATHS)
    assert not [name for name in PATHS if _NAMED_AS_PATH.search(name) and name not in found]


def test_every_listed_path_is_a_setting() -> None:
    assert set(PATHS) - set(_settings()) == set()


def test_no_other_module_lists_paths() -> None:
    """A list, a tuple, a set or a mapping whose words are all paths of a recipe."""
    found = []
    for file in set(_SRC.rglob("*.py")) - {_SRC / "config" / "paths.py"}:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                    words = parts
                case ast.Dict(keys=keys):
                    words = [key for key in keys if key is not None]
                case _:
                    continue
            texts = [word.value for word in words if isinstance(word, ast.Constant)]
            if len(words) > 1 and len(texts) == len(words) and set(texts) <= set(PATHS):
                found.append(f"{file.relative_to(_SRC)}:{node.lineno} {texts}")
    assert found == []


def with_path(setting: str, path: str) -> Recipe:
    """A recipe in which the setting has the path."""
    section, _, rest = setting.partition(".")
    if rest == "lora.path":
        content: Any = {"lora": {"path": path, "rank": 8}}
    elif rest.startswith("ssh."):
        content = {"ssh": {rest.removeprefix("ssh."): path}}
    elif rest.startswith("mixture."):
        share = {"name": "one", "weight": 1, "source": "python-stdlib"}
        content = {"mixture": [{**share, rest.removeprefix("mixture."): path}]}
    else:
        content = {rest: {"one": path} if setting in _BY_NAME else path}
    return load_recipe([{section: content}], [])


def named(setting: str, path: str) -> str:
    """The path, with the suffix without which the setting takes it for a name."""
    row = PATHS[setting]
    return path if row.is_path(path) else f"{path}{row.suffixes[0]}"


def text_of(recipe: Recipe, setting: str) -> list[str]:
    shown = f"{setting}.one" if setting in _BY_NAME else setting.replace("mixture.", "mixture[0].")
    return [path.text for path in paths_of(recipe) if path.setting == shown]


def setting_of(place: str) -> str:
    """The setting, of the place that a problem names."""
    return place.replace("[0]", "").removesuffix(".one")


@pytest.mark.parametrize("setting", OPENED)
def test_each_is_made_absolute_and_followed(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    recipe = make_paths_absolute(with_path(setting, named(setting, "./there")))
    assert text_of(recipe, setting) == [named(setting, f"{tmp_path}/there")]
    (problem,) = check_readable_paths(with_path(setting, named(setting, "./file/inside")))
    assert setting_of(problem.path) == setting
    assert "which is a file, not a folder" in problem.text


@pytest.mark.parametrize("setting", OF_RUN)
def test_each_that_a_run_opens_is_one_that_nodes_see(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = with_path(setting, named(setting, "./there"))
    (problem,) = check_mounted_paths(recipe, FAR)
    assert setting_of(problem.path) == setting
    missing = [setting_of(problem.path) for problem in check_existing_paths(recipe, NEAR)]
    assert missing == ([] if PATHS[setting].is_made else [setting])


@pytest.mark.parametrize("setting", OF_RUN)
def test_the_doctor_tries_each_that_a_run_opens(setting: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    recipe = with_path(setting, named(setting, f"{tmp_path}/file/inside"))
    found = check_paths(recipe, tmp_path / "runs", checkpoint_bytes=None)
    wrong = [setting_of(finding.name) for finding in found if finding.verdict == "problem"]
    assert wrong == [setting]


@pytest.mark.parametrize("setting", [name for name in OPENED if ".mixture." not in name])
def test_the_shell_completes_each(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = PATHS[setting]
    (tmp_path / "there").mkdir()
    (tmp_path / "theme.none").touch()
    (tmp_path / f"theme{(row.suffixes or ('.txt',))[0]}").touch()
    offered = [item.value.partition("=")[2] for item in overrides(f"{setting}=the", {})]
    files = [name for name in ("theme.jinja", "theme.json", "theme.none", "theme.txt", "theme.yaml")
             if (tmp_path / name).exists() and not row.is_folder
             and (not row.suffixes or name.endswith(row.suffixes))]  # fmt: skip
    assert offered == [*files, "there/"]


def test_a_word_for_the_tokenizer_is_no_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train", "auto", "own"):
        (tmp_path / name).mkdir()
    for word in ("train", "auto", "owner/name"):
        assert text_of(with_path("data.tokenizer", word), "data.tokenizer") == []
    assert text_of(with_path("data.tokenizer", "own"), "data.tokenizer") == ["own"]
