"""Pointers of Git LFS, broken links, web pages and empty files in data.source are named as such."""

from pathlib import Path

import pytest

from shardyard.data.readers.columns import TextOf
from shardyard.data.sources import check_readable, list_files
from shardyard.data.stores.base import open_file
from shardyard.errors import RequestError, SourceError
from tests.config.test_weight_files import POINTER


def refusal(folder: Path) -> str:
    with pytest.raises(SourceError) as refused:
        check_readable(list_files(str(folder)), TextOf())
    return str(refused.value)


@pytest.mark.parametrize(
    "name",
    ["a.txt", "a.jsonl", "a.json", "a.parquet", "a.jsonl.gz", "a.jsonl.zst", "a.xml"],
)
def test_a_pointer_of_git_lfs_is_no_document(tmp_path: Path, name: str) -> None:
    (tmp_path / "good.txt").write_text("text of a document")
    (tmp_path / name).write_text(POINTER)
    told = refusal(tmp_path)
    assert f"{name} is a Git LFS pointer (130 bytes), not the file itself of 12,345 bytes" in told
    assert f"`git lfs pull` in {tmp_path}" in told


def test_a_document_about_git_lfs_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "spec.md").write_text(POINTER + "is how a pointer looks. " * 60)
    (tmp_path / "more.md").write_text("It begins: " + POINTER)
    check_readable(list_files(str(tmp_path)), TextOf())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.parquet", b"", "is empty (0 bytes)"),
        ("a.jsonl.gz", b"", "is empty (0 bytes)"),
        ("a.jsonl", b"<!DOCTYPE html><html>Sign in</html>", "is a web page"),
        ("a.parquet", b"\n<html lang=en>" + b" " * 5000, "is a web page"),
        ("a.txt", b"/annex/objects/MD5E-s12--0123.txt\n", "git annex get"),
    ],
)
def test_what_stands_in_the_place_of_a_file_is_named(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / "good.txt").write_text("text of a document")
    (tmp_path / name).write_bytes(content)
    assert f"{name} {said}" in refusal(tmp_path) or said in refusal(tmp_path)


def test_an_empty_text_file_and_a_text_of_html_are_read(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "page.txt").write_text("<html>a document about HTML</html>")
    check_readable(list_files(str(tmp_path)), TextOf())


def test_a_broken_link_is_named_with_its_target(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to("../blobs/deadbeef")
    for entry in (tmp_path, tmp_path / "a.txt", tmp_path / "*.txt"):
        with pytest.raises(RequestError, match=r"a\.txt is a broken symbolic link to .*deadbeef"):
            list_files(str(entry))


def test_a_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (file,) = list_files(str(tmp_path))
    with open_file(file) as opened:
        assert opened.read() == b"text"
