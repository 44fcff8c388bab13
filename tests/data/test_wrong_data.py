"""Each kind of broken data is told in one message: file and place, soon, in little memory."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardyard.config.schema import Recipe
from shardyard.data.prepare import prepare
from shardyard.errors import ShardyardError
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
    (tmp_path / "recipe.json").write_text(recipe_of(wrong, tmp_path).model_dump_json())
    command = [sys.executable, "-m", "shardyard.data", str(tmp_path / "recipe.json")]
    with (tmp_path / "told").open("wb") as told, (tmp_path / "said").open("wb") as said:
        began_s = time.monotonic()
        process = subprocess.Popen(command, stdout=told, stderr=said)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    answer = json.loads((tmp_path / "told").read_text())
    assert time.monotonic() - began_s < MOST_S
    assert used.ru_maxrss * 1024 < MOST_BYTES
    assert process.returncode == answer["exit_code"] and process.returncode in (1, 2)
    assert re.search(wrong.words, answer["error"])
    assert "Traceback" not in (tmp_path / "said").read_text()


def test_there_are_at_least_forty_kinds() -> None:
    assert len({wrong.name for wrong in WRONG}) == len(WRONG) >= 40
