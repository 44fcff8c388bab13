"""The far side lists what may come, its newest sound checkpoint verified, nothing that steers."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from shardyard.checkpoint.retention import mark_best, mark_latest
from shardyard.checkpoint.select import main
from shardyard.checkpoint.verify import FORMAT, Manifest, write_flushed, write_manifest
from shardyard.errors import DataError, RequestError, ShardyardError
from shardyard.rundir.layout import RunDir
from shardyard.transfer.download import RemoteListing, read_listing

BESIDE = {
    "events.jsonl": "{}\n", "metrics.jsonl": "{}\n", "report.html": "page", "sample.txt": "text",
    "attempts/0/resolved.json": "{}", "logs/attempt-0/rank-0.log": "said",
}  # fmt: skip
STEERING = (
    "ledger.jsonl", "recipe.yaml", "lease.json", "launch/slurm.sbatch", "submissions/2.yaml",
    "sessions/a.json", "logs/job-1/status.json", ".events.jsonl.17", "attempts/1.tmp/x",
    "checkpoints/latest", "checkpoints/step-00000009.tmp/rank-00000.safetensors",
)  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    for name in (*BESIDE, *STEERING):
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text(BESIDE.get(name, "steers"))
    (run.path / "link.txt").symlink_to("/etc/passwd")
    for step in (2, 4, 6):
        folder = run.checkpoint(step)
        folder.mkdir()
        files = {
            name: write_flushed(folder / name, [memoryview(f"{name} of {step}".encode())])
            for name in ("values.json", "rank-00000.bin")
        }
        made = Manifest(format=FORMAT, step=step, world_size=1, torch="2.13.0", files=files)
        write_manifest(folder, made)
    mark_latest(run.checkpoints, 6)
    mark_best(run.checkpoints, 4)
    return run


def listed(run: RunDir, capsys: pytest.CaptureFixture[str], step: str = "latest") -> RemoteListing:
    code = main([str(run.path), "--step", step])
    lines = capsys.readouterr().out.splitlines()
    assert code == json.loads(lines[-1]).get("exit_code", 0)
    return read_listing(lines)


def test_all_that_may_come_is_listed_with_its_digest_and_nothing_else(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    found = listed(run_dir, capsys)
    inside = ("manifest.json", "rank-00000.bin", "values.json")
    assert set(found.files) == {*BESIDE, *(f"checkpoints/step-00000006/{name}" for name in inside)}
    for name, digest in found.files.items():
        content = (run_dir.path / name).read_bytes()
        assert digest.bytes == len(content)
        assert digest.sha256 == hashlib.sha256(content).hexdigest()
    assert (found.steps, found.best, found.warnings) == ((6,), 4, ())
    assert set(found.checkpoints) == {"checkpoints/step-00000006"}
    assert set(found.others) == set(BESIDE)


def test_the_newest_sound_checkpoint_is_taken_and_the_damaged_one_named(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir.checkpoint(6) / "values.json").write_text("rotten")
    found = listed(run_dir, capsys)
    assert found.steps == (4,)
    assert "step-00000006 is damaged: values.json: 6 bytes long" in found.warnings[0]
    with pytest.raises(ShardyardError, match=r"step-00000006 is damaged: values.json: 6 bytes"):
        listed(run_dir, capsys, "6")


@pytest.mark.parametrize(("step", "steps"), [("4", (4,)), ("best", (4,)), ("all", (2, 4, 6))])
def test_a_step_best_or_all_can_be_asked_for(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], step: str, steps: tuple[int, ...]
) -> None:
    assert listed(run_dir, capsys, step).steps == steps


def test_of_all_the_damaged_ones_are_left_out_and_named(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir.checkpoint(2) / "values.json").unlink()
    found = listed(run_dir, capsys, "all")
    assert found.steps == (4, 6)
    assert found.warnings == ("step-00000002 is damaged: values.json: missing. It is left out",)


def test_a_step_that_is_not_there_and_a_run_that_is_not_there_are_refused(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError, match=r"has those of steps 2, 4, 6"):
        listed(run_dir, capsys, "5")
    with pytest.raises(
        RequestError, match=r"the run folder .* is missing where the nodes look for it"
    ):
        listed(RunDir(run_dir.path / "gone"), capsys)


def test_a_run_without_a_checkpoint_has_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    run.events.write_text("{}\n")
    found = listed(run, capsys)
    assert (set(found.files), found.warnings) == (
        {"events.jsonl"},
        ("the run has no checkpoint yet",),
    )


GOOD = {"file": "report.md", "bytes": 1, "sha256": "0" * 64}
END: dict[str, Any] = {"end": {"steps": [], "best": None, "warnings": []}}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({**GOOD, "file": "/etc/passwd"}, "not a plain path"),
        ({**GOOD, "file": "../../.ssh/authorized_keys"}, "leads out"),
        ({**GOOD, "file": "ledger.jsonl"}, "not a file that the remote side of a run may send"),
        ({**GOOD, "file": "recipe.yaml"}, "not a file that the remote side of a run may send"),
        (
            {**GOOD, "file": "logs/job-1/status.json"},
            ("not a file that the remote side of a run may send"),
        ),
        ({**GOOD, "bytes": -1}, "not a number of bytes"),
        ({**GOOD, "sha256": "x"}, "not a SHA-256"),
        ({"end": {"steps": ["1"], "best": None, "warnings": []}}, "are not steps"),
        ([], "TypeError|indices|form"),
    ],
)
def test_what_the_far_side_says_is_held_to_its_form(line: Any, why: str) -> None:
    with pytest.raises(DataError, match=why):
        read_listing([json.dumps(GOOD), json.dumps(line), json.dumps(END)])


def test_a_listing_that_was_cut_is_none() -> None:
    with pytest.raises(DataError, match="was cut off"):
        read_listing([json.dumps(GOOD)])
    assert list(read_listing([json.dumps(GOOD), json.dumps(END)]).files) == ["report.md"]
