"""The manifest says with what, where and from which command an attempt was started."""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from shardyard import __version__
from shardyard.hardware.machine import Machine
from shardyard.rundir.layout import RunDir
from shardyard.rundir.manifest import git_state, write_manifest

pytestmark = pytest.mark.heavy

MACHINE = Machine(device="cpu", name="a CPU", count=1, memory_bytes=1, cores=2, hostname="here")


def test_a_manifest_holds_versions_command_and_machine(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    command = ["shardyard", "train", "a.yaml", "data.source=hf_" + "x" * 30]
    write_manifest(run_dir, 2, command=command, machine=asdict(MACHINE), started_at=5.0)
    text = run_dir.manifest(2).read_text()
    content = json.loads(text)
    assert (content["contract_version"], content["attempt"]) == (1, 2)
    assert content["shardyard"] == __version__
    assert content["packages"]["torch"]
    assert content["machine"]["cores"] == 2
    assert content["started_at"] == 5.0
    assert content["command"] == ["shardyard", "train", "a.yaml", "(not shown)"]
    assert "xxxx" not in text


def test_a_work_tree_is_named_by_its_commit_and_whether_it_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    assert git_state(tmp_path) is None
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "--no-verify", "-m", "first")
    state = git_state(tmp_path)
    assert state is not None
    assert (len(state["commit"]), state["is_dirty"]) == (40, False)
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {**state, "is_dirty": True}
