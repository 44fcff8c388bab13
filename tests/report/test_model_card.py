"""The card of an export: the hub's own fields, a snippet that loads it, numbers of the run."""

from pathlib import Path

import pytest
import yaml

from shardyard.report.model_card import is_unedited_card, model_card
from shardyard.report.run_data import read_run
from shardyard.rundir.layout import RunDir
from tests.report.synthetic import RunWriter, resolved_run, write_whole_run

RECIPE = """\
model:
  hub: acme/base
  path: /home/ann/models/base
data:
  source: [hf://acme/texts@main/train, /home/ann/private/text]
  dir: /home/ann/prepared
run:
  dir: /home/ann/runs
secrets:
  HF_TOKEN: env
"""


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def card_of(run: RunDir, export: Path, step: int = 120, branch: str = "main") -> str:
    record = read_run(run)
    return model_card("acme/tuned", record, export, branch=branch, step=step, size_bytes=10**9)


def test_the_card_has_the_numbers_of_the_run(tmp_path: Path, export: Path) -> None:
    card = card_of(write_whole_run(tmp_path / "runs"), export)
    assert 'model = LlamaForCausalLM.from_pretrained("acme/tuned")' in card
    assert "tokenizer = AutoTokenizer" in card and "| steps | 120 |" in card
    assert "Validation at step 120" in card and "| loss | " in card


def test_the_snippet_names_the_branch(tmp_path: Path, export: Path) -> None:
    card = card_of(write_whole_run(tmp_path / "runs"), export, branch="step-4")
    assert 'LlamaForCausalLM.from_pretrained("acme/tuned", revision="step-4")' in card
    assert 'AutoTokenizer.from_pretrained("acme/tuned", revision="step-4")' in card


def test_scores_are_those_of_the_exported_step(tmp_path: Path, export: Path) -> None:
    card = card_of(write_whole_run(tmp_path / "runs"), export, step=45)
    assert "Validation at step 40;" in card


def test_the_front_matter_names_base_and_data(tmp_path: Path, export: Path) -> None:
    data = {"source": "hf://datasets/acme/texts@main/a"}
    resolved = resolved_run(model={"hub": "acme/base"}, data=data)
    writer = RunWriter(RunDir(tmp_path / "run"), resolved)
    writer.begin()
    writer.start()
    writer.steps(1, 3)
    (export / "adapter_config.json").write_text("{}")
    card = card_of(writer.write(), export, step=3)
    fields = yaml.safe_load(card.split("---")[1])
    assert fields == {
        "tags": ["shardyard"], "library_name": "peft", "base_model": "acme/base",
        "base_model_relation": "adapter", "datasets": ["acme/texts"],
    }  # fmt: skip
    assert "AutoPeftModelForCausalLM" in card


def test_the_recipe_is_in_it_without_places_of_the_machine(tmp_path: Path, export: Path) -> None:
    run = write_whole_run(tmp_path / "runs")
    run.attempt_recipe(run.attempts()[-1]).write_text(RECIPE)
    card = card_of(run, export)
    recipe = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert recipe == {
        "model": {"hub": "acme/base", "path": "base"},
        "data": {"source": ["hf://acme/texts@main/train", "text"]},
    }
    assert "/home" not in card and "secrets" not in card


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("s3://acme-secret/team/texts", "texts"),
        ("s3://acme-secret/texts/*.jsonl", "*.jsonl"),
        ("s3://acme-secret", "s3 (private)"),
        ("https://ann:pw@files.acme.internal/texts.jsonl?sig=abc", "texts.jsonl"),
        ("hf://acme/texts@main/train", "hf://acme/texts@main/train"),
    ],
)
def test_of_an_address_only_what_is_not_private_is_shown(
    tmp_path: Path, export: Path, address: str, shown: str
) -> None:
    run = write_whole_run(tmp_path / "runs")
    sets = f"{{code: ['{address}']}}"
    written = f"data: {{source: '{address}', eval_sets: {sets}}}\n"
    run.attempt_recipe(run.attempts()[-1]).write_text(written)
    card = card_of(run, export)
    recipe = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert recipe == {"data": {"source": shown, "eval_sets": {"code": [shown]}}}


def test_a_card_that_somebody_edited_is_told_from_ours(tmp_path: Path, export: Path) -> None:
    card = card_of(write_whole_run(tmp_path / "runs"), export)
    assert is_unedited_card(card)
    assert not is_unedited_card(card.replace("# tuned", "# Tuned"))
    assert not is_unedited_card("# theirs\n")
