"""What a node finds at the paths of a recipe: tried as the user of the run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardyard.config.rules.check import load_checked_recipe
from shardyard.doctor.finding import Finding
from shardyard.doctor.paths import check_paths
from tests.hub import saved_llama
from tests.mounts import mounted, needs_root

NOBODY = 65534


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """With text and a model, as everybody may enter it."""
    volume = tmp_path / "volume"
    for name in ("text", "tokenizer", "runs"):
        (volume / name).mkdir(parents=True)
    (volume / "text" / "a.txt").write_text("a")
    saved_llama(volume / "model")
    (volume / "tokenizer" / "tokenizer.json").write_text("{}")
    for folder in (volume, *volume.parents):
        if folder != Path(folder.anchor) and folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    return volume


def look(volume: Path, *overrides: str, runs: str = "runs", **more: int) -> dict[str, Finding]:
    settings = {
        "data.source": volume / "text",
        "data.dir": volume / "runs" / "prepared",
        "launch.run_dir": volume / runs,
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    recipe = load_checked_recipe([], ["model.preset=llama-tiny", *words, *overrides])
    size = more.get("checkpoint_bytes")
    before = sorted(volume.rglob("*"))
    found = check_paths(recipe, volume / runs, checkpoint_bytes=size, mounts=[str(volume)])
    assert sorted(volume.rglob("*")) == before  # nothing is left behind
    return {finding.name: finding for finding in found}


def of(volume: Path, *parts: str) -> tuple[str, ...]:
    return tuple(f"{setting}={volume}/{place}" for setting, _, place in
                 (part.partition("=") for part in parts))  # fmt: skip


@contextmanager
def as_nobody() -> Iterator[None]:
    """As the user of a pod, who is not root."""
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def test_what_is_there_and_may_be_used_is_ok(volume: Path) -> None:
    settings = of(volume, "model.path=model", "data.tokenizer=tokenizer")
    found = look(volume, "model.preset=null", *settings, checkpoint_bytes=1000)
    assert [finding.what for finding in found.values() if finding.verdict != "ok"] == []
    assert list(found) == [
        "model.path", "data.source", "data.tokenizer", "launch.run_dir", "data.dir", "room",
    ]  # fmt: skip
    assert found["data.source"].what == f"{volume}/text: 1 file can be read"
    assert f"to be made in {volume}/runs" in found["data.dir"].what
    assert "4 checkpoints of 1000 B take" in found["room"].what


@pytest.mark.parametrize("place", ["tokenizer/vocab.txt", "tokenizer"])
def test_a_tokenizer_is_a_file_too_and_a_vocabulary(volume: Path, place: str) -> None:
    (volume / "tokenizer" / "tokenizer.json").rename(volume / "tokenizer" / "vocab.txt")
    found = look(volume, *of(volume, f"data.tokenizer={place}"))["data.tokenizer"]
    assert (found.verdict, found.what) == ("ok", f"{volume}/tokenizer/vocab.txt can be read")


MISSING = (
    ("data.source=other", "data.source", "it does not exist"),
    ("data.source=text/*.jsonl", "data.source", "it has no file in it"),
    ("data.source=text/a.txt/b", "data.source", "it leads through a file"),
    ("data.tokenizer=text", "data.tokenizer", "tokenizer.json: it does not exist"),
    ("model.path=gone", "model.path", "it does not exist"),
    ("model.path=text/a.txt", "model.path", "is a file"),
    ("model.path=text", "model.path", "holds no config.json"),
    ("data.dir=text/a.txt", "data.dir", "a.txt is not a folder"),
)


@pytest.mark.parametrize(("override", "name", "words"), MISSING)
def test_what_is_missing_or_of_another_kind_is_a_problem(
    override: str, name: str, words: str, volume: Path
) -> None:
    nothing = ("model.preset=null",) if name == "model.path" else ()
    finding = look(volume, *nothing, *of(volume, override))[name]
    assert finding.verdict == "problem" and words in finding.what
    assert finding.mend or "Give" in finding.what or "Save" in finding.what


def test_a_folder_that_is_not_of_the_preset_is_found_before_the_training(volume: Path) -> None:
    found = look(volume, "model.preset=llama2-7b", *of(volume, "model.path=model"))
    assert found["model.path"].verdict == "problem"
    assert "hidden_size=64, not 4096" in found["model.path"].what


def test_a_volume_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    found = look(tmp_path / "none")
    assert found["launch.volumes"].what.startswith(f"{tmp_path}/none: no volume is mounted there")


def test_a_run_folder_in_place_of_which_is_a_file_is_a_problem(volume: Path) -> None:
    found = look(volume, runs="text/a.txt")
    assert "a.txt is not a folder" in found["launch.run_dir"].what


@needs_root
def test_what_a_user_who_is_not_root_may_not_read_is_a_problem(volume: Path) -> None:
    (volume / "text" / "b.txt").write_text("b")
    (volume / "text" / "b.txt").chmod(0o600)
    (volume / "model" / "model.safetensors").chmod(0o600)
    (volume / "tokenizer").chmod(0o700)
    settings = of(volume, "model.path=model", "data.tokenizer=tokenizer/")
    with as_nobody():
        found = look(volume, "model.preset=null", *settings)
    for name, file in (("data.source", "b.txt"), ("model.path", "model.safetensors")):
        assert found[name].verdict == "problem"
        assert f"{file}: it may not be read, as user 65534, group 65534" in found[name].what
    assert "it may not be read" in found["data.tokenizer"].what


@needs_root
def test_a_folder_of_another_user_cannot_be_written(volume: Path) -> None:
    with as_nobody():
        found = look(volume)
    for name in ("launch.run_dir", "data.dir"):
        assert found[name].verdict == "problem"
        assert "user 65534, group 65534 may not write there; it belongs to user 0" in (
            found[name].what
        )
        assert found[name].mend.startswith("chown it to 65534:65534")


@pytest.mark.heavy
@pytest.mark.heavy
@needs_root
def test_a_full_volume_and_one_to_be_read_alone_are_told(volume: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=64k") as small:
        (small / "fill").write_bytes(b"x" * 65536)
        found = look(volume, *of(small, "launch.run_dir=runs"))
        recipe = load_checked_recipe([], ["model.preset=llama-tiny", "launch.run_dir=/any"])
        (finding, *_) = check_paths(
            recipe.model_copy(update={"data": recipe.data.model_copy(update={"dir": str(small)})}),
            small, checkpoint_bytes=10**6,
        )  # fmt: skip
    assert finding.verdict == "problem" and "it is full" in finding.what
    assert found["launch.run_dir"].verdict == "ok"  # the parent that is told is what is tried
    with mounted(tmp_path / "shut", "ro") as shut:
        found = look(volume, f"data.dir={shut}/prepared")
    assert "it is mounted to be read only" in found["data.dir"].what


def test_checkpoints_that_do_not_fit_are_a_problem(volume: Path) -> None:
    found = look(volume, "checkpoint.keep_last=3", checkpoint_bytes=2**50)
    assert found["room"].verdict == "problem"
    assert "5 checkpoints of 1.0 PiB take 5.0 PiB" in found["room"].what
    assert "lower checkpoint.keep_last" in found["room"].mend
