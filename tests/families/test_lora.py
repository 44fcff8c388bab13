"""Which matrices get an adapter, by which names, and how many parameters that is."""

from dataclasses import replace

import pytest
import torch

from shardyard.config.schema.recipe import Lora, Model
from shardyard.families.dimensions import Labelled
from shardyard.families.lora import (
    is_adapter,
    lora_target_errors,
    peft_targets,
    scale_of,
    targets_of,
    trained_module_errors,
    trained_modules,
)
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.models.build import build_on_meta, freeze_base
from shardyard.models.lora import add_adapters
from shardyard.planner.kernels import flops_per_token
from shardyard.planner.trainable_parameters import trained_of
from tests.families.random_models import small_shape

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _shape(preset: str = "llama-tiny") -> ModelShape:
    return replace(PRESETS[preset].shape, vocab_size=512)


def _names(*patterns: str, preset: str = "llama-tiny") -> set[str]:
    shape = _shape(preset)
    return {each.module for found in targets_of(shape, patterns).values() for each in found}


@pytest.mark.parametrize(
    ("patterns", "number", "one"),
    [
        ((), 14, "model.layers.1.mlp.down_proj"),
        (("q_proj", "v_*"), 4, "model.layers.0.self_attn.v_proj"),
        (("self_attn",), 8, "model.layers.1.self_attn.o_proj"),
        (("mlp.up_proj",), 2, "model.layers.1.mlp.up_proj"),
        (("model.layers.1.mlp",), 3, "model.layers.1.mlp.up_proj"),
        (("model.layers.0", "q_proj"), 8, "model.layers.1.self_attn.q_proj"),
    ],
)
def test_names_mean_matrices(patterns: tuple[str, ...], number: int, one: str) -> None:
    assert len(_names(*patterns)) == number
    assert one in _names(*patterns)


def test_of_a_mixture_attention_alone_gets_adapters() -> None:
    assert _names(preset="mixtral-tiny") == _names("self_attn", preset="mixtral-tiny") != set()


@pytest.mark.parametrize(
    ("preset", "pattern", "words"),
    [
        ("llama-tiny", "lm_head", "='lm_head' gets no adapter: the dense matrices of blocks have"),
        ("llama-pocket", "model.embed_tokens", "not the table of tokens, the head, norms, routers"),
        ("llama-tiny", "input_layernorm", "='input_layernorm' gets no adapter"),
        ("mixtral-tiny", "mlp.experts", "='mlp.experts' gets no adapter"),
        ("mixtral-tiny", "router", "='router' gets no adapter"),
        (
            "llama-tiny",
            "q_prj",
            "='q_prj' names no matrix that has an adapter. Did you mean q_proj",
        ),
        ("bert-tiny", "querry", "Did you mean query? There are, in bert.encoder.layer.0.*: att"),
    ],
)
def test_a_name_that_gets_none_is_refused(preset: str, pattern: str, words: str) -> None:
    (found,) = lora_target_errors(_shape(preset), ["*", pattern])
    assert found.path == "model.lora.targets" and words in str(found)


@pytest.mark.parametrize("preset", ["llama-tiny", "llama-pocket", "mixtral-tiny", "bert-tiny"])
@pytest.mark.parametrize("targets", [(), ("q_proj", "query", "dense")])
def test_the_plan_counts_what_the_model_gets(preset: str, targets: tuple[str, ...]) -> None:
    shape = _shape(preset)
    model, lora = build_on_meta(shape), Lora(rank=3, targets=targets)
    freeze_base(model, storage_dtype=torch.bfloat16)
    held = sum(each.numel() for each in model.parameters())
    add_adapters(model, shape, lora)
    trained = trained_of(shape, Model(lora=lora))
    assert trained is not None
    learnt = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert trained.parameters == trained.added == sum(each.numel() for each in learnt.values()) > 0
    assert sum(each.numel() for each in model.parameters()) == held + trained.added
    for name, param in model.named_parameters():
        assert is_adapter(name) == (name in learnt)
        assert param.dtype == (torch.float32 if name in learnt else torch.bfloat16)


def test_flops_lack_gradients_of_the_base() -> None:
    shape = PRESETS["llama-1b"].shape
    trained = trained_of(shape, Model(lora=Lora(rank=16)))
    assert trained is not None
    whole = flops_per_token(shape, 1024)["full"]
    found = flops_per_token(shape, 1024, trained)["full"]
    assert found == pytest.approx(whole - 2 * shape.matmul_parameters + 6 * trained.parameters)


def test_peft_is_told_the_shortest_names_that_mean_these_matrices() -> None:
    assert peft_targets(_shape(), ()) == ALL
    assert peft_targets(_shape(), ("self_attn",)) == ALL[:4]
    one = ["model.layers.1.mlp.up_proj"]
    assert peft_targets(_shape(), one) == one
    bert = _shape("bert-tiny")
    assert peft_targets(bert, ("query",)) == ["query"]
    # the end of another name too
    named = [f"bert.encoder.layer.{n}.output.dense" for n in range(bert.num_hidden_layers)]
    assert peft_targets(bert, ("output.dense",)) == named


def test_the_scale_is_alpha_over_rank_or_its_root() -> None:
    assert scale_of(rank=16, alpha=8, rslora=False) == 0.5
    assert scale_of(rank=16, alpha=8, rslora=True) == 2.0


def test_adapters_of_matrices_that_files_fuse_are_refused() -> None:
    shape = small_shape("phi3")
    (found,) = lora_target_errors(shape, ["q_proj", "down_proj"])
    assert "mean self_attn.q_proj: in files of phi3 they are parts of larger" in str(found)
    assert "Name some of: self_attn.o_proj, mlp.down_proj." in str(found)
    (found,) = lora_target_errors(shape, [])
    assert "are left open, which means self_attn.q_proj, self_attn.k_proj" in str(found)
    assert lora_target_errors(shape, ["o_proj", "down_proj"]) == []


POOLER = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
CLASSIFIER = {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize(
    ("preset", "labelled", "patterns", "names"),
    [
        ("llama-tiny", "samples", (), {"score.weight"}),
        ("llama-tiny", "tokens", ("classifier", "score"), {"score.weight", "score.bias"}),
        ("bert-tiny", "samples", (), CLASSIFIER),
        ("bert-tiny", "samples", ("classifier", "score", "pooler"), CLASSIFIER | POOLER),
        ("bert-tiny", "samples", ("bert.pooler.dense",), CLASSIFIER | POOLER),
        ("bert-tiny", "tokens", ("score",), CLASSIFIER),
        ("gpt2-tiny", "tokens", (), CLASSIFIER),
    ],
)
def test_a_head_over_labels_is_trained_next_to_adapters(
    preset: str, labelled: Labelled, patterns: tuple[str, ...], names: set[str]
) -> None:
    shape = replace(
        _shape(preset), label_head=labelled, num_labels=3, tie_word_embeddings=False,
        judges_pairs=False,
    )  # fmt: skip
    assert trained_modules(shape, patterns).keys() == names
    assert trained_module_errors(shape, patterns) == []
    model, lora = build_on_meta(shape), Lora(rank=2, modules_to_save=patterns)
    freeze_base(model, storage_dtype=torch.float32, trained=names)
    add_adapters(model, shape, lora)
    trained = trained_of(shape, Model(lora=lora))
    assert trained is not None
    learnt = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert trained.parameters == learnt
    (wrong,) = trained_module_errors(shape, ["poller"])
    assert "'poller' names no module outside of the blocks. Name some of: " in str(wrong)


def test_a_frozen_pooler_is_counted_as_such() -> None:
    shape = replace(
        _shape("bert-tiny"), label_head="samples", num_labels=3, tie_word_embeddings=False
    )
    for frozen, trained in (("bert.encoder", POOLER), ("bert", set())):
        found = trained_of(shape, Model(frozen=(frozen,)))
        assert found is not None
        width = shape.hidden_size
        assert sum(found.after) == (width * width + width if trained else 0)
