"""A run's folder that is gone, also when something failed for want of it before the watch knew."""

from pathlib import Path

from shardyard.elastic.agent import FolderWatch


def test_a_file_is_missed_at_once_when_asked_though_others_lie_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "resolved.json").write_text("{}")
    watch = FolderWatch(folder / "resolved.json")
    try:
        assert not watch.is_missing()
        folder.rename(tmp_path / "aside")
        folder.mkdir()  # as a restart does for its logs
        assert watch.is_missing() and not watch.is_gone
    finally:
        watch.stop()
