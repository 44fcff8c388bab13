"""Phases of a recipe: each is a recipe of its own, and what cannot differ is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.load import dump_recipe, load_recipe
from shardyard.config.phases import of_phases
from shardyard.config.resolve import resolve
from shardyard.config.resolved import Resolved, SourceMetadata
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RecipeError
from tests.config.test_resolve import CPU, DATA, TINY, resolved

SHORT: dict[str, Any] = {
    "run": {"steps": 40}, "data": {"seq_len": 64}, "optim": {"lr": 6e-3, "global_batch": 8},
}  # fmt: skip
LONG: dict[str, Any] = {
    "run": {"samples": 30}, "data": {"seq_len": 256},
    "optim": {"lr": 4e-3, "warmup_share": 0.1, "global_batch": 5},
}  # fmt: skip
BASE: dict[str, Any] = {"model": {"preset": "llama-tiny"}, "optim": {"schedule": "poly"}}


def recipe(*overrides: str, phases: Any = (SHORT, LONG), **more: Any) -> Recipe:
    return load_checked_recipe([{**BASE, **more, "phases": list(phases)}], overrides)


def test_a_phase_is_the_recipe_with_its_own_settings() -> None:
    first, second = of_phases(recipe())
    assert (first.run.steps, first.data.seq_len, first.optim.global_batch) == (40, 64, 8)
    assert (second.run.steps, second.run.samples, second.data.seq_len) == (None, 30, 256)
    assert first.optim.schedule == second.optim.schedule == "poly"
    assert second.optim.global_batch == 5
    assert first.phases == second.phases == ()
    without = load_recipe([BASE])
    assert of_phases(without) == (without,)


def test_each_phase_is_resolved_by_itself_and_comes_back_from_json() -> None:
    whole = resolve(recipe(), shape=TINY, machine=CPU, data=DATA)
    first, second = whole.of_phases
    assert (first.steps, first.recipe.optim.warmup_steps) == (40, 4)
    assert first.reasons["optim.warmup_steps"].startswith("a tenth of the run")
    assert second.reasons["optim.warmup_steps"] == "0.1 of the run"
    assert second.recipe.optim.decay_steps == second.steps
    assert whole.steps == first.steps + second.steps
    assert whole.recipe.data.seq_len == 64 and len(whole.recipe.phases) == 2
    assert Resolved.from_json(whole.to_json()) == whole
    assert resolved().of_phases == (resolved(),)


def test_a_recipe_with_phases_is_written_and_read(tmp_path: Path) -> None:
    asked = recipe()
    (tmp_path / "recipe.yaml").write_text(dump_recipe(asked))
    assert of_phases(load_recipe([tmp_path / "recipe.yaml"])) == of_phases(asked)


def test_an_override_names_a_phase_from_1() -> None:
    _, second = of_phases(recipe("phases.2.optim.lr=1e-4", "phases.2.run.samples=12"))
    assert (second.optim.lr, second.run.samples) == (1e-4, 12)
    with pytest.raises(RecipeError, match=r"phases\.3=run\.steps=9: the run has 2 phases"):
        recipe("phases.3.run.steps=9")
    with pytest.raises(RecipeError, match=r"phases\.2\.optim\.lr='high' is not a number"):
        recipe("phases.2.optim.lr=high")


def without(phase: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**phase, **more}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"phases": {"run": {"steps": 4}}}, "phases: is a list of settings. Write `phases: [{run:"),
        ({"phases": [3]}, "phases: is a list of settings"),
        (
            {"phases": [without(SHORT, parallel={"tp": 2}), LONG]},
            "phases.1.parallel.tp: cannot differ between phases: they share the model, the",
        ),
        (
            {"phases": [SHORT, without(LONG, data={"source": "other"})]},
            "phases.2.data.source: cannot differ between phases",
        ),
        ({"phases": [SHORT, without(LONG, optm={})]}, "phases.2.optm: unknown section"),
        (
            {"phases": [without(SHORT, optim={"lr": "high"}), LONG]},
            "phases.1.optim.lr='high' is not a number above 0",
        ),
        (
            {"phases": [without(SHORT, run={"steps": 4, "patience": 2}), LONG]},
            "phases.1.run.patience: ends a run, and this is not its last phase",
        ),
        (
            {"phases": [without(SHORT, run={"steps": 4, "target": {"loss": 2.0}}), LONG]},
            "phases.1.run.target: ends a run, and this is not its last phase",
        ),
        (
            {"run": {"steps": 9}, "phases": [SHORT, LONG]},
            "run.steps: does not apply to each phase. Give it in the phase",
        ),
        (
            {"optim": {"lr": 1e-3}, "phases": [SHORT, LONG]},
            "optim.lr: every phase gives its own, so this one is never read",
        ),
        # what is wrong in one phase alone is told of it; what is wrong in all, once
        (
            {"phases": [SHORT, without(LONG, optim={"nesterov": True, "lr": 1e-3})]},
            "phases.2.optim.nesterov=True is a setting of sgd",
        ),
        ({"model": {"preset": "lama-tiny"}, "phases": [SHORT, LONG]}, "model.preset=lama-tiny is"),
    ],
)
def test_what_no_phase_can_mean_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_checked_recipe([{"model": {"preset": "llama-tiny"}, **sections}])
    assert words in str(refused.value)
    assert str(refused.value).count("lama-tiny is not a preset") <= 1


def test_a_resume_keeps_the_phases_that_the_run_began_with() -> None:
    known: dict[str, Any] = {"shape": TINY, "machine": CPU, "data": DATA}
    began = resolve(recipe(), **known)
    longer = resolve(recipe("phases.2.run.samples=60"), **known, previous=began)
    second = longer.of_phases[1]
    assert second.steps == 2 * began.of_phases[1].steps
    assert second.recipe.optim.decay_steps == began.of_phases[1].recipe.optim.decay_steps
    with pytest.raises(RecipeError, match=r"optim\.lr: 0\.004 -> 0\.001 changes what is learnt"):
        resolve(recipe("phases.2.optim.lr=1e-3"), **known, previous=began)
    with pytest.raises(
        RecipeError, match=r"phases: the run began with 2 and continues with as many"
    ):
        resolve(recipe(phases=[SHORT]), **known, previous=began)


def test_samples_that_were_made_when_prepared_have_one_length() -> None:
    made = replace(DATA, train_samples=900, eval_samples=9)
    mixed = replace(DATA, parts=(SourceMetadata(name="made", slots=1, data=made),))
    for data in (made, mixed):
        with pytest.raises(RecipeError, match=r"phases: have samples of 64, 256 tokens, and those"):
            resolve(recipe(), shape=TINY, machine=CPU, data=data)
