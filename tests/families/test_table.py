"""A family's table against the model that transformers builds: every row, name and count."""

import ast
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

import shardyard
from shardyard.errors import RequestError
from shardyard.families.file_tensors import file_tensors, whole_shape
from shardyard.families.presets import PRESETS
from shardyard.families.registry import FAMILIES, family_of
from shardyard.models.build import build_on_meta, hf_config
from shardyard.models.submodules import blocks_of
from tests.families.random_models import small_shape


@cache
def model_of(model_type: str) -> PreTrainedModel:
    return build_on_meta(small_shape(model_type))


# The head of BERT has a dense layer, a norm and a bias that the planner does not count.
NOT_COUNTED = {
    "bert": {"cls.predictions.bias"}
    | {
        f"cls.predictions.transform.{name}"
        for name in ("dense.weight", "dense.bias", "LayerNorm.weight", "LayerNorm.bias")
    }
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_rows_of_a_family_are_the_parameters_of_its_model(model_type: str) -> None:
    shape, model = small_shape(model_type), model_of(model_type)
    family = shape.family
    rows = {f"{row.module}.{row.parameter}": row for row in (*family.before, family.head)}
    rows |= {f"{family.norm.module}.weight": family.norm}
    expected: dict[str, int] = {}
    for number in range(shape.num_hidden_layers):
        for row in family.block:
            rows[f"{family.blocks}.{number}.{row.module}.{row.parameter}"] = row
    for name, row in rows.items():
        number = shape.num_experts if row.per_expert else 1
        elements = number * row.elements(shape)
        bias = row.rows(shape) if row.bias is not None and row.bias(shape) else 0
        if elements:
            expected[name] = elements - bias
        if bias:
            expected[f"{name.removesuffix('weight')}bias"] = bias
    if shape.tie_word_embeddings:
        del expected[f"{family.head.module}.weight"]
    real = {name: param.numel() for name, param in model.named_parameters()}
    left_out = NOT_COUNTED.get(model_type, set())
    assert {name: size for name, size in real.items() if name not in left_out} == expected
    assert sum(expected.values()) == shape.parameters


def test_the_heads_for_pairs_are_rows_where_they_are_asked_for() -> None:
    without = small_shape("bert")
    shape = replace(without, judges_pairs=True)
    names = dict(build_on_meta(shape).named_parameters())
    added = names.keys() - dict(build_on_meta(without).named_parameters()).keys()
    rows = [row for row in (shape.family.pooler, shape.family.pair_head) if row is not None]
    told = {name: size for row in rows for name, size, _ in row.parameters(shape)}
    assert told == {name: names[name].numel() for name in added} and len(told) == 4
    assert shape.parameters - without.parameters == sum(told.values())
    assert [name for row in rows for name, *_ in row.parameters(without)] == []


def test_a_head_over_labels_that_transformers_lacks_is_rejected() -> None:
    shape = replace(small_shape("olmo2"), label_head="samples", num_labels=3)
    names = [name for name, _ in build_on_meta(shape).named_parameters()]
    assert names[-1] == "score.weight"
    says = (
        r"over labels of tokens for model_type='olmo2' \(it has: samples\).* model.preset=qwen3-8b"
    )
    with pytest.raises(RequestError, match=says):
        _ = replace(shape, label_head="tokens").family
    with pytest.raises(
        RequestError, match=r"over labels of samples .*'granite' \(it has: nothing\)"
    ):
        _ = replace(small_shape("granite"), label_head="samples").family
    kinds = {
        "samples": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "tokens": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }
    for name in FAMILIES:
        theirs = tuple(kind for kind, known in kinds.items() if name in known)
        assert family_of(name).labels == theirs, name


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("bias", [False, True])
def test_what_tp_splits_and_what_it_leaves_whole_make_a_block(model_type: str, bias: bool) -> None:
    shape = replace(small_shape(model_type), attention_bias=bias)
    family = shape.family
    split = sum(
        row.elements(shape) - row.unsplit_elements(shape)
        for row in family.block
        if row.split is not None and not row.per_expert
    )
    assert split + shape.unsplit_block_parameters == shape.shared_block_parameters
    matrices = {row.module: row for row in family.block}
    assert [matrices[name].split for name in family.colwise] == ["rows"] * len(family.colwise)
    assert [matrices[name].split for name in family.rowwise] == ["columns"] * len(family.rowwise)


# Norms of the stream, norms of heads, routers, and biases that come after a sum over ranks.
ON_EVERY_RANK = [
    ("llama2-7b", False, 2 * 4096),
    ("llama2-7b", True, 2 * 4096 + 4096),
    ("qwen2.5-7b", False, 2 * 3584),
    ("qwen3-8b", False, 2 * 4096 + 2 * 128),
    ("mixtral-8x7b", False, 2 * 4096 + 8 * 4096),
    ("gpt3-175b", False, 2 * 2 * 12288 + 2 * 12288),
    ("bert-large", False, 2 * 2 * 1024 + 2 * 1024),
]


@pytest.mark.parametrize(("preset", "bias", "elements"), ON_EVERY_RANK)
def test_what_every_rank_of_tp_holds_of_a_block(preset: str, bias: bool, elements: int) -> None:
    shape = replace(PRESETS[preset].shape, attention_bias=bias)
    assert shape.unsplit_block_parameters == elements


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_modules_of_a_block_are_those_that_the_model_has(model_type: str) -> None:
    family = family_of(model_type)
    block = next(iter(blocks_of(model_of(model_type), family).values()))
    assert set(family.block_modules) == {name for name, _ in block.named_modules() if name}
    named = (*family.dropped, *family.gathered, *family.colwise, *family.rowwise)
    assert set(named) <= set(family.block_modules)


@pytest.mark.heavy
@pytest.mark.parametrize("model_type", FAMILIES)
def test_names_in_files_are_those_that_transformers_saves(model_type: str, tmp_path: Path) -> None:
    shape, family = small_shape(model_type), family_of(model_type)
    shapes = {name: param.shape for name, param in model_of(model_type).named_parameters()}
    ours = {name: whole_shape(pieces) for name, pieces in file_tensors(shapes, family).items()}
    kind = AutoModelForCausalLM if shape.is_causal else AutoModelForMaskedLM
    theirs = kind.from_config(hf_config(shape))
    theirs.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert ours == {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def test_a_row_of_the_registry_has_the_name_of_its_family() -> None:
    assert {name: family_of(name).model_type for name in FAMILIES} == {
        name: name for name in FAMILIES
    }
    wrong = [
        (model_type, name)
        for model_type in FAMILIES
        for name, preset in family_of(model_type).presets.items()
        if preset.shape.model_type != model_type
    ]
    assert wrong == []


def test_products_take_the_parameters_of_a_block_but_norms_and_biases() -> None:
    for preset in PRESETS.values():
        shape = preset.shape
        for_one = sum(sum(product.outputs) * product.inputs for product in shape.products)
        rows = [row for row in shape.family.block if row.columns is not None]
        biases = sum(row.rows(shape) for row in rows if row.bias is not None and row.bias(shape))
        assert for_one + biases == sum(row.elements(shape) for row in rows)


PACKAGE = Path(shardyard.__file__).parent


def asks_for_a_family(node: ast.AST) -> bool:
    """Whether a node compares a model type, or spells one."""
    if isinstance(node, ast.Constant):
        return node.value in FAMILIES
    if isinstance(node, ast.Match):
        return "model_type" in ast.unparse(node.subject)
    sides = (node.left, *node.comparators) if isinstance(node, ast.Compare) else ()
    ends = ("model_type", "['model_type']", "get('model_type')")
    return any(ast.unparse(side).endswith(ends) for side in sides)


@pytest.mark.heavy
def test_no_code_outside_asks_what_a_family_is_called() -> None:
    texts = {
        path.relative_to(PACKAGE): path.read_text()
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "families"
    }
    guilty = [
        f"{path}:{node.lineno}"
        for path, text in texts.items()
        if any(word in text for word in ("model_type", *FAMILIES))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt | ast.expr) and asks_for_a_family(node)
    ]
    assert guilty == []
    assert all(
        asks_for_a_family(ast.parse(code, mode="eval").body)
        for code in ("shape.model_type == x", "config.get('model_type') in MIXTURES", "'bert'")
    )


@pytest.mark.heavy
def test_a_preset_is_found_without_the_families_after_its_own() -> None:
    """What `shardyard train model.preset=llama-tiny` imports before it begins."""
    code = (
        "import sys; from shardyard.families.presets import PRESETS; PRESETS['llama-tiny'];"
        "print(sorted(n for n in sys.modules if n.startswith('shardyard.families.')"
        " or n == 'torch'))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ("config_json", "dimensions", "family", "llama", "presets", "registry", "shape")
    assert told.stdout.strip() == str([f"shardyard.families.{name}" for name in names])


@pytest.mark.parametrize(
    ("model_type", "experts", "words"),
    [("llama", 8, "num_experts=8 with model_type='llama', which has no experts"),
     ("mixtral", 0, "num_experts=0 with model_type='mixtral', which has experts")],
)  # fmt: skip
def test_experts_that_a_family_does_not_have_are_refused(
    model_type: str, experts: int, words: str
) -> None:
    shape = replace(PRESETS["llama-tiny"].shape, model_type=model_type, num_experts=experts)
    with pytest.raises(RequestError, match=words):
        _ = shape.parameters


def test_an_unknown_type_is_refused_where_it_is_counted() -> None:
    shape = replace(PRESETS["llama-tiny"].shape, model_type="lama")
    with pytest.raises(
        RequestError, match=r"unknown model family 'lama'. Did you mean llama\? Available: llama"
    ):
        _ = shape.parameters


@pytest.mark.parametrize("model_type", FAMILIES)
def test_matrices_are_split_as_in_transformers_own_plan(model_type: str) -> None:
    family = family_of(model_type)
    plan = getattr(hf_config(small_shape(model_type)), "base_model_tp_plan", None) or {}
    if not plan or family.unfused:
        assert family.unfused or not family.is_causal, "BERT has none"
        return
    alike = {"colwise_gather_output": "colwise", "rowwise_split_input": "rowwise"}
    theirs = {name.removeprefix("layers.*."): alike.get(kind, kind) for name, kind in plan.items()}
    ours = dict.fromkeys(family.colwise, "colwise") | dict.fromkeys(family.rowwise, "rowwise")
    split = {name for name, kind in theirs.items() if kind in ("colwise", "rowwise")}
    assert ours == {name: theirs[name] for name in split & set(family.block_modules)}
