"""Pictures of every source become one data set, the same bytes whatever happens on the way."""

import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.control.attempt import split_lines
from shardyard.data.images.cache import ImageBytes
from shardyard.data.images.index import ImageIndex
from shardyard.data.images.prepare import prepare_images
from shardyard.data.images.tar import members
from shardyard.data.shards import verify
from shardyard.errors import DataError, RequestError, SourceError
from tests.data.images.made import class_folders, noise, parquet_file, saved, shard, tar_bytes

THREE = {"ant": range(20), "bee": range(20, 40), "cow": range(40, 60)}


def recipe_of(source: Path | str, folder: Path, images: Any = None, **data: Any) -> Recipe:
    given = {"source": str(source), "dir": str(folder / "out"), "workers": 1, **data}
    return Recipe.model_validate({"data": {**given, "images": images or {}}})


def run(source: Path | str, folder: Path, images: Any = None, **data: Any) -> DatasetMetadata:
    recipe = recipe_of(source, folder, images, **data)
    return prepare_images(recipe, model_dir=None, progress=lambda *_: None)


def pictures_of(facts: DatasetMetadata) -> dict[str, list[tuple[str, bytes]]]:
    """Split -> class and bytes of each picture, sorted."""
    found = {}
    for split in ("train", "eval"):
        index = ImageIndex(Path(facts.dir), split)
        contents = ImageBytes(index, 2**20)
        found[split] = sorted(
            (index.classes[index.rows[n]["label"]], bytes(contents.content(n)))
            for n in range(index.num_samples)
        )
    return found


def everything() -> list[tuple[str, bytes]]:
    return sorted((name, saved(noise(n))) for name, numbers in THREE.items() for n in numbers)


@pytest.mark.parametrize("packs", ["auto", False])
def test_each_picture_of_class_folders_is_there_once(packs: Any, tmp_path: Path) -> None:
    facts = run(class_folders(tmp_path / "a", THREE), tmp_path, {"pack": packs}, eval_fraction=0.2)
    found = pictures_of(facts)
    assert sorted(found["train"] + found["eval"]) == everything()
    assert (facts.train_samples, facts.eval_samples) == (len(found["train"]), len(found["eval"]))
    assert facts.eval_samples and 4 <= facts.eval_samples <= 24
    assert bool([*Path(facts.dir).glob("*.tar")]) == (packs == "auto")


def test_what_is_held_out_depends_on_content_alone(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "a", THREE)
    (tmp_path / "b").mkdir()
    tar = {f"{name}/{n}.jpg": saved(noise(n)) for name, numbers in THREE.items() for n in numbers}
    (tmp_path / "b" / "all.tar").write_bytes(tar_bytes(tar))
    folders, shards = run(source, tmp_path), run(tmp_path / "b", tmp_path)
    assert pictures_of(folders) == pictures_of(shards)


def test_train_and_val_folders_are_the_splits(tmp_path: Path) -> None:
    class_folders(tmp_path / "a", {"ant": range(9), "bee": range(9, 20)}, below="train")
    source = class_folders(tmp_path / "a", {"ant": range(20, 24)}, below="val")
    found = pictures_of(run(source, tmp_path))
    assert [name for name, _ in found["train"]] == ["ant"] * 9 + ["bee"] * 11
    assert [name for name, _ in found["eval"]] == ["ant"] * 4
    with pytest.raises(RequestError, match="has a validation split, which is validated on"):
        run(source, tmp_path, eval_fraction=0.1)


@pytest.mark.parametrize("name", ["dev", "validation_images", "eval", "testing"])
def test_splits_of_pictures_have_the_names_that_those_of_text_have(
    name: str, tmp_path: Path
) -> None:
    class_folders(tmp_path / "a", {"ant": range(4)}, below="training")
    facts = run(class_folders(tmp_path / "a", {"ant": range(4, 6)}, below=name), tmp_path)
    assert (facts.train_samples, facts.eval_samples) == (4, 2)
    assert facts.validation_files == f"{name}/"


def test_eval_source_names_pictures_to_validate_on(tmp_path: Path) -> None:
    class_folders(tmp_path / "a", {"ant": range(3), "bee": range(3, 4)}, below="train")
    source = class_folders(tmp_path / "a", {"ant": range(4, 5), "bee": range(5, 6)}, below="val")
    others = class_folders(tmp_path / "b", {"ant": range(6, 8), "bee": range(8, 9)})
    facts = run(source, tmp_path, eval_source=str(others))
    wanted = {"train": range(4), "eval": range(6, 9)}
    assert pictures_of(facts) == {
        split: sorted(("bee" if n in (3, 8) else "ant", saved(noise(n))) for n in numbers)
        for split, numbers in wanted.items()
    }
    assert (facts.validation_files, facts.left_out_files) == ("data.eval_source", "val/")
    moved = run(source / "train", tmp_path, eval_source=str(source / "val"))
    assert (moved.train_samples, moved.eval_samples) == (4, 2)
    with pytest.raises(RequestError, match=r"data\.eval_source names all of them\. Validate"):
        run(others, tmp_path, eval_source=str(others))


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (("val", "test"), r"has no pictures to train on: .*\(test, val\)\. To train on them, name"),
        (("train", "val", "more"), r": more next to train, val names no split\. Move it away, or"),
    ],
)
def test_pictures_named_test_or_val_are_never_trained_on_unasked(
    folders: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    for number, name in enumerate(folders):
        class_folders(tmp_path / "a", {"ant": range(4 * number, 4 * number + 4)}, below=name)
    with pytest.raises(RequestError, match=message):
        run(tmp_path / "a", tmp_path)


def test_empty_classes_and_those_without_validation_pictures_are_named(tmp_path: Path) -> None:
    class_folders(tmp_path / "a", {"ant": range(4), "bee": range(4, 8)}, below="train")
    source = class_folders(tmp_path / "a", {"ant": range(8, 10)}, below="val")
    for name in ("train/zoo", "val/bee", "train/.hidden"):
        (source / name).mkdir()
    facts = run(source, tmp_path)
    assert split_lines(facts) == [
        "validation files: val/ (2 pictures)",
        "class folders without a picture: train/zoo, val/bee",
        "classes without validation pictures: bee",
    ]
    flat = class_folders(tmp_path / "b", {"ant": range(4), "bee": range(4, 8)})
    (flat / "yak").mkdir()
    assert run(flat, tmp_path, eval_fraction=0).empty_classes == "yak"


def test_a_shard_named_test_is_trained_on_if_data_source_names_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name, numbers in {"test": range(4), "more": range(4, 9), "val": range(9, 11)}.items():
        content = tar_bytes({f"ant/{n}.jpg": saved(noise(n)) for n in numbers})
        (tmp_path / "a" / f"{name}-0.tar").write_bytes(content)
    facts = run(tmp_path / "a" / "test-0.tar", tmp_path, eval_fraction=0)
    assert (facts.train_samples, facts.eval_samples) == (4, 0)
    whole = run(tmp_path / "a", tmp_path)
    assert (whole.train_samples, whole.eval_samples) == (5, 2)
    assert (whole.validation_files, whole.left_out_files) == ("val-0.tar", "test-0.tar")


def test_a_test_split_in_a_tar_file_is_left_out_next_to_validation(tmp_path: Path) -> None:
    splits = {"train": range(5), "val": range(5, 8), "test": range(8, 10)}
    files = {f"{s}/ant/{n}.jpg": saved(noise(n)) for s, numbers in splits.items() for n in numbers}
    (tmp_path / "all.tar").write_bytes(tar_bytes(files))
    facts = run(tmp_path / "all.tar", tmp_path)
    assert (facts.train_samples, facts.eval_samples) == (5, 3)


def test_a_class_in_val_alone_is_refused(tmp_path: Path) -> None:
    class_folders(tmp_path / "a", {"ant": range(9)}, below="train")
    source = class_folders(tmp_path / "a", {"ant": range(9, 12), "bee": range(12, 14)}, below="val")
    with pytest.raises(
        RequestError, match=r"1 of 2 classes .* only in the validation split \(bee\)"
    ):
        run(source, tmp_path)


def test_shards_of_others_are_read_where_they_are(tmp_path: Path) -> None:
    source = tmp_path / "shards"
    source.mkdir()
    for number, format in enumerate((tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):
        content = shard(range(number * 20, number * 20 + 20))
        long = {f"{'long/' * 40}{name}": each for name, each in content.items()}
        kept = content if format == tarfile.USTAR_FORMAT else long
        (source / f"my-train-{number:06d}.tar").write_bytes(tar_bytes(kept, format))
    facts = run(source, tmp_path, eval_fraction=0.2)
    assert not [*Path(facts.dir).glob("*.tar")]
    found = pictures_of(facts)
    expected = sorted((str(n * 7 % 3), saved(noise(n))) for n in range(60))
    assert sorted(found["train"] + found["eval"]) == expected
    packed = run(source, tmp_path, {"pack": True}, eval_fraction=0.2)
    assert pictures_of(packed) == found


def test_the_parts_of_a_sample_may_stand_in_any_order(tmp_path: Path) -> None:
    content = shard(range(30))
    names = np.random.default_rng(0).permutation(sorted(content)).tolist()
    (tmp_path / "a.tar").write_bytes(tar_bytes({name: content[name] for name in names}))
    found = pictures_of(run(tmp_path / "a.tar", tmp_path))
    expected = sorted((str(n * 7 % 3), saved(noise(n))) for n in range(30))
    assert sorted(found["train"] + found["eval"]) == expected


def test_packed_tar_files_and_labels_in_json(tmp_path: Path) -> None:
    content = {f"{n}.png": saved(noise(n), "PNG") for n in range(30)}
    for n in range(30):
        content[f"{n}.json"] = json.dumps({"kind": "ab"[n % 2], "more": [1]}).encode()
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar_bytes(content)))
    with pytest.raises(SourceError, match=r"its .json has no 'label' \(it has kind, more\)"):
        run(tmp_path / "a.tar.gz", tmp_path)
    found = pictures_of(run(tmp_path / "a.tar.gz", tmp_path, {"label_key": "kind"}))
    assert [name for name, _ in sorted(found["train"] + found["eval"])] == ["a"] * 15 + ["b"] * 15


def test_parquet_of_hugging_face_with_its_class_names(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    names = ["cat", "dog", "bird"]
    parquet_file(tmp_path / "data" / "train-00000-of-00002.parquet", range(30), names)
    parquet_file(tmp_path / "data" / "train-00001-of-00002.parquet", range(30, 50), names)
    parquet_file(tmp_path / "data" / "test-00000-of-00001.parquet", range(50, 60), names)
    facts = run(tmp_path / "data", tmp_path)
    assert ImageIndex(Path(facts.dir), "train").classes == names
    expected = sorted((names[n % 3], saved(noise(n), "PNG")) for n in range(50, 60))
    assert pictures_of(facts)["eval"] == expected


def test_our_shards_are_as_webdataset_has_them(tmp_path: Path) -> None:
    facts = run(class_folders(tmp_path / "a", THREE), tmp_path, eval_fraction=0)
    (path,) = Path(facts.dir).glob("*.tar")
    with path.open("rb") as file:
        names = [member.name for member in members(file, str(path))]
    assert names[:2] == ["00000-000000.jpg", "00000-000000.cls"] and len(names) == 120
    assert pictures_of(run(path, tmp_path, eval_fraction=0)) == pictures_of(facts)


def test_a_second_call_does_nothing_and_another_folder_is_the_same_bytes(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "a", THREE)
    facts = run(source, tmp_path)
    before = {p: p.stat().st_mtime_ns for p in Path(facts.dir).iterdir()}
    assert run(source, tmp_path) == facts
    assert before == {p: p.stat().st_mtime_ns for p in Path(facts.dir).iterdir()}
    other = run(source, tmp_path / "other")
    assert other.fingerprint == facts.fingerprint


def contents(facts: DatasetMetadata) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(facts.dir).iterdir()}


class StoppedError(Exception):
    """What a kill is in a test."""


def test_what_was_finished_outlives_a_kill_and_changes_no_byte(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "a", {"ant": range(40), "bee": range(40, 80)})
    for picture in source.rglob("*.jpg"):  # large enough for several pieces
        picture.write_bytes(picture.read_bytes() + bytes(60_000))
    expected = contents(run(source, tmp_path / "one"))
    recipe = recipe_of(source, tmp_path / "two")
    seen: list[int] = []

    def stop_at_half(_: str, done_bytes: int, total_bytes: int) -> None:
        seen.append(done_bytes)
        if done_bytes > total_bytes / 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        prepare_images(recipe, model_dir=None, progress=stop_at_half)
    assert not [*tmp_path.glob("two/out/*/manifest.json")]
    stopped_at = seen[-1]
    seen.clear()
    facts = prepare_images(recipe, model_dir=None, progress=lambda _, n, __: seen.append(n))
    assert min(seen) > stopped_at
    found = contents(facts)
    assert found.keys() == expected.keys() and len(found) > 8
    assert all(found[name] == expected[name] for name in found)


@pytest.mark.heavy
def test_two_workers_write_the_same_bytes(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "a", THREE)
    for picture in source.rglob("*.jpg"):
        picture.write_bytes(picture.read_bytes() + bytes(60_000))
    one, two = run(source, tmp_path / "one"), run(source, tmp_path / "two", workers=2)
    assert contents(one) == contents(two)


def test_shards_that_nobody_shuffled_are_read_picture_by_picture(tmp_path: Path) -> None:
    mixed = [number * 7 % 5 for number in range(200)]
    blocks = {}
    for name, labels in (("mixed", mixed), ("sorted", sorted(mixed))):
        content = {}
        for number, label in enumerate(labels):
            content[f"{number:04d}.jpg"] = saved(noise(number))
            content[f"{number:04d}.cls"] = str(label).encode()
        (tmp_path / f"{name}.tar").write_bytes(tar_bytes(content))
        facts = run(tmp_path / f"{name}.tar", tmp_path, eval_fraction=0)
        blocks[name] = ImageIndex(Path(facts.dir), "train").window.block
    assert blocks["sorted"] == 1 < blocks["mixed"]


def test_what_cannot_stay_where_it_is_is_refused_where_that_is_asked_for(tmp_path: Path) -> None:
    parquet_file(tmp_path / "a.parquet", range(10))
    with pytest.raises(
        RequestError, match=r"data\.images\.pack=false.* of which no picture is read"
    ):
        run(tmp_path / "a.parquet", tmp_path, {"pack": False})


def test_every_file_can_be_verified(tmp_path: Path) -> None:
    facts = run(class_folders(tmp_path / "a", THREE), tmp_path)
    verify(Path(facts.dir))
    (path, *_) = Path(facts.dir).glob("*.tar")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=f"{path.name} is damaged: its SHA-256"):
        verify(Path(facts.dir))
