"""Which steps are evaluated, by hand: the steps in which so many passes over the data are full."""

import pytest

from shardyard.config.schema.recipe import TaskSettings
from shardyard.train.evaluate import evaluation_due


@pytest.mark.parametrize(
    ("task", "due"),
    [
        # 10 samples, 4 a step: sample 10 is in step 3, sample 20, the last one, in step 5
        (TaskSettings(eval_every_epochs=1), [3, 5]),
        (TaskSettings(eval_every_epochs=0.5), [2, 3, 4, 5]),  # samples 5, 10, 15 and 20
        (TaskSettings(eval_every_epochs=0.7), [2, 4, 5]),  # samples 7 and 14, and the end
        (TaskSettings(eval_every_epochs=2), [5]),
        (TaskSettings(eval_every_steps=2), [2, 4, 5]),
        (TaskSettings(), [5]),
    ],
)
def test_evaluations_are_due_in_the_steps_worked_out_by_hand(
    task: TaskSettings, due: list[int]
) -> None:
    found = [
        step
        for step in range(1, 6)
        if evaluation_due(
            step,
            task=task,
            is_last=step == 5,
            read=range(4 * (step - 1), 4 * step),
            samples=10,
        )
    ]
    assert found == due
