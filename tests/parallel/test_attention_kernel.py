"""The kernel that attends is the one that torch is seen to call, or is refused in a sentence."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardyard.config.formulas import attends_by_length, best_attention, needs_mask
from shardyard.config.rules.model import check_model
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RequestError
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.parallel.attention_kernel import attention_kernel, choose_attention
from shardyard.parallel.device import enable_sdpa_kernels
from tests.models import varlen_on_cpu

assert varlen_on_cpu.__doc__, "gives a CPU the operator"
CPU = torch.device("cpu")
LLAMA = PRESETS["llama-tiny"].shape


@pytest.fixture(autouse=True)
def all_kernels() -> Iterator[None]:
    yield
    enable_sdpa_kernels(None)


def recipe(**sections: dict[str, Any]) -> Recipe:
    base: dict[str, dict[str, Any]] = {
        "model": {"preset": "llama-tiny", "dropout": 0.0},
        "data": {"seq_len": 64},
        "precision": {"compute": "fp32"},
        "cluster": {"device": "cpu", "devices": 1},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections}
    return Recipe.model_validate(merged)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("shape", [LLAMA, PRESETS["bert-tiny"].shape], ids=["causal", "both sides"])
def test_a_cpu_attends_by_flash_attention(shape: ModelShape, across: bool, compute: str) -> None:
    asked = recipe(data={"attend_across_documents": across}, precision={"compute": compute})
    assert attention_kernel(asked, shape, tp=1, device=CPU) == "flash"


def test_what_is_not_allowed_is_not_called() -> None:
    enable_sdpa_kernels(["math"])
    assert attention_kernel(recipe(), LLAMA, tp=1, device=CPU) == "math"
    choose_attention("flash")
    assert attention_kernel(recipe(), LLAMA, tp=1, device=CPU) == "flash"
    choose_attention("sdpa")
    assert attention_kernel(recipe(), LLAMA, tp=1, device=CPU) == "flash"


def test_a_window_is_looked_at_beside_what_sees_all() -> None:
    windowed = replace(
        LLAMA, model_type="qwen2", sliding_window=8,
        layer_types=("full_attention", "sliding_attention"),
    )  # fmt: skip
    assert attention_kernel(recipe(), windowed, tp=2, device=CPU) == "flash"


def test_scores_that_are_bent_have_no_kernel() -> None:
    assert attention_kernel(recipe(), PRESETS["gemma2-tiny"].shape, tp=1, device=CPU) == "unfused"


def test_a_kernel_that_is_not_there_is_named() -> None:
    enable_sdpa_kernels(["cudnn"])
    asked = recipe(model={"attention": "cudnn"})
    with pytest.raises(RequestError) as refused:
        attention_kernel(asked, LLAMA, tp=1, device=CPU)
    message = str(refused.value)
    assert message.startswith("model.attention=cudnn cannot be used here: No ")
    assert message.endswith("without a mask. Use model.attention=sdpa.")


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(RequestError) as refused:
        choose_attention("fa3")
    message = str(refused.value)
    assert message.startswith("model.attention=fa3: ") and "Install FlashAttention 3" in message
    assert message.endswith("or use model.attention=auto.")


REFUSED: list[tuple[dict[str, dict[str, Any]], str, str]] = [
    ({"model": {"attention": "cudnn"}}, "llama-tiny", "runs only on NVIDIA devices"),
    ({"model": {"attention": "fa3"}}, "llama-tiny", "runs only on NVIDIA devices"),
    (
        {"model": {"attention": "flash"}, "parallel": {"cp": 2}, "cluster": {"devices": 2}},
        "llama-tiny", "is not asked where parallel.cp=2 splits samples",
    ),
    ({"model": {"attention": "flash"}}, "gemma2-tiny", "bends no scores, as a gemma2 does"),
    (
        {"model": {"attention": "flash"}, "cluster": {"device": "cuda"}},
        "llama-tiny", "takes numbers of 16 bits, and precision.compute=fp32",
    ),
    (
        {
            "model": {"attention": "flash"}, "cluster": {"device": "xpu"},
            "precision": {"compute": "bf16"}, "data": {"attend_across_documents": False},
        },
        "llama-tiny",
        "takes no mask, and data.attend_across_documents=false is one: only a CUDA device's kernel "
        "takes the bounds of documents",
    ),
    (
        {
            "model": {"attention": "fa3"}, "cluster": {"device": "xpu"},
            "precision": {"compute": "bf16"}, "data": {"seq_len": 8192},
        },
        "phi3-mini-4k", "takes no mask, and a window of 2047 tokens is one: only a CUDA device's",
    ),
    (
        {
            "model": {"attention": "flash"}, "cluster": {"device": "cuda"},
            "precision": {"compute": "bf16"}, "task": {"name": "masked_lm"},
        },
        "bert-tiny",
        "takes no mask, and padding that is not to be seen is one: documents are separated "
        "only where tokens see earlier ones",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "preset", "why"), REFUSED)
def test_what_a_kernel_cannot_do_is_refused(
    sections: dict[str, dict[str, Any]], preset: str, why: str
) -> None:
    found = check_model(recipe(**sections), PRESETS[preset].shape, devices_per_node=None)
    told = [str(each) for each in found if each.path == "model.attention"]
    assert any(why in text for text in told), told
    assert all(text.endswith("Use model.attention=auto.") for text in told)


def on_cuda(**sections: dict[str, Any]) -> Recipe:
    base = {"cluster": {"device": "cuda"}, "precision": {"compute": "bf16"}}
    return recipe(**{**base, "model": {"attention": "flash"}, **sections})


APART = {"attend_across_documents": False}
NARROW = replace(LLAMA, num_attention_heads=16, num_key_value_heads=16)


@pytest.mark.parametrize(
    ("sections", "shape", "is_told", "is_masked"),
    [
        ({"data": APART}, LLAMA, True, False),
        ({}, LLAMA, False, False),
        ({"data": {"pack": "whole"}}, LLAMA, True, False),
        ({"data": {"seq_len": 8192}}, PRESETS["phi3-mini-4k"].shape, True, False),
        ({"data": APART, "model": {"attention": "fa3"}}, LLAMA, True, False),
        ({"data": APART, "model": {"attention": "sdpa"}}, LLAMA, False, True),
        ({"data": APART, "model": {"attention": "cudnn"}}, LLAMA, False, True),
        ({"data": APART, "precision": {"compute": "fp8"}}, LLAMA, True, False),
        ({"data": APART, "precision": {"compute": "fp32"}}, LLAMA, False, True),
        ({"data": APART, "cluster": {"device": "cpu"}}, LLAMA, False, True),
        ({"data": APART, "parallel": {"cp": 2}}, LLAMA, False, True),
        ({"data": APART}, NARROW, False, True),
        ({"data": APART}, PRESETS["gemma2-tiny"].shape, False, True),
        ({}, PRESETS["bert-tiny"].shape, False, True),
    ],
)
def test_flash_attention_is_told_where_documents_begin(
    sections: dict[str, dict[str, Any]], shape: ModelShape, is_told: bool, is_masked: bool
) -> None:
    asked = on_cuda(**sections)
    assert (attends_by_length(asked, shape), needs_mask(asked, shape)) == (is_told, is_masked)
    # auto takes it where it can be had, and only there
    chosen, reason = best_attention(asked, shape)
    named = asked.model.attention in ("cudnn", "sdpa")
    assert (chosen == "flash") == (is_told or (named and is_masked)) and reason


def test_a_kernel_that_is_told_lengths_has_a_name_of_its_own() -> None:
    assert attention_kernel(on_cuda(data=APART), LLAMA, tp=2, device=CPU) == "flash by length"
    windowed = replace(
        LLAMA, model_type="qwen2", sliding_window=8,
        layer_types=("full_attention", "sliding_attention"),
    )  # fmt: skip
    assert attention_kernel(on_cuda(), windowed, tp=1, device=CPU) == "flash by length"


def test_a_head_that_flash_attention_does_not_take_is_refused_by_its_width() -> None:
    [found] = check_model(on_cuda(data=APART), NARROW, devices_per_node=None)
    assert str(found).endswith(
        "takes no mask, and data.attend_across_documents=false is one: it takes heads of a "
        "multiple of 8 up to 256, not 4. Use model.attention=auto."
    )
