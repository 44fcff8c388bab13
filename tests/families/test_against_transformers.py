"""Every family against transformers: config.json out and in, weights, logits, count."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from shardyard.checkpoint.export import export
from shardyard.checkpoint.retention import step_name
from shardyard.checkpoint.save import Saver
from shardyard.config.model.source import read_shape
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.rules.custom_module import require_shape
from shardyard.config.schema.recipe import Model, Recipe
from shardyard.families.config_json import shape_of_config
from shardyard.families.registry import FAMILIES, family_of
from shardyard.families.shape import ModelShape
from shardyard.models.build import build_on_meta, fill_weights, hf_config, materialize
from tests.families.random_models import (
    TOKENS_BL,
    VARIANTS,
    cases,
    loaded,
    logits_of,
    our_logits,
    small_shape,
    theirs,
)

pytestmark = pytest.mark.heavy

CASES = {
    f"{model_type}, {name}": shape
    for model_type in VARIANTS
    for name, shape in cases(model_type).items()
}
HEAD_OF_BERT = 64**2 + 3 * 64 + 300
"""Dense layer, norm and bias, which are not counted."""


def sizes(shape: ModelShape) -> dict[str, Any]:
    """Widths in the place of the settings that they follow from."""
    widths = {"head_dim": shape.head_width, "moe_intermediate_size": shape.expert_width}
    return {**shape.to_dict(), **widths}


def test_every_family_has_its_cases() -> None:
    assert set(VARIANTS) == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_transformers_is_the_same_model_here_and_as_an_export(
    case: str, tmp_path: Path, alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardyard.checkpoint.export.ROWS_BYTES", 5000)  # several parts a tensor
    shape, source = CASES[case], tmp_path / "source"
    model = theirs(shape)
    model.save_pretrained(source, max_shard_size="100KB")  # several files and an index
    resolved = resolved_of(source)
    read = require_shape(resolved.shape)
    assert sizes(read) == sizes(shape)
    real = sum(param.numel() for param in model.parameters())
    assert real - (0 if shape.is_causal else HEAD_OF_BERT) == shape.parameters
    with torch.no_grad():
        expected_BLV = model(input_ids=TOKENS_BL).logits
    torch.testing.assert_close(our_logits(read, source), expected_BLV)
    exported = tmp_path / "export"
    checkpoint = save_untrained(resolved, tmp_path / "checkpoints", alone)
    export(checkpoint, resolved, exported, max_shard_bytes=100_000)
    opened = type(model).from_pretrained(exported, attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.equal(opened(input_ids=TOKENS_BL).logits, expected_BLV)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, exported)]
    assert configs[0] == configs[1]


PLAIN = [
    name for name in FAMILIES if not (family_of(name).unfused or family_of(name).sparse is not None)
]
"""Families whose parameters have one name here and in transformers."""


@pytest.mark.parametrize("model_type", PLAIN)
def test_loss_and_gradients_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    shape = small_shape(model_type)
    model = theirs(shape)
    model.save_pretrained(tmp_path)
    ours = loaded(shape, tmp_path)
    found = {}
    for each, logits_BLV in (
        (model, model(input_ids=TOKENS_BL).logits), (ours, logits_of(ours, shape))
    ):  # fmt: skip
        loss = cross_entropy(logits_BLV[:, :-1].flatten(0, 1), TOKENS_BL[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        grads = {name: param.grad for name, param in each.named_parameters()}
        found[each is ours] = {"loss": loss.detach(), **grads}
    torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-6)


def resolved_of(folder: Path) -> Resolved:
    """What a run of the model in a folder would be, as far as export asks."""
    asked = Model(path=str(folder), dropout=0.0)
    return Resolved(
        recipe=Recipe(model=asked), reasons={}, shape=read_shape(asked, folder, 0),
        data=DatasetMetadata(
            dir=str(folder), fingerprint="0", vocab_size=300, train_tokens=1, eval_tokens=1,
            train_documents=1, eval_documents=1, unigram_entropy=1.0,
        ),
        steps=1, model_dir=str(folder),
    )  # fmt: skip


def save_untrained(resolved: Resolved, folder: Path, group: dist.ProcessGroup) -> Path:
    """A checkpoint of the weights as they were loaded."""
    model = loaded(require_shape(resolved.shape), Path(str(resolved.model_dir)))
    saver = Saver(folder, group=group, rank=0, world_size=1, keep_last=1)
    saver.save(1, {f"model.{name}": each.detach() for name, each in model.named_parameters()}, {})
    saver.wait()
    saver.close()
    return folder / step_name(1)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_norms_and_biases_begin_as_transformers_begins_them(model_type: str) -> None:
    shape = small_shape(model_type)
    ours = build_on_meta(shape)
    materialize(ours, torch.device("cpu"))
    fill_weights(ours, folder=None, seed=0)
    kind = AutoModelForCausalLM if shape.is_causal else AutoModelForMaskedLM
    theirs = dict(kind.from_config(hf_config(shape)).named_parameters())
    narrow = {name: param for name, param in ours.named_parameters() if param.dim() == 1}
    same = [name for name in narrow if name in theirs and torch.equal(narrow[name], theirs[name])]
    assert same == [name for name in narrow if name in theirs] != []


def test_random_matrices_of_gpt2_that_add_to_the_stream_begin_smaller() -> None:
    """By the root of how many there are, as in transformers' own."""
    shape = replace(small_shape("gpt2"), num_hidden_layers=8)
    ours = build_on_meta(shape)
    materialize(ours, torch.device("cpu"))
    fill_weights(ours, folder=None, seed=0)
    torch.manual_seed(0)
    block = AutoModelForCausalLM.from_config(hf_config(shape)).transformer.h[7]
    last = ours.get_submodule("transformer.h.7")
    for name in ("attn.c_proj", "mlp.c_proj", "mlp.c_fc"):
        found = [each.get_parameter(f"{name}.weight").std().item() for each in (last, block)]
        assert found[0] == pytest.approx(found[1], rel=0.05)
    assert last.get_parameter("mlp.c_proj.weight").std().item() == pytest.approx(0.005, rel=0.05)


def test_files_of_a_gpt2_without_its_head_open_too(tmp_path: Path) -> None:
    """As those on the hub are, which hold the masks of attention beside."""
    shape = small_shape("gpt2")
    model = theirs(shape)
    model.transformer.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    mask = {f"h.{n}.attn.bias": torch.ones(1, 1, 8, 8) for n in range(2)}
    save_file({**load_file(file), **mask}, file)
    with torch.no_grad():
        expected_BLV = model(input_ids=TOKENS_BL).logits
    torch.testing.assert_close(our_logits(shape, tmp_path), expected_BLV)


LEFT_OUT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "n_inner": 96, "vocab_size": 300,
}  # fmt: skip
_NORMS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
SAME = ("max_position_embeddings", "tie_word_embeddings", "num_experts", "num_experts_per_tok")


@pytest.mark.parametrize("switch", [None, False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_config_leaves_out_means_what_it_means_to_transformers(
    model_type: str, switch: bool | None
) -> None:
    """Without what the two do apart: dropout of BERT, and weights of experts that add up to 1."""
    config = {"model_type": model_type, **LEFT_OUT, "norm_topk_prob": True}
    if switch is not None:
        config["use_sliding_window"] = switch
    shape = shape_of_config(config, "config.json", is_random=False, overrides_dropout=True)
    theirs = AutoConfig.for_model(**config)
    assert {name: getattr(shape, name) for name in SAME} == {
        name: getattr(theirs, name, getattr(shape, name)) for name in SAME
    }
    heads = getattr(theirs, "num_key_value_heads", theirs.num_attention_heads)
    assert shape.num_key_value_heads == heads
    assert shape.head_width == (getattr(theirs, "head_dim", None) or 64 // 4)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"]
    window = getattr(theirs, "sliding_window", None) if "sliding_attention" in types else None
    assert shape.sliding_window == window
    rope = getattr(theirs, "rope_parameters", {"rope_theta": shape.rope_theta})
    assert shape.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    local = rope.get("sliding_attention", {"rope_theta": None})["rope_theta"]
    assert shape.rope_local_base_freq == local
    eps = {getattr(theirs, name, shape.rms_norm_eps) for name in _NORMS}
    assert eps == {shape.rms_norm_eps}
    width = theirs.intermediate_size if model_type == "mixtral" else None
    assert shape.expert_width == (width or getattr(theirs, "moe_intermediate_size", 96))
    assert shape.family.initial_std == theirs.initializer_range
