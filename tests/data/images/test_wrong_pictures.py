"""Each kind of broken source is told in one message: file and place. Odd ones are read."""

import re
from pathlib import Path

import pytest

from shardyard.config.schema.recipe import Recipe
from shardyard.data.images.cache import ImageBytes
from shardyard.data.images.decode import decode
from shardyard.data.images.index import ImageIndex
from shardyard.data.images.prepare import prepare_images
from shardyard.errors import ShardyardError
from tests.data.data_program import run_data_program
from tests.data.images.wrong_pictures import BROKEN, ODD, Wrong

MOST_S, MOST_BYTES = 60.0, 2**30

each_broken = pytest.mark.parametrize("wrong", BROKEN, ids=[wrong.name for wrong in BROKEN])


def recipe_of(wrong: Wrong, folder: Path) -> Recipe:
    data = {"source": wrong.make(folder), "dir": str(folder / "out"), "workers": 1}
    task = {"name": "image_classification"}
    return Recipe.model_validate({"data": {**data, "images": wrong.images or {}}, "task": task})


@each_broken
def test_a_message_names_the_file_and_the_place(wrong: Wrong, tmp_path: Path) -> None:
    recipe = recipe_of(wrong, tmp_path)
    with pytest.raises(ShardyardError) as told:
        prepare_images(recipe, model_dir=None, progress=lambda *_: None)
    assert wrong.words is not None and re.search(wrong.words, str(told.value)), told.value
    assert not [*tmp_path.glob("out/*/manifest.json")]


@pytest.mark.parametrize("odd", ODD, ids=[odd.name for odd in ODD])
def test_what_is_odd_but_readable_is_read(odd: Wrong, tmp_path: Path) -> None:
    recipe = recipe_of(odd, tmp_path)
    facts = prepare_images(recipe, model_dir=None, progress=lambda *_: None)
    for split in ("train", "eval"):
        index = ImageIndex(Path(facts.dir), split)
        contents = ImageBytes(index, 2**20)
        for number in range(index.num_samples):
            assert decode(contents.content(number), "here").mode == "RGB"
    assert facts.train_samples and facts.eval_samples
    assert facts.train_samples + facts.eval_samples in (10, 20, 21)


def test_there_are_at_least_thirty_kinds() -> None:
    assert len(BROKEN) >= 30
    names = [wrong.name for wrong in (*BROKEN, *ODD)]
    assert len(set(names)) == len(names)


def test_broken_images_are_left_out_and_listed_where_that_is_asked_for(tmp_path: Path) -> None:
    (wrong,) = (each for each in BROKEN if each.name == "a picture that is cut off")
    recipe = recipe_of(Wrong("", wrong.make, None, {"broken": "leave_out"}), tmp_path)
    facts = prepare_images(recipe, model_dir=None, progress=lambda *_: None)
    assert (facts.train_samples or 0) + (facts.eval_samples or 0) == 20
    assert facts.broken_images == 1
    assert re.search(r"a/bee/odd\.jpg is damaged", (Path(facts.dir) / "left-out.txt").read_text())


@pytest.mark.system
@each_broken
def test_the_data_program_ends_soon_in_little_memory_and_without_a_traceback(
    wrong: Wrong, tmp_path: Path
) -> None:
    ran = run_data_program(recipe_of(wrong, tmp_path), tmp_path)
    assert ran.wall_s < MOST_S
    assert ran.peak_bytes < MOST_BYTES
    assert ran.exit_code == ran.answer["exit_code"] and ran.exit_code in (1, 2)
    assert wrong.words is not None and re.search(wrong.words, ran.answer["error"])
    assert "Traceback" not in ran.said
