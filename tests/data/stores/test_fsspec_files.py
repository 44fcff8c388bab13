"""What fsspec knows: its file system in memory stands for all of them."""

import sys
from collections.abc import Iterator

import fsspec
import pytest

from shardyard.config import sources
from shardyard.config.sources import SCHEMES
from shardyard.data.readers.columns import TextOf
from shardyard.data.sources import list_files, read_sections, split_into_pieces
from shardyard.data.stores import fsspec_files
from shardyard.data.stores.fsspec_files import FsspecStore, _translate_error
from shardyard.errors import AccessError, LostError, RequestError, SourceError


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[fsspec.AbstractFileSystem]:
    monkeypatch.setitem(sources.SCHEMES, "memory", SCHEMES["gs"])
    files = fsspec.filesystem("memory")
    for name in ("t/a.txt", "t/b.jsonl", "t/in/c.txt", "t/.git/d.txt", "tt/e.txt"):
        files.pipe(f"/{name}", b'{"text": "one"}\n')
    yield files
    files.rm("/", recursive=True)


def test_folders_globs_and_files_are_found_as_everywhere(
    memory: fsspec.AbstractFileSystem,
) -> None:
    assert memory.exists("/t/a.txt")

    def names(source: str) -> list[str]:
        return [file.path for file in list_files(source)]

    all_of_t = ["memory://t/a.txt", "memory://t/b.jsonl", "memory://t/in/c.txt"]
    assert names("memory://t") == names("memory://t/") == all_of_t
    assert names("memory://t/**/*.txt") == ["memory://t/a.txt", "memory://t/in/c.txt"]
    (piece,) = split_into_pieces(list_files("memory://t/b.jsonl"), 2**20)
    assert [section.text for section in read_sections(piece, TextOf())] == ["one"]
    with pytest.raises(RequestError, match=r"'memory://nowhere' does not exist"):
        names("memory://nowhere")


@pytest.mark.parametrize("content", [b'{"text": "two"}\n', b'{"text": "three"}\n', None])
def test_a_file_that_changes_in_the_middle_is_refused(
    memory: fsspec.AbstractFileSystem, content: bytes | None
) -> None:
    (piece,) = split_into_pieces(list_files("memory://t/b.jsonl"), 2**20)
    memory.rm("/t/b.jsonl")
    if content is not None:
        memory.pipe("/t/b.jsonl", content)
    with pytest.raises(SourceError, match=r"memory://t/b\.jsonl changed since it was listed"):
        list(read_sections(piece, TextOf()))


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(RequestError, match=r"gs://b/x is read with gcsfs.*pip install gcsfs"):
        FsspecStore().stat("gs://b/x")


def test_a_package_of_a_plug_ins_scheme_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = sources.Scheme(code="shardyard.data.stores.fsspec_files:FsspecStore")
    monkeypatch.setattr(fsspec_files, "scheme_row", {"gcs": row}.__getitem__)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(
        RequestError, match=r"gcs://b/x is read with .*not installed .*install gcsfs"
    ):
        FsspecStore().stat("gcs://b/x")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (PermissionError("no"), AccessError, "have the right to read added"),
        (TimeoutError("late"), LostError, "then prepare again"),
        (KeyError("odd"), RequestError, "its package's configuration, or copy the text here"),
    ],
)
def test_errors_of_packages_are_told_in_our_words(
    error: Exception, kind: type[Exception], message: str
) -> None:
    told = _translate_error("gs://b/x", error)
    assert isinstance(told, kind)
    assert message in str(told)
