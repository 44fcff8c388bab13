"""A file appears here when it is right, whatever happens on the way."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardyard.errors import DataError, LostError, StorageError
from shardyard.io.digests import COMPLETE, FileDigest, FolderDigests
from shardyard.transfer.download import (
    FolderSource,
    check_free_space,
    missing_locally,
    receive,
    receive_whole,
)
from tests.mounts import mounted, needs_root

CONTENT = {
    "weights": bytes(range(256)) * 10_000,
    "logs/attempt-0/rank-0.log": b"said\n",
    "empty": b"",
}
FILES = {
    name: FileDigest(len(content), hashlib.sha256(content).hexdigest())
    for name, content in CONTENT.items()
}


@dataclass
class Unsteady:
    """A source that breaks off, or garbles, as it is told."""

    breaks_after: list[int] = field(default_factory=list)
    """Bytes of one read after the other."""
    garbles: list[str] = field(default_factory=list)
    """Names of files that come wrong, once each."""
    asked: list[tuple[str, int]] = field(default_factory=list)

    def read(self, name: str, offset: int) -> Iterator[bytes]:
        self.asked.append((name, offset))
        content = CONTENT[name]
        if name in self.garbles:
            self.garbles.remove(name)
            content = bytes([content[0] ^ 1]) + content[1:]
        data = content[offset:]
        if self.breaks_after:
            yield data[: self.breaks_after.pop(0)]
            raise LostError("gone")
        yield data[:1000]
        yield data[1000:]


def ignore(_name: str, _size: int) -> None:
    """Nobody looks."""


def no_pause(_seconds: float) -> None:
    """Tests do not wait."""


def bring(source: Unsteady, folder: Path) -> None:
    receive(source, FILES, folder, on_progress=ignore, sleep=no_pause)


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_files_come_whole_and_no_scratch_is_left(tmp_path: Path) -> None:
    seen: dict[str, int] = {}

    def count(name: str, size: int) -> None:
        seen[name] = seen.get(name, 0) + size

    receive(Unsteady(), FILES, tmp_path, on_progress=count)
    assert files_in(tmp_path) == CONTENT
    assert seen == {name: len(content) for name, content in CONTENT.items()}
    assert missing_locally(FILES, tmp_path) == {}


def test_a_broken_connection_goes_on_where_it_stopped(tmp_path: Path) -> None:
    source = Unsteady(breaks_after=[5, 70_000, 900_000])
    bring(source, tmp_path)
    assert files_in(tmp_path) == CONTENT
    places = [offset for name, offset in source.asked if name == "weights"]
    assert places == [0, 70_000, 970_000]  # the first break was in the log


def test_an_interrupted_call_leaves_no_half_file_under_its_name_and_is_gone_on_with(
    tmp_path: Path,
) -> None:
    def interrupt(name: str, size: int) -> None:
        if name == "weights" and size:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        receive(Unsteady(), FILES, tmp_path, on_progress=interrupt)
    assert not (tmp_path / "weights").exists()
    assert (tmp_path / "logs" / "attempt-0" / "rank-0.log").read_bytes() == b"said\n"
    again = Unsteady()
    bring(again, tmp_path)
    assert files_in(tmp_path) == CONTENT
    assert again.asked == [("weights", 1000)]


def test_a_file_that_comes_wrong_is_fetched_once_more(tmp_path: Path) -> None:
    source = Unsteady(garbles=["weights"])
    bring(source, tmp_path)
    assert files_in(tmp_path) == CONTENT
    assert [offset for name, offset in source.asked if name == "weights"] == [0, 0]


def test_a_file_that_comes_wrong_twice_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"weights came wrong twice: 2,560,000 bytes with SHA-256"):
        bring(Unsteady(garbles=["weights", "weights"]), tmp_path)
    assert not (tmp_path / "weights").exists()


def test_half_a_file_of_another_version_is_not_gone_on_with(tmp_path: Path) -> None:
    broken = Unsteady(breaks_after=[5, *[40] * 1, *[0] * 7])
    with pytest.raises(LostError):
        bring(broken, tmp_path)
    newer = {**FILES, "weights": FileDigest(3, hashlib.sha256(b"new").hexdigest())}

    class New:
        def read(self, name: str, offset: int) -> Iterator[bytes]:
            yield (b"new" if name == "weights" else CONTENT[name])[offset:]

    receive(New(), newer, tmp_path, on_progress=ignore)
    assert (tmp_path / "weights").read_bytes() == b"new"


def test_a_source_that_is_gone_for_good_is_given_up(tmp_path: Path) -> None:
    pauses: list[float] = []
    with pytest.raises(LostError, match="gone"):
        receive(
            Unsteady(breaks_after=[0] * 50),
            FILES,
            tmp_path,
            on_progress=ignore,
            sleep=pauses.append,
        )
    assert len(pauses) == 5 and pauses == sorted(pauses)


def test_names_that_lead_out_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    files = {"../out": FILES["empty"]}
    with pytest.raises(ValueError, match=r"leads out"):
        receive(Unsteady(), files, tmp_path / "in", on_progress=ignore)
    assert list(tmp_path.iterdir()) == []


def test_a_whole_folder_appears_at_once_and_a_damaged_one_is_mended(tmp_path: Path) -> None:
    complete = FolderDigests(files=FILES, provenance={"step": 1})
    source = Unsteady()
    receive_whole(source, FILES, tmp_path / "hf", on_progress=ignore, complete=complete)
    assert files_in(tmp_path / "hf") == {**CONTENT, COMPLETE: complete.text().encode()}
    (tmp_path / "hf" / "weights").write_bytes(b"rotten")
    again = Unsteady()
    receive_whole(again, FILES, tmp_path / "hf", on_progress=ignore, complete=complete)
    assert files_in(tmp_path / "hf") == {**CONTENT, COMPLETE: complete.text().encode()}
    assert again.asked == [("weights", 0)]
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_interrupted_folder_is_not_there_under_its_name(tmp_path: Path) -> None:
    with pytest.raises(LostError):
        receive_whole(
            Unsteady(breaks_after=[5, 70_000, *[0] * 9]), FILES, tmp_path / "hf",
            on_progress=ignore, sleep=no_pause,
        )  # fmt: skip
    assert not (tmp_path / "hf").exists()
    again = Unsteady()
    receive_whole(again, FILES, tmp_path / "hf", on_progress=ignore)
    assert again.asked == [("weights", 70_000)]
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_without_room_nothing_is_begun(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"free, and 8.0 PiB are to come. No file was fetched"):
        check_free_space(2**53, tmp_path / "not" / "there")


@pytest.mark.heavy
@needs_root
def test_a_disk_that_fills_up_on_the_way_is_told_and_keeps_nothing_of_a_folder(
    tmp_path: Path,
) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        with pytest.raises(StorageError, match=r"hf.* cannot be written: No space left on device"):
            receive_whole(Unsteady(), FILES, disk / "hf", on_progress=ignore)
        assert list(disk.iterdir()) == []


def test_a_folder_that_this_machine_sees_is_a_source(tmp_path: Path) -> None:
    for name, content in CONTENT.items():
        (tmp_path / "there" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there" / name).write_bytes(content)
    receive(FolderSource(folder=tmp_path / "there"), FILES, tmp_path / "here", on_progress=ignore)
    assert files_in(tmp_path / "here") == CONTENT
    (tmp_path / "there" / "weights").unlink()
    with pytest.raises(DataError, match="may have removed it; repeat the command"):
        receive(
            FolderSource(folder=tmp_path / "there"), FILES, tmp_path / "new", on_progress=ignore
        )
