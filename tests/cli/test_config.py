"""`shardyard config`: the resolved recipe with reasons, and the documentation of settings."""

import json
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.config.schema.reference import settings
from shardyard.families.presets import PRESETS


def test_a_recipe_is_shown_by_section_with_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "small.yaml"
    recipe.write_text("model: {preset: llama-tiny}")
    assert main(["config", str(recipe), "run.steps=100"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "name small the recipe's file name" in lines
    assert "preset llama-tiny given" in lines
    assert "seed 0 default" in lines
    assert "warmup_steps 10 a tenth of the run, at most 2,000 as in Llama 2" in lines
    assert "length 100 steps run.steps" in lines


def test_values_of_a_site_file_are_shown_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("launch:\n  image: a\n")
    monkeypatch.setenv("SHARDYARD_SITE", str(site))
    assert main(["config", "model.preset=llama-tiny"]) == 0
    captured = capsys.readouterr()
    lines = [" ".join(line.split()) for line in captured.out.splitlines()]
    assert f"image a site file {site}, line 2" in lines
    assert f"site files {site} read below the recipe, the last one wins" in lines
    assert not [line for line in lines if line.startswith("origins")]  # in the rows already
    assert captured.err == f"note: site file {site} sets launch.image\n"
    assert main(["config", "model.preset=llama-tiny", "launch.image=b", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["site_files"] == [str(site)]
    assert content["settings"]["launch.image"] == {"value": "b", "reason": "given"}


def test_a_note_tells_what_of_a_folder_is_done_in_another_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import MixtralConfig

    MixtralConfig(router_aux_loss_coef=0.02).save_pretrained(tmp_path)
    assert main(["config", f"model.path={tmp_path}", "model.weights=random"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("note: ") and "router_aux_loss_coef=0.02, which weighs another" in said
    chosen = "model.router_aux_loss=0.02"
    assert main(["config", f"model.path={tmp_path}", "model.weights=random", chosen]) == 0
    assert capsys.readouterr().err == ""


def test_json_holds_value_and_reason_of_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "model.preset=llama2-7b", "run.tokens=1e9", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert set(content["settings"]) == set(settings()) - {"secrets"}
    assert content["settings"]["model.preset"] == {"value": "llama2-7b", "reason": "given"}
    # 1e9 tokens / (1,024 samples x 4,096 tokens) = 238.4
    assert content["steps"]["value"] == 239
    assert content["shape"]["hidden_size"] == 4096


def test_the_schema_documents_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == 0
    text = capsys.readouterr().out
    assert all(setting.sentence in text for setting in settings().values())
    assert main(["config", "--schema", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listing] == list(settings())


def test_the_presets_are_listed_with_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--presets"]) == 0
    text = capsys.readouterr().out
    assert all(name in text and preset.source in text for name, preset in PRESETS.items())
    assert main(["config", "--presets", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(PRESETS)


def test_a_recipe_is_needed_unless_documentation_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config"]) == 2
    assert "RECIPE is missing. Give a YAML file" in capsys.readouterr().err
    assert main(["config", "--schema", "--presets"]) == 2
    assert "exclude each other" in capsys.readouterr().err
