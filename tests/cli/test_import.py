"""The verb `import`: what is printed where, and what is written."""

import json
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.config.load import load_recipe

Captured = pytest.CaptureFixture[str]
WORDS = ["model.preset=llama-tiny", "data.source=./text"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    content = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": True}}
    Path("ds.json").write_text(json.dumps(content))
    return "ds.json"


def test_the_recipe_is_the_answer(file: str, capsys: Captured) -> None:
    assert main(["import", file, *WORDS]) == 0
    printed = capsys.readouterr().out
    Path("again.yaml").write_text(printed)
    recipe = load_recipe(["again.yaml"])
    assert (recipe.optim.global_batch, recipe.parallel.zero) == (8, 2)
    assert "#   ds.json: zero_optimization.overlap_comm, line 1: communication overlaps" in printed


def test_to_a_file_the_answer_is_what_has_no_counterpart(file: str, capsys: Captured) -> None:
    assert main(["import", file, *WORDS, "--to", "recipe.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "recipe: recipe.yaml" in printed
    assert "2 mapped, 0 equal to the default, 1 no counterpart, 0 refused" in printed
    assert "zero_optimization.overlap_comm" in printed and "next: shardyard plan" in printed
    assert load_recipe(["recipe.yaml"]).parallel.zero == 2


def test_a_dry_run_writes_nothing(file: str, capsys: Captured) -> None:
    assert main(["import", file, *WORDS, "--to", "recipe.yaml", "--dry-run"]) == 0
    assert "zero: 2" in capsys.readouterr().out
    assert not Path("recipe.yaml").exists()


def test_json_holds_every_outcome_and_the_problems(file: str, capsys: Captured) -> None:
    assert main(["import", file, "--json"]) == 2
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert [each["outcome"] for each in found["outcomes"]] == [
        "mapped", "mapped", "no counterpart",
    ]  # fmt: skip
    assert [problem.partition(":")[0] for problem in found["problems"]] == ["model", "data.source"]
    assert found["recipe"] == {} and "No recipe was made" in said.err


def test_a_file_is_written_over_only_by_force(file: str, capsys: Captured) -> None:
    Path("recipe.yaml").write_text("mine: 1\n")
    words = ["import", file, *WORDS, "--to", "recipe.yaml"]
    assert main(words) == 2
    assert Path("recipe.yaml").read_text() == "mine: 1\n"
    assert main([*words, "--force"]) == 0
    assert "zero: 2" in Path("recipe.yaml").read_text()
    assert "exists already" in capsys.readouterr().err


def test_a_url_is_no_file(capsys: Captured) -> None:
    assert main(["import", "s3://bucket/ds.json"]) == 2
    assert "is a URL, which is not opened here" in capsys.readouterr().err


CHECKPOINTS = Path(__file__).parents[1] / "importers" / "checkpoints" / "deepspeed"


def test_a_checkpoint_becomes_a_folder_and_says_what_is_not_in_it(
    tmp_path: Path, capsys: Captured
) -> None:
    words = ["import", str(CHECKPOINTS / "zero-3"), "--like", str(CHECKPOINTS / "like")]
    assert main([*words, "--dry-run"]) == 0
    assert "DeepSpeed ZeRO 3 (0.19.8), saved at step 2" in capsys.readouterr().out
    to = tmp_path / "weights"
    assert main([*words, "--to", str(to)]) == 0
    said = capsys.readouterr().out
    assert "not taken: optimizer" in said and "begins with a new optimizer" in said
    assert f"next: model.path={to} in a recipe" in said
    assert {path.name for path in to.iterdir()} == {
        "config.json", "imported.json", "model.safetensors",
    }  # fmt: skip


def test_what_a_checkpoint_holds_is_told_as_json(capsys: Captured) -> None:
    words = ["import", str(CHECKPOINTS / "zero-1"), "--like", str(CHECKPOINTS / "like")]
    assert main([*words, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["not_taken"], told["dtypes"]) == (2, ["optimizer"], ["float32"])
