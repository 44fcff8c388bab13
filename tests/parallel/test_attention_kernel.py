"""The kernel that attends is the one that torch is seen to call, or is refused in a sentence."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardyard.config.model_problems import misfits
from shardyard.config.schema import Recipe
from shardyard.errors import RequestError
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.parallel.attention_kernel import attention_kernel, choose_attention
from shardyard.parallel.device import let_attend_by

CPU = torch.device("cpu")
LLAMA = PRESETS["llama-tiny"].shape


@pytest.fixture(autouse=True)
def all_kernels() -> Iterator[None]:
    yield
    let_attend_by(None)


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
    let_attend_by(["math"])
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
    let_attend_by(["cudnn"])
    asked = recipe(model={"attention": "cudnn"})
    with pytest.raises(RequestError) as refused:
        attention_kernel(asked, LLAMA, tp=1, device=CPU)
    message = str(refused.value)
    assert message.startswith("model.attention=cudnn cannot be used here: No ")
    assert message.endswith("without a mask. Use model.attention=auto.")


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(RequestError) as refused:
        choose_attention("fa3")
    message = str(refused.value)
    assert message.startswith("model.attention=fa3: ") and "Install FlashAttention 3" in message
    assert message.endswith("or use model.attention=auto.")


REFUSED: list[tuple[dict[str, dict[str, Any]], str, str]] = [
    ({"model": {"attention": "cudnn"}}, "llama-tiny", "runs on NVIDIA devices alone"),
    ({"model": {"attention": "fa3"}}, "llama-tiny", "runs on NVIDIA devices alone"),
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
            "model": {"attention": "flash"}, "cluster": {"device": "cuda"},
            "precision": {"compute": "bf16"}, "data": {"attend_across_documents": False},
        },
        "llama-tiny", "takes no mask, and data.attend_across_documents=false is one",
    ),
    (
        {
            "model": {"attention": "fa3"}, "cluster": {"device": "cuda"},
            "precision": {"compute": "bf16"}, "data": {"seq_len": 8192},
        },
        "gemma2-9b", "takes no mask, and a window of 4096 tokens is one",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "preset", "why"), REFUSED)
def test_what_a_kernel_cannot_do_is_refused(
    sections: dict[str, dict[str, Any]], preset: str, why: str
) -> None:
    found = misfits(recipe(**sections), PRESETS[preset].shape, devices_per_node=None)
    told = [str(each) for each in found if each.path == "model.attention"]
    assert any(why in text for text in told), told
    assert all(text.endswith("Use model.attention=auto.") for text in told)
