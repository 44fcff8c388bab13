"""Messages for files that are not what their names say."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shardyard.cluster.spec_file import read_cluster_spec
from shardyard.config.load import load_recipe
from shardyard.config.model.source import model_folder
from shardyard.config.schema.recipe import Model
from shardyard.errors import RequestError
from shardyard.file_faults import broken_link_error
from shardyard.hardware.cluster_file import read_cluster_file
from shardyard.importers.configs.source_file import read_files
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
    assert "a symbolic link to a that leads back to itself" in str(broken_link_error(link))


@pytest.mark.parametrize(
    "read",
    [
        lambda path: load_recipe([path], []),
        lambda path: read_cluster_file(path, 1),
        lambda path: read_cluster_spec([str(path)]),
        lambda path: read_files(path),
    ],
    ids=["recipe", "cluster file", "cluster description", "import"],
)
def test_a_given_file_behind_a_broken_link_names_the_link_and_its_target(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "r.yaml").symlink_to("gone.yaml")
    (tmp_path / "folder").symlink_to("away")
    words = r"r\.yaml is a symbolic link to gone\.yaml, and that leads nowhere\. Let .*`ln -sfn T"
    with pytest.raises(RequestError, match=words):
        read(tmp_path / "r.yaml")
    with pytest.raises(
        RequestError, match=r"cannot be reached: \S*folder is a symbolic link to away"
    ):
        read(tmp_path / "folder" / "r.yaml")


def test_a_model_path_that_is_a_broken_link_names_its_target(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to("gone")
    with pytest.raises(RequestError, match=r"/model is a broken symbolic link to gone\. Copy"):
        model_folder(Model(path=str(tmp_path / "model")))
