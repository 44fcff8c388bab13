"""A folder says what it holds, and what is not so is named."""

import hashlib
import json
from pathlib import Path

import pytest

from shardyard.errors import DataError
from shardyard.io.digests import (
    COMPLETE,
    FileDigest,
    find_damage,
    parse_digests,
    read_digests,
    validate_name,
    write_digests,
)

FILES = {"weights": b"\x00\xff" * 1000, "inner/words.txt": b"a word", "empty": b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    write_digests(tmp_path, {"step": 3})
    return tmp_path


def test_every_file_stands_with_its_bytes_and_sha256(folder: Path) -> None:
    wanted = {
        name: FileDigest(len(content), hashlib.sha256(content).hexdigest())
        for name, content in FILES.items()
    }
    complete = read_digests(folder)
    assert (complete.files, complete.provenance, complete.bytes) == (wanted, {"step": 3}, 2006)
    assert complete.sha256 == hashlib.sha256((folder / COMPLETE).read_bytes()).hexdigest()
    assert find_damage(folder, complete) == []


def test_a_list_that_is_written_again_does_not_list_itself(folder: Path) -> None:
    first = read_digests(folder)
    assert write_digests(folder, {"step": 3}) == first == read_digests(folder)


def test_what_was_changed_is_named(folder: Path) -> None:
    complete = read_digests(folder)
    (folder / "weights").write_bytes(b"\x00\xfe" * 1000)
    (folder / "empty").unlink()
    (folder / "inner" / "words.txt").write_text("a wor")
    assert [text.split(" is ")[0] for text in find_damage(folder, complete)] == [
        "empty: missing",
        "inner/words.txt: 5 bytes long instead of 6",
        "weights: SHA-256",
    ]


OUT = ("/etc/passwd", "../out", "a/../../b", "a//b", "a/", ".", "", "a\\b", "a\nb", 3, "a" * 2000)


@pytest.mark.parametrize("name", OUT)
def test_a_name_that_leads_out_of_the_folder_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match=r"is no|leads out|control|longer"):
        validate_name(name)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"format": 9, "files": {}, "made_of": {}}', "format 9 is not known"),
        ({"../x": {"bytes": 1, "sha256": "0" * 64}}, "not a plain path|leads out"),
        ({"x": {"bytes": -1, "sha256": "0" * 64}}, "not a number of bytes"),
        ({"x": {"bytes": 1, "sha256": "0" * 63 + "G"}}, "not a SHA-256"),
    ],
)
def test_a_damaged_list_is_refused_with_the_reason(content: object, why: str) -> None:
    if isinstance(content, dict):
        content = json.dumps({"format": 1, "made_of": {}, "files": content})
    with pytest.raises(DataError, match=why):
        parse_digests(str(content).encode())


def test_without_a_list_a_folder_was_never_finished(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"complete\.json is missing, so it was never finished"):
        read_digests(tmp_path)
