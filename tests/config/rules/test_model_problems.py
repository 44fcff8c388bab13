"""What a model cannot be asked is refused by every verb with one sentence, before any data."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.config.load import load_recipe
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.rules.model import check_model
from shardyard.config.rules.precision import check_precision
from shardyard.errors import RecipeError
from shardyard.families.presets import PRESETS

WRONG = [
    (["model.preset=bert-tiny"], "task.name=causal_lm: in bert-tiny a token sees tokens on both"),
    (["task.name=masked_lm"], "task.name=masked_lm: in llama-tiny a token sees only earlier to"),
    (
        ["model.preset=bert-tiny", "task.name=masked_lm", "task.generate_tokens=8"],
        "task.generate_tokens=8: a model of task.name=masked_lm does not continue text. Use 0.",
    ),
    (
        ["task.generate_every=validation", "task.generate_tokens=0"],
        'task.generate_every="validation" has no effect with task.generate_tokens=0, which '
        "generates no text. Set task.generate_tokens=64, for example.",
    ),
    (
        ["task.prompts=[a]", "task.generate_tokens=0"],
        'task.prompts=["a"] has no effect with task.generate_tokens=0',
    ),
    (
        ["task.prompts=[a]", "task.prompt=b", "task.generate_tokens=8"],
        'task.prompt="b": task.prompt and task.prompts both name prompts. Keep task.prompts.',
    ),
    (
        ["task.generate_every=validation", "task.generate_tokens=8", "data.eval_fraction=0"],
        "data.eval_fraction=0 leaves no validation split, but task.generate_every needs an",
    ),
    (
        ["task.top_k=40"],
        "task.top_k=40 has no effect at temperature 0, where each token is the likeliest. "
        "Set task.temperature=0.8, or task.top_k=0.",
    ),
    (["task.top_k=-1"], "task.top_k=-1"),
    (
        ["task.name=bert_pretraining", "data.format=sentences"],
        "task.name=bert_pretraining: in llama-tiny a token sees only earlier tokens. Use",
    ),
    (["data.seq_len=512"], "data.seq_len=512 is more than the model's context of 256 tokens. Use"),
    (["parallel.tp=4"], "parallel.tp=4 does not divide the model's 4 heads and 2 key-value heads"),
    (["parallel.pp=5"], "parallel.pp=5 is more stages than the model has blocks."),
    (["parallel.ep=2"], "parallel.ep=2 but the model has no experts to split."),
    (["parallel.cp=2", "data.seq_len=254"], "parallel.cp=2 needs samples of a multiple of 4 token"),
    (
        ["memory.recompute=[mlp, attention]"],
        "memory.recompute: names the module 'attention', which no block has. Name some of: self_a",
    ),
    (
        ["precision.compute=fp8", "data.seq_len=40"],
        "precision.compute=fp8 needs samples of a multiple of 16 tokens (16 x cp)",
    ),
    (
        ["model.compile=true", "parallel.tp=2", "memory.recompute=full"],
        "model.compile=true with memory.recompute=full and parallel.tp=2: torch compiles what is",
    ),
]


OFFLOADED = ["model.preset=llama-tiny", "memory.offload=params", "optim.lr=1e-3"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "memory.offload=params with parallel.zero=auto: weights would stay on the device"),
        (["parallel.zero=2"], "memory.offload=params with parallel.zero=2: weights would stay"),
        (["parallel.strategy=NO_SHARD"], "parallel.zero=1: weights would stay on the device"),
        (
            ["parallel.zero=3", "optim.name=lamb"],
            "memory.offload=params with optim.name=lamb, which reads or moves all weights at "
            "once, and only some of them are on the device at a time. Use "
            "memory.offload=optimizer, or optim.name=adamw or sgd",
        ),
        (
            ["parallel.zero=3", "optim.ema_decay=0.99"],
            "optim.ema_decay=0.99 with memory.offload=params: averages of weights in host memory",
        ),
    ],
)
def test_weights_on_the_host_need_blocks_that_are_freed(settings: list[str], words: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_checked_recipe([], [*OFFLOADED, *settings])
    assert words in str(refused.value)
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize("given", ["parallel.zero=3", "parallel.strategy=FULL_SHARD"])
def test_weights_on_the_host_train_with_zero_3(given: str) -> None:
    load_checked_recipe([], [*OFFLOADED, given])


@pytest.mark.parametrize("verb", ["config", "plan", "prepare", "train"])
@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_what_train_refuses_every_verb_refuses_with_the_same_sentence(
    verb: str, settings: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "model.preset=llama-tiny", "data.source=nowhere", *settings]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.out == ""


@pytest.mark.parametrize("verb", ["config", "plan", "prepare", "train"])
def test_a_model_in_a_folder_is_held_against_the_recipe_before_any_data_too(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    settings = [f"model.path={tmp_path}", "model.weights=random", "data.source=nowhere"]
    assert main([verb, *settings, "data.seq_len=256", "parallel.pp=3"]) == 2
    said = capsys.readouterr().err
    assert "data.seq_len=256 is more than the model's context of 128 tokens." in said
    assert "parallel.pp=3 is more stages than the model has blocks." in said


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.device=cpu", "torchao has no fp8 products for cpu. Use bf16 or fp32."),
        ("cluster.instance=p4d.24xlarge", "torchao has no fp8 products for A100"),
        ("cluster.instance=dl1.24xlarge", "torchao has no fp8 products for Gaudi"),
    ],
)
def test_fp8_is_refused_where_its_products_cannot_be(override: str, words: str) -> None:
    recipe = load_recipe([], ["model.preset=llama-tiny", "precision.compute=fp8", override])
    (problem,) = check_precision(recipe)
    assert problem.path == "precision.compute" and words in str(problem)


@pytest.mark.parametrize("instance", ["p3.16xlarge", "g4dn.12xlarge"])
def test_bf16_is_refused_where_it_would_be_emulated(instance: str) -> None:
    given = ["model.preset=llama-tiny", "precision.compute=bf16", f"cluster.instance={instance}"]
    (problem,) = check_precision(load_recipe([], given))
    assert problem.path == "precision.compute"
    assert "capability 8.0 or more" in problem.text and "Use precision.compute=fp16" in problem.text
    assert list(check_precision(load_recipe([], [*given, "cluster.instance=g5.xlarge"]))) == []


@pytest.mark.parametrize(
    ("preset", "settings", "what"),
    [
        ("llama-tiny", ("parallel.tp=2", "memory.recompute=selective"), "parallel.tp=2"),
        ("mixtral-tiny", ("memory.recompute=full",), "experts"),
    ],
)
def test_what_would_not_be_compiled_is_refused(
    preset: str, settings: tuple[str, ...], what: str
) -> None:
    """By what tests/distributed/test_compile.py counts: graphs of such blocks."""
    given = [f"model.preset={preset}", "model.compile=true", *settings]
    shape = PRESETS[preset].shape
    (problem,) = check_model(load_recipe([], given), shape, devices_per_node=None)
    assert problem.path == "model.compile" and what in str(problem)
    assert "Use false, or memory.recompute=none." in str(problem)
    plain = load_recipe([], [*given, "memory.recompute=none"])
    assert check_model(plain, shape, devices_per_node=None) == []


MIXTURE = {"model_type": "mixtral", "num_experts": 4}


@pytest.mark.parametrize(
    ("sizes", "tp", "can"),
    [
        ({}, 1, True),
        ({"hidden_size": 136}, 1, False),  # a side of every matrix
        ({"head_dim": 8, "intermediate_size": 40}, 2, True),  # heads 4 x 8 / 2
        ({"head_dim": 6, "intermediate_size": 40}, 1, False),  # heads 4 x 6, inner 40
        ({"head_dim": 6, "intermediate_size": 96}, 2, True),  # inner 96 / 2
        ({**MIXTURE, "head_dim": 6, "intermediate_size": 96}, 2, False),  # those of experts do not
    ],
)
def test_fp8_wants_a_matrix_whose_sides_its_kernels_take(
    sizes: dict[str, Any], tp: int, can: bool
) -> None:
    shape = replace(PRESETS["llama-tiny"].shape, **sizes)
    recipe = load_recipe([], ["precision.compute=fp8", f"parallel.tp={tp}"])
    words = "precision.compute=fp8 but no matrix of a block has two sides of a multiple of 16"
    found = check_model(recipe, shape, devices_per_node=None)
    assert any(words in str(problem) for problem in found) is not can


def test_what_is_wrong_with_recipe_and_model_is_told_at_once() -> None:
    given = ["model.preset=llama-tiny", "parallel.tp=4", "data.seq_len=512", "run.steps=1"]
    with pytest.raises(RecipeError) as refused:
        load_checked_recipe([], [*given, "run.epochs=1", "optim.name=sgd"])
    paths = {problem.path for problem in refused.value.problems}
    assert paths == {"parallel.tp", "data.seq_len", "run", "optim.lr"}


def test_a_model_without_a_head_for_pairs_is_not_asked_to_judge_them() -> None:
    shape = replace(PRESETS["bert-tiny"].shape, vocab_size=300)
    settings = ["model.preset=bert-tiny", "task.name=bert_pretraining", "data.format=sentences"]
    recipe = load_recipe([], [*settings, "data.source=x"])
    assert check_model(recipe, shape, devices_per_node=1) == []
    shape.__dict__["family"] = replace(shape.family, pair_head=None)
    (problem,) = check_model(recipe, shape, devices_per_node=1)
    assert str(problem).startswith("task.name=bert_pretraining: a bert has no head for pairs. Use")
    assert str(problem).endswith("task.name=masked_lm.")
