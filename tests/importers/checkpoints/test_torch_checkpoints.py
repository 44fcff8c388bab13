"""What torch writes comes out as the model that was saved: the same logits."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardyard.errors import CheckpointError, RequestError
from shardyard.importers.checkpoints.convert import plan_import, run_import
from shardyard.importers.checkpoints.hf_writer import ORIGIN, write_folder
from tests.distributed.ranks import run_on_ranks
from tests.importers.checkpoints.made import TOKENS, model, save_all

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    model().save_pretrained(folder / "like")
    run_on_ranks(save_all, 2, folder)
    return folder


@pytest.fixture
def bare(made: Path, tmp_path: Path) -> Path:
    """A folder like the model's that holds no weights."""
    (tmp_path / "bare").mkdir()
    shutil.copy(made / "like" / "config.json", tmp_path / "bare")
    return tmp_path / "bare"


def taken(path: Path, like: Path, to: Path, **settings: Any) -> dict[str, Any]:
    planned = plan_import(path, like, **settings)
    written: list[int] = []
    told = run_import(planned, to, written.append)
    assert sum(written) == planned.bytes == told["bytes"]
    assert json.loads((to / ORIGIN).read_text()) == told
    return told


KINDS = {
    "full.pt": ("torch.save", 7, []),
    "pytorch_model_fsdp.bin": ("torch.save", None, []),
    "sharded": ("torch.distributed.checkpoint", 7, ["optimizer (63 tensors)"]),
    "fsdp2": ("torch.distributed.checkpoint", 7, ["optimizer (63 tensors)"]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_weights", [True, False])
def test_logits_are_those_of_the_model_that_was_saved(
    kind: str, has_weights: bool, made: Path, bare: Path, tmp_path: Path
) -> None:
    like = made / "like" if has_weights else bare
    told = taken(made / kind, like, tmp_path / "to")
    assert (told["format"], told["step"], told["not_taken"]) == KINDS[kind]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "to", dtype=torch.float32)
    assert torch.equal(again(TOKENS).logits, model()(TOKENS).logits)


def test_weights_in_sixteen_bits_are_rounded_as_torch_rounds(made: Path, tmp_path: Path) -> None:
    taken(made / "fsdp2", made / "like", tmp_path / "to", dtype="bfloat16")
    held = load_file(tmp_path / "to" / "model.safetensors")
    wanted = model().to(torch.bfloat16).state_dict()
    assert held.keys() == wanted.keys()
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)
    assert json.loads((tmp_path / "to" / "config.json").read_text())["dtype"] == "bfloat16"


def test_several_files_have_an_index_that_transformers_reads(made: Path, tmp_path: Path) -> None:
    planned = plan_import(made / "fsdp2", made / "like")
    files = write_folder(
        tmp_path / "to", planned.model.tensors, planned.like, {}, dtype=None,
        on_progress=lambda _: None, most_bytes=10_000,
    )  # fmt: skip
    assert len(files) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "to", dtype=torch.float32)
    assert torch.equal(again(TOKENS).logits, model()(TOKENS).logits)


def test_shards_that_only_fsdp1_can_put_together_are_refused_with_what_to_save(made: Path) -> None:
    with pytest.raises(CheckpointError, match="save with FULL_STATE_DICT, or with"):
        plan_import(made / "local.pt", made / "like")


def test_a_missing_file_of_another_rank_is_named(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "fsdp2", tmp_path / "half")
    (tmp_path / "half" / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is missing.*all nodes into one"):
        plan_import(tmp_path / "half", made / "like")


def test_a_file_that_was_cut_off_leaves_nothing(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "fsdp2", tmp_path / "cut")
    file = tmp_path / "cut" / "__0_0.distcp"
    planned = plan_import(tmp_path / "cut", made / "like")
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="ends within a tensor"):
        run_import(planned, tmp_path / "to", lambda _: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut"]


def test_a_folder_that_is_there_is_kept(made: Path, tmp_path: Path) -> None:
    taken(made / "full.pt", made / "like", tmp_path / "to")
    before = (tmp_path / "to" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(RequestError, match="exists already"):
        taken(made / "fsdp2", made / "like", tmp_path / "to")
    assert (tmp_path / "to" / "model.safetensors").stat().st_mtime_ns == before


def test_what_a_killed_call_left_is_taken_away(made: Path, tmp_path: Path) -> None:
    (tmp_path / ".to.importing").mkdir()
    (tmp_path / ".to.importing" / "model-00001-of-00009.safetensors").write_text("half")
    taken(made / "full.pt", made / "like", tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["to"]
    assert len(list((tmp_path / "to").glob("*.safetensors"))) == 1


def saved(path: Path, **content: Any) -> Path:
    torch.save(content, path)
    return path


def test_another_model_is_told_by_what_differs(made: Path, bare: Path, tmp_path: Path) -> None:
    state = model().state_dict()
    del state["model.norm.weight"]
    state["model.embed_tokens.weight"] = torch.zeros(40, 16)
    path = saved(tmp_path / "a.pt", model=state)
    words = r"embed_tokens.weight is \(40, 16\), there \(37, 16\), model.norm.weight is missing"
    with pytest.raises(CheckpointError, match=words):
        plan_import(path, made / "like")
    with pytest.raises(CheckpointError, match="parameters, and the model of"):
        plan_import(path, bare)


def test_of_two_models_the_user_says_which(made: Path, tmp_path: Path) -> None:
    state = model().state_dict()
    average = {name: tensor + 1 for name, tensor in state.items()}
    path = saved(tmp_path / "a.pt", model=state, ema=average)
    with pytest.raises(RequestError, match=r"holds 2 models, under 'ema\.', 'model\.'"):
        plan_import(path, made / "like")
    told = taken(path, made / "like", tmp_path / "to", prefix="ema.")
    assert told["not_taken"] == ["model (21 tensors)"]
    held = load_file(tmp_path / "to" / "model.safetensors")
    assert torch.equal(held["model.norm.weight"], average["model.norm.weight"])
    with pytest.raises(RequestError, match="no tensor of the model has it"):
        plan_import(path, made / "like", prefix="other.")


def test_names_of_wrappers_are_taken_off(made: Path, tmp_path: Path) -> None:
    state = {
        "module."
        + name.replace("layers.0.", "layers.0._checkpoint_wrapped_module._orig_mod."): each
        for name, each in model().state_dict().items()
    }
    taken(saved(tmp_path / "a.pt", **state), made / "like", tmp_path / "to")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "to", dtype=torch.float32)
    assert torch.equal(again(TOKENS).logits, model()(TOKENS).logits)


def test_a_tied_head_is_left_out_and_one_that_differs_is_refused(tmp_path: Path) -> None:
    tied = model(tied=True)
    tied.save_pretrained(tmp_path / "like")
    state = tied.state_dict()
    assert "lm_head.weight" in state
    told = taken(saved(tmp_path / "a.pt", **state), tmp_path / "like", tmp_path / "to")
    assert told["tensors"] == len(state) - 1
    apart = {**state, "lm_head.weight": state["lm_head.weight"].clone()}
    taken(saved(tmp_path / "b.pt", **apart), tmp_path / "like", tmp_path / "of equals")
    other = {**state, "lm_head.weight": state["lm_head.weight"] + 1}
    with pytest.raises(CheckpointError, match=r"differ, though .* ties them"):
        plan_import(saved(tmp_path / "c.pt", **other), tmp_path / "like")


def test_buffers_that_models_make_anew_are_left_out(made: Path, tmp_path: Path) -> None:
    state = {**model().state_dict(), "model.rotary_emb.inv_freq": torch.ones(2)}
    told = taken(saved(tmp_path / "a.pt", **state), made / "like", tmp_path / "to")
    assert told["tensors"] == 21
    counted = {**model().state_dict(), "model.norm.weight": torch.ones(16, dtype=torch.int8)}
    with pytest.raises(CheckpointError, match="quantised weights are not read"):
        plan_import(saved(tmp_path / "b.pt", **counted), made / "like")


def test_a_family_that_is_not_known_needs_a_folder_with_weights(made: Path, tmp_path: Path) -> None:
    config = json.loads((made / "like" / "config.json").read_text())
    for name in ("like", "bare"):
        shutil.copytree(made / "like", tmp_path / name)
        other = {**config, "model_type": "another"}
        (tmp_path / name / "config.json").write_text(json.dumps(other))
    (tmp_path / "bare" / "model.safetensors").unlink()
    assert taken(made / "full.pt", tmp_path / "like", tmp_path / "to")["tensors"] == 21
    with pytest.raises(RequestError, match="holds no weights that would tell them"):
        plan_import(made / "full.pt", tmp_path / "bare")


def test_a_config_beside_the_checkpoint_has_to_be_of_the_same_model(
    made: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    torch.save(model().state_dict(), folder / "pytorch_model.bin")
    config = json.loads((made / "like" / "config.json").read_text())
    own = folder / "config.json"
    own.write_text(json.dumps({**config, "use_cache": False}))
    assert plan_import(folder, made / "like").parameters
    own.write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    with pytest.raises(CheckpointError, match=r"rms_norm_eps is 1e-05, there 1e-06.*--like .*-7"):
        plan_import(folder, made / "like")
