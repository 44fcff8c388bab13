"""Launching with a model and data that this machine does not have, and the nodes do."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.config.load import load_recipe
from tests.cli.fake_launcher import FakeLauncher, fake_that_can
from tests.cli.launched_runs import launch
from tests.config.model.test_source import LLAMA

Captured = pytest.CaptureFixture[str]
ON_VOLUMES = (
    "--dry-run", "model.path=/models/mine", "data.source=/data/text", "launch.run_dir=/runs",
    "launch.volumes=[{path: /runs, claim: a}, {path: /models, claim: b}, {path: /data, claim: c}]",
)  # fmt: skip
RENTED = (
    "optim.global_batch=16", "cluster.device=auto", "cluster.devices=auto",
    "cluster.instance=p5.48xlarge",
)  # fmt: skip


@pytest.fixture
def far() -> FakeLauncher:
    return fake_that_can(shares_folder=False)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def config_file(folder: Path, **changes: Any) -> Path:
    file = folder / "mine.json"
    file.write_text(json.dumps({**LLAMA, **changes}))
    return file


def test_a_preset_beside_a_path_says_the_shape_that_is_planned(
    tmp_path: Path, far: FakeLauncher, capsys: Captured
) -> None:
    assert launch(tmp_path, far, *ON_VOLUMES, *RENTED, "model.preset=llama2-7b") == 0
    said = capsys.readouterr().err
    assert "plan: llama2-7b" in said and "price: $110.08 an hour" in said
    sent = far.submitted[0].recipe
    assert (sent.model.path, sent.model.preset) == ("/models/mine", "llama2-7b")
    assert sent.model.weights == "auto"  # node 0 settles it: they are loaded


def test_a_config_json_here_says_the_shape_and_goes_with_the_recipe(
    tmp_path: Path, far: FakeLauncher, capsys: Captured
) -> None:
    file = config_file(tmp_path)
    config = ("model.preset=null", f"model.config={file.name}")
    assert launch(tmp_path, far, *ON_VOLUMES, *config) == 0
    assert "no prediction" not in capsys.readouterr().err
    text = far.submitted[0].recipe_text
    file.unlink()
    (tmp_path / "sent.yaml").write_text(text)
    assert load_recipe([tmp_path / "sent.yaml"]).model.config == LLAMA


def test_without_either_the_plan_is_not_known_and_node_0_settles_it(
    tmp_path: Path, far: FakeLauncher, capsys: Captured
) -> None:
    assert launch(tmp_path, far, *ON_VOLUMES, "model.preset=null") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "plan: no prediction: model.path=/models/mine is on the nodes" in said
    assert "not known here; node 0 settles what is open. Give model.preset or model.config" in said
    assert far.submitted[0].recipe.optim.lr == "auto"


def test_a_limit_in_dollars_wants_a_shape(
    tmp_path: Path, far: FakeLauncher, capsys: Captured
) -> None:
    words = [word for word in ON_VOLUMES if word != "--dry-run"]
    limited = (*words, "model.preset=null", "--yes", "--max-usd", "5")
    assert launch(tmp_path, far, *limited) == 2
    assert "the price is not known: model.path=/models/mine is on the nodes" in (
        capsys.readouterr().err
    )
    assert far.created == set()


def test_a_preset_beside_a_hub_name_needs_no_network(
    tmp_path: Path, far: FakeLauncher, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fetch(*_: object, **__: object) -> None:
        raise AssertionError("the hub is asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fetch)
    words = ("--dry-run", "launch.run_dir=/runs", "launch.volumes=[{path: /runs, claim: a}]")
    hub = ("model.hub=owner/name", "model.preset=llama2-7b")
    assert launch(tmp_path, far, *words, *hub, *RENTED) == 0
    assert "plan: llama2-7b" in capsys.readouterr().err
    assert main(["plan", *hub, *RENTED, "--layouts", "0"]) == 0


def test_a_hub_that_is_not_reached_leaves_the_shape_to_node_0(
    tmp_path: Path, far: FakeLauncher, capsys: Captured
) -> None:
    words = ("--dry-run", "launch.run_dir=/runs", "launch.volumes=[{path: /runs, claim: a}]")
    assert launch(tmp_path, far, *words, "model.preset=null", "model.hub=owner/name") == 0
    assert "plan: no prediction: model.hub=owner/name could not be read here" in (
        capsys.readouterr().err
    )


def test_paths_that_no_node_can_have_are_refused_together(
    tmp_path: Path, far: FakeLauncher, capsys: Captured
) -> None:
    where = ("launch.run_dir=/runs", "launch.volumes=[{path: /runs, claim: a}]")
    wrong = ("data.source=./my-text", "model.path=/models/mine")
    assert launch(tmp_path, far, "--yes", *where, *wrong) == 2
    said = capsys.readouterr().err
    assert "data.source=./my-text is relative" in said
    assert "model.path=/models/mine is in no folder that nodes of fake see" in said
    assert far.created == set() and not (tmp_path / "runs").exists()


def test_a_path_where_nothing_is_is_refused_before_nodes_that_see_this_machine_are_paid_for(
    tmp_path: Path, capsys: Captured
) -> None:
    fake = FakeLauncher()
    assert launch(tmp_path, fake, "--yes", "data.source=my-text") == 2
    assert "data.source=my-text does not exist on this machine" in capsys.readouterr().err
    assert fake.created == set()
