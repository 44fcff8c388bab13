"""Messages for files that are not what their names say."""

from pathlib import Path

import pytest

from shardyard.config.model_source import model_folder
from shardyard.config.schema import Model
from shardyard.errors import RequestError
from shardyard.file_faults import why_broken_link
from shardyard.models.hf import _damaged


def test_weights_behind_a_broken_link_name_the_link_and_its_target(tmp_path: Path) -> None:
    link = tmp_path / "model.safetensors"
    link.symlink_to("../blobs/abc")
    told = str(_damaged(link, FileNotFoundError(2, "No such file or directory")))
    assert told.startswith(f"{link} is a broken symbolic link to ../blobs/abc. Copy the folder")
    assert "Fetch the file again" not in told


def test_a_damaged_file_is_to_be_fetched_again(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x" * 2000)
    assert str(_damaged(file, ValueError("odd"))).endswith("read: odd. Fetch the file again.")


def test_a_link_to_itself_is_named(tmp_path: Path) -> None:
    link = tmp_path / "a"
    link.symlink_to("a")
    assert "a symbolic link to a that leads back to itself" in str(why_broken_link(link))


def test_a_model_path_that_is_a_broken_link_names_its_target(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to("gone")
    with pytest.raises(RequestError, match=r"/model is a broken symbolic link to gone\. Copy"):
        model_folder(Model(path=str(tmp_path / "model")))
