"""A gated model without a token for the nodes is refused before they are paid for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.config.rules.check import load_checked_recipe
from shardyard.control.hub_access import access_errors
from shardyard.control.submission import launcher_named
from tests.cli.fake_launcher import FakeLauncher, fake_that_can
from tests.cli.launched_runs import launch
from tests.hub import STRANGER, TOKEN, Hub, running_hub

FAR = ("launch.run_dir=/runs", "launch.volumes=[{path: /runs, claim: a}]")
GATED = ("model.preset=llama-tiny", "model.hub=acme/gated")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with running_hub() as made:
        for name in ("open", "gated", "private"):
            made.add(f"acme/{name}", tmp_path / "model")
        made.repos["acme/gated"].is_gated = made.repos["acme/private"].is_private = True
        made.take_over(monkeypatch, tmp_path / "home")
        yield made


def problems(name: str, *overrides: str) -> list[str]:
    recipe = load_checked_recipe([], ["model.preset=llama-tiny", *FAR, *overrides])
    return access_errors(recipe, launcher_named(name))


ON = {
    "kubernetes": (
        "kubectl create secret generic hf-token --from-file=token=/dev/stdin --context ours "
        "--namespace team",
        "secrets.HF_TOKEN=k8s:hf-token/token",
    ),
    "aws-batch": (
        "aws secretsmanager create-secret --name hf-token --secret-string file:///dev/stdin "
        "--region eu-west-1 --query ARN --output text",
        "secrets.HF_TOKEN=aws-sm:ARN",
    ),
    "slurm": (
        f"install -m 600 /dev/stdin {Path.home()}/.hf-token",
        f"secrets.HF_TOKEN=file:{Path.home()}/.hf-token",
    ),
}
PLACE = (
    "launch.kubernetes.context=ours", "launch.kubernetes.namespace=team",
    "launch.aws_batch.region=eu-west-1",
)  # fmt: skip


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("name", ON)
def test_the_message_has_the_line_that_keeps_the_token(name: str) -> None:
    (said,) = problems(name, *PLACE, "model.hub=acme/gated")
    assert said.startswith("model.hub=acme/gated is gated on the Hugging Face hub, and secrets.HF_")
    for words in ON[name]:
        assert words in said
    reference = ON[name][1].replace("aws-sm:ARN", "ssm:hf-token")
    assert reference in said
    assert problems(name, *PLACE, "model.hub=acme/gated", reference) == []


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("name", "why"), [("open", None), ("private", "private, or not there"), ("none", "not there")]
)
def test_what_the_hub_shows_to_some_only_is_told(name: str, why: str | None) -> None:
    found = problems("kubernetes", f"model.hub=acme/{name}")
    assert len(found) == (why is not None)
    assert why is None or why in found[0]


def test_the_token_of_this_machine_is_none_of_the_nodes(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.take_over(monkeypatch, tmp_path / "home", token=TOKEN)
    (said,) = problems("kubernetes", "model.hub=acme/private")
    assert "acme/private is private on" in said
    hub.take_over(monkeypatch, tmp_path / "home", token=STRANGER)
    (said,) = problems("kubernetes", "model.hub=acme/gated")
    assert "acme/gated is gated on" in said


def test_processes_of_this_machine_have_its_token(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(problems("local", "model.hub=acme/gated")) == 1
    hub.take_over(monkeypatch, tmp_path / "home", token=TOKEN)
    assert problems("local", "model.hub=acme/gated") == []
    assert len(problems("slurm", "model.hub=acme/gated")) == 1  # sbatch hands no environment on


@pytest.mark.usefixtures("hub")
def test_nodes_that_see_this_home_have_the_token_that_lies_in_it(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(TOKEN)
    assert problems("slurm", "model.hub=acme/gated") == []
    container = ("launch.slurm.container_image=image", "launch.slurm.container_mounts=[/a]")
    assert len(problems("slurm", "model.hub=acme/gated", *container)) == 1


@pytest.mark.usefixtures("hub")
def test_a_gated_tokenizer_is_told_too() -> None:
    (said,) = problems("kubernetes", "data.tokenizer=acme/gated")
    assert said.startswith("data.tokenizer=acme/gated is gated")
    assert problems("kubernetes", "data.tokenizer=train") == []


def test_a_hub_that_gives_no_answer_refuses_nothing(hub: Hub) -> None:
    hub.is_down = True
    assert problems("kubernetes", "model.hub=acme/gated") == []


def test_it_is_refused_before_anything_is_submitted_and_a_dry_run_asks_nobody(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far: FakeLauncher = fake_that_can(shares_folder=False, secrets=("k8s",))
    assert launch(tmp_path, far, "--dry-run", *FAR, *GATED) == 0
    assert not hub.requests
    capsys.readouterr()
    assert launch(tmp_path, far, "--yes", *FAR, *GATED) == 2
    assert "kubectl create secret generic hf-token" in capsys.readouterr().err
    assert far.created == set()
    assert launch(tmp_path, far, "--yes", "--force", *FAR, *GATED) == 0
