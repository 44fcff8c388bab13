"""Which checkpoints a run folder has, as the half without torch sees it."""

import json
from pathlib import Path

import pytest

from shardyard.errors import RequestError
from shardyard.rundir.layout import RunDir, find_run, step_of_name


def add_checkpoint(run: RunDir, named: int, manifest: str | None) -> None:
    run.checkpoint(named).mkdir(parents=True)
    if manifest is not None:
        (run.checkpoint(named) / "manifest.json").write_text(manifest)


def test_a_checkpoint_counts_that_holds_what_its_own_manifest_says(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step, size in ((2, 3), (6, 4), (7, 3)):
        files = {"values.json": {"bytes": size, "sha256": ""}}
        add_checkpoint(run, step, json.dumps({"step": step, "files": files}))
        (run.checkpoint(step) / "values.json").write_text("{}\n")
    (run.checkpoint(7) / "values.json").unlink()
    add_checkpoint(run, 3, "{torn")
    add_checkpoint(run, 4, None)
    add_checkpoint(run, 99, json.dumps({"step": 2, "files": {}}))
    (run.checkpoints / "step-00000005.tmp").mkdir()
    assert run.checkpoint_steps() == [2]


@pytest.mark.parametrize("name", ["step-5", "step-00000005.tmp", "step-00000005\n", "latest"])
def test_only_the_whole_name_is_that_of_a_checkpoint(name: str) -> None:
    assert step_of_name(name) is None
    assert step_of_name("step-00000005") == 5


@pytest.mark.parametrize("held", [b"", b"\xff", b"../../etc", b"step-00000007"])
def test_a_latest_that_names_nothing_is_no_checkpoint(tmp_path: Path, held: bytes) -> None:
    run = RunDir(tmp_path)
    add_checkpoint(run, 2, None)
    run.latest.write_bytes(held)
    assert run.latest_checkpoint() is None
    run.latest.write_text("step-00000002\n")
    assert run.latest_checkpoint() == run.checkpoint(2)


def test_a_latest_that_is_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    RunDir(tmp_path).latest.mkdir(parents=True)
    assert RunDir(tmp_path).latest_checkpoint() is None


@pytest.mark.parametrize("name", ["²", "\uff15", "-1", "1.bak"])
def test_a_folder_beside_the_attempts_is_none_of_them(tmp_path: Path, name: str) -> None:
    for each in ("0", "10", name):
        (tmp_path / "attempts" / each).mkdir(parents=True)
    assert RunDir(tmp_path).attempts() == [0, 10]


def test_a_run_whose_name_is_nearly_right_is_proposed_with_its_id(tmp_path: Path) -> None:
    for stamp in ("20261101-000000-aaaa", "20261102-000000-bbbb"):
        (tmp_path / f"quickstart-{stamp}").mkdir()
        (tmp_path / f"quickstart-{stamp}" / "recipe.yaml").write_text("{}")
    with pytest.raises(RequestError, match=r"Did you mean quickstart-20261102-000000-bbbb\?"):
        find_run("quikstart", tmp_path)
    with pytest.raises(RequestError, match=r"The newest there is quickstart-20261102"):
        find_run("bert", tmp_path)
    with pytest.raises(RequestError, match=r"none/\. The folder has no runs\."):
        find_run("bert", tmp_path / "none")
