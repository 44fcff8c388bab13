"""A folder compared with its config.json: what transformers opens whole is taken, nothing else is.

The references are transformers' own report of a load (missing, unexpected and mismatched tensors)
and its logits.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from shardyard.config.weight_files import read_weight_files
from shardyard.config.weights_match import match_weights
from shardyard.families.file_tensors import parameter_shapes
from shardyard.families.shape import ModelShape
from shardyard.models.build import build_on_meta
from tests.families.random_models import TOKENS_BL, VARIANTS, cases, our_logits, small_shape, theirs

State = dict[str, Tensor]


def saved(shape: ModelShape, folder: Path, change: Callable[[State], object]) -> None:
    """A folder of transformers' model, its tensors changed afterwards."""
    theirs(shape).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    change(state)
    state = {name: each.contiguous() for name, each in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def opened(shape: ModelShape, folder: Path) -> tuple[Tensor, bool]:
    """Logits of transformers' model of a folder, and whether it found all and used all."""
    kind: Any = AutoModelForCausalLM if shape.is_causal else AutoModelForMaskedLM
    model, told = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True,
        ignore_mismatched_sizes=True,
    )  # fmt: skip
    with torch.no_grad():
        return model.eval()(TOKENS_BL).logits, not any(told.values())


def drop(*names: str) -> Callable[[State], object]:
    return lambda state: [state.pop(name) for name in names]


def add(**shapes: tuple[int, ...]) -> Callable[[State], object]:
    """Tensors of no pattern; __ stands for a dot."""
    torch.manual_seed(1)
    tensors = {name.replace("__", "."): torch.randn(sizes) for name, sizes in shapes.items()}
    return lambda state: state.update(tensors)


def rename(pattern: str, to: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        renamed = {re.sub(pattern, to, name): each for name, each in state.items()}
        state.clear()
        state.update(renamed)

    return change


def copy(name: str, source: str, *, plus: float = 0.0) -> Callable[[State], object]:
    return lambda state: state.update({name: state[source] + plus})


HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
BERT_TABLE = "bert.embeddings.word_embeddings.weight"
BERT_HEAD = "cls.predictions.decoder"
TIED = {"tie_word_embeddings": True}

FOLDERS: dict[str, tuple[str, dict[str, Any], Callable[[State], object], str]] = {
    "whole": ("llama", {}, drop(), ""),
    "base without the prefix": ("llama", TIED, rename(r"^model\.", ""), ""),
    "head under the prefix": ("llama", {}, rename(r"^lm_head", "model.lm_head"), ""),
    "tied, one matrix twice": ("llama", TIED, copy(HEAD, TABLE), ""),
    "tied, head alone": ("llama", TIED, rename(r"^model.embed_tokens", "lm_head"), ""),
    "tied, another head": ("llama", TIED, copy(HEAD, TABLE, plus=0.5), ""),
    "gpt2, another head": ("gpt2", TIED, copy(HEAD, "transformer.wte.weight", plus=0.5), ""),
    "angles of positions": (
        "llama", {}, add(model__layers__0__self_attn__rotary_emb__inv_freq=(8,)), "",
    ),
    "causal masks of GPT-2": (
        "gpt2", {}, add(transformer__h__0__attn__bias=(1, 1, 4, 4)), "",
    ),
    "causal masks of GPT-NeoX": (
        "gpt_neox", {}, add(gpt_neox__layers__1__attention__masked_bias=(1,)), "",
    ),
    "norms of the first BERTs": ("bert", {}, rename(r"LayerNorm\.weight", "LayerNorm.gamma"), ""),
    "BERT's second bias": (
        "bert", {}, rename(r"cls\.predictions\.bias", f"{BERT_HEAD}.bias"), "",
    ),
    "no head": ("llama", {}, drop(HEAD), "set tie_word_embeddings: true in config.json"),
    "no table": ("llama", {}, drop(TABLE), f"lacks 1 of the 21 tensors .*: {TABLE}"),
    "neither": ("llama", TIED, drop(TABLE), f"lacks 1 of the 20 tensors .*: {TABLE}"),
    "biases of attention": (
        "llama", {}, add(model__layers__0__self_attn__q_proj__bias=(64,)),
        r"has 1 tensor that config.json has no place for: model.layers.0.self_attn.q_proj.bias. "
        "If its attention has biases, set attention_bias: true in config.json",
    ),
    "biases of the MLP": (
        "llama", {}, add(model__layers__0__mlp__up_proj__bias=(172,)), "An MLP with biases",
    ),
    "norms of queries": (
        "llama", {}, add(model__layers__0__self_attn__q_norm__weight=(16,)), "model_type",
    ),
    "adapters": (
        "llama", {}, add(model__layers__0__self_attn__q_proj__lora_A__default__weight=(4, 64)),
        "merge_and_unload",
    ),
    "scales": (
        "llama", {}, add(model__layers__0__mlp__up_proj__weight_scale=(1,)), "full-precision",
    ),
    "a value head": (
        "llama", {}, add(v_head__summary__weight=(1, 64)), r"from_pretrained\(FOLDER\)",
    ),
    "more blocks": (
        "llama", {}, add(model__layers__2__input_layernorm__weight=(64,)),
        "Set num_hidden_layers: 3",
    ),
    "more experts": (
        "mixtral", {},
        lambda state: [
            copy(name.replace("experts.7.", "experts.8."), name)(state)
            for name in list(state) if "experts.7." in name
        ],
        "config.json says 8 experts, and the files have 9",
    ),
    "a narrow table": (
        "llama", {}, lambda state: state.update({TABLE: state[TABLE][:-4]}),
        r"has \[296, 64\], not \[300, 64\]",
    ),
}  # fmt: skip
"""What a folder holds -> family, its settings, what is changed, and what is said of it."""


@pytest.mark.heavy
@pytest.mark.parametrize("name", FOLDERS)
def test_what_transformers_opens_whole_is_the_same_model_here_and_all_else_is_rejected(
    name: str, tmp_path: Path
) -> None:
    family, settings, change, said = FOLDERS[name]
    shape = replace(small_shape(family), **settings)
    saved(shape, tmp_path, change)
    logits_BLV, is_whole = opened(shape, tmp_path)
    match = match_weights(tmp_path, read_weight_files(tmp_path), shape)
    assert is_whole == (match.errors == ()) == (said == "")
    if is_whole:
        ours_BLV = our_logits(match.shape, tmp_path)
        torch.testing.assert_close(ours_BLV, logits_BLV, rtol=1e-4, atol=1e-5)
    else:
        assert re.search(said, " ".join(match.errors))


def test_a_head_that_differs_from_its_table_is_told_and_used(tmp_path: Path) -> None:
    tied = replace(small_shape("llama"), tie_word_embeddings=True)
    saved(tied, tmp_path, copy(HEAD, TABLE, plus=0.5))
    match = match_weights(tmp_path, read_weight_files(tmp_path), tied)
    assert not match.shape.tie_word_embeddings
    assert "tie_word_embeddings: false" in " ".join(match.notes)


def test_a_head_of_its_own_in_a_bert_is_rejected(tmp_path: Path) -> None:
    """transformers would take it apart from the table, which no BERT here can."""
    shape = small_shape("bert")
    saved(shape, tmp_path, copy(f"{BERT_HEAD}.weight", BERT_TABLE, plus=0.5))
    match = match_weights(tmp_path, read_weight_files(tmp_path), shape)
    assert f"{BERT_HEAD}.weight differs from {BERT_TABLE}" in " ".join(match.errors)


def test_the_heads_for_pairs_of_a_bert_are_left_out_with_a_note(tmp_path: Path) -> None:
    shape = small_shape("bert")
    saved(shape, tmp_path, add(bert__pooler__dense__bias=(64,), cls__seq_relationship__bias=(2,)))
    match = match_weights(tmp_path, read_weight_files(tmp_path), shape)
    assert match.errors == ()
    assert "bert.pooler.dense.bias, cls.seq_relationship.bias" in " ".join(match.notes)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    shape = small_shape("llama")
    saved(shape, tmp_path, lambda state: state.update({HEAD: state[HEAD].to(torch.int8)}))
    match = match_weights(tmp_path, read_weight_files(tmp_path), shape)
    assert "lm_head.weight (I8)" in " ".join(match.errors)


@pytest.mark.parametrize("model_type", VARIANTS)
def test_the_parameters_of_a_family_are_known_without_building_its_model(model_type: str) -> None:
    for shape in cases(model_type).values():
        real = {name: tuple(each.shape) for name, each in build_on_meta(shape).named_parameters()}
        assert parameter_shapes(shape) == real
