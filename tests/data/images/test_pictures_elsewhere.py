"""Pictures in a bucket: shards stay there and are read by ranges, class folders are packed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from shardyard.data.images.decode import DecodeThreads
from shardyard.data.images.index import ImageIndex
from shardyard.data.images.samples import ImageSet, ImageStream
from shardyard.data.images.transforms import CenterCrop
from shardyard.data.stores import s3
from shardyard.errors import RequestError
from tests.data.images.made import noise, saved, shard, tar_bytes
from tests.data.images.test_image_stream import SMALL
from tests.data.images.test_prepare_images import pictures_of, run
from tests.launchers.batch_server import BatchServer

VIEW = CenterCrop(size=8, share=1.0, resample=Image.Resampling.BILINEAR)

pytest.importorskip("boto3", reason="boto3 is an extra")
pytest.importorskip("moto", reason="moto is for development")
pytestmark = pytest.mark.heavy


@pytest.fixture
def server(moto: BatchServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchServer]:
    moto.reset()
    for name, value in moto.environ.items():
        monkeypatch.setenv(name, value)
    s3._client.cache_clear()
    moto.client("s3").create_bucket(Bucket="pictures")
    yield moto
    s3._client.cache_clear()


def test_a_bucket_gives_what_a_folder_gives(server: BatchServer, tmp_path: Path) -> None:
    place = tmp_path / "here"
    for split, numbers in (("train", range(30)), ("val", range(30, 40))):
        content = tar_bytes(shard(numbers))
        (place / split).mkdir(parents=True)
        (place / split / "a.tar").write_bytes(content)
        server.client("s3").put_object(Bucket="pictures", Key=f"s/{split}/a.tar", Body=content)
    for number in range(6):
        key = f"folders/{'ab'[number % 2]}/{number}.jpg"
        server.client("s3").put_object(Bucket="pictures", Key=key, Body=saved(noise(number)))

    there = run("s3://pictures/s", tmp_path)
    assert not [*Path(there.dir).glob("*.tar")]
    assert pictures_of(there) == pictures_of(run(place, tmp_path))

    index = ImageIndex(Path(there.dir), "train")
    index.window = SMALL
    pictures = ImageSet(index, VIEW, size=8, cache_bytes=2**20)
    stream = ImageStream(pictures, DecodeThreads(2), seed=0)
    for start in range(0, 30, 6):
        stream.micro_batch(range(start, start + 6), 6)
    blocks = -(-30 // SMALL.block)
    assert pictures.contents.num_reads == blocks

    folders = run("s3://pictures/folders", tmp_path, eval_fraction=0)
    expected = sorted(("ab"[n % 2], saved(noise(n))) for n in range(6))
    assert pictures_of(folders)["train"] == expected
    with pytest.raises(RequestError, match=r"data\.images\.pack=false"):
        run("s3://pictures/folders", tmp_path, {"pack": False}, eval_fraction=0)
