"""A verb that ends something refuses a folder in which others may write."""

import os
from pathlib import Path

import pytest

from shardyard.control.train import next_attempt
from shardyard.errors import AccessError
from shardyard.launchers.ledger_owner import check_trusted
from shardyard.rundir.layout import RunDir
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.launched_runs import launch, runs_dir, shardyard

Captured = pytest.CaptureFixture[str]
STEERING = ("", "ledger.jsonl", "launch", "logs", "submissions")
SUBMITTED = ("recipe.yaml", "submissions/2.yaml", "launch/slurm.sbatch")


@pytest.fixture
def run(tmp_path: Path, capsys: Captured) -> Path:
    assert launch(tmp_path, FakeLauncher(), "--yes") == 0
    capsys.readouterr()
    made = tmp_path / "runs" / "first"
    for name in STEERING[2:]:
        (made / name).mkdir(exist_ok=True)
    return made


@pytest.mark.parametrize("verb", [("cancel",), ("teardown", "--yes", "--force"), ("scale", "3")])
def test_an_older_folder_with_group_write_ends_nothing_until_it_is_mended(
    run: Path, tmp_path: Path, capsys: Captured, verb: tuple[str, ...]
) -> None:
    run.chmod(0o775)
    (run / "ledger.jsonl").chmod(0o664)
    fake = FakeLauncher(created={"fake job"})
    words = (verb[0], "first", *verb[1:], *runs_dir(tmp_path))
    assert shardyard(fake, *words) == 4
    said = capsys.readouterr().err
    assert f"chmod go-w {run}/ledger.jsonl {run}\n" in said and "--trust-folder" in said
    assert (fake.cancelled, fake.scaled, fake.created) == (0, [], {"fake job"})
    assert shardyard(fake, "status", "first", *runs_dir(tmp_path)) == 0  # it may be looked at
    assert shardyard(fake, *words, "--trust-folder") == 0
    run.chmod(0o755)
    (run / "ledger.jsonl").chmod(0o644)
    assert shardyard(fake, *words) == 0


@pytest.mark.parametrize("name", STEERING)
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_every_folder_in_which_a_verb_writes_is_looked_at(run: Path, name: str, mode: int) -> None:
    path = run / name if name else run
    check_trusted(run / "ledger.jsonl", trusts_folder=False)
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(AccessError, match="everybody" if mode == 0o002 else "its group"):
        check_trusted(run / "ledger.jsonl", trusts_folder=False)


@pytest.mark.parametrize("name", SUBMITTED)
def test_what_a_verb_would_submit_is_looked_at_like_the_ledger(run: Path, name: str) -> None:
    path = run / name
    path.touch(mode=0o644)
    check_trusted(run / "ledger.jsonl", trusts_folder=False)
    path.chmod(0o664)
    with pytest.raises(AccessError, match=f"{name} may be written by its group") as refusal:
        check_trusted(run / "ledger.jsonl", trusts_folder=False)
    assert f"chmod go-w {path}\n" in str(refusal.value)


def test_a_ledger_of_another_user_is_refused(run: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(run / "ledger.jsonl", 65534, 65534)
    with pytest.raises(AccessError, match=r"ledger.jsonl belongs to nobody; you are root"):
        check_trusted(run / "ledger.jsonl", trusts_folder=False)
    (run / "recipe.yaml").touch(mode=0o644)
    os.chown(run / "recipe.yaml", 65534, 65534)
    with pytest.raises(AccessError, match=r"ledger.jsonl and 1 more belong to nobody; you are"):
        check_trusted(run / "ledger.jsonl", trusts_folder=False)


def test_a_link_to_a_ledger_is_held_to_the_folder_that_it_leads_to(
    run: Path, tmp_path: Path
) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (run / "ledger.jsonl").rename(open_to_all / "ledger.jsonl")
    (run / "ledger.jsonl").symlink_to(open_to_all / "ledger.jsonl")
    with pytest.raises(AccessError, match=f"{open_to_all} may be written by everybody"):
        check_trusted(run / "ledger.jsonl", trusts_folder=False)


def test_a_launched_run_s_folder_needs_no_mending_whatever_the_umask(
    tmp_path: Path, capsys: Captured
) -> None:
    before = os.umask(0)
    try:
        fake = FakeLauncher()
        assert launch(tmp_path, fake, "--yes") == 0
        assert shardyard(fake, "cancel", "first", *runs_dir(tmp_path)) == 0
    finally:
        os.umask(before)
    made = [tmp_path / "runs" / "first", *(tmp_path / "runs" / "first").rglob("*")]
    assert [path for path in made if path.stat().st_mode & 0o022] == []
    capsys.readouterr()


@pytest.mark.parametrize("is_folder", [True, False])
def test_resume_by_another_user_says_whose_the_run_is_and_what_to_do(
    is_folder: bool, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user for a while")
    run = tmp_path / "runs" / "trained"
    run.mkdir(parents=True)
    for name in ("recipe.yaml", "events.jsonl"):
        (run / name).touch()
    if not is_folder:
        run.chmod(0o777)
    opened = [folder for folder in run.parents if not folder.stat().st_mode & 0o001]
    modes = [folder.stat().st_mode for folder in opened]
    for folder in opened:
        folder.chmod(0o755)
    os.seteuid(_NOBODY)
    try:
        with pytest.raises(AccessError) as refused:
            next_attempt(RunDir(run), ())
    finally:
        os.seteuid(0)
        for folder, mode in zip(opened, modes, strict=True):
            folder.chmod(mode)
    err = str(refused.value)
    shut = run if is_folder else run / "events.jsonl"
    assert f"{shut} belongs to root, and you, nobody, may not write there" in err
    assert f"Run this as root; or continue with a copy of your own: cp -r {run} FOLDER" in err


_NOBODY = 65534
