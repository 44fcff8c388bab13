"""Files that were touched or copied are not prepared again; files that changed are."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.schema.recipe import Recipe
from shardyard.control.prune import find_sets
from shardyard.data import content_cache
from shardyard.data.prepare import prepare

COMPARED = "comparing files with what was prepared of as many bytes"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"a text called {name}\n" * 40)
    return folder


def prepared(source: Path, **settings: Any) -> tuple[Path, set[str]]:
    """The folder, and what was done for it."""
    data = {"source": str(source), "dir": str(source.parent / "sets"), "workers": 1}
    recipe = Recipe.model_validate({"data": {**data, "vocab_size": 300, **settings}})
    done: set[str] = set()
    facts = prepare(recipe, model_dir=None, progress=lambda words, *_: done.add(words))
    return Path(facts.dir), done


def touched(*files: Path) -> None:
    for file in files:
        later = file.stat().st_mtime_ns + 10**9
        os.utime(file, ns=(later, later))


def test_touched_files_are_compared_once_and_found(text: Path) -> None:
    first, done = prepared(text)
    assert COMPARED not in done
    touched(*text.iterdir())
    assert prepared(text) == (first, {COMPARED})
    assert prepared(text) == (first, set()), "what these times mean is known by now"
    touched(*text.iterdir())
    assert prepared(text) == (first, {COMPARED})


def test_a_copy_is_found_by_its_content(text: Path) -> None:
    first, _ = prepared(text)
    copy = text.parent / "elsewhere"
    shutil.copytree(text, copy)
    touched(*copy.iterdir())
    assert prepared(copy) == (first, {COMPARED})


def test_a_changed_byte_of_an_equal_size_is_prepared_anew(text: Path) -> None:
    first, _ = prepared(text)
    content = (text / "b.txt").read_text()
    (text / "b.txt").write_text(content.replace("text", "test", 1))
    touched(text / "b.txt")
    second, done = prepared(text)
    assert second != first
    assert done > {COMPARED}
    (text / "b.txt").write_text(content)
    assert prepared(text)[0] == first, "as it was again, at another time"


def test_another_order_or_request_is_prepared_anew(text: Path) -> None:
    first, _ = prepared(text)
    touched(*text.iterdir())
    assert prepared(text, vocab_size=299)[0] != first
    (text / "a.txt").rename(text / "d.txt")
    assert prepared(text)[0] != first


def test_files_of_other_sizes_are_not_read(text: Path) -> None:
    prepared(text)
    (text / "a.txt").write_text("longer than it was\n" * 90)
    assert COMPARED not in prepared(text)[1]


def test_a_damaged_list_of_content_only_costs_work(text: Path) -> None:
    first, _ = prepared(text)
    (first / content_cache.SOURCES).write_text("[")
    touched(*text.iterdir())
    second, done = prepared(text)
    assert second != first
    assert COMPARED not in done


def test_what_was_prepared_can_still_be_pruned(text: Path, tmp_path: Path) -> None:
    first, _ = prepared(text)
    recipe = Recipe.model_validate(
        {"data": {"dir": str(first.parent)}, "run": {"dir": str(tmp_path / "runs")}}
    )
    assert [unused.folder for unused in find_sets(recipe).unused] == [first]
