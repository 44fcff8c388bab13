"""Each kind of broken data is told in one message: file and place, soon, in little memory."""

import re
from pathlib import Path

import pytest

from shardyard.config.schema.recipe import Recipe
from shardyard.data.prepare import prepare
from shardyard.errors import ShardyardError
from tests.data.data_program import run_data_program
from tests.data.wrong_data import ENDLESS, WRONG, Wrong

MOST_S, MOST_BYTES = 60.0, 2**30

each_kind = pytest.mark.parametrize("wrong", WRONG, ids=[wrong.name for wrong in WRONG])


def recipe_of(wrong: Wrong, folder: Path) -> Recipe:
    data = {"source": wrong.make(folder), "dir": str(folder / "out"), "vocab_size": 300}
    settings = dict(wrong.settings)
    if "tokenizer" in settings:
        settings["tokenizer"] = str(folder / settings["tokenizer"])
    return Recipe.model_validate({"data": {**data, "workers": 1, **settings}})


@each_kind
def test_a_message_names_the_file_and_the_place(wrong: Wrong, tmp_path: Path) -> None:
    recipe = recipe_of(wrong, tmp_path)
    with pytest.raises(ShardyardError) as told:
        prepare(recipe, model_dir=None, progress=lambda *_: None)
    assert re.search(wrong.words, str(told.value)), told.value
    assert not [*tmp_path.glob("out/*/manifest.json")]


@pytest.mark.system
@pytest.mark.parametrize("wrong", [*WRONG, *ENDLESS], ids=lambda wrong: wrong.name)
def test_the_data_program_ends_soon_in_little_memory_and_without_a_traceback(
    wrong: Wrong, tmp_path: Path
) -> None:
    ran = run_data_program(recipe_of(wrong, tmp_path), tmp_path)
    assert ran.wall_s < MOST_S
    assert ran.peak_bytes < MOST_BYTES
    assert ran.exit_code == ran.answer["exit_code"] and ran.exit_code in (1, 2)
    assert re.search(wrong.words, ran.answer["error"])
    assert "Traceback" not in ran.said


def test_there_are_at_least_forty_kinds() -> None:
    assert len({wrong.name for wrong in WRONG}) == len(WRONG) >= 40
