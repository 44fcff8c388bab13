"""`shardyard export` of a run that only its nodes see: written there, brought here, held to it."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard.errors import RequestError
from shardyard.io.digests import COMPLETE, parse_digests, read_digests, write_digests
from shardyard.launchers.base import JobState
from shardyard.node.side_job import SideWork
from shardyard.rundir.layout import RunDir
from shardyard.transfer import download
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.far_launcher import FarLauncher
from tests.cli.launched_runs import launch, runs_dir, shardyard, status
from tests.hub import READER, TOKEN, running_hub

Captured = pytest.CaptureFixture[str]
WEIGHTS = bytes(range(256)) * 2000


def write_export(work: SideWork) -> dict[str, Any]:
    """What checkpoint/export.py would write, and answer."""
    dtype = work.arguments["dtype"] or "float32"
    beside = work.run.path / "exports" / f"step-00000004-{dtype}"
    folder = Path(work.arguments["to"] or beside)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "config.json").write_text("{}")
    complete = write_digests(folder, {"step": 4, "dtype": dtype})
    return {
        "step": 4, "checkpoint": "there", "to": str(folder), "parameters": 128, "bytes": 512,
        "dtype": dtype, "form": "weights", "files": ["model.safetensors"], "tokenizer": False,
        "copied": [],
        "verified": {"files": 2, "bytes": 1000},
        "complete": {"files": 2, "bytes": complete.bytes, "sha256": complete.sha256,
                     "was_there": False},
    }  # fmt: skip


class Site:
    """A far run that has finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.volume = folder / "volume"
        self.far = FarLauncher(works={"export": write_export})
        where = (
            f"launch.run_dir={self.volume}/runs",
            f"launch.volumes=[{{path: {self.volume}, claim: runs}}]",
            f"data.source={self.volume}/text",
        )
        assert launch(folder, self.far, "--yes", *where) == 0
        self.there = RunDir(self.volume / "runs" / "first")
        self.there.path.mkdir(parents=True)

    def export(self, to: object, *words: str) -> int:
        asked = ("export", "first", *runs_dir(self.folder), "--to", str(to), "--yes")
        return shardyard(self.far, *asked, *words)


@pytest.fixture
def site(tmp_path: Path, capsys: Captured) -> Site:
    made = Site(tmp_path)
    capsys.readouterr()
    return made


@pytest.mark.heavy
def test_a_finished_far_run_is_exported_there_and_brought_here(
    site: Site, capsys: Captured
) -> None:
    assert site.export(site.folder / "hf") == 0
    out, err = capsys.readouterr()
    assert (
        f"exported step-00000004: 128 parameters, 512 B, float32, 1 file(s) in {site.folder}/hf"
        in out
    )
    assert "verified: the checkpoint's 2 files" in out
    assert "no checkpoint yet" not in err
    assert (site.folder / "hf" / "model.safetensors").read_bytes() == WEIGHTS
    assert read_digests(site.folder / "hf").provenance["step"] == 4
    assert list((site.there.path / "exports").iterdir()) == [], "what was brought is not kept there"
    assert not site.far.lives


@pytest.mark.heavy
def test_a_call_that_was_killed_after_the_export_finds_it_here(
    site: Site, capsys: Captured
) -> None:
    assert site.export(site.folder / "hf") == 0
    site.far.commands.clear()
    capsys.readouterr()
    assert site.export(site.folder / "hf", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["complete"]["was_there"] is True and site.far.commands == []


@pytest.mark.heavy
def test_a_broken_connection_goes_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_LONGEST_PAUSE_S", 0.01)
    site.far.breaks = [10, 0, 10**9, 1, 1000, 0, 300_000]
    assert site.export(site.folder / "hf") == 0
    assert (site.folder / "hf" / "model.safetensors").read_bytes() == WEIGHTS


def test_a_folder_that_the_nodes_see_is_written_there_and_stays(
    site: Site, capsys: Captured
) -> None:
    to = site.volume / "models" / "mine"
    assert site.export(to) == 0
    assert "is on the nodes' storage, where it was written and stays" in capsys.readouterr().err
    assert (to / COMPLETE).exists() and site.far.commands == []


@pytest.mark.heavy
def test_step_and_dtype_and_form_reach_the_node(site: Site) -> None:
    asked = ("--dtype", "bfloat16", "--step", "4", "--merged")
    assert site.export(site.folder / "hf", *asked) == 0
    (side,) = [each.side for each in site.far.submitted if each.side and each.side.kind == "export"]
    assert side.arguments == {"step": "4", "dtype": "bfloat16", "merged": True, "to": None}


def test_a_dry_run_prints_the_side_job_and_creates_nothing(site: Site, capsys: Captured) -> None:
    before = sorted(site.folder.rglob("*"))
    assert site.export(site.folder / "hf", "--dry-run") == 0
    assert '"kind": "job"' in capsys.readouterr().out
    assert sorted(site.folder.rglob("*")) == before


def test_a_run_that_goes_on_without_a_checkpoint_is_told_so_and_nothing_is_submitted(
    site: Site, capsys: Captured
) -> None:
    site.far.training = status(JobState.RUNNING)
    count = len(site.far.submitted)
    assert site.export(site.folder / "hf") == 2
    told = capsys.readouterr().err
    assert "run first has no checkpoint yet and its job is running: one is written every" in told
    assert "shardyard watch" in told and "shardyard cancel" in told
    assert len(site.far.submitted) == count


def test_the_nodes_own_refusal_is_the_verbs(site: Site, capsys: Captured) -> None:
    def refuse(_work: SideWork) -> dict[str, Any]:
        raise RequestError("run first has no checkpoint yet: wait, or resume the run.")

    site.far.works["export"] = refuse
    assert site.export(site.folder / "hf") == 2
    assert "run first has no checkpoint yet: wait" in capsys.readouterr().err
    assert not (site.folder / "hf").exists()


def test_a_folder_with_something_else_is_refused_before_anything_is_submitted(
    site: Site, capsys: Captured
) -> None:
    (site.folder / "hf").mkdir()
    (site.folder / "hf" / "mine.txt").write_text("")
    count = len(site.far.submitted)
    assert site.export(site.folder / "hf") == 2
    assert "is not an empty folder; an export would mix" in capsys.readouterr().err
    assert len(site.far.submitted) == count


def test_nodes_that_cannot_be_read_need_a_bucket_or_a_folder_of_their_own(
    tmp_path: Path, capsys: Captured
) -> None:
    kind = type("Batch", (FakeLauncher,), {"capabilities": FarLauncher.capabilities})
    batch = kind()
    volume = ("launch.run_dir=/v/runs", "launch.volumes=[{path: /v, claim: c}]")
    assert launch(tmp_path, batch, "--yes", *volume, "data.source=/v/text") == 0
    capsys.readouterr()
    asked = ("export", "first", *runs_dir(tmp_path), "--to", str(tmp_path / "hf"))
    assert shardyard(batch, *asked) == 2
    told = capsys.readouterr().err
    assert "cannot be read from here. Give --to s3://bucket/prefix, or a folder of" in told


@pytest.mark.parametrize("to", ["s3://", "s3://Bucket/x", "s3:models/x", "https://host/x"])
def test_what_is_no_place_is_refused(site: Site, capsys: Captured, to: str) -> None:
    assert site.export(to) == 2
    assert "s3://bucket/prefix" in capsys.readouterr().err or to.startswith("https")


@pytest.mark.heavy
def test_an_export_of_a_far_run_is_pushed_to_the_hub_from_here(
    site: Site, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_hub() as hub:
        hub.take_over(monkeypatch, site.folder / "home", token=TOKEN)
        assert site.export("hf://acme/first", "--public") == 0
        repo = hub.repos["acme/first"]
        files = repo.commits[repo.refs["main"]]
        assert files["model.safetensors"] == WEIGHTS and COMPLETE in files
        assert b"# first" in files["README.md"] and not repo.is_private
        assert "1 file(s) in hf://acme/first" in capsys.readouterr().out
        assert not list(site.folder.rglob("hub-*")), "nothing of it stays here"


def test_a_token_that_may_only_read_is_named_before_anything_is_submitted(
    site: Site, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = len(site.far.submitted)
    with running_hub() as hub:
        hub.take_over(monkeypatch, site.folder / "home", token=READER)
        assert site.export("hf://acme/first") == 4
    assert "may only read" in capsys.readouterr().err and len(site.far.submitted) == submitted


@pytest.mark.heavy
def test_public_does_not_change_a_private_repository(
    site: Site, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_hub() as hub:
        hub.take_over(monkeypatch, site.folder / "home", token=TOKEN)
        assert site.export("hf://acme/first") == 0
        for to in ("hf://acme/first", "hf://acme/first@new"):
            assert site.export(to, "--public") == 2
            assert f"--public: {to}: the repository exists and is" in capsys.readouterr().err
        assert hub.repos["acme/first"].is_private
        assert list(hub.repos["acme/first"].refs) == ["main"]


@pytest.mark.heavy
def test_an_export_that_a_broken_push_left_is_replaced_by_a_later_step(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _s: None)
    with running_hub() as hub:
        hub.take_over(monkeypatch, site.folder / "home", token=TOKEN)
        hub.uploads_before_down = 0
        assert site.export("hf://acme/first") != 0
        assert list(site.folder.rglob("hub-acme--first@main"))
        hub.uploads_before_down = None
        assert site.export("hf://acme/first", "--dtype", "bfloat16") == 0
        repo = hub.repos["acme/first"]
        complete = parse_digests(repo.commits[repo.refs["main"]][COMPLETE])
        assert complete.provenance["dtype"] == "bfloat16"
    assert not list(site.folder.rglob("hub-acme--first@main"))


def test_public_is_for_the_hub_alone(site: Site, capsys: Captured) -> None:
    assert site.export(site.folder / "hf", "--public") == 2
    assert "--public is for a repository of the Hugging Face hub" in capsys.readouterr().err
