"""Text from a bucket of moto's S3: the same bytes as from here, over connections that break."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.data.prepare import prepare
from shardyard.data.readers.columns import TextOf
from shardyard.data.sources import list_files, read_sections, split_into_pieces
from shardyard.data.stores import range_reader, s3
from shardyard.errors import AccessError, LostError, RequestError, SourceError
from tests.data.cutting_proxy import Proxy, cutting_proxy
from tests.launchers.batch_server import BatchServer
from tests.transfer.s3_front import Front, s3_front

pytest.importorskip("boto3", reason="boto3 is an extra")
pytest.importorskip("moto", reason="moto is for development")
pytestmark = pytest.mark.heavy

ROWS = [{"text": f"text {number} é " * (number % 50), "n": number} for number in range(500)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@dataclass
class World:
    server: BatchServer
    proxy: Proxy
    front: Front
    folder: Path

    def put(self, key: str, content: bytes) -> None:
        self.server.client("s3").put_object(Bucket="corpus", Key=key, Body=content)

    def prepared(self, source: str | Path, **settings: Any) -> DatasetMetadata:
        return prepare(self.recipe(source, **settings), model_dir=None, progress=lambda *_: None)

    def recipe(self, source: str | Path, **settings: Any) -> Recipe:
        data = {"source": str(source), "dir": str(self.folder / "out"), "vocab_size": 400}
        return Recipe.model_validate({"data": {**data, "workers": 1, **settings}})


@pytest.fixture
def world(moto: BatchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A bucket behind a connection that breaks, behind a server that fails as it is told."""
    moto.reset()
    moto.client("s3").create_bucket(Bucket="corpus")
    with s3_front(moto.url) as front, cutting_proxy(front.url) as proxy:
        for name, value in {**moto.environ, "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(range_reader, "_LONGEST_PAUSE_S", 0.01)
        s3._client.cache_clear()
        yield World(moto, proxy, front, tmp_path)
    s3._client.cache_clear()


def names(source: str | tuple[str, ...]) -> list[str]:
    return [file.path.removeprefix("s3://corpus/") for file in list_files(source)]


def test_a_prefix_is_a_folder_and_a_glob_names_what_fits(world: World) -> None:
    for key in ("t/b.txt", "t/a.jsonl", "t/in/c.md", "t/in/d.txt", "tt/e.txt", "t2.txt"):
        world.put(key, LINES)
    for key in ("t/.hidden.txt", "t/.git/x.txt", "t/in/__pycache__/x.pyc", "t/in/"):
        world.put(key, b"")
    all_of_t = ["t/a.jsonl", "t/b.txt", "t/in/c.md", "t/in/d.txt"]
    assert names("s3://corpus/t") == names("s3://corpus/t/") == all_of_t
    assert names("s3://corpus/t/b.txt") == ["t/b.txt"]
    assert names("s3://corpus/t/*.txt") == ["t/b.txt"]
    assert names("s3://corpus/t*/*.txt") == ["t/b.txt", "tt/e.txt"]
    assert names("s3://corpus/t/**/*.txt") == ["t/b.txt", "t/in/d.txt"]
    assert names(("s3://corpus/t2.txt", "s3://corpus/t?.txt")) == ["t2.txt"]
    for key in ("[r]*/a/x?.txt", "[r]*/a/xy.txt", "rr/a/x.txt"):
        world.put(key, LINES)
    assert names("s3://corpus/[r]*/a/x?.txt") == ["[r]*/a/x?.txt"]
    assert names("s3://corpus/[r]*/*/*.txt") == ["[r]*/a/x?.txt", "[r]*/a/xy.txt"]
    assert names("s3://corpus/[r]*/a/") == ["[r]*/a/x?.txt", "[r]*/a/xy.txt"]
    assert names("s3://corpus/[r]r/**/*.txt") == ["rr/a/x.txt"]
    for key in ("[r]*/a/x?.txt", "[r]*/a/xy.txt", "rr/a/x.txt"):
        world.server.client("s3").delete_object(Bucket="corpus", Key=key)
    assert names("s3://corpus") == [*all_of_t, "t2.txt", "tt/e.txt"]


def test_many_forms_from_a_bucket_are_prepared_into_the_bytes_of_plain_lines_here(
    world: World,
) -> None:
    import gzip

    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an extra")
    parquet = pytest.importorskip("pyarrow.parquet")
    zstd = pytest.importorskip("backports.zstd", reason="backports.zstd is an extra")
    here = world.folder / "text"
    here.mkdir()
    for name in ("a", "b", "c", "d"):
        (here / f"{name}.jsonl").write_bytes(LINES)
    world.put("text/a.jsonl", LINES)
    world.put("text/b.jsonl.zst", zstd.compress(LINES))
    world.put("text/c.jsonl.gz", gzip.compress(LINES))
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink, row_group_size=100)
    world.put("text/d.parquet", sink.getvalue().to_pybytes())
    world.proxy.cuts = [100, 3000, 40_000, 200, 90_000, 500, 10_000, 700, 2000]
    far = world.prepared("s3://corpus/text")
    assert world.proxy.num_cut >= 5  # a connection that ends before its cut counts for none
    assert far.fingerprint == world.prepared(here).fingerprint
    with pytest.raises(SourceError, match=r"d\.parquet: no column 'body' \(its columns: n, text\)"):
        world.prepared("s3://corpus/text/d.parquet", text_key="body")
    with pytest.raises(SourceError, match=r"s3://corpus/text/a\.jsonl:1: no key 'body'"):
        world.prepared("s3://corpus/text/a.jsonl", text_key="body")


def test_workers_share_a_large_file_of_a_bucket(world: World) -> None:
    content = LINES * 24  # four pieces
    assert len(content) > 3 * 2**20
    (world.folder / "x.jsonl").write_bytes(content)
    world.put("x.jsonl", content)
    world.proxy.cuts = [300_000] * 12
    path = world.folder / "recipe.json"
    path.write_text(world.recipe("s3://corpus/x.jsonl", workers=2).model_dump_json())
    command = [sys.executable, "-m", "shardyard.data", str(path)]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert world.proxy.num_cut >= 10
    here = world.prepared(world.folder / "x.jsonl")
    assert json.loads(done.stdout)["fingerprint"] == here.fingerprint
    for secret in world.server.environ["AWS_SECRET_ACCESS_KEY"], "Signature=":
        assert secret.encode() not in done.stdout + done.stderr


def test_another_object_of_the_same_size_is_prepared_anew(world: World) -> None:
    world.put("x.jsonl", LINES)
    first = world.prepared("s3://corpus/x.jsonl")
    assert world.prepared("s3://corpus/x.jsonl").dir == first.dir
    world.put("x.jsonl", LINES.replace(b"text 1", b"test 1"))
    assert world.prepared("s3://corpus/x.jsonl").dir != first.dir


@pytest.mark.parametrize(
    ("now", "how"),
    [
        (b"x" * 2_000_000, "etag is another"),
        (b"x", "etag is another|shorter"),
        (None, "it is gone"),
    ],
)
def test_an_object_that_changes_in_the_middle_is_refused(
    world: World, now: bytes | None, how: str
) -> None:
    world.put("x.jsonl", LINES * 8)
    (piece,) = split_into_pieces(list_files("s3://corpus/x.jsonl"), 2**27)
    sections = read_sections(piece, TextOf())
    next(sections)
    if now is None:
        world.server.client("s3").delete_object(Bucket="corpus", Key="x.jsonl")
    else:
        world.put("x.jsonl", now)
    message = rf"s3://corpus/x\.jsonl changed since it was listed: .*({how}).*Prepare again"
    with pytest.raises(SourceError, match=message):
        list(sections)


def test_the_etag_is_a_condition_of_each_range(world: World) -> None:
    world.put("x.jsonl", LINES * 8)
    (file,) = list_files("s3://corpus/x.jsonl")
    world.put("x.jsonl", LINES * 9)
    world.front.drops = ("etag",)
    with pytest.raises(SourceError, match="its etag is another one"):
        next(s3.S3Store().read(file, 0, 10))


def test_a_store_that_knows_no_conditions_is_held_to_the_etag_too(world: World) -> None:
    world.put("x.jsonl", LINES * 8)
    (file,) = list_files("s3://corpus/x.jsonl")
    world.put("x.jsonl", LINES * 9)
    world.front.ignores = ("if-match",)
    with pytest.raises(SourceError, match="its etag is another one"):
        next(s3.S3Store().read(file, 0, 10))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("s3://nobodys/x", r"cannot list s3://nobodys/x: bucket 'nobodys' does not exist.*Correct"),
        ("s3://corpus/x.jsonl", r"'s3://corpus/x\.jsonl' does not exist: .*Correct the address"),
        ("s3://corpus/*.txt", r"no file matches '\*\.txt' in s3://corpus\. Correct the pattern"),
        ("s3://corp*/x.txt", r"has a wildcard in the name of a bucket.*wildcards behind it"),
        ("s3://b!/x", r"names no bucket that can be\. Give s3://bucket/folder"),
        ("s3:///x", r"names no bucket that can be\. Give s3://bucket/folder"),
    ],
)
@pytest.mark.usefixtures("world")
def test_what_is_not_there_is_told(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        list_files(source)


def test_without_the_right_the_rights_are_named(world: World) -> None:
    world.put("t/x.jsonl", LINES)
    world.front.failures = {("GET", "list-type"): [(403, "AccessDenied")] * 3}
    with pytest.raises(AccessError, match=r"cannot list s3://.*Needed are s3:ListBucket") as told:
        list_files("s3://corpus/t")
    assert told.value.exit_code == 4
    world.front.failures = {("GET", "/t/x.jsonl"): [(403, "AccessDenied")] * 3}
    with pytest.raises(AccessError, match=r"cannot read s3://corpus/t/x\.jsonl: .*s3:GetObject"):
        world.prepared("s3://corpus/t")


def test_a_server_that_is_busy_for_a_while_is_asked_again(world: World) -> None:
    world.put("x.jsonl", LINES)
    world.front.failures = {("GET", "/x.jsonl"): [(503, "SlowDown")] * 5}
    world.prepared("s3://corpus/x.jsonl")
    world.front.failures = {("GET", "/x.jsonl"): [(503, "SlowDown")] * 99}
    with pytest.raises(LostError, match=r"S3 itself failed \(SlowDown\).*prepare again: finished"):
        world.prepared("s3://corpus/x.jsonl", vocab_size=300)
    assert len(world.front.failures["GET", "/x.jsonl"]) > 80


@pytest.mark.usefixtures("world")
def test_without_an_endpoint_it_is_said_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3._client.cache_clear()
    with pytest.raises(LostError, match=r"Check the network and AWS_ENDPOINT_URL, then prepare ag"):
        list_files("s3://corpus/x.jsonl")


@pytest.mark.usefixtures("world")
def test_without_credentials_or_boto3_it_is_said_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3._client.cache_clear()
    with pytest.raises(AccessError, match=r"Unable to locate credentials.*aws configure"):
        list_files("s3://corpus/x.jsonl")
    monkeypatch.setitem(sys.modules, "boto3.session", None)
    s3._client.cache_clear()
    with pytest.raises(RequestError, match=r"boto3, which is not installed.*'shardyard\[aws\]'"):
        list_files("s3://corpus/x.jsonl")
