"""What DeepSpeed 0.19 wrote here is read as its own zero_to_fp32.py reads it.

`deepspeed/` holds folders of a model with 13 x 4 embeddings, trained for two steps in bf16 by two
processes (ZeRO 1 and 2) and three (ZeRO 3), and beside them what DeepSpeed's script made of each.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardyard.errors import CheckpointError
from shardyard.importers.checkpoints.convert import plan_import, run_import

MADE = Path(__file__).parent / "deepspeed"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_master_weights_are_those_of_deepspeeds_own_script(stage: int, tmp_path: Path) -> None:
    planned = plan_import(MADE / f"zero-{stage}", MADE / "like")
    told = run_import(planned, tmp_path / "to", lambda _: None)
    assert told["format"] == f"DeepSpeed ZeRO {stage} (0.19.8)"
    assert (told["step"], told["not_taken"], told["dtypes"]) == (2, ["optimizer"], ["float32"])
    held = load_file(tmp_path / "to" / "model.safetensors")
    wanted = load_file(MADE / f"zero-{stage}.safetensors")
    assert held.keys() == wanted.keys()
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)


def test_the_folder_of_a_step_may_be_named_itself() -> None:
    planned = plan_import(MADE / "zero-1" / "global_step2", MADE / "like")
    assert planned.checkpoint.step == 2


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    for stage, lost in ((1, 0), (1, 1), (3, 1)):
        folder = tmp_path / f"{stage}-{lost}"
        shutil.copytree(MADE / f"zero-{stage}", folder)
        (found,) = folder.glob(f"global_step2/*zero_pp_rank_{lost}_*_optim_states.pt")
        found.unlink()
        with pytest.raises(CheckpointError, match="Copy the files of all nodes"):
            plan_import(folder, MADE / "like")


def test_without_an_optimizers_files_the_models_own_weights_are_taken(tmp_path: Path) -> None:
    shutil.copytree(MADE / "zero-1", tmp_path / "a")
    for path in (tmp_path / "a").glob("*/*_optim_states.pt"):
        path.unlink()
    told = run_import(plan_import(tmp_path / "a", MADE / "like"), tmp_path / "to", lambda _: None)
    assert told["remarks"] and told["dtypes"] == ["bfloat16"]
    held = load_file(tmp_path / "to" / "model.safetensors")
    wanted = load_file(MADE / "zero-1.safetensors")
    assert all(torch.equal(held[name], wanted[name].bfloat16()) for name in wanted)


def test_shares_of_another_run_are_told(tmp_path: Path) -> None:
    """Files of two processes among those of three."""
    shutil.copytree(MADE / "zero-3", tmp_path / "a")
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(MADE / "zero-1" / "global_step2" / name, tmp_path / "a" / "global_step2" / name)
    with pytest.raises(CheckpointError):
        plan_import(tmp_path / "a", MADE / "like")


@pytest.mark.parametrize(
    "file",
    [
        "layer_00-model_states.pt",
        "mp_rank_01_model_states.pt",
        "layer_0_expert_0_mp_rank_00_model_states.pt",
    ],
)
def test_stages_and_experts_are_rejected(file: str, tmp_path: Path) -> None:
    torch.save({"module": None, "mp_world_size": 1}, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"weight": torch.ones(2)}, tmp_path / file)
    with pytest.raises(CheckpointError, match=rf"split by .*{file[:8]}.*model's state dict"):
        plan_import(tmp_path, MADE / "like")
