"""Public configurations: every key has an outcome, and a recipe that the schema takes comes of it.

Their keys and values are in ``cases/``, each with where it is from, written anew as files here.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardyard.config.rules.check import load_checked_recipe
from shardyard.importers.configs.convert import import_files
from shardyard.importers.configs.rules import OutcomeKind

CASES = Path(__file__).parent / "cases"
SUFFIXES = {"deepspeed": "json", "smp": "json", "torchtitan": "toml", "scripts": "sh"}


def cases() -> Iterator[Any]:
    for file in sorted(CASES.glob("*.yaml")):
        for case in yaml.safe_load(file.read_text()):
            yield pytest.param(file.stem, case, id=f"{file.stem}: {case['from']}")


def written(kind: str, case: dict[str, Any], folder: Path) -> Path:
    """The case as the file that its source reads."""
    path = folder / f"source.{SUFFIXES.get(kind, 'yaml')}"
    if "text" in case:
        path.write_text(case["text"])
    elif kind == "torchtitan":
        path.write_text(as_toml(case["content"]))
    elif path.suffix == ".json":
        path.write_text(json.dumps(case["content"], indent=2))
    else:
        path.write_text(yaml.safe_dump(case["content"], sort_keys=False))
    return path


def as_toml(content: dict[str, Any], above: str = "") -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in content.items()
             if not isinstance(value, dict)]  # fmt: skip
    for key, value in content.items():
        if isinstance(value, dict):
            name = f"{above}{key}"
            lines += [f"[{name}]", as_toml(value, f"{name}.")]
    return "\n".join(lines)


def walk(content: Any, at: tuple[str, ...] = ()) -> Iterator[str]:
    """Every leaf of a parsed file; independent of the product's own walk."""
    if isinstance(content, dict) and content:
        for key in content:
            yield from walk(content[key], (*at, str(key)))
    elif isinstance(content, list) and any(isinstance(each, dict | list) for each in content):
        for number, each in enumerate(content):
            yield from walk(each, (*at, str(number)))
    else:
        yield ".".join(at)


def words_of(case: dict[str, Any], known: set[str]) -> list[str]:
    """The case's own, and model and data where it says neither."""
    words = list(case.get("words", ()))
    if not any(word.startswith("model.") for word in words) and not known & {
        "model.hub", "model.path", "model.preset",
    }:  # fmt: skip
        words.append("model.preset=llama2-7b")
    return [*words, "data.source=./text"]


ALL = list(cases())


@pytest.mark.parametrize("kind, case", ALL)
def test_every_key_has_one_outcome_and_a_recipe_comes_of_it(
    kind: str, case: dict[str, Any], tmp_path: Path
) -> None:
    file = written(kind, case, tmp_path)
    first = import_files([file])
    known = {
        name for each in first.outcomes for name, value in each.result.settings.items() if value
    }
    imported = import_files([file], words_of(case, known), case.get("without", ()))
    own = [each.entry.path for each in imported.outcomes if each.file == str(file)]
    if "content" in case:
        assert sorted(walk(case["content"])) == sorted(own)
    else:
        assert not_told(case["text"], imported.to_json()) == []
    assert imported.of_kind(OutcomeKind.REFUSED) == []
    assert [str(problem) for problem in imported.errors] == []
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(imported.text)
    loaded = load_checked_recipe([recipe], to_train=False)
    assert loaded.model_dump(mode="json", exclude_unset=True) == imported.recipe


def not_told(text: str, told: dict[str, Any]) -> list[str]:
    """Words of a script that no outcome holds, in its key or its value."""
    said = " ".join(f"{each['key']} {json.dumps(each['value'])}" for each in told["outcomes"])
    said = re.sub(r"[_-]", "", said)
    words = re.findall(r"(?<![\w$-])--?([A-Za-z][\w-]+)", re.sub(r"(?m)(^|\s)# .*$", "", text))
    return [word for word in words if re.sub(r"[_-]", "", word) not in said]


def test_there_are_enough_of_them_from_many_places() -> None:
    found = [case.values for case in ALL]
    assert len(found) >= 55
    assert len({case["from"].split("/")[0] for _, case in found}) > 15


def test_what_is_here_names_no_place_of_a_person() -> None:
    text = "".join(file.read_text() for file in CASES.glob("*.yaml"))
    assert re.findall(r"/home/|/Users/|hf_[A-Za-z0-9]{10}|\b\d{12}\b", text) == []
    addresses = set(re.findall(r"\b\d+\.\d+\.\d+\.\d+\b", text))
    assert all(address.startswith("192.0.2.") for address in addresses)  # RFC 5737
