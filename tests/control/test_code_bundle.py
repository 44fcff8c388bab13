"""launch.code reaches the nodes: what was launched is what is imported there, also on a resume."""

import base64
import gzip
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.config.load import dump_recipe, load_recipe
from shardyard.control.code_bundle import packed_code, take_code
from shardyard.errors import DataError, RequestError
from shardyard.launchers.base import JobState
from shardyard.launchers.bundle import _tar, bundle, write_bundle
from shardyard.launchers.kubernetes import pod
from shardyard.launchers.kubernetes.objects import render_objects
from shardyard.rundir.layout import RunDir
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.launched_runs import launch, runs_dir, shardyard, status
from tests.launchers.kubernetes.requests import request_for


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A launched run, from a folder with a module of the user's own."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("ANSWER = 42\n")
    monkeypatch.chdir(tmp_path)
    assert launch(tmp_path, FakeLauncher(), "--yes", "launch.code=[mine]") == 0
    return RunDir(tmp_path / "runs" / "first")


def imported(cwd: Path) -> str:
    """What a process of a node imports."""
    program = "import mine; print(mine.ANSWER, mine.__file__)"
    return subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.heavy
def test_a_node_imports_what_was_launched(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "__init__.py").write_text("ANSWER = 'changed since'\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    recipe = load_recipe([run.recipe])
    for _ in range(2):  # every node unpacks, or finds it unpacked
        monkeypatch.setenv("PYTHONPATH", "/somewhere")
        take_code(recipe, run)
    assert os.environ["PYTHONPATH"].endswith(f"{os.pathsep}/somewhere")
    answer, place = imported(elsewhere).split()
    assert answer == "42" and place.startswith(str(run.path / "launch" / "code-"))


def test_a_run_without_code_has_nothing_to_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch(tmp_path, FakeLauncher(), "--yes") == 0
    run = RunDir(tmp_path / "runs" / "first")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    take_code(load_recipe([run.recipe]), run)
    assert "PYTHONPATH" not in os.environ
    assert not (run.path / "launch").exists()


@pytest.mark.heavy
def test_code_that_was_lost_on_its_way_is_told(run: RunDir) -> None:
    (run.path / "launch" / "code.json").unlink()
    with pytest.raises(DataError, match=r"code\.json is missing.*Launch again"):
        take_code(load_recipe([run.recipe]), run)


def test_code_that_is_not_there_is_refused_before_anything_is_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeLauncher()
    assert launch(tmp_path, fake, "--yes", "launch.code=[no-such-*]") == 2
    assert "matches no file in" in capsys.readouterr().err
    assert fake.created == set() and not (tmp_path / "runs" / "first").exists()


@pytest.mark.heavy
def test_a_pod_imports_what_its_config_map_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("ANSWER = 43\n")
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe([], ["model.preset=llama-tiny", "launch.code=[mine]"])
    text = dump_recipe(recipe)
    run = RunDir(tmp_path / "claim" / "r")
    code = packed_code(recipe, text, run, is_resume=False)
    assert code is not None
    request = replace(request_for(), recipe_text=text, code=code)
    (config, *_) = render_objects(request)
    assert config["data"] == {"recipe.yaml": text} and config["immutable"]
    ((name, content),) = config["binaryData"].items()
    assert pod.command(request)[-2:] == ["--code", f"/shardyard/recipe/{name}"]
    mounted = tmp_path / "mounted" / name
    mounted.parent.mkdir()
    mounted.write_bytes(base64.b64decode(content))

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    take_code(recipe, run, mounted)
    assert imported(elsewhere).split()[0] == "43"

    other = replace(request, code=bundle(["mine"], text + "# other\n"))
    assert render_objects(other)[0]["metadata"]["name"] != config["metadata"]["name"]
    assert other.code is not None
    mounted.write_bytes(other.code.archive)  # under the name of the first
    with pytest.raises(DataError, match="SHA-256"):
        take_code(recipe, RunDir(tmp_path / "another"), mounted)


def test_code_that_a_config_map_cannot_take_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "large.bin").write_bytes(os.urandom(1_100_000))
    request = replace(request_for(), code=bundle(["large.bin"], "", start=tmp_path))
    with pytest.raises(RequestError, match=r"a ConfigMap takes 1,000,000.*into the image"):
        render_objects(request)


@pytest.mark.heavy
def test_a_resume_sends_the_code_that_was_launched(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "mine" / "__init__.py").write_text("ANSWER = 'changed since'\n")
    fake = FakeLauncher(statuses=[status(JobState.FAILED)])
    assert shardyard(fake, "resume", "first", "--yes", *runs_dir(tmp_path)) == 0
    (request,) = fake.submitted
    (kept,) = (run.path / "launch").glob("bundle-*.tar.gz")
    assert request.code is not None and request.code.archive == kept.read_bytes()


@pytest.mark.heavy
def test_unpacked_code_that_was_changed_is_rejected_before_it_is_used(run: RunDir) -> None:
    recipe = load_recipe([run.recipe])
    take_code(recipe, run)
    (module,) = run.path.glob("launch/code-*/code/mine/__init__.py")
    for damage in ("", "ANSWER = 41\n"):
        module.write_text(damage)
        with pytest.raises(DataError, match=r"code/mine/__init__\.py changed\. Remove .*: rm -r "):
            take_code(recipe, run)
        with pytest.raises(DataError, match="is not the code that was launched"):
            packed_code(recipe, "", run, is_resume=True)
    module.unlink()
    with pytest.raises(DataError, match=r"code/mine/__init__\.py changed"):
        take_code(recipe, run)


def packed_by_an_earlier_version(run: RunDir, **files: str) -> Path:
    """Its archive in the run's folder, with files that no version of today packs."""
    content = {f"code/mine/{name}": (text.encode(), 0o644) for name, text in files.items()}
    content |= {"code/mine/__init__.py": (b"ANSWER = 42\n", 0o644), "recipe.yaml": (b"{}", 0o644)}
    archive = _tar(content)
    digest = hashlib.sha256(archive).hexdigest()
    path = run.path / "launch" / f"bundle-{digest[:16]}.tar.gz"
    path.write_bytes(gzip.compress(archive, mtime=0))
    note = {"code": ["mine"], "file": path.name, "digest": digest, "files": len(content)}
    (run.path / "launch" / "code.json").write_text(json.dumps(note))
    return path


@pytest.mark.heavy
def test_a_resume_sends_no_private_files_that_an_earlier_version_packed(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    files = {".env": "PASSWORD=x", "deploy_key": "-----BEGIN OPENSSH PRIVATE KEY-----\n"}
    path = packed_by_an_earlier_version(run, **files)
    recipe = load_recipe([run.recipe])
    again = packed_code(recipe, dump_recipe(recipe), run, is_resume=True)
    assert again is not None and again.names == ("mine/__init__.py",)
    assert set(again.excluded_files) == {"mine/.env", "mine/deploy_key"}
    assert b"PASSWORD" not in gzip.decompress(again.archive)
    assert again.digest == hashlib.sha256(gzip.decompress(again.archive)).hexdigest()
    assert f"{path}, which an earlier version packed, holds private files" in caplog.text
    assert "rm -r" in caplog.text


@pytest.mark.heavy
def test_a_resume_of_code_with_a_token_that_an_earlier_version_packed_is_rejected(
    run: RunDir,
) -> None:
    token = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ01234567"
    packed_by_an_earlier_version(run, **{"login.py": f"TOKEN = '{token}'\n"})
    recipe = load_recipe([run.recipe])
    words = r"mine/login\.py:1 .*an earlier version packed\. Remove the note .*: rm \S*code\.json"
    with pytest.raises(RequestError, match=words) as caught:
        packed_code(recipe, dump_recipe(recipe), run, is_resume=True)
    assert token not in str(caught.value)


@pytest.mark.heavy
@pytest.mark.parametrize("damage", ["empty", "missing", "cut"])
def test_a_resume_packs_the_same_code_again_where_the_archive_is_lost(
    damage: str, run: RunDir, tmp_path: Path
) -> None:
    (archive,) = (run.path / "launch").glob("bundle-*")
    content = archive.read_bytes()
    recipe = load_recipe([run.recipe])
    if damage == "missing":
        archive.unlink()
    else:
        archive.write_bytes(b"" if damage == "empty" else content[: len(content) // 2])
    code = packed_code(recipe, "changed: since\n", run, is_resume=True)
    assert code is not None and archive.name == code.name
    write_bundle(code, run.path / "launch")
    take_code(recipe, run)
    archive.write_bytes(b"")
    (tmp_path / "mine" / "__init__.py").write_text("ANSWER = 44\n")
    with pytest.raises(
        DataError, match=r"not the code that was launched either.*: rm .*code\.json"
    ):
        packed_code(recipe, "", run, is_resume=True)
