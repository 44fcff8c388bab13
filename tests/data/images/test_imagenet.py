"""ImageNet's own tree is read as class folders, whole or refused with what is missing."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.schema.recipe import Recipe
from shardyard.data.images.sources import Listing, list_images
from shardyard.data.images.tar import content_of
from shardyard.errors import RequestError, ShardyardError, SourceError
from tests.data.images.ilsvrc import BOXES, CLASSES, tar_of, tree


def _list(source: Path, **images: Any) -> Listing:
    given = {"complete": False, **images}
    data = {"source": str(source), "images": {k: v for k, v in given.items() if v is not None}}
    return list_images(Recipe.model_validate({"data": data}))


def _sorted(listing: Listing) -> dict[str, tuple[str | None, str]]:
    return {
        Path(file.name).stem: (listing.split_of(file), listing.class_of(file))
        for file in listing.files
    }


@pytest.mark.parametrize(
    ("place", "by_solution"), [("ILSVRC", False), (".", False), (".", True)]
)  # the solution lies beside the tree
def test_val_is_sorted_into_classes(tmp_path: Path, place: str, by_solution: bool) -> None:
    tree(tmp_path, by_solution=by_solution)
    listing = _list(tmp_path / place)
    found = _sorted(listing)
    assert found["ILSVRC2012_val_00000001"] == ("eval", CLASSES[0])
    assert found["ILSVRC2012_val_00000002"] == ("eval", CLASSES[1])
    assert found["n15075141_3"] == ("train", CLASSES[1])
    assert Counter(split for split, _ in found.values()) == {"train": 16, "eval": 4}
    assert listing.kind == "folders" and "test" not in str(sorted(found))


def test_a_val_that_is_in_class_folders_needs_no_annotations(tmp_path: Path) -> None:
    root = tree(tmp_path, val=1)
    val = root / "Data/CLS-LOC/val"
    (val / CLASSES[1]).mkdir()
    (val / "ILSVRC2012_val_00000001.JPEG").rename(val / CLASSES[1] / "ILSVRC2012_val_00000001.JPEG")
    (root / "Annotations/CLS-LOC/val/ILSVRC2012_val_00000001.xml").unlink()
    assert _sorted(_list(root))["ILSVRC2012_val_00000001"] == ("eval", CLASSES[1])


def test_a_tar_file_of_the_tree_is_the_tree(tmp_path: Path) -> None:
    root = tree(tmp_path)
    folder, packed = _list(root), _list(tar_of(root, tmp_path / "imagenet.tar"))
    assert _sorted(packed) == _sorted(folder)
    contents = [{file.name: content_of(file) for file in each.files} for each in (folder, packed)]
    assert contents[0] == contents[1]


def test_a_tar_file_that_has_become_shorter_is_named(tmp_path: Path) -> None:
    packed = tar_of(tree(tmp_path), tmp_path / "imagenet.tar")
    last = max(_list(packed).files, key=lambda file: getattr(file, "offset", 0))
    packed.write_bytes(packed.read_bytes()[:2000])
    with pytest.raises(SourceError, match=r"imagenet.tar, member ILSVRC/.*JPEG changed while"):
        content_of(last)
    packed.unlink()
    with pytest.raises(SourceError, match=r"cannot be read: No such file or directory. Check"):
        content_of(last)


def test_a_tree_with_gaps_says_which_pictures_are_missing(tmp_path: Path) -> None:
    root = tree(tmp_path)
    (root / "Data/CLS-LOC/train/n15075141/n15075141_3.JPEG").unlink()
    (root / "Data/CLS-LOC/val/ILSVRC2012_val_00000002.JPEG").unlink()
    with pytest.raises(SourceError) as refused:
        _list(root, complete=None)
    told = str(refused.value)
    assert "15 of 1,281,167 in train and 3 of 50,000 in val and 2 of 1,000 classes" in told
    assert "missing are train/n15075141_3.JPEG, val/ILSVRC2012_val_00000002.JPEG. Copy" in told
    assert "data.images.complete=false" in told


def test_without_lists_numbers_say_what_is_missing_of_val(tmp_path: Path) -> None:
    root = tree(tmp_path)
    for path in (root / "ImageSets/CLS-LOC").iterdir():
        path.unlink()
    words = r"val/ILSVRC2012_val_00000005.JPEG, .* and 49,992 more"
    with pytest.raises(SourceError, match=words):
        _list(root, complete=None)


def _without_annotations(root: Path) -> Path:
    (root / "Annotations/CLS-LOC/val/ILSVRC2012_val_00000003.xml").unlink()
    return root


def _annotation(text: str) -> Any:
    def write(root: Path) -> Path:
        (root / "Annotations/CLS-LOC/val/ILSVRC2012_val_00000003.xml").write_text(text)
        return root

    return write


def _val_alone(root: Path) -> Path:
    return root / "Data/CLS-LOC"


def _flat_train(root: Path) -> Path:
    train = root / "Data/CLS-LOC/train"
    (train / "n15075141/n15075141_0.JPEG").rename(train / "n15075141_0.JPEG")
    return root


EXPANDS = '<!DOCTYPE a [<!ENTITY b "n01440764"><!ENTITY c "&b;&b;&b;">]>\n'
WRONG: list[tuple[Any, type[ShardyardError], str]] = [
    (_without_annotations, SourceError, "1 pictures of val have no class: neither LOC_val_solut"),
    (_annotation("<annotation><object>"), SourceError, "00000003.xml is not XML: no element found"),
    (_annotation(EXPANDS + BOXES), SourceError, "it declares a document type, which no annotation"),
    (
        _annotation(BOXES.format(name="x", wnid="cat")),
        SourceError,
        "says cat, not one class such",
    ),
    (_annotation("<annotation/>"), SourceError, "says nothing, not one class such as n01440764"),
    (
        _annotation("<annotation>" + " " * 2**20),
        SourceError,
        "is not an annotation: it has 1,048,588 b",
    ),
    (_val_alone, RequestError, "what says their classes lies elsewhere. Name the folder ILSVRC"),
    (_flat_train, SourceError, "1 pictures of train lie in no folder of a class: Data/CLS-LOC/tra"),
    (
        lambda root: tar_of(root, root.parent / "i.tar.gz", mode="w:gz"),
        RequestError,
        "i.tar.gz is ImageNet in one tar file, which is compressed: its 1.3 million pictures",
    ),
]


@pytest.mark.parametrize(("spoil", "kind", "words"), WRONG)
def test_what_is_wrong_with_the_tree_is_named(
    tmp_path: Path, spoil: Any, kind: type[ShardyardError], words: str
) -> None:
    source = spoil(tree(tmp_path))
    with pytest.raises(kind) as refused:
        _list(source)
    assert words in str(refused.value)


def test_a_solution_that_says_two_classes_is_named(tmp_path: Path) -> None:
    tree(tmp_path, by_solution=True)
    path = tmp_path / "LOC_val_solution.csv"
    path.write_text(path.read_text().replace("n01440764 5 6", "n15075141 5 6", 1))
    with pytest.raises(SourceError, match=r"csv, line 2 says n01440764, n15075141, not one"):
        _list(tmp_path)


def test_what_must_be_there_of_imagenet_is_not_asked_of_others(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(b"")
    with pytest.raises(RequestError, match=r"data.images.complete=False says which pictures of"):
        _list(tmp_path)
    assert _list(tmp_path, complete=None).kind == "folders"
