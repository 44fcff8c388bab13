"""``precision.reduce=exact`` refuses by name all that is not held to its promise."""

from dataclasses import replace
from typing import Any

import pytest

from shardyard.config.model.source import shape_or_none
from shardyard.config.resolved import Resolved
from shardyard.config.rules.reproducible import (
    check_reproducible,
    micro_batches,
    require_reproducible,
)
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RecipeError

_GOOD: dict[str, dict[str, Any]] = {
    "model": {"preset": "llama-tiny"},
    "optim": {"micro_batch": 1, "global_batch": 8},
    "precision": {"reduce": "exact", "compute": "fp32"},
}


def _recipe(**sections: dict[str, Any]) -> Recipe:
    names = {*_GOOD, *sections}
    return Recipe.model_validate({n: {**_GOOD.get(n, {}), **sections.get(n, {})} for n in names})


@pytest.mark.parametrize(
    ("setting", "value", "why"),
    [
        ("parallel.tp", 2, "sums in floating point"),
        ("parallel.cp", 2, "sums in floating point"),
        ("parallel.pp", 2, "sums in floating point"),
        ("parallel.ep", 2, "sums in floating point"),
        ("precision.compute", "fp16", "scales depend on what was summed before"),
        ("precision.compute", "fp8", "scales depend on what was summed before"),
        ("precision.optimizer_states", "bf16", "not held to the same bits"),
        ("memory.offload", "optimizer", "not held to the same bits"),
        ("memory.offload", "activations", "not held to the same bits"),
        ("task.name", "masked_lm", "not held to the same bits"),
        ("model.lora.rank", 4, "not held to the same bits"),
        ("model.frozen", ["model.embed_tokens"], "not held to the same bits"),
        ("model.module", "mine:make", "what is inside of it is not known"),
        ("model.compile", True, "may differ from process to process"),
        ("model.batch_norm", "step", "sums over all ranks in floating point"),
        ("optim.name", "lamb", "needs norms of whole parameters"),
        ("optim.name", "lars", "needs norms of whole parameters"),
        ("optim.ema_decay", 0.9, "where a shard is cut"),
        ("optim.batch_per_device", 2, "a step on other devices is then another step"),
        ("optim.micro_batch", "auto", "it follows the number of ranks"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(setting: str, value: Any, why: str) -> None:
    section, *keys = setting.split(".")
    inner: Any = value
    for key in reversed(keys):
        inner = {key: inner}
    more = {"model": {"preset": None}} if setting == "model.module" else {}
    merged = {**more, section: {**more.get(section, {}), **inner}}
    problems = list(check_reproducible(_recipe(**merged)))
    assert [problem.path for problem in problems] == [setting]
    told = str(problems[0])
    assert why in told and "with precision.reduce=exact: " in told and "or reduce=fp32." in told
    # alone, it is not this that is wrong
    assert not list(check_reproducible(_recipe(**{**merged, "precision": {"reduce": "fp32", **(
        inner if section == "precision" else {})}})))  # fmt: skip


def test_a_plain_recipe_has_no_problem() -> None:
    assert not list(check_reproducible(_recipe()))
    assert not list(check_reproducible(_recipe(optim={"name": "sgd"}, parallel={"zero": 2})))


def _resolved(recipe: Recipe) -> Resolved:
    data: Any = None  # not asked
    shape = shape_or_none(recipe, None, 512)
    return Resolved(recipe=recipe, reasons={}, shape=shape, data=data, steps=1)


def test_what_shows_when_the_model_is_known_is_refused_then() -> None:
    require_reproducible(_resolved(_recipe()))
    sparse = _resolved(_recipe(model={"preset": "qwen3-moe-tiny"}))
    with pytest.raises(RecipeError, match=r"reduce=exact with experts, whose routers .* Use fp32"):
        require_reproducible(sparse)
    with pytest.raises(RecipeError, match=r"reduce=exact needs a model of a known family.*fp32"):
        require_reproducible(replace(sparse, shape=None))
    require_reproducible(replace(sparse, recipe=_recipe(precision={"reduce": "fp32"})))


def test_a_step_of_more_micro_batches_than_a_sum_holds_is_refused() -> None:
    recipe = _recipe(optim={"global_batch": 2**20 + 1})
    with pytest.raises(RecipeError, match=r"micro_batch=1 makes 1,048,577 .* room for 1,048,576"):
        require_reproducible(_resolved(recipe))
    assert micro_batches(_recipe(optim={"global_batch": 10, "micro_batch": 4}).optim) == 3
