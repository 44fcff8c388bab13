"""A model cut as Megatron's documents describe comes out whole; Megatron itself wrote none."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from shardyard.errors import CheckpointError, RequestError
from shardyard.importers.checkpoints.convert import plan_import, run_import
from tests.importers.checkpoints.made import TOKENS, model

pytestmark = pytest.mark.heavy

PADDED = 48
"""Rows of the table of tokens, of which 37 are tokens."""

HEAD, QUERIES_A_GROUP = 4, 2


def _qkv(state: dict[str, Any], before: str) -> torch.Tensor:
    """Group by group: its queries, its key, its value."""
    q, k, v = (state[f"{before}self_attn.{name}_proj.weight"].split(HEAD) for name in "qkv")
    rows = []
    for group in range(len(k)):
        rows += q[group * QUERIES_A_GROUP : (group + 1) * QUERIES_A_GROUP]
        rows += [k[group], v[group]]
    return torch.cat(rows)


def _block(state: dict[str, Any], before: str, rank: int, ranks: int) -> dict[str, Any]:
    """What a rank holds of a block, by the names of Megatron's core."""
    gate, up, down = (state[f"{before}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    fc1 = torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]])
    return {
        "self_attention.linear_qkv.weight": _qkv(state, before).chunk(ranks)[rank],
        "self_attention.linear_qkv.layer_norm_weight": state[f"{before}input_layernorm.weight"],
        "self_attention.linear_qkv._extra_state": None,
        "self_attention.linear_proj.weight": state[f"{before}self_attn.o_proj.weight"].chunk(
            ranks, dim=1
        )[rank],
        "mlp.linear_fc1.weight": fc1,
        "mlp.linear_fc1.layer_norm_weight": state[f"{before}post_attention_layernorm.weight"],
        "mlp.linear_fc2.weight": down.chunk(ranks, dim=1)[rank],
    }


def cut(folder: Path, *, ranks: int, stages: int, **args: Any) -> Path:
    """A checkpoint of the model after iteration 40."""
    whole = model()
    state = whole.state_dict()
    layers = whole.config.num_hidden_layers // stages
    noise = torch.full((PADDED - 37, 16), 9.0)
    tables = {
        name: torch.cat([state[name], noise]).chunk(ranks)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    for stage in range(stages):
        for rank in range(ranks):
            held: dict[str, Any] = {}
            if stage == 0:
                table = tables["model.embed_tokens.weight"][rank]
                held["embedding.word_embeddings.weight"] = table
            for layer in range(layers):
                before = f"model.layers.{stage * layers + layer}."
                for name, tensor in _block(state, before, rank, ranks).items():
                    held[f"decoder.layers.{layer}.{name}"] = tensor
            if stage == stages - 1:
                held["decoder.final_layernorm.weight"] = state["model.norm.weight"]
                held["output_layer.weight"] = tables["lm_head.weight"][rank]
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            (folder / "iter_0000040" / name).mkdir(parents=True)
            torch.save(
                {
                    "args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 40,
                    "model": held, "optimizer": {"state": {}}, "rng_state": [],
                },
                folder / "iter_0000040" / name / "model_optim_rng.pt",
            )  # fmt: skip
    (folder / "latest_checkpointed_iteration.txt").write_text("40")
    return folder


@pytest.fixture
def like(tmp_path: Path) -> Path:
    model().save_pretrained(tmp_path / "like")
    return tmp_path / "like"


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_model_that_was_cut_is_whole_again(
    ranks: int, stages: int, like: Path, tmp_path: Path
) -> None:
    path = cut(tmp_path / "cut", ranks=ranks, stages=stages)
    told = run_import(plan_import(path, like), tmp_path / "to", lambda _: None)
    assert told["format"] == f"Megatron, {ranks} x {stages} (tensor x pipeline)"
    assert told["step"] == 40 and "documented layout" in told["remarks"][0]
    assert told["not_taken"] == ["optimizer", "rng_state"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "to", dtype=torch.float32)
    assert torch.equal(again(TOKENS).logits, model()(TOKENS).logits)


def test_a_head_under_its_older_name_is_the_head(like: Path, tmp_path: Path) -> None:
    path = cut(tmp_path / "cut", ranks=1, stages=2)
    file = path / "iter_0000040" / "mp_rank_00_001" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    head = content["model"].pop("output_layer.weight")
    content["model"]["word_embeddings_for_head.weight"] = head
    torch.save(content, file)
    assert "lm_head.weight" in plan_import(path, like).model.tensors


def test_a_missing_rank_is_named(like: Path, tmp_path: Path) -> None:
    path = cut(tmp_path / "cut", ranks=2, stages=2)
    (path / "iter_0000040" / "mp_rank_01_000" / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match="lacks mp_rank_01_000"):
        plan_import(path, like)


def test_weights_with_another_meaning_are_rejected(like: Path, tmp_path: Path) -> None:
    path = cut(tmp_path / "cut", ranks=1, stages=1, apply_layernorm_1p=True, rotary_percent=0.5)
    with pytest.raises(CheckpointError) as caught:
        plan_import(path, like)
    assert "apply_layernorm_1p=True, rotary_percent=0.5" in str(caught.value)
    assert "Megatron's own tools" in str(caught.value)


def test_an_unknown_argument_is_rejected_unless_it_is_left_out(like: Path, tmp_path: Path) -> None:
    path = cut(tmp_path / "cut", ranks=1, stages=1, residual_multiplier=0.22)
    with pytest.raises(
        CheckpointError, match=r"residual_multiplier=0\.22.*\n?.*--without residual_"
    ):
        plan_import(path, like)
    assert plan_import(path, like, without=("residual_multiplier",)).parameters
    torch.save(model().state_dict(), tmp_path / "other.pt")
    with pytest.raises(RequestError, match="only a Megatron checkpoint has arguments"):
        plan_import(tmp_path / "other.pt", like, without=("residual_multiplier",))


def test_the_older_order_of_queries_keys_and_values_is_rejected(like: Path, tmp_path: Path) -> None:
    path = cut(tmp_path / "cut", ranks=1, stages=1)
    (file,) = path.glob("*/*/model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    torch.save({**content, "checkpoint_version": 1.0}, file)
    with pytest.raises(CheckpointError, match=r"checkpoint_version=1\.0.*newer Megatron"):
        plan_import(path, like)


def test_a_checkpoint_without_arguments_says_so(like: Path, tmp_path: Path) -> None:
    path = cut(tmp_path / "cut", ranks=1, stages=1)
    (file,) = path.glob("*/*/model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    torch.save({**content, "args": None}, file)
    assert "no `args`" in plan_import(path, like).checkpoint.notes[1]


def test_stages_that_take_turns_are_refused(like: Path, tmp_path: Path) -> None:
    path = cut(tmp_path / "cut", ranks=1, stages=1)
    (file,) = path.glob("*/*/model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    torch.save({**content, "model0": content["model"], "model": None}, file)
    with pytest.raises(CheckpointError, match="interleaved stages"):
        plan_import(path, like)


def test_a_name_without_a_place_is_refused(like: Path, tmp_path: Path) -> None:
    path = cut(tmp_path / "cut", ranks=1, stages=1)
    (file,) = path.glob("*/*/model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    content["model"]["decoder.layers.0.mlp.router.weight"] = torch.ones(2, 2)
    torch.save(content, file)
    with pytest.raises(CheckpointError, match=r"router\.weight has no place"):
        plan_import(path, like)


def test_a_kind_whose_layout_is_not_known_is_refused(tmp_path: Path) -> None:
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=37))
    other.save_pretrained(tmp_path / "like")
    path = cut(tmp_path / "cut", ranks=1, stages=1)
    with pytest.raises(RequestError, match="decoders with a gate and without experts"):
        plan_import(path, tmp_path / "like")
