"""The weight files of a folder: what is none, is cut off, or lies elsewhere is named at once."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from shardyard.config.weight_files import INDEX, SINGLE, read_weight_files
from shardyard.errors import RequestError

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
"""As the specification of Git LFS writes one."""


def weights(path: Path, **tensors: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.arange(size, dtype=np.float32) for name, size in tensors.items()}, path)
    return path


def index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(folder: Path) -> str:
    with pytest.raises(RequestError) as refused:
        read_weight_files(folder)
    return str(refused.value)


def test_headers_say_what_the_library_says(tmp_path: Path) -> None:
    path = weights(tmp_path / SINGLE, a=3, b=5)
    found = read_weight_files(tmp_path)
    with safe_open(path, framework="np") as file:
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {name: each.shape for name, each in found.items()} == theirs
    content = path.read_bytes()
    assert np.frombuffer(content[found["b"].start : found["b"].stop], np.float32)[4] == 4


def test_one_file_counts_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    weights(tmp_path / SINGLE, a=3)
    weights(tmp_path / "old.safetensors", a=4)
    index(tmp_path, {"a": "old.safetensors"})
    assert read_weight_files(tmp_path)["a"].shape == (3,)


@pytest.mark.parametrize("left", [0, 5, 40, -4])
def test_a_file_that_is_cut_off_is_named_as_the_library_rejects_it(
    tmp_path: Path, left: int
) -> None:
    path = weights(tmp_path / SINGLE, a=100)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(SafetensorError), safe_open(path, framework="np"):
        pass
    assert re.search(
        r"empty \(0 bytes\)|no safetensors|not a safetensors|cut off", refusal(tmp_path)
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (POINTER, r"Git LFS pointer .* of 12,345 bytes. Run `git lfs pull`"),
        ("/annex/objects/SHA256E-s12--ab.safetensors\n", "`git annex get"),
        ("<!DOCTYPE html>\n<html>Not found</html>", "web page"),
    ],
)
def test_what_stands_in_the_place_of_a_file_is_named(
    tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / SINGLE).write_text(content)
    assert re.search(said, refusal(tmp_path))


def test_all_files_that_are_wrong_are_named_together(tmp_path: Path) -> None:
    index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"})
    (tmp_path / "1.safetensors").symlink_to("../../blobs/deadbeef")
    (tmp_path / "2.safetensors").write_text(POINTER)
    told = refusal(tmp_path)
    assert "1.safetensors is a broken symbolic link to ../../blobs/deadbeef" in told
    assert "2.safetensors is a Git LFS pointer" in told
    assert "3.safetensors is missing" in told


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("../private/w.safetensors", "outside of the folder"),
        ("/etc/w.safetensors", "outside of the folder"),
        ("sub/../../w.safetensors", "outside of the folder"),
        (5, "has 5 where the name of a file"),
        (None, "has null where the name"),
        (["w.safetensors"], "where the name of a file"),
        ("", "outside of the folder"),
        ("w.bin", "not a .safetensors file"),
    ],
)
def test_an_index_names_files_of_its_folder_alone(tmp_path: Path, file: Any, said: str) -> None:
    weights(tmp_path / "private" / "w.safetensors", a=3)
    folder = tmp_path / "evil"
    folder.mkdir()
    index(folder, {"a": file})
    assert said in refusal(folder)


@pytest.mark.parametrize("content", ["", "[", "[1]", '{"weight_map": 5}', "{}"])
def test_an_index_without_names_is_told_in_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    assert INDEX in refusal(tmp_path) and "\n" not in refusal(tmp_path)


def test_a_link_to_shared_weights_is_followed(tmp_path: Path) -> None:
    """People link the files of a large model, and git-annex and DVC do."""
    target = weights(tmp_path / "other" / "w.safetensors", a=3)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / SINGLE).symlink_to(target)
    assert read_weight_files(folder)["a"].shape == (3,)


def test_a_snapshot_of_the_hub_is_opened_through_its_links(tmp_path: Path) -> None:
    repository = tmp_path / "models--acme--llama"
    weights(repository / "blobs" / "abc", a=3)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / SINGLE).symlink_to("../../blobs/abc")
    assert read_weight_files(snapshot)["a"].shape == (3,)
    copied = tmp_path / "mine"
    copied.mkdir()
    (copied / SINGLE).symlink_to(repository / "blobs" / "abc")
    assert read_weight_files(copied)["a"].shape == (3,)


def test_a_tensor_in_two_files_is_rejected(tmp_path: Path) -> None:
    weights(tmp_path / "1.safetensors", a=3, b=2)
    weights(tmp_path / "2.safetensors", a=3)
    index(tmp_path, {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"})
    assert "2.safetensors has 1 tensor that 1.safetensors has too: a" in refusal(tmp_path)


def test_an_adapter_next_to_weights_is_rejected(tmp_path: Path) -> None:
    weights(tmp_path / SINGLE, a=3)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "merge_and_unload" in refusal(tmp_path)


def test_an_index_is_held_to_its_files(tmp_path: Path) -> None:
    weights(tmp_path / "1.safetensors", a=3)
    index(tmp_path, {"a": "1.safetensors", "b": "1.safetensors"})
    assert "names 1 tensor that its files do not have: b" in refusal(tmp_path)
