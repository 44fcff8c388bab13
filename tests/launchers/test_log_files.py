"""Growing files as one stream: nothing missed, nothing twice, bounded memory."""

from collections.abc import Iterator
from pathlib import Path

from shardyard.launchers.base import LogLine, read_logs


def test_all_lines_of_all_files_come_with_their_source(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("a\nb\n")
    (tmp_path / "1").write_text("c\n\nno end")
    files = {"node 0": tmp_path / "0", "node 1": tmp_path / "1", "node 2": tmp_path / "none"}
    lines = list(read_logs(files, is_over=lambda: True))
    assert lines[:2] == [LogLine(source="node 0", text="a"), LogLine(source="node 0", text="b")]
    assert [line.text for line in lines[2:]] == ["c", "", "no end"]
    assert {line.source for line in lines[2:]} == {"node 1"}


def test_what_is_appended_until_the_end_is_seen_once(tmp_path: Path) -> None:
    path = tmp_path / "0"

    def grow() -> Iterator[bool]:
        yield False
        path.write_text("first\nhal")
        yield False
        with path.open("a") as file:
            file.write("f\nlast")
        yield True

    growing = grow()
    lines = read_logs({"node 0": path}, is_over=lambda: next(growing))
    assert [line.text for line in lines] == ["first", "half", "last"]


def test_lines_longer_than_a_block_come_in_pieces_and_letters_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "0"
    path.write_bytes(b"x" * 200_000 + b"\n" + "é\n".encode() * 50_000)
    texts = [line.text for line in read_logs({"node 0": path}, is_over=lambda: True)]
    assert "".join(texts) == "x" * 200_000 + "é" * 50_000
    assert max(map(len, texts)) <= 64 * 1024
