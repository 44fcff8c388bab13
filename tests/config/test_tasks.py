"""Tasks are rows: what has to know one asks its row, and nothing asks for its name."""

import ast
import math
from pathlib import Path

import pytest

from shardyard.config.data_choices import DATA_FORMATS
from shardyard.config.tasks import TASKS, Metric, task_code, task_prepare, tasks_of

PACKAGE = Path(__file__).parents[2] / "src" / "shardyard"
NAMING = {"config/tasks.py", "config/schema/recipe.py"}
"""The registry, and the setting."""


@pytest.mark.parametrize("name", TASKS)
def test_a_row_names_what_exists_and_scores_what_it_says(name: str) -> None:
    row = TASKS[name]
    assert callable(task_prepare(name))
    means = {each: 0.5 for each, metric in row.metrics.items() if metric.is_of_logits}
    scores = task_code(name).scores(2.0, means)
    assert list(scores) == list(row.metrics)
    assert {*row.data_formats} <= {*DATA_FORMATS}
    assert scores["loss"] == 2.0 and scores.items() >= means.items()
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


def test_bits_per_byte_are_of_the_text_and_null_where_they_mean_nothing() -> None:
    loss, bytes_of = 3.0 * math.log(2), TASKS["causal_lm"].bits_per_byte  # 3 bits a token
    assert bytes_of(loss, targets=1_000, nbytes=3_000) == pytest.approx(1.0)
    assert bytes_of(loss, targets=1_000, nbytes=None) is None, "bytes were not counted then"
    few = TASKS["masked_lm"].bits_per_byte
    assert few(loss, targets=1_000, nbytes=3_000) is None, "few of its tokens are predicted"
    told = [name for name, row in TASKS.items() if "bits_per_byte" in row.targets]
    assert told == ["causal_lm"]
