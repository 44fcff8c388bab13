"""Pictures whose classes are in a CSV file next to them."""

from pathlib import Path
from typing import Any

import pytest

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.data.images.index import ImageIndex
from shardyard.data.images.prepare import prepare_images
from shardyard.errors import RequestError, SourceError
from tests.data.images.made import noise, saved

ROWS = {"a.jpg": "cat", "b.jpg": "dog", "c.jpg": "cat", "d.jpg": "dog"}


def table(folder: Path, text: str, *, name: str = "labels.csv", below: str = "images") -> Path:
    """Write a table, and four pictures in a folder next to it."""
    (folder / below).mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(ROWS):
        (folder / below / image).write_bytes(saved(noise(number)))
    (folder / name).write_text(text)
    return folder / name


def lines(header: str = "image,label", **rows: str) -> str:
    return "\n".join([header, *(f"{image},{label}" for image, label in (rows or ROWS).items())])


def run(source: Path, folder: Path, images: Any = None, **data: Any) -> DatasetMetadata:
    given = {"source": str(source), "dir": str(folder / "out"), "workers": 1, **data}
    recipe = Recipe.model_validate({"data": {**given, "images": images or {}}})
    return prepare_images(recipe, model_dir=None, progress=lambda *_: None)


def classes_of(facts: DatasetMetadata, split: str) -> dict[str, str]:
    """Name of each picture of a split, and its class."""
    index = ImageIndex(Path(facts.dir), split)
    numbers = [int(row["label"]) for row in index.rows]
    names = [Path(index.name(n)).name for n in range(index.num_samples)]
    return {name: index.classes[number] for name, number in zip(names, numbers, strict=True)}


def test_a_table_gives_each_picture_its_class(tmp_path: Path) -> None:
    facts = run(table(tmp_path / "a", lines()), tmp_path, eval_fraction=0)
    assert classes_of(facts, "train") == ROWS


def test_a_column_gives_each_picture_its_split(tmp_path: Path) -> None:
    rows = ("file_name y split", "a.jpg 0 train", "b.jpg 10 train", "c.jpg 2 train", "d.jpg 2 val")
    text = "\n".join(rows).replace(" ", "\t")
    source = table(tmp_path / "a", text, name="labels.tsv", below=".")
    facts = run(source, tmp_path, {"image_key": "file_name", "label_key": "y"})
    assert facts.num_classes == 11  # numbers stay numbers: class 10 is not next to class 1
    assert classes_of(facts, "train") == {"a.jpg": "0", "b.jpg": "10", "c.jpg": "2"}
    assert classes_of(facts, "eval") == {"d.jpg": "2"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            lines("file,class"),
            r"no column 'image', no column 'label' \(its columns: file, class\)\. Name the right "
            r"one: data\.images\.image_key=file data\.images\.label_key=class",
        ),
        (
            lines().replace(",", ";"),
            r"\(its header: image;label\)\. Columns are separated",
        ),
        (
            lines() + "\ngone.jpg,cat",
            r"a row names a file .* not exist: gone\.jpg \(line 6\)",
        ),
        (
            lines() + "\na.jpg,dog",
            r"line 6: a\.jpg is also in .*labels\.csv, line 2\. Keep",
        ),
        (
            lines().replace("a.jpg,cat", "a.jpg,"),
            r"line 2 has no label\. Correct or remove",
        ),
        (lines().replace("a.jpg,cat", "a.jpg"), "line 2 has another number of columns"),
        (lines().replace("a.jpg,cat", "a.jpg,x/y"), "line 2: x/y cannot name a class"),
        ("image,label,split\na.jpg,cat,fold1", r"line 2: the split 'fold1' is none of train, val"),
        ("image,label", "has no rows below its header"),
        ("", r"no column 'image'.*its columns: none"),
    ],
)
def test_a_wrong_table_is_an_error_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=words):
        run(table(tmp_path / "a", text), tmp_path)


def test_a_picture_in_two_folders_is_an_error(tmp_path: Path) -> None:
    table(tmp_path / "a", lines(), below="more")
    source = table(tmp_path / "a", lines())
    with pytest.raises(SourceError, match=r"a\.jpg may be .*Write it with its folder: images/a"):
        run(source, tmp_path)


def test_one_class_is_nothing_to_learn(tmp_path: Path) -> None:
    rows = lines(**dict.fromkeys(ROWS, "cat"))
    with pytest.raises(RequestError, match=r"all its rows have the class cat.*images.label_key"):
        run(table(tmp_path / "a", rows), tmp_path)
    with pytest.raises(RequestError, match=r"data.images.complete=False says which pictures"):
        run(table(tmp_path / "b", lines()), tmp_path, {"complete": False})


def test_a_folder_of_all_pictures_is_no_class(tmp_path: Path) -> None:
    source = table(tmp_path / "a", lines())
    with pytest.raises(RequestError, match=rf"one class folder, images.*data\.source={source}"):
        run(source.parent, tmp_path)
    with pytest.raises(RequestError, match=r"in no class folder: .* Or write a CSV file"):
        run(source.parent / "images", tmp_path)
