"""ImageNet's tree is prepared from a folder, a tar file and a bucket: the same pictures, and a call
that was killed goes on."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.data.images.index import ImageIndex
from shardyard.data.images.prepare import prepare_images
from shardyard.data.stores import s3
from shardyard.errors import RequestError
from tests.data.images.ilsvrc import CLASSES, tar_of, tree
from tests.launchers.batch_server import BatchServer

pytestmark = pytest.mark.heavy

LARGE = (640, 480)
"""Pixels: some hundred KB a picture in the form that they are written, so that there are pieces."""


def _recipe(source: Path | str, out: Path, **images: object) -> Recipe:
    data = {"source": str(source), "dir": str(out), "workers": 1}
    return Recipe.model_validate({"data": {**data, "images": {"complete": False, **images}}})


def _prepare(source: Path | str, out: Path) -> DatasetMetadata:
    recipe = _recipe(source, out)
    return prepare_images(recipe, model_dir=None, progress=lambda *_: None)


def _labels(facts: DatasetMetadata) -> dict[str, list[str]]:
    """Split -> class of each picture by its place in the order of packing."""
    found = {}
    for split in ("train", "eval"):
        index = ImageIndex(Path(facts.dir), split)
        found[split] = [index.classes[row["label"]] for row in index.rows]
    return found


def test_folder_and_tar_file_are_the_same_data(tmp_path: Path) -> None:
    root = tree(tmp_path)
    folder = _prepare(root, tmp_path / "a")
    packed = _prepare(tar_of(root, tmp_path / "imagenet.tar"), tmp_path / "b")
    assert (folder.num_classes, folder.train_samples, folder.eval_samples) == (2, 16, 4)
    assert sorted(_labels(folder)["eval"]) == sorted([*CLASSES, *CLASSES])
    assert _labels(packed) == _labels(folder)
    assert packed.fingerprint == folder.fingerprint
    with pytest.raises(RequestError, match=r"data.images.pack=false: "):
        recipe = _recipe(tmp_path / "imagenet.tar", tmp_path / "c", pack=False)
        prepare_images(recipe, model_dir=None, progress=lambda *_: None)


def test_other_annotations_are_other_data(tmp_path: Path) -> None:
    root = tree(tmp_path)
    before = _prepare(root, tmp_path / "out")
    for path in (root / "Annotations/CLS-LOC/val").iterdir():
        path.write_text(path.read_text().replace(CLASSES[0], CLASSES[1]))
    after = _prepare(root, tmp_path / "out")
    assert after.dir != before.dir
    assert _labels(after)["eval"] == [CLASSES[1]] * 4


@pytest.fixture
def server(moto: BatchServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchServer]:
    moto.reset()
    for name, value in moto.environ.items():
        monkeypatch.setenv(name, value)
    s3._client.cache_clear()
    yield moto
    s3._client.cache_clear()


def test_a_bucket_is_the_same_data(tmp_path: Path, server: BatchServer) -> None:
    root = tree(tmp_path)
    client = server.client("s3")
    client.create_bucket(Bucket="pictures")
    for path in root.rglob("*.*"):
        key = f"all/ILSVRC/{path.relative_to(root)}"
        client.put_object(Bucket="pictures", Key=key, Body=path.read_bytes())
    folder = _prepare(root, tmp_path / "a")
    bucket = _prepare("s3://pictures/all", tmp_path / "b")
    assert _labels(bucket) == _labels(folder)
    assert bucket.fingerprint == folder.fingerprint
    tar = tar_of(root, tmp_path / "i.tar").read_bytes()
    client.put_object(Bucket="pictures", Key="one/imagenet.tar", Body=tar)
    with pytest.raises(RequestError, match=r"is ImageNet in one tar file, which lies elsewhere"):
        _prepare("s3://pictures/one/imagenet.tar", tmp_path / "c")


DIES = """\
import os, signal, sys
from pathlib import Path
from shardyard.data.images.prepare import prepare_images
from tests.data.images.test_imagenet_prepare import _recipe

def progress(*_):
    os.kill(os.getpid(), signal.SIGKILL)

prepare_images(_recipe(sys.argv[1], Path(sys.argv[2])), model_dir=None, progress=progress)
"""


def test_a_killed_call_goes_on_and_the_result_is_the_same(tmp_path: Path) -> None:
    root = tree(tmp_path, train=12, size=LARGE)
    died = subprocess.run(
        [sys.executable, "-c", DIES, str(root), str(tmp_path / "out")], check=False
    )
    assert died.returncode == -signal.SIGKILL
    done: list[tuple[int, int]] = []
    recipe = _recipe(root, tmp_path / "out")
    facts = prepare_images(
        recipe, model_dir=None, progress=lambda _what, at, of: done.append((at, of))
    )
    undisturbed = _prepare(root, tmp_path / "other")
    assert _manifest(facts)["files"] == _manifest(undisturbed)["files"]
    pieces = len(list(Path(undisturbed.dir).glob("train-*.tar")))
    assert pieces > 1 and len(done) == pieces - 1 and done[0][0] > 0
    again = prepare_images(recipe, model_dir=None, progress=lambda *_: pytest.fail("does it again"))
    assert again == facts


def _manifest(facts: DatasetMetadata) -> dict[str, object]:
    read: dict[str, object] = json.loads((Path(facts.dir) / "manifest.json").read_text())
    return read
