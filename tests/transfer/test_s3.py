"""Against moto's S3 over HTTP: what is there is what was sent, whatever happened on the way."""

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardyard.errors import AccessError, DataError, LostError, RequestError
from shardyard.io.aws import s3_client
from shardyard.io.digests import COMPLETE, FolderDigests, write_digests
from shardyard.io.object_store import S3Location, parse_location
from shardyard.transfer.download import receive_whole
from shardyard.transfer.s3 import S3Source, upload
from tests.launchers.batch_server import BatchServer
from tests.transfer.s3_front import HANG_UP, Front, s3_front

pytest.importorskip("boto3", reason="boto3 is an extra")
pytest.importorskip("moto", reason="moto is for development")

pytestmark = pytest.mark.heavy

PART = 5 * 2**20
CONTENT = {
    "config.json": b"{}",
    "model-1.safetensors": bytes(range(256)) * 4096 * 6,  # 6 MiB: two parts
    "inner/words.txt": b"words",
    "empty": b"",
}
PLACE = S3Location(bucket="models", prefix="mine/tuned")


@pytest.fixture(scope="module")
def one_front(moto: BatchServer) -> Iterator[tuple[Front, Any]]:
    """A front and a client of it, which takes a second to make."""
    with s3_front(moto.url) as front, pytest.MonkeyPatch.context() as patch:
        for name, value in {**moto.environ, "AWS_ENDPOINT_URL": front.url}.items():
            patch.setenv(name, value)
        yield front, s3_client()


@dataclass
class World:
    server: BatchServer
    front: Front
    client: Any
    folder: Path
    complete: FolderDigests

    def send(self, place: S3Location = PLACE, **more: Any) -> bool:
        complete = more.pop("complete", self.complete)
        return upload(
            self.client, self.folder, complete, place, told=ignore, part_bytes=PART, **more
        )

    @property
    def source(self) -> S3Source:
        return S3Source(client=self.client, location=PLACE)

    @property
    def s3(self) -> Any:
        """The tests' own client, past the front."""
        return self.server.client("s3")

    def objects(self) -> dict[str, bytes]:
        found = self.s3.list_objects_v2(Bucket="models").get("Contents", [])
        return {
            each["Key"]: self.s3.get_object(Bucket="models", Key=each["Key"])["Body"].read()
            for each in found
        }


def ignore(_name: str, _size: int) -> None:
    """Nobody looks."""


@pytest.fixture
def world(moto: BatchServer, one_front: tuple[Front, Any], tmp_path: Path) -> World:
    moto.reset()
    moto.client("s3").create_bucket(Bucket="models")
    front, client = one_front
    front.forget()
    folder = tmp_path / "hf"
    for name, content in CONTENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    complete = write_digests(folder, {"step": 3})
    return World(moto, front, client, folder, complete)


def test_what_was_sent_is_there_and_comes_back_the_same(world: World, tmp_path: Path) -> None:
    assert world.send() is True
    there = world.objects()
    names = {*CONTENT, COMPLETE}
    assert there == {f"mine/tuned/{name}": (world.folder / name).read_bytes() for name in names}
    puts = [path for method, path in world.front.requests if method == "PUT"]
    assert puts[-1].endswith("mine/tuned/complete.json")  # the commit
    assert world.front.sent("PUT", "partNumber=") == 2

    source = world.source
    found = source.complete()
    assert found == world.complete
    world.front.cuts_after = [0, 3_000_000, 5]
    receive_whole(
        source,
        found.files,
        tmp_path / "back",
        on_progress=ignore,
        complete=found,
        sleep=lambda _: None,
    )
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (world.folder / name).read_bytes()


def test_s3_keeps_the_sha256_of_each_object(world: World) -> None:
    world.send()
    key = "mine/tuned/model-1.safetensors"
    head = world.s3.head_object(Bucket="models", Key=key, ChecksumMode="ENABLED")
    content = CONTENT["model-1.safetensors"]
    parts = [content[start : start + PART] for start in range(0, len(content), PART)]
    joined = b"".join(hashlib.sha256(part).digest() for part in parts)
    wanted = base64.b64encode(hashlib.sha256(joined).digest()).decode()
    # S3 writes the number of parts behind it, moto does so in another answer only
    assert head["ChecksumSHA256"].removesuffix("-2") == wanted


def test_a_call_that_is_repeated_sends_only_what_is_missing(world: World) -> None:
    world.send()
    world.s3.delete_object(Bucket="models", Key="mine/tuned/config.json")
    world.s3.put_object(Bucket="models", Key="mine/tuned/inner/words.txt", Body=b"w0rds")
    world.front.requests.clear()
    assert world.send() is True
    puts = [path.partition("?")[0] for method, path in world.front.requests if method == "PUT"]
    assert [path.rpartition("/")[2] for path in puts] == ["config.json", "words.txt", COMPLETE]
    world.front.requests.clear()
    assert world.send() is False
    assert world.front.sent("PUT", "") + world.front.sent("POST", "") == 0


def test_an_upload_that_breaks_off_is_not_whole_and_is_gone_on_with(world: World) -> None:
    world.front.failures["PUT", "partNumber=2"] = [HANG_UP] * 6
    with pytest.raises(LostError, match=r"cannot write to s3://models/mine/tuned: .*then repeat"):
        world.send()
    assert "mine/tuned/complete.json" not in world.objects()
    assert world.s3.list_multipart_uploads(Bucket="models").get("Uploads", []) == []
    with pytest.raises(RequestError, match=r"holds no complete\.json.*upload was interrupted"):
        world.source.complete()
    world.front.failures.clear()
    assert world.send() is True
    assert len(world.objects()) == 5


def test_parts_of_a_killed_upload_are_ended_by_the_next(world: World) -> None:
    s3 = world.s3
    key = "mine/tuned/model-1.safetensors"
    s3.create_multipart_upload(Bucket="models", Key=key)  # what SIGKILL leaves
    world.send()
    assert s3.list_multipart_uploads(Bucket="models").get("Uploads", []) == []


def test_a_store_that_keeps_no_checksums_is_read_back(world: World) -> None:
    world.front.drops = ("x-amz-checksum",)
    assert world.send() is True
    assert world.front.sent("GET", "mine/tuned/model-1.safetensors") == 1
    assert world.send() is False


def test_a_store_that_keeps_something_else_is_told(world: World) -> None:
    world.front.drops = ("x-amz-checksum",)
    world.front.garbles = True
    with pytest.raises(DataError, match="is not what was sent"):
        world.send()
    assert "mine/tuned/complete.json" not in world.objects()


def test_another_export_under_the_prefix_is_not_mixed_with(world: World) -> None:
    world.send()
    other = FolderDigests(files=world.complete.files, provenance={"step": 9})
    with pytest.raises(RequestError, match=r"something else already: 4 files.*made of step 3"):
        world.send(complete=other)
    world.s3.put_object(Bucket="models", Key="other/notes.txt", Body=b"")
    with pytest.raises(RequestError, match=r"is not empty: it holds 'other/notes.txt'"):
        world.send(S3Location(bucket="models", prefix="other"))


def test_the_files_of_a_run_are_brought_up_to_date(world: World) -> None:
    world.send(
        complete=FolderDigests(files=world.complete.files, provenance={"run": "r", "steps": [1]})
    )
    newer = FolderDigests(files=world.complete.files, provenance={"run": "r", "steps": [2]})
    assert world.send(complete=newer, replaces=True) is True
    assert world.source.complete() == newer
    with pytest.raises(RequestError, match="holds something else already"):
        another = FolderDigests(files=world.complete.files, provenance={"run": "s"})
        world.send(complete=another, replaces=True)


def test_a_file_that_changed_meanwhile_is_told_and_not_kept(world: World) -> None:
    (world.folder / "model-1.safetensors").write_bytes(b"\0" * len(CONTENT["model-1.safetensors"]))
    with pytest.raises(DataError, match=r"model-1.safetensors changed while it was read"):
        world.send()
    assert "mine/tuned/model-1.safetensors" not in world.objects()


def test_a_bucket_that_is_not_there_is_told_with_how_to_make_it(world: World) -> None:
    with pytest.raises(
        RequestError, match=r"bucket 'nobodys' does not exist.*aws s3 mb s3://nobodys"
    ):
        world.send(S3Location(bucket="nobodys", prefix="x"))


def test_without_the_right_the_rights_are_named(world: World) -> None:
    world.front.failures["PUT", "config.json"] = [(403, "AccessDenied")]
    with pytest.raises(AccessError, match=r"AccessDenied it is.*s3:PutObject, s3:Get") as told:
        world.send()
    assert told.value.exit_code == 4


@pytest.mark.parametrize("region", ["eu-west-1", None])
def test_a_bucket_of_another_region_is_told_with_the_region(
    world: World, region: str | None
) -> None:
    world.front.failures["GET", "complete.json"] = [(301, "PermanentRedirect")] * 6
    world.front.headers = {"x-amz-bucket-region": region} if region else {}
    with pytest.raises(RequestError, match=f"AWS_REGION={region or '<its region>'}"):
        world.send()


def test_without_credentials_it_is_said_how_to_get_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AccessError, match=r"Unable to locate credentials.*aws configure"):
        upload(s3_client(), world.folder, world.complete, PLACE, told=ignore)


@pytest.mark.parametrize(
    "text", ["s3://", "s3://bucket", "s3://bucket/", "s3:bucket/x", "s3://B/x", "s3://b-1/../x"]
)
def test_what_is_no_place_in_s3_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(RequestError, match=r"Give s3://bucket/prefix, such as"):
        parse_location(text)
    assert str(parse_location("s3://models/a/b/")) == "s3://models/a/b"
