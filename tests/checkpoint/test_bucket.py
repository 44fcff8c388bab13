"""Checkpoints in a bucket of moto's S3: whole or not there, whatever happened on the way."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardyard.checkpoint import bucket_lease, uploads
from shardyard.checkpoint.bucket import RunBucket
from shardyard.checkpoint.bucket_lease import LEASE, BucketLease
from shardyard.checkpoint.download import fetch_newer
from shardyard.checkpoint.retention import complete_steps, read_pointer
from shardyard.checkpoint.save import Saver
from shardyard.checkpoint.upload_protocol import NotUploaded, Uploaded
from shardyard.checkpoint.uploads import Uploads
from shardyard.checkpoint.verify import verify_manifest
from shardyard.errors import RequestError
from shardyard.io import object_store
from shardyard.io.aws import s3_client
from shardyard.io.object_store import parse_location
from tests.launchers.batch_server import BatchServer
from tests.transfer.s3_front import Front, s3_front

pytest.importorskip("boto3", reason="boto3 is an extra")
pytest.importorskip("moto", reason="moto is for development")
pytestmark = pytest.mark.heavy

TO = parse_location("s3://runs/team")


@dataclass
class World:
    server: BatchServer
    front: Front
    group: dist.ProcessGroup
    folder: Path

    def bucket(self) -> RunBucket:
        return RunBucket(TO, "run-1")

    def names(self) -> list[str]:
        found = self.server.client("s3").list_objects_v2(Bucket="runs", Prefix="team/run-1/")
        return [each["Key"].removeprefix("team/run-1/") for each in found.get("Contents", [])]

    def steps(self) -> list[int]:
        return [each.step for each in self.bucket().checkpoints()]

    def unfinished(self) -> list[Any]:
        found = self.server.client("s3").list_multipart_uploads(Bucket="runs")
        uploads: list[Any] = found.get("Uploads", [])
        return uploads

    def saver(self, opened: Uploads, *, keep_last: int = 2) -> Saver:
        return Saver(
            self.folder / "checkpoints", group=self.group, rank=0, world_size=1,
            keep_last=keep_last, uploads=opened,
        )  # fmt: skip

    def uploads(self, *, keep_last: int = 2, rank: int = 0) -> Uploads:
        place = self.folder / "checkpoints"
        return Uploads(self.bucket(), place, rank=rank, lease=None, keep_last=keep_last)

    def save(self, *steps: int, size: int = 1000, best: tuple[int, ...] = ()) -> list[Any]:
        """Save and upload, one after the other; the outcomes of the uploads."""
        opened, outcomes = self.uploads(), list[Any]()
        saver = self.saver(opened)
        for step in steps:
            tensors = {"model.w": torch.full((size,), float(step))}
            saver.save(step, tensors, {"step": step}, is_best=step in best)
            saver.wait()
            outcomes += wait_for_uploads(opened)
        saver.close()
        opened.close()
        return outcomes


def wait_for_uploads(opened: Uploads) -> list[Any]:
    while opened.unfinished:
        time.sleep(0.01)
    return list(opened.poll())


@pytest.fixture(scope="module")
def one_front(moto: BatchServer) -> Iterator[Front]:
    with s3_front(moto.url) as front, pytest.MonkeyPatch.context() as patch:
        for name, value in {**moto.environ, "AWS_ENDPOINT_URL": front.url}.items():
            patch.setenv(name, value)
        patch.setattr(uploads, "_LONGEST_PAUSE_S", 0.01)
        patch.setattr(uploads, "_LOOK_S", 0.01)
        # one client for all tests, as each takes half a second to make
        client = s3_client(attempts=2)
        patch.setattr(object_store, "s3_client", lambda **_: client)
        yield front


@pytest.fixture
def world(moto: BatchServer, one_front: Front, alone: dist.ProcessGroup, tmp_path: Path) -> World:
    moto.reset()
    moto.client("s3").create_bucket(Bucket="runs")
    one_front.forget()
    return World(moto, one_front, alone, tmp_path)


def test_the_manifest_comes_last_and_the_bytes_are_those_of_the_folder(world: World) -> None:
    (outcome,) = world.save(7, best=(7,))
    assert isinstance(outcome, Uploaded) and outcome.step == 7
    (folder,) = {key.partition("/")[0] for key in world.names() if "/" in key}
    assert outcome.to == f"s3://runs/team/run-1/{folder}"
    here = world.folder / "checkpoints" / "step-00000007"
    for path in here.iterdir():
        found = world.bucket().store.read(f"{folder}/{path.name}")
        assert found is not None and found[0] == path.read_bytes()
    puts = [path.rpartition("/")[2] for method, path in world.front.requests if method == "PUT"]
    assert puts == ["rank-00000.safetensors", "values.json", "manifest.json", "latest", "best"]
    assert world.bucket().pointer("latest") == world.bucket().pointer("best") == folder


def test_retention_keeps_the_newest_the_best_and_what_is_not_ours(world: World) -> None:
    notes = world.server.client("s3")
    notes.put_object(Bucket="runs", Key="team/run-1/notes.txt", Body=b"mine")
    notes.put_object(Bucket="runs", Key="team/run-10/step-00000001-00000000/x", Body=b"another")
    world.save(1, 3, 4, 5, best=(1,))
    assert world.steps() == [1, 4, 5]
    assert "notes.txt" in world.names()
    world.save(5, size=10)  # trained again, to other values
    assert world.steps() == [1, 4, 5]
    found = notes.list_objects_v2(Bucket="runs", Prefix="team/run-10/")["Contents"]
    assert len(found) == 1


def test_what_is_lost_here_is_downloaded_with_the_best_one(world: World) -> None:
    world.save(1, 3, best=(1,))
    there = world.folder / "other"
    notes = fetch_newer(world.bucket(), there, newer_than=0, group=world.group)
    assert complete_steps(there) == [1, 3] and read_pointer(there, "best") == 1
    assert not verify_manifest(there / "step-00000003")
    assert notes[0].startswith("step 3 was downloaded from s3://runs/team/run-1/step-00000003-")
    assert fetch_newer(world.bucket(), there, newer_than=0, group=world.group) == []
    empty = world.folder / "empty"
    assert fetch_newer(world.bucket(), empty, newer_than=3, group=world.group) == []


def test_a_damaged_one_is_passed_over_for_the_one_before(world: World) -> None:
    world.save(1, 2)
    client = world.server.client("s3")
    (key,) = [each for each in world.names() if each.startswith("step-00000002") and "rank" in each]
    content = client.get_object(Bucket="runs", Key=f"team/run-1/{key}")["Body"].read()
    client.put_object(Bucket="runs", Key=f"team/run-1/{key}", Body=content[:-1] + b"!")
    there = world.folder / "other"
    notes = fetch_newer(world.bucket(), there, newer_than=0, group=world.group)
    assert complete_steps(there) == [1]
    assert "is damaged: rank-00000.safetensors: SHA-256 is" in notes[0]
    client.delete_object(Bucket="runs", Key=f"team/run-1/{key}")
    third = world.folder / "third"
    assert "missing" in fetch_newer(world.bucket(), third, newer_than=0, group=world.group)[0]


def test_a_store_that_is_busy_for_a_while_is_asked_again(world: World) -> None:
    world.front.failures = {
        ("PUT", "rank-00000"): [(503, "SlowDown")] * 4,
        ("PUT", "manifest.json"): [(500, "InternalError"), (0, "")],
        ("GET", "list-type"): [(503, "SlowDown")] * 3,
    }
    (outcome,) = world.save(1)
    assert isinstance(outcome, Uploaded) and world.steps() == [1]
    assert not any(world.front.failures.values())


def test_a_lasting_failure_is_reported_and_the_next_save_is_fine(world: World) -> None:
    world.front.failures = {("PUT", "rank-00000"): [(403, "AccessDenied")] * 10}
    (outcome,) = world.save(1)
    assert isinstance(outcome, NotUploaded) and outcome.step == 1
    assert "s3:PutObject" in outcome.reason and world.steps() == []
    assert complete_steps(world.folder / "checkpoints") == [1]
    world.front.forget()
    (outcome,) = world.save(2)
    assert isinstance(outcome, Uploaded) and world.steps() == [2]


def test_saves_faster_than_uploads_are_left_out_and_their_files_stay(world: World) -> None:
    opened = world.uploads()
    saver = world.saver(opened, keep_last=1)
    release = threading.Event()
    send = opened.bucket.store.upload

    def slow(*arguments: Any, **named: Any) -> None:
        release.wait()
        send(*arguments, **named)

    opened.bucket.store.upload = slow  # type: ignore[method-assign]
    for step in (1, 2, 3, 4):
        saver.save(step, {"model.w": torch.ones(9)}, {}, is_best=step == 4)
        saver.wait()
    assert complete_steps(world.folder / "checkpoints") == [1, 2, 4]
    release.set()
    (left_out, *done) = wait_for_uploads(opened)
    assert left_out.step == 3 and "Raise checkpoint.every" in left_out.reason
    assert [each.step for each in done] == [1, 2, 4]
    saver.close()
    opened.close()


def test_rank_0_learns_that_another_rank_cannot_send_its_file(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(1)
    here = world.folder / "checkpoints" / "step-00000001"
    manifest = json.loads((here / "manifest.json").read_text())
    manifest["files"]["rank-00001.safetensors"] = {"bytes": 5, "sha256": "0" * 64}
    (here / "manifest.json").write_text(json.dumps(manifest))  # as of two ranks
    of_rank_0, of_rank_1 = world.uploads(), world.uploads(rank=1)
    of_rank_1.add(1, is_best=False)  # it has no such file
    wait_for_uploads(of_rank_1)
    of_rank_0.add(1, is_best=False)
    (outcome,) = wait_for_uploads(of_rank_0)
    assert isinstance(outcome, NotUploaded) and outcome.reason.startswith("rank-00001: [Errno 2]")
    (here / "rank-00001.safetensors").write_bytes(b"12345")
    monkeypatch.setattr(uploads, "_WAIT_S", 0.05)
    of_rank_0.add(1, is_best=False)
    (outcome,) = wait_for_uploads(of_rank_0)
    assert "rank-00001.safetensors did not come from their ranks in time" in outcome.reason
    of_rank_1.add(1, is_best=False)
    of_rank_0.add(1, is_best=False)
    (outcome,) = wait_for_uploads(of_rank_0)
    assert isinstance(outcome, Uploaded)


def test_what_a_killed_upload_left_is_invisible_and_removed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_PART_BYTES", 5 * 2**20)
    world.save(1)
    saver = Saver(
        world.folder / "checkpoints", group=world.group, rank=0, world_size=1, keep_last=2
    )
    saver.save(2, {"model.w": torch.ones(4 * 2**20)}, {})  # 16 MiB: four parts
    saver.wait()
    saver.close()
    child = os.fork()
    if child == 0:
        try:
            client = s3_client(attempts=1)  # connections are not to be shared with the parent
            monkeypatch.setattr(object_store, "s3_client", lambda **_: client)
            world.uploads().add(2, is_best=False)
            time.sleep(20)
        finally:
            os._exit(1)
    _await(lambda: world.front.sent("PUT", "partNumber") > 0)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert world.unfinished() and world.steps() == [1]
    world.bucket().remove_leftovers()
    assert not world.unfinished() and world.steps() == [1]
    assert not any(key.startswith("step-00000002") for key in world.names())
    (outcome,) = world.save(3)
    assert isinstance(outcome, Uploaded) and world.steps() == [1, 3]


def test_a_resume_from_an_earlier_step_hides_the_later_ones(world: World) -> None:
    world.save(1, 2, best=(2,))
    assert world.bucket().put_aside_after(1) == [2]
    assert world.steps() == [1] and world.bucket().pointer("best") is None
    world.bucket().remove_leftovers()  # they stay until the run is as far again
    assert any(key.startswith("step-00000002") for key in world.names())
    world.save(3)
    assert world.steps() == [1, 3]
    assert not any(key.startswith("step-00000002") for key in world.names())


def test_one_lease_holds_and_is_taken_over_only_from_the_dead(world: World) -> None:
    store = world.bucket().store
    first = BucketLease(store, "folder-a", beat_s=0.02)
    with pytest.raises(RequestError, match=r"run-1 is in use: host .* run\.id=NAME"):
        BucketLease(store, "folder-b", silence_s=5.0, sleep=lambda _: time.sleep(0.1))
    first.close()
    assert LEASE not in world.names()

    dead = BucketLease(store, "folder-a", beat_s=60.0)  # no sign of life
    second = BucketLease(store, "folder-b", beat_s=0.3, silence_s=0.2, sleep=_short)
    _await(lambda: int(json.loads((store.read(LEASE) or (b"{}", ""))[0])["count"]) > 0)
    dead._renew(0.001)
    assert dead.is_lost and not second.is_lost
    dead.close()  # takes nothing away from the second
    assert LEASE in world.names()

    again = BucketLease(store, "folder-b", beat_s=60.0)  # the same folder waits for nobody
    _await(lambda: second.is_lost)
    opened = Uploads(
        world.bucket(), world.folder / "checkpoints", rank=0, lease=second, keep_last=2
    )
    saver = world.saver(opened)
    saver.save(5, {"model.w": torch.ones(3)}, {})
    saver.wait()
    (outcome,) = wait_for_uploads(opened)
    assert "another training of this run has taken over s3://runs/team/run-1" in outcome.reason
    assert world.steps() == []
    saver.close()
    opened.close()
    again.close()


def test_a_lost_answer_to_the_first_write_is_no_other_holder(world: World) -> None:
    store = world.bucket().store
    write = store.write

    def answer_is_lost(*arguments: Any, **named: Any) -> None:
        write(*arguments, **named)

    store.write = answer_is_lost  # type: ignore[method-assign]
    lease = BucketLease(store, "folder-a", silence_s=0.0, sleep=_short)
    store.write = write  # type: ignore[method-assign]
    lease.close()
    assert bucket_lease.LEASE not in world.names()


def _short(_seconds: float) -> None:
    time.sleep(0.05)


def _await(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)
