"""`shardyard image`: shows its Dockerfile, builds and pushes, answers with the digest."""

import json
from pathlib import Path

import pytest

from shardyard import __version__
from shardyard.cli import main
from tests.image.test_dockerfile import DIGEST, calls, made_tool


def test_a_dry_run_prints_the_dockerfile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["image", "build", "--base", "cpu", "--dry-run"]) == 0
    assert capsys.readouterr().out == Path("docker/Dockerfile.cpu").read_text()
    assert main(["image", "build", "--base", "cpu", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tag"] == f"shardyard:{__version__}-cpu"


@pytest.mark.heavy
def test_an_image_is_built_and_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, log = made_tool(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["image", "build", "--base", "cpu"]) == 0
    assert capsys.readouterr().out == f"shardyard:{__version__}-cpu\n"
    to = "registry.example/me/shardyard:1"
    assert main(["image", "push", to, "--base", "cpu", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["launch.image"] == f"registry.example/me/shardyard@{DIGEST}"
    assert [arguments[0] for arguments, _ in calls(log)] == ["build", "tag", "push"]


def test_a_dry_push_says_what_it_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    to = "123456789012.dkr.ecr.us-east-1.amazonaws.com/shardyard:1"
    assert main(["image", "push", to, "--base", "cpu", "--dry-run"]) == 0
    assert "create the ECR repository shardyard if it is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "--base", "tpu"], "--base 'tpu' is not a base. Use cpu, cuda-efa, cuda126-efa"),
        (["build", "--base", "gaudi"], "Give a newer one with --base gaudi:IMAGE"),
        (["build", "--tag", "-x"], "--tag '-x' is not a name of an image. Write registry/name:tag"),
        (["push", "Registry.example/A:1"], "TO 'Registry.example/A:1' is not a name of an image"),
    ],
)
def test_a_wrong_request_says_what_to_do(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["image", *arguments]) == 2
    assert words in capsys.readouterr().err
