"""torchtitan's TOML: initial weights and validation, as its own ``CheckpointManager`` and
``Validator`` treat them (torchtitan 0.1 and 0.2, config/job_config.py).
"""

from pathlib import Path

import pytest

from shardyard.importers.configs.convert import Imported, import_files

START = """
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[lr_scheduler]
warmup_steps = 10
[training]
steps = 100
"""
SAID = ["data.source=./text", "cluster.devices=8"]


def imported(folder: Path, table: str, lines: str, *words: str) -> Imported:
    path = folder / "train.toml"
    path.write_text(f"{START}[{table}]\n{lines}\n")
    return import_files([path], [*SAID, *words])


def setting(found: Imported, section: str, key: str) -> object:
    assert [str(problem) for problem in found.errors] == []
    return found.recipe.get(section, {}).get(key)


@pytest.mark.parametrize(
    ("lines", "path"),
    [
        ('enable = true\ninitial_load_path = "w"\ninitial_load_in_hf = true', "w"),
        ("enable = true\ninitial_load_in_hf = true", "./assets/hf/Llama-3.1-8B"),
        ('enable = false\ninitial_load_path = "w"\ninitial_load_in_hf = true', None),
        ("initial_load_in_hf = true", None),
        ('enable = true\ninitial_load_path = ""', None),
    ],
)
def test_initial_weights_of_a_hugging_face_folder_are_kept(
    tmp_path: Path, lines: str, path: str | None
) -> None:
    assert setting(imported(tmp_path, "checkpoint", lines), "model", "path") == path


def test_initial_weights_in_another_format_are_rejected_with_the_command(tmp_path: Path) -> None:
    lines = 'enable_checkpoint = true\ninitial_load_path = "out/my step-9"'
    (problem,) = imported(tmp_path, "checkpoint", lines).errors
    command = "shardyard import 'out/my step-9' --like ./assets/hf/Llama-3.1-8B --to weights"
    assert command in problem.text
    settled = imported(tmp_path, "checkpoint", lines, "model.path=weights")
    assert setting(settled, "model", "path") == "weights"


def test_the_state_of_an_optimizer_is_not_dropped_silently(tmp_path: Path) -> None:
    lines = (
        'enable = true\ninitial_load_path = "w"\ninitial_load_in_hf = true\n'
        "initial_load_model_only = false"
    )
    (problem,) = imported(tmp_path, "checkpoint", lines).errors
    assert problem.path.endswith("checkpoint.initial_load_model_only")


@pytest.mark.parametrize(
    ("lines", "words", "steps"),
    [
        ("enable = true", [], 10),
        ("enabled = true", [], 10),
        ("enable = true\nfreq = 500", [], 500),
        ("enable = true", ["task.eval_every_steps=7"], 7),
        ("enable = true", ["task.eval_every_epochs=1"], None),
        ("enable = false\nfreq = 500", [], None),
    ],
)
def test_validation_runs_every_ten_steps_unless_freq_is_given(
    tmp_path: Path, lines: str, words: list[str], steps: int | None
) -> None:
    found = imported(tmp_path, "validation", lines, *words)
    assert setting(found, "task", "eval_every_steps") == steps
