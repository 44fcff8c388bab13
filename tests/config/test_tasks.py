"""Tasks are rows: what has to know one asks its row, and nothing asks for its name."""

import ast
from pathlib import Path
from typing import get_args

import pytest

from shardyard.config.schema import Task
from shardyard.config.tasks import TASKS, Metric, imported, tasks_of

PACKAGE = Path(__file__).parents[2] / "src" / "shardyard"
NAMING = {"config/tasks.py", "config/schema.py"}
"""The registry, and the setting."""


def test_every_task_that_a_recipe_may_name_has_a_row_and_no_other() -> None:
    assert set(get_args(Task.model_fields["name"].annotation)) == set(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_a_row_names_what_exists_and_scores_what_it_says(name: str) -> None:
    row = TASKS[name]
    assert callable(imported(row.prepare))
    assert list(imported(row.code).scores(2.0)) == list(row.metrics)
    assert next(iter(row.metrics)) == "loss"


def test_no_code_asks_what_a_task_is_called() -> None:
    guilty = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Constant) or node.value not in TASKS:
                continue
            if str(path.relative_to(PACKAGE)) not in NAMING:
                guilty.append(f"{path.name}:{node.lineno}")
    assert guilty == []


def test_the_first_task_of_a_kind_is_the_usual_one() -> None:
    assert tasks_of(is_causal=True)[0] == "causal_lm"
    assert tasks_of(is_causal=False)[0] == "masked_lm"


def test_a_target_is_reached_from_the_side_that_gets_better() -> None:
    assert Metric().is_reached(2.0, 2.0) and not Metric().is_reached(2.1, 2.0)
    right = Metric(is_better_higher=True)
    assert right.is_reached(0.7, 0.7) and not right.is_reached(0.6, 0.7)
    assert not any(each.is_reached(float("nan"), 1.0) for each in (Metric(), right))
