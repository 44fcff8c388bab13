"""A folder gets its name after all that it holds is on disk; the name is on disk after that."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.errors import JsonFileError
from shardyard.io.files import publish_file, publish_folder, read_json, read_json_object

SRC = Path(__file__).parents[2] / "src" / "shardyard"
OWN_ORDER = {
    "io/files.py": 1,
    "checkpoint/retention.py": 3,  # what goes, or is set aside
    "checkpoint/writer.py": 1,  # each rank flushes its own file
    "transfer/download.py": 1,  # what was there before
    "control/resume.py": 1,  # sets checkpoints aside
    "doctor/paths.py": 1,
    "drill/injectors.py": 2,
}
"""Files that rename folders without ``publish_folder``, and how often."""


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flushes and renames in their order, as the kernel is asked for them."""
    asked: list[str] = []
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        fsync(descriptor)
        asked.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)

    def rename(name: str) -> None:
        real = getattr(Path, name)

        def renamed(path: Path, to: Path) -> None:
            asked.append(f"{path.name} -> {to.name}")
            real(path, to)

        monkeypatch.setattr(Path, name, renamed)

    monkeypatch.setattr(os, "fsync", watch)
    rename("rename")
    rename("replace")
    return asked


def test_a_folder_is_published_after_all_its_files_and_folders(
    tmp_path: Path, order: list[str]
) -> None:
    (tmp_path / "draft" / "sub").mkdir(parents=True)
    for name in ("a", "sub/b"):
        (tmp_path / "draft" / name).write_text(name)
    publish_folder(tmp_path / "draft", tmp_path / "out")
    place = order.index("draft -> out")
    assert sorted(order[:place]) == ["a", "b", "draft", "sub"]
    assert order[place + 1 :] == [tmp_path.name]


def test_a_file_is_published_after_its_content(tmp_path: Path, order: list[str]) -> None:
    (tmp_path / "draft").write_text("x")
    publish_file(tmp_path / "draft", tmp_path / "out")
    assert order == ["draft", "draft -> out", tmp_path.name]


def test_nothing_else_gives_a_folder_its_name() -> None:
    texts = {path.relative_to(SRC).as_posix(): path.read_text() for path in SRC.rglob("*.py")}
    found = {name: len(re.findall(r"\.rename\(", text)) for name, text in texts.items()}
    assert {name: count for name, count in found.items() if count} == OWN_ORDER


# --- JSON ----------------------------------------------------------------------------------------

OWN_PARSERS = {
    "io/files.py": "parse_json itself",
    "io/digests.py": "the header of a safetensors file, whose length is checked before",
    "importers/configs/source_file.py": "rejects repeated keys; the text was read bounded",
}
"""Files that call Python's JSON parser themselves, and why they may."""


def test_a_file_of_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, null]}')
    assert read_json(tmp_path / "a.json") == {"a": [1, None]}
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty (0 bytes)"),
        ("{", "is not JSON (Expecting property name"),
        ("[" * 500_000, "is not JSON (it is nested too deeply)"),
        ("9" * 5000, "is not JSON (Exceeds the limit"),
        ("[]", "holds no JSON object"),
        ('{"a": "' + "a" * 1_000_000 + '"}', "has 1,000,009 bytes, more than the 1,000,000"),
    ],
    ids=["empty", "torn", "deep", "long number", "list", "large"],
)
def test_a_file_that_cannot_be_used_names_itself_and_the_cause(
    tmp_path: Path, content: str, reason: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(JsonFileError) as caught:
        read_json_object(path, limit_bytes=1_000_000)
    assert str(caught.value).startswith(f"{path} {reason}")


def test_no_process_is_waited_for_to_write_to_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in ((tmp_path / "pipe", "a named pipe"), (tmp_path, "a folder")):
        with pytest.raises(JsonFileError, match=re.escape(f"{path} is {reason}, not a file.")):
            read_json(path)
    with pytest.raises(JsonFileError, match="/dev/zero is a device, not a file"):
        read_json(Path("/dev/zero"))


def parsers(path: Path) -> Iterator[int]:
    """Lines that name ``json.load`` or ``json.loads``, or import them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ("load", "loads"):
            if isinstance(node.value, ast.Name) and node.value.id == "json":
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "json":
            yield from (node.lineno for name in node.names if name.name in ("load", "loads"))


def test_all_json_is_parsed_where_size_kind_and_depth_are_checked() -> None:
    found = {
        name
        for path in SRC.rglob("*.py")
        if (name := path.relative_to(SRC).as_posix()) and any(parsers(path))
    }
    assert found == OWN_PARSERS.keys()
