"""Phases of a run: recipes that differ in a few settings, trained one after the other.

Weights continue from phase to phase, the optimizer starts again. Everything that reads a recipe
reads that of each phase (``of_phases``), which has no phases itself.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row
from shardyard.config.validate import to_plain
from shardyard.errors import Problem

SECTIONS_THAT_MAY_DIFFER = ("optim",)
SETTINGS_THAT_MAY_DIFFER = (
    "run.steps",
    "run.tokens",
    "run.samples",
    "run.epochs",
    "run.target",
    "run.patience",
    "data.seq_len",
    "task.eval_every_steps",
    "task.eval_every_epochs",
    "memory.recompute",
)
"""Settings of a phase. Model, prepared data, layout and machines are those of the run."""

_LENGTHS = ("steps", "tokens", "samples", "epochs")


def of_phases(recipe: Recipe) -> tuple[Recipe, ...]:
    """The recipe of each phase; of a run without phases, itself."""
    if not recipe.phases:
        return (recipe,)
    whole = to_plain(recipe)
    del whole["phases"]
    return tuple(Recipe.model_validate(_with(whole, to_plain(phase))) for phase in recipe.phases)


def check_phases(recipe: Recipe) -> Iterable[Problem]:
    """Find settings in a list of phases that no phase can have."""
    if not recipe.phases:
        return
    row = task_row(recipe.task.name)
    if row.compares_answers and not row.gives_reward:
        text = "are not supported with pairs of answers, whose reference is the model as the run "
        text += "begins. Train each by a run of its own, with run.from."
        yield Problem("phases", text)
    given = [_settings(to_plain(phase)) for phase in recipe.phases]
    for number, settings in enumerate(given, 1):
        for name in settings:
            if not may_differ(name):
                yield Problem(f"phases.{number}.{name}", _WHY_NOT)
        for key in ("target", "patience"):
            if f"run.{key}" in settings and number < len(given):
                text = "ends a run, and this is not its last phase. Give it in the last one, or a "
                yield Problem(f"phases.{number}.run.{key}", f"{text}shorter length here.")
    outside = _settings({k: v for k, v in to_plain(recipe).items() if k != "phases"})
    for key in (*_LENGTHS, "target", "patience"):
        if f"run.{key}" in outside and getattr(recipe.run, key) is not None:
            text = "does not apply to each phase. Give it in the phase that it is for."
            yield Problem(f"run.{key}", text)
    for name in outside:
        if all(name in settings for settings in given) and not name.startswith("run."):
            yield Problem(name, "every phase gives its own, so this one is never read. Drop it.")


_WHY_NOT = (
    "cannot differ between phases: they share the model, the prepared data, the layout and the "
    f"machines. A phase may give {', '.join(f'{s}.*' for s in SECTIONS_THAT_MAY_DIFFER)}, "
    f"{', '.join(SETTINGS_THAT_MAY_DIFFER)}."
)


def may_differ(setting: str) -> bool:
    """Whether a phase may give a setting, by its dotted name."""
    section = setting.partition(".")[0]
    return section in SECTIONS_THAT_MAY_DIFFER or setting in SETTINGS_THAT_MAY_DIFFER


def check_each_phase(
    recipe: Recipe, check: Callable[[Recipe], Iterable[Problem]]
) -> Iterable[Problem]:
    """Find the problems of each phase; one that all phases share is reported once."""
    found = [list(check(each)) for each in of_phases(recipe)]
    for number, problems in enumerate(found, 1):
        for problem in problems:
            if all(problem in others for others in found):
                if number == 1:
                    yield problem
            else:
                yield in_phase(problem, number)


def in_phase(problem: Problem, number: int) -> Problem:
    """A problem of one phase, counted from 1."""
    return Problem(f"phases.{number}.{problem.path}", problem.text)


def _settings(tree: dict[str, Any]) -> list[str]:
    """Dotted names of what a tree gives; sections in sections do not differ by phase."""
    return [
        f"{section}.{key}"
        for section, content in tree.items()
        for key in (content if isinstance(content, dict) else ())
    ]


def _with(tree: dict[str, Any], phase: dict[str, Any]) -> dict[str, Any]:
    """A tree with the settings of a phase in it."""
    merged = copy.deepcopy(tree)
    for section, content in phase.items():
        merged.setdefault(section, {}).update(content)
    return merged
