"""A checkpoint is what its manifest says, or the damage is named."""

import hashlib
import json
from pathlib import Path

import pytest

from shardyard.checkpoint.verify import (
    FORMAT,
    Manifest,
    main,
    read_manifest,
    verify_manifest,
    write_flushed,
    write_manifest,
)
from shardyard.errors import CheckpointError
from shardyard.io.digests import FileDigest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "a.safetensors": write_flushed(tmp_path / "a.safetensors", [memoryview(b"abcd")]),
        "b.safetensors": write_flushed(tmp_path / "b.safetensors", [memoryview(b"efgh")]),
    }
    seal(tmp_path, files, version=FORMAT)
    return tmp_path


def seal(folder: Path, files: dict[str, FileDigest], *, version: int) -> None:
    manifest = Manifest(format=version, step=7, world_size=2, torch="2.13.0", files=files)
    write_manifest(folder, manifest)


def reasons(folder: Path) -> list[str]:
    return [str(damage) for damage in verify_manifest(folder)]


def test_the_digest_taken_while_writing_is_that_of_the_file(tmp_path: Path) -> None:
    content = bytes(range(256)) * 200_000  # longer than one chunk
    digest = write_flushed(tmp_path / "x", [memoryview(content), memoryview(b"end")])
    assert (tmp_path / "x").read_bytes() == content + b"end"
    assert digest == FileDigest(len(content) + 3, hashlib.sha256(content + b"end").hexdigest())


def test_an_untouched_checkpoint_is_sound(folder: Path) -> None:
    assert verify_manifest(folder) == []
    assert read_manifest(folder).bytes == 8


def test_a_flipped_byte_is_damage(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(b"abcD")
    assert len(reasons(folder)) == 1
    assert reasons(folder)[0].startswith("a.safetensors: SHA-256 is ")


def test_a_truncated_file_is_damage(folder: Path) -> None:
    (folder / "b.safetensors").write_bytes(b"ef")
    assert reasons(folder) == ["b.safetensors: 2 bytes long instead of 4"]


def test_a_missing_file_is_damage(folder: Path) -> None:
    (folder / "b.safetensors").unlink()
    assert reasons(folder) == ["b.safetensors: missing"]


def test_a_stranger_among_the_tensors_is_damage(folder: Path) -> None:
    (folder / "c.safetensors").write_bytes(b"")
    assert reasons(folder) == ["c.safetensors: not in the manifest"]


def test_a_share_of_the_files_leaves_the_others_unread(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(b"abcD")
    assert verify_manifest(folder, ["b.safetensors"]) == []
    assert len(verify_manifest(folder, ["a.safetensors"])) == 1


def test_a_missing_manifest_is_damage(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    assert reasons(folder) == ["manifest.json: missing, so the checkpoint was never completed"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty (0 bytes)"),
        ("[]", "holds no JSON object"),
        ("{}", "is not a manifest (KeyError: 'format')"),
        ('{"format": 1', "is not JSON ("),
        ("[" * 100_000, "is not JSON (it is nested too deeply)"),
        ('{"format": -1, "files": {}}', "is not a manifest ("),
    ],
    ids=["empty", "list", "other object", "torn", "deep", "negative"],
)
def test_a_garbled_manifest_is_damage_not_a_crash(folder: Path, text: str, why: str) -> None:
    (folder / "manifest.json").write_text(text)
    assert len(reasons(folder)) == 1
    assert reasons(folder)[0].startswith(f"manifest.json: {why}")


def test_a_manifest_cannot_name_files_elsewhere(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    content["files"]["../a"] = content["files"].pop("a.safetensors")
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"'\.\./a' is not a file name"):
        read_manifest(folder)


def test_the_program_prints_damage_and_exits_with_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder)]) == 0
    (folder / "b.safetensors").unlink()
    assert main([str(folder)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}: sound",
        f"{folder}: damaged",
        "  b.safetensors: missing",
    ]
    assert main([]) == 2


def test_a_file_of_format_1_that_is_no_safetensors_is_damage_though_its_checksum_fits(
    folder: Path,
) -> None:
    seal(folder, dict(read_manifest(folder).files), version=1)
    assert reasons(folder)[0].startswith("a.safetensors: is not a safetensors file: ")
